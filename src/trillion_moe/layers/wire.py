"""What travels between devices: several arrays as one message, rows in 8 bits, the bytes of both.

A message is one row of unsigned words for each token, so that one exchange carries all there is of it: an exchange
costs time before its first byte, and a TPU rounds the width of each up to 128 words.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from trillion_moe.ops import accumulator

BLOCK = 128  # values that share a scale
_LARGEST = {"float8_e4m3fn": 448.0}


class Narrow(NamedTuple):
    """Rows in 8 bits: values ``[N, L]`` and float32 scales ``[N, L / 128]``, by which they are multiplied."""

    values: jax.Array
    scales: jax.Array


def narrow(x_NL: jax.Array, wire: str | None) -> jax.Array | Narrow:
    """Rows as they travel: as they are, or with `wire` in 8 bits, scaled so that the largest of each 128 values is the
    largest there is (DeepSeek-V3, arXiv 2412.19437, section 3.3). What is not finite becomes NaN."""
    if wire is None:
        return x_NL
    n, width = x_NL.shape
    blocks = (
        jnp.pad(x_NL, ((0, 0), (0, -width % BLOCK)))
        .astype(accumulator(x_NL.dtype))
        .reshape(n, -(-width // BLOCK), BLOCK)
    )
    most = jnp.max(jnp.abs(blocks), axis=-1)
    least = jnp.finfo(jnp.float32).tiny  # below it devices take 0 for a number, and dividing by it would not be finite
    scales = jnp.where(most > 0, jnp.maximum(most / _LARGEST[wire], least), 1).astype(jnp.float32)
    values = (blocks / scales[:, :, None]).reshape(n, -(-width // BLOCK) * BLOCK)[:, :width].astype(wire)
    return Narrow(lax.bitcast_convert_type(values, jnp.uint8), scales)


def widen(x: jax.Array | Narrow, wire: str | None, dtype: Any) -> jax.Array:
    """What `narrow` made rows of; 0 where nothing came."""
    if not isinstance(x, Narrow):
        return x
    assert wire is not None
    n, width = x.values.shape
    values = lax.bitcast_convert_type(x.values, jnp.dtype(wire)).astype(accumulator(dtype))
    blocks = jnp.pad(values, ((0, 0), (0, -width % BLOCK))).reshape(n, -1, BLOCK) * x.scales[:, :, None]
    return blocks.reshape(n, -1)[:, :width].astype(dtype)


def as_one(move: Callable[[jax.Array], jax.Array], tree: Any) -> Any:
    """move(rows [N, ...]) -> rows [M, ...] done to every array of a tree in one message."""
    leaves, treedef = jax.tree.flatten(tree)
    if len(leaves) <= 1:
        return jax.tree.map(move, tree)
    size = min(leaf.dtype.itemsize for leaf in leaves)
    words = [_words(leaf, size) for leaf in leaves]
    ends = itertools.accumulate(w.shape[1] for w in words)
    moved = move(jnp.concatenate(words, axis=1))
    parts = [moved[:, end - w.shape[1] : end] for w, end in zip(words, ends, strict=True)]
    return treedef.unflatten([_restored(part, leaf) for part, leaf in zip(parts, leaves, strict=True)])


def row_bytes(x: jax.Array, exact: Any = (), wire: str | None = None) -> int:
    """Bytes of one row's message: of x as it travels, and of what goes with it."""
    leaves = jax.tree.leaves((jax.eval_shape(lambda x: narrow(x, wire), x), exact))
    return sum(math.prod(leaf.shape[1:]) * leaf.dtype.itemsize for leaf in leaves)


def _words(x: jax.Array, size: int) -> jax.Array:
    """``[N, ...]`` -> its bits as unsigned words of so many bytes ``[N, W]``."""
    width = math.prod(x.shape[1:])
    bits = lax.bitcast_convert_type(x.reshape(len(x), width), f"uint{8 * size}")
    return bits.reshape(len(x), width * x.dtype.itemsize // size)


def _restored(words: jax.Array, like: jax.Array) -> jax.Array:
    """The other way: ``[M, W]`` -> ``[M, ...]`` of the dtype and sizes of `like`."""
    share = like.dtype.itemsize // words.dtype.itemsize
    if share > 1:
        words = words.reshape(len(words), words.shape[1] // share, share)
    return lax.bitcast_convert_type(words, like.dtype).reshape(len(words), *like.shape[1:])
