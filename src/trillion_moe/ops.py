"""The three products that know how a weight is stored: `dot`, `grouped_dot` and `dense`.

Shape suffixes: K contraction, N out, R routed rows, E experts, r adapter rank.
"""

from typing import assert_never

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from trillion_moe.kernels.grouped_matmul import grouped_matmul
from trillion_moe.kernels.mxfp4 import decode, grouped_matmul_mxfp4
from trillion_moe.weights import MXFP4, LoRA, Weight


def accumulator(dtype: DTypeLike) -> jnp.dtype:
    """The dtype in which products of `dtype` are summed: float32, or float64 for float64."""
    return jnp.promote_types(dtype, jnp.float32)


def dot(x: jax.Array, w: Weight, *, dtype: DTypeLike | None = None) -> jax.Array:
    """``x [..., K] @ w [K, N] -> [..., N]`` in `dtype` (default x's), accumulated in float32 (float64 for float64)."""
    match w:
        case jax.Array():
            y = lax.dot_general(
                x,
                w.astype(x.dtype),
                (((x.ndim - 1,), (0,)), ((), ())),
                preferred_element_type=accumulator(x.dtype),
            )
            return y.astype(dtype or x.dtype)
        case MXFP4():
            return dot(x, dense(w, x.dtype), dtype=dtype)
        case LoRA():
            return dot(x, w.base, dtype=dtype) + _scaled(dot(dot(x, w.a), w.b, dtype=dtype), w.scaling)
        case _:
            assert_never(w)


def grouped_dot(x_RK: jax.Array, w: Weight, group_sizes_E: jax.Array) -> jax.Array:
    """Rows sorted by expert times that expert's matrix: ``[R, K] x [E, K, N] -> [R, N]``.

    group_sizes_E: int32, rows per expert; rows past their sum (padding) give zeros.
    """
    match w:
        case jax.Array():
            return grouped_matmul(x_RK, w.astype(x_RK.dtype), group_sizes_E)
        case MXFP4():
            return grouped_matmul_mxfp4(x_RK, w.packed, w.scale, group_sizes_E, layout=w.layout)
        case LoRA():
            base = grouped_dot(x_RK, w.base, group_sizes_E)
            h_Rr = _adapter_dot(x_RK, w.a, w.slots, group_sizes_E)
            return base + _scaled(_adapter_dot(h_Rr, w.b, w.slots, group_sizes_E), w.scaling)
        case _:
            assert_never(w)


def dense(w: Weight, dtype: DTypeLike) -> jax.Array:
    """The matrix itself, ``[*b, K, N]`` in `dtype`. For merging and for weights small enough to hold decoded."""
    match w:
        case jax.Array():
            return w.astype(dtype)
        case MXFP4():
            w_nk = decode(w.packed, w.scale, layout=w.layout, dtype=dtype)
            return w_nk if w.layout == "kn" else jnp.swapaxes(w_nk, -1, -2)
        case LoRA():
            base = dense(w.base, dtype)
            acc = accumulator(dtype)
            a, b = (_per_expert(m, w.slots).astype(acc) for m in (w.a, w.b))
            delta = jnp.matmul(a, b, precision=lax.Precision.HIGHEST)
            return (base.astype(acc) + w.scaling * delta).astype(dtype)
        case _:
            assert_never(w)


def _adapter_dot(x_RK: jax.Array, m: jax.Array, slots_E: jax.Array | None, group_sizes_E: jax.Array) -> jax.Array:
    if m.ndim == 2:
        return dot(x_RK, m)
    return grouped_matmul(x_RK, _per_expert(m, slots_E).astype(x_RK.dtype), group_sizes_E)


def _per_expert(m: jax.Array, slots_E: jax.Array | None) -> jax.Array:
    """One adapter matrix per expert, zero where an expert has none."""
    if slots_E is None or m.ndim == 2:
        return m
    return jnp.where((slots_E >= 0)[:, None, None], m[jnp.maximum(slots_E, 0)], 0)


def _scaled(y: jax.Array, scaling: float) -> jax.Array:
    return y * jnp.asarray(scaling, y.dtype)
