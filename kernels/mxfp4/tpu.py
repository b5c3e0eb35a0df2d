"""MXFP4 banks for the TPU kernels of `grouped_matmul`: a block of an expert is decoded in VMEM, once per group.

Layout "kn", whose bytes hold two neighbours of K: as low and high half of an int32 they are two rows of bfloat16, so no
value moves. Powers of two are exact in bfloat16, and so is the decode: the scale is added to the exponent. That needs
codes that `codec.check` allows: no NaN, and 0 or 1 only where all values are 0.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..grouped_matmul import tpu
from ..grouped_matmul.pallas import Kernels
from .codec import GROUP, bfloat16_bits

CHUNK = 128  # packed rows that are decoded at once: 8 rows of scales, which is a tile of int32
BYTES = GROUP // 2  # packed rows that share a scale


class PackedTiles(tpu.Tiles):
    """packed u8 [E, K/2, N], scale u8 [E, K/32, N] of w [E, K, N]."""

    @property
    def shape(self) -> tuple[int, ...]:
        experts, half, n = self.arrays[0].shape
        return experts, 2 * half, n

    def _shape(self, block: int) -> tuple[int, int]:
        return (block, self.contraction) if self.transposed else (self.contraction, block)

    def specs(self, block: int) -> list[pl.BlockSpec]:
        k, n = self._shape(block)
        return [tpu.expert_block((k // each, n), self.experts, 1 - self.contracted) for each in (2, GROUP)]

    def scratch(self, block: int, dtype: jnp.dtype) -> list[Any]:
        k, n = self._shape(block)
        return [pltpu.VMEM((k, n), dtype), pltpu.VMEM((max(k // GROUP, 1), n), jnp.int32)]

    def prepare(self, refs: Sequence[Any], scratch: Sequence[Any]) -> None:
        decode_block(*refs, *scratch)

    def load(self, refs: Sequence[Any], scratch: Sequence[Any]) -> jax.Array:
        return scratch[0][...]


def decode_block(packed, scale, decoded, exponent) -> None:
    """packed [1, K/2, n] and scale [1, K/32, n] -> decoded [K, n]; exponent int32 [K/32, n] is scratch."""
    exponent[...] = (scale[0].astype(jnp.int32) - 127) << 7
    rows = packed.shape[1]
    if rows % CHUNK:
        _decode_rows(packed, decoded, exponent, 0, rows)
    else:
        lax.fori_loop(0, rows // CHUNK, lambda c, _: _decode_rows(packed, decoded, exponent, c * CHUNK, CHUNK), None)


def _decode_rows(packed, decoded, exponent, start, count: int) -> None:
    """`count` packed rows from `start`, twice as many values."""
    at = partial(_at, start)
    codes = packed[0, at(count, 1), :].astype(jnp.int32)
    s = exponent[at(count // BYTES, BYTES), :]
    s = jnp.broadcast_to(s[:, None, :], (count // BYTES, BYTES, s.shape[1])).reshape(count, -1)
    pairs = bfloat16_bits(codes & 15, s) | (bfloat16_bits(codes >> 4, s) << 16)
    decoded[_at(2 * start, 2 * count, 1), :] = pltpu.bitcast(pairs, jnp.bfloat16).astype(decoded.dtype)


def _at(start, count: int, divisor: int):
    """A slice of `count` from start / divisor, aligned where it moves."""
    if isinstance(start, int):
        return pl.ds(start // divisor, count)
    return pl.ds(pl.multiple_of(lax.div(start, divisor), CHUNK // divisor), count)


KERNELS = Kernels(PackedTiles, tpu.products, None)
