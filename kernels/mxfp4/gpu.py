"""MXFP4 banks for the GPU kernels of `grouped_matmul`: tiles are decoded in registers as they are loaded.

Layout "nk", as checkpoints store it: low and high nibbles of a tile, interleaved, are the values in their order. Powers
of two are exact in bfloat16, so the scale is added to the exponent; `codec.check` says which codes that allows.
"""

import jax
import jax.numpy as jnp
from jax import lax

from ..grouped_matmul import gpu
from ..grouped_matmul.pallas import Kernels
from .codec import GROUP, bfloat16_bits


class PackedTiles(gpu.Tiles):
    """packed u8 [E, N, K/2], scale u8 [E, N, K/32] of w [E, K, N]."""

    @property
    def shape(self) -> tuple[int, ...]:
        experts, n, half = self.arrays[0].shape
        return experts, 2 * half, n

    @property
    def contracted(self) -> int:
        return int(not self.transposed)

    def load(self, refs, expert, k, n) -> jax.Array:
        """bfloat16 [n, k], or [k, n] transposed: along the last dim the bytes lie."""
        rows, columns = (k, n) if self.transposed else (n, k)
        packed, scale = (
            gpu.load(ref, (expert,), rows, columns.over(each)) for ref, each in zip(refs, (2, GROUP), strict=True)
        )
        return decode_tile(packed, scale)


def decode_tile(packed: jax.Array, scale: jax.Array) -> jax.Array:
    """u8 [n, k/2] and [n, k/32] -> bfloat16 [n, k]."""
    n, groups = scale.shape
    exponent = (scale.astype(jnp.int32) - 127) << 7
    wide = jnp.broadcast_to(exponent[:, :, None], (n, groups, GROUP // 2)).reshape(packed.shape)
    codes = packed.astype(jnp.int32)
    both = jnp.stack([_values(codes & 15, wide), _values(codes >> 4, wide)], axis=-1)
    return both.reshape(n, 2 * packed.shape[1])


def _values(nibble: jax.Array, exponent: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bfloat16_bits(nibble, exponent).astype(jnp.uint16), jnp.bfloat16)


KERNELS = Kernels(PackedTiles, gpu.products, None)
