"""MXFP4 banks for the GPU kernels of `grouped_matmul`: tiles are decoded in registers as they are loaded.

Layout "nk", as checkpoints store it: low and high nibbles of a tile, interleaved, are the values in their order. Powers
of two are exact in bfloat16, so the scale is added to the exponent; `codec.check` says which codes that allows.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from ..grouped_matmul import gpu
from ..grouped_matmul.pallas import Kernels
from .codec import GROUP


@dataclass(frozen=True)
class PackedTiles:
    """packed u8 [E, N, K/2], scale u8 [E, N, K/32] of w [E, K, N]; transposed: rows [R, N] times w^T."""

    arrays: tuple[jax.Array, ...]
    transposed: bool

    @property
    def experts(self) -> int:
        return self.arrays[0].shape[0]

    @property
    def contraction(self) -> int:
        return self.arrays[0].shape[1] if self.transposed else 2 * self.arrays[0].shape[2]

    @property
    def out(self) -> int:
        return 2 * self.arrays[0].shape[2] if self.transposed else self.arrays[0].shape[1]

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
    """e2m1 codes times 2^(exponent / 128); the magnitude is the low 3 bits."""
    magnitude = nibble & 7
    bits = (magnitude << 6) + (126 << 7)  # 1.0 is code 2: one mantissa bit below two of exponent
    bits = jnp.where(magnitude == 1, 126 << 7, bits) + exponent  # 0.5, e2m1's only subnormal
    bits = jnp.where(magnitude == 0, 0, bits) | ((nibble & 8) << 12)
    return lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)


KERNELS = Kernels(PackedTiles, gpu.products, None)
