"""Checksums of arrays, taken where they lie: what changed on disk is noticed, and no host or device has one whole.

An array's checksum is the sum over its elements, modulo 2**32, of their bits mixed with their place in the array.
However the array is cut, the sums of its shards add up to the same number, and they are all that travels.
"""

import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from trillion_moe.distributed import whole

_SPREAD = 0x9E3779B1  # odd: no two numbers below 2**32 have the same product with it


def checksums(arrays: Mapping[str, jax.Array]) -> dict[str, int]:
    """By name, below 2**32. A change of one element of up to 32 bits changes it, any other all but one time in 2**32.

    All processes over which arrays lie call this with the same names in the same order.
    """
    jax.block_until_ready(arrays)
    # One after the other: XLA:CPU may give its few threads to programs that wait in their sums for one another.
    return {name: int(whole(_checksum(array, array.sharding))) for name, array in arrays.items()}


@functools.partial(jax.jit, static_argnums=1)
def _checksum(array: jax.Array, sharding: jax.sharding.Sharding) -> jax.Array:
    if not isinstance(sharding, NamedSharding):
        return _sum(array, jnp.uint32(0))
    axes_of = [(axes,) if isinstance(axes, str) else axes or () for axes in sharding.spec]

    def of_shard(shard: jax.Array) -> jax.Array:
        starts = [_along(d, lax.axis_index(axes) * shard.shape[d]) for d, axes in enumerate(axes_of) if axes]
        return lax.psum(_sum(shard, sum(starts, jnp.uint32(0))), [axis for axes in axes_of for axis in axes])

    return jax.shard_map(of_shard, mesh=sharding.mesh, in_specs=sharding.spec, out_specs=P(), check_vma=False)(array)


def _sum(shard: jax.Array, start: jax.Array) -> jax.Array:
    """Of a shard whose first element is at `start`. Matrix by matrix, so that there are no 32 bits for every element of
    the shard; where XLA makes its bits a copy, there are those."""
    bits = _bits(shard)
    lead = max(bits.ndim - 2, 0)
    within = _places(bits.shape[lead:], lead)

    def add(total: jax.Array, matrix: tuple[jax.Array, jax.Array]):
        words, at = matrix
        mixed = _mix(words.astype(jnp.uint32) * np.uint32(_SPREAD) ^ _mix(at + within))
        return total + jnp.sum(mixed, dtype=jnp.uint32), None

    starts = start + _places(bits.shape[:lead], 0)
    matrices = bits.reshape(starts.size, *within.shape), starts.reshape(-1)
    return lax.scan(add, jnp.uint32(0), matrices)[0]


def _places(shape: Sequence[int], first: int) -> jax.Array:
    """Of every element of an array's dims from `first` on."""
    along = [_along(first + d, lax.broadcasted_iota(jnp.uint32, shape, d)) for d in range(len(shape))]
    return sum(along, jnp.zeros(shape, jnp.uint32))


def _along(dim: int, index: jax.Array) -> jax.Array:
    return index.astype(jnp.uint32) * np.uint32(pow(_SPREAD, dim + 1, 1 << 32))


def _bits(array: jax.Array) -> jax.Array:
    """As unsigned integers; 64 bits as two of 32, in a dim of their own."""
    if array.dtype == jnp.bool_:
        return array.astype(jnp.uint8)
    return lax.bitcast_convert_type(array, f"uint{min(8 * array.dtype.itemsize, 32)}")


def _mix(x: jax.Array) -> jax.Array:
    """The finaliser of MurmurHash3 (Appleby 2011): one to one, and each bit depends on all."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
