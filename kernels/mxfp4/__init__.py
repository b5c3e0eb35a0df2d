"""MXFP4: 4-bit weights with shared power-of-two scales, and the grouped matmul that multiplies by them as stored.

decode, encode, to_layout, check        the codec (`codec.py`)
grouped_matmul_mxfp4                    y[r] = x[r] @ w[e(r)]^T, the bank never decoded as a whole
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from ..grouped_matmul import Array, check_groups, choose
from . import codec, reference, xla
from .codec import check, decode, encode, to_layout

__all__ = ["IMPLS", "check", "decode", "encode", "grouped_matmul_mxfp4", "to_layout"]

IMPLS: dict[str, Callable[[jax.Array, jax.Array, jax.Array, jax.Array, str], jax.Array]] = {
    "reference": reference.grouped_matmul_mxfp4,
    "xla": xla.grouped_matmul_mxfp4,
}


def grouped_matmul_mxfp4(
    x: Array,
    packed: Array,
    scale: Array,
    group_sizes: Array,
    *,
    layout: str = "nk",
    impl: str = "xla",
) -> jax.Array:
    """y [R, N] with y[r] = x[r] @ w[e(r)]^T, w [E, N, K] = decode(packed, scale), e(r) the group that row r belongs to.

    x [R, K]: rows sorted by group; packed u8 [E, N, K/2] and scale u8 [E, N, K/32] ("nk"), or their byte transposes
    [E, K/2, N] and [E, K/32, N] ("kn"). group_sizes int [E], may be traced, sum <= R; rows past the sum give zeros in
    y and dx, even when they hold NaN. Accumulates in fp32 (float64 for x float64), y in x.dtype; the only rounding is
    that of the product, as decoding is exact.

    Differentiable in x only: codes have no gradient. impl "reference" decodes the bank (tests only), "xla" one expert
    at a time. Raises ValueError for an unknown `impl` or `layout` and for shapes that do not fit, TypeError for
    storage dtypes that are not bytes.
    """
    run = choose(IMPLS, impl, "grouped_matmul_mxfp4")
    if packed.ndim != 3:
        raise ValueError(f"grouped_matmul_mxfp4: packed must have 3 dims (experts first), got {packed.shape}")
    _, k = codec.dims(packed.shape, scale.shape, layout)
    check_groups(x, group_sizes, packed.shape[0], k, "grouped_matmul_mxfp4")
    x, packed, scale = jnp.asarray(x), jnp.asarray(packed), jnp.asarray(scale)
    return run(x, packed, scale, jnp.asarray(group_sizes, jnp.int32), layout)
