"""Which rows a step of a Pallas kernel works on, from group sizes that are known only at run time.

Rows past the last group are a group of their own, number E, so that every row of an output is written.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Visits(NamedTuple):
    """Row tiles on a fixed grid, each visited once by every group that has rows in it, in the order of the groups.

    offset [E + 2]: group g owns the rows offset[g] to offset[g + 1]. group, tile [most visits]: of each visit; past
    `count` they repeat the last one.
    """

    offset: jax.Array
    group: jax.Array
    tile: jax.Array
    count: jax.Array


class Owned(NamedTuple):
    """Tiles of which each lies in one group: group, first row and the row behind the last. Unused ones are empty."""

    group: jax.Array
    first: jax.Array
    end: jax.Array


def offsets(group_sizes_E: jax.Array, rows: int) -> jax.Array:
    """int32 [E + 2]: where each group begins, the dead rows as group E, and `rows`."""
    end_E = jnp.minimum(jnp.cumsum(group_sizes_E.astype(jnp.int32)), rows)
    return jnp.concatenate([jnp.zeros(1, jnp.int32), end_E, jnp.full(1, rows, jnp.int32)])


def visits(group_sizes_E: jax.Array, rows: int, tile: int, *, empty: bool = False) -> Visits:
    """The visits of tiles of `tile` rows; with `empty`, one also by each group without rows, and none by dead rows."""
    offset = offsets(group_sizes_E, rows)
    groups, tiles = group_sizes_E.shape[0] + (not empty), -(-rows // tile)
    start, end = offset[:groups], offset[1 : groups + 1]
    first = jnp.minimum(start // tile, tiles - 1)
    each = jnp.where(end > start, (end - 1) // tile - first + 1, int(empty))
    most = tiles + groups - 1 + (groups if empty else 0)
    group, index, count = _spread(each, most)
    return Visits(offset, group, first[group] + index, count)


def owned(group_sizes_E: jax.Array, rows: int, tile: int) -> Owned:
    """The tiles of at most `tile` rows of each group, the dead rows' too, from each group's first row on."""
    offset = offsets(group_sizes_E, rows)
    groups = group_sizes_E.shape[0] + 1
    each = -(-(offset[1:] - offset[:-1]) // tile)
    group, index, count = _spread(each, -(-rows // tile) + groups - 1)
    first, end = offset[group] + index * tile, offset[group + 1]
    used = jnp.arange(group.shape[0]) < count
    return Owned(group, jnp.where(used, first, end), jnp.minimum(end, first + tile))


def _spread(each_G: jax.Array, most: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Group g `each[g]` times in a row -> (group [most], which of the group's it is [most], how many in all).

    Behind the last one that one is repeated.
    """
    end_G = jnp.cumsum(each_G)
    count = end_G[-1]
    item = jnp.minimum(jnp.arange(most), count - 1)
    group = jnp.searchsorted(end_G, item, side="right").astype(jnp.int32)
    return group, (item - (end_G - each_G)[group]).astype(jnp.int32), count.astype(jnp.int32)
