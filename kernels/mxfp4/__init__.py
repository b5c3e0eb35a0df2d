"""MXFP4: 4-bit weights with shared power-of-two scales, and the grouped matmul that multiplies by them as stored.

decode, encode, to_layout, check        the codec (`codec.py`)
grouped_matmul_mxfp4                    y[r] = x[r] @ w[e(r)]^T, the bank never decoded as a whole
gated_grouped_matmul_mxfp4              the same for gate and up at once, and their activation
"""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from ..grouped_matmul import Activation, Array, Gated, check_added, check_groups, choose, fused, pallas, unfused
from . import codec, gpu, reference, tpu, xla
from .codec import check, decode, encode, to_layout

__all__ = [
    "GATED",
    "IMPLS",
    "LAYOUT",
    "check",
    "decode",
    "encode",
    "gated_grouped_matmul_mxfp4",
    "grouped_matmul_mxfp4",
    "to_layout",
]


def _kernels(kernels: pallas.Kernels) -> Callable[[jax.Array, jax.Array, jax.Array, jax.Array, str], jax.Array]:
    return lambda x, packed, scale, group_sizes, layout: pallas.matmul(kernels, False, x, (packed, scale), group_sizes)


IMPLS: dict[str, Callable[[jax.Array, jax.Array, jax.Array, jax.Array, str], jax.Array]] = {
    "reference": reference.grouped_matmul_mxfp4,
    "xla": xla.grouped_matmul_mxfp4,
    "tpu": _kernels(tpu.KERNELS),
    "gpu": _kernels(gpu.KERNELS),
}
GATED: dict[str, Gated] = {
    "reference": unfused(reference.grouped_matmul_mxfp4),
    "xla": unfused(xla.grouped_matmul_mxfp4),
    "tpu": fused(tpu.KERNELS),
    "gpu": fused(gpu.KERNELS),
}
LAYOUT: dict[str, Literal["nk", "kn"]] = {"tpu": "kn", "gpu": "nk"}
"""The layout that a kernel reads; the others read both."""


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
    run = choose(IMPLS, impl, "grouped_matmul_mxfp4", x)
    _, k = _check_bank((packed, scale), layout, impl, "grouped_matmul_mxfp4")
    check_groups(x, group_sizes, packed.shape[0], k, "grouped_matmul_mxfp4")
    packed, scale = _bytes((packed, scale))
    return run(jnp.asarray(x), packed, scale, jnp.asarray(group_sizes, jnp.int32), layout)


def gated_grouped_matmul_mxfp4(
    x: Array,
    gate: tuple[Array, Array],
    up: tuple[Array, Array],
    group_sizes: Array,
    activation: Activation,
    *,
    added: tuple[Array, ...] = (),
    layout: str = "nk",
    impl: str = "xla",
) -> jax.Array:
    """y [R, F] with y[r] = activation(x[r] @ gate[e(r)]^T, x[r] @ up[e(r)]^T), the activation in fp32.

    gate, up: (packed, scale) of one shape, as in `grouped_matmul_mxfp4`; added: nothing, or two arrays [R, F] that are
    added to the products first. Differentiable in x and added. The kernels store no product: the backward pass makes
    them again from x. Errors as there.
    """
    name = "gated_grouped_matmul_mxfp4"
    run = choose(GATED, impl, name, x, *added)
    n, k = _check_bank(gate, layout, impl, name)
    if _check_bank(up, layout, impl, name) != (n, k) or gate[0].shape != up[0].shape:
        raise ValueError(f"{name}: gate and up must have one shape, got {gate[0].shape} and {up[0].shape}")
    check_groups(x, group_sizes, gate[0].shape[0], k, name)
    check_added(added, x.shape[0], n, name)
    banks = map(_bytes, (gate, up))
    more = tuple(map(jnp.asarray, added))
    return run(activation, jnp.asarray(x), *banks, more, jnp.asarray(group_sizes, jnp.int32), layout)


def _check_bank(bank: tuple[Array, Array], layout: str, impl: str, name: str) -> tuple[int, int]:
    """(N, K) of a bank [E, N, K]."""
    packed, scale = bank
    if packed.dtype != jnp.uint8 or scale.dtype not in (jnp.uint8, jnp.float8_e8m0fnu):
        raise TypeError(
            f"{name}: packed must be uint8 and scale uint8 or float8_e8m0fnu, got {packed.dtype}, {scale.dtype}"
        )
    if packed.ndim != 3:
        raise ValueError(f"{name}: packed must have 3 dims (experts first), got {packed.shape}")
    if layout != LAYOUT.get(impl, layout):
        raise ValueError(f"{name}: impl {impl!r} reads layout {LAYOUT[impl]!r}, the bank has {layout!r}: see to_layout")
    return codec.dims(packed.shape, scale.shape, layout)


def _bytes(bank: tuple[Array, Array]) -> tuple[jax.Array, jax.Array]:
    """The bank with scales as their codes, whichever of the two storage dtypes they have."""
    return jnp.asarray(bank[0]), codec.scale_code(bank[1])
