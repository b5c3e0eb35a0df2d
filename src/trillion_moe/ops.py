"""The products that know how a weight is stored: `dot`, `grouped_dot`, `grouped_glu` and `dense`. And `einsum`.

Which implementation of an operator they call is said by `using`, else by the platform. Shape suffixes: K contraction, N
out, R routed rows, E experts, F expert hidden, r adapter rank.
"""

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial
from typing import assert_never

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from trillion_moe.kernels import grouped_matmul as grouped
from trillion_moe.kernels import linear_attention, mxfp4
from trillion_moe.kernels.grouped_matmul import Activation, Silu, Situ, activate
from trillion_moe.weights import MXFP4, LoRA, Weight, matrix_shape

__all__ = [
    "IMPLEMENTATIONS",
    "Activation",
    "Silu",
    "Situ",
    "accumulator",
    "activate",
    "dense",
    "dot",
    "einsum",
    "grouped_dot",
    "grouped_glu",
    "implementation",
    "using",
]

IMPLEMENTATIONS: dict[str, tuple[str, ...]] = {
    "grouped_matmul": tuple(name for name in grouped.IMPLS if name != "reference"),
    "grouped_matmul_mxfp4": tuple(name for name in mxfp4.IMPLS if name != "reference"),
    "kda": tuple(name for name in linear_attention.IMPLS if name != "reference"),
}
"""Operators of which there is more than one implementation."""

_chosen = jax.make_user_context(default_value=())  # part of what `jax.jit` keeps programs by


@contextlib.contextmanager
def using(choice: Mapping[str, str]) -> Iterator[None]:
    """Inside, these implementations and no others: operator to implementation, those that are not named by platform.

    ValueError for a name that is not in `IMPLEMENTATIONS`.
    """
    for operator, name in choice.items():
        if operator not in IMPLEMENTATIONS:
            raise ValueError(f"no operator {operator!r} to choose: legal are {', '.join(IMPLEMENTATIONS)}")
        if name not in IMPLEMENTATIONS[operator]:
            raise ValueError(f"{operator} has no {name!r}: legal are {', '.join(IMPLEMENTATIONS[operator])}")
    with _chosen(tuple(sorted(choice.items()))):
        yield


def implementation(operator: str, dtype: DTypeLike) -> str:
    """What computes an operator here and now: the choice of `using`, or the platform's kernel if it takes the dtype."""
    chosen = dict(_chosen.value)
    if operator in chosen:
        return chosen[operator]
    platform = jax.default_backend()
    takes = jnp.dtype(dtype).name in ("float32", "bfloat16")
    return platform if platform in ("tpu", "gpu") and takes else "xla"


def accumulator(dtype: DTypeLike) -> jnp.dtype:
    """The dtype in which products of `dtype` are summed: float32, or float64 for float64."""
    return jnp.promote_types(dtype, jnp.float32)


def dot(x: jax.Array, w: Weight, *, dtype: DTypeLike | None = None) -> jax.Array:
    """``x [..., K] @ w [K, N] -> [..., N]`` in `dtype` (default x's), accumulated in float32 (float64 for float64)."""
    match w:
        case jax.Array():
            return einsum("...k,kn->...n", x, w.astype(x.dtype)).astype(dtype or x.dtype)
        case MXFP4():
            return dot(x, dense(w, x.dtype), dtype=dtype)
        case LoRA():
            return dot(x, w.base, dtype=dtype) + _scaled(dot(dot(x, w.a), w.b, dtype=dtype), w.scaling)
        case _:
            assert_never(w)


def einsum(expression: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """`jnp.einsum` of two arrays of one dtype, accumulated and given in float32 (float64 for float64).

    Gradients of half-precision arrays are products in half precision, too: JAX would widen both sides of them.
    """
    if accumulator(a.dtype) == a.dtype:
        return jnp.einsum(expression, a, b)
    return _half_einsum(expression, a, b)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _half_einsum(expression: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(expression, a, b, preferred_element_type=accumulator(a.dtype))


def _half_einsum_bwd(expression: str, operands: tuple[jax.Array, jax.Array], g: jax.Array):
    narrow = partial(jnp.einsum, expression, preferred_element_type=operands[0].dtype)
    return jax.vjp(narrow, *operands)[1](g.astype(operands[0].dtype))


_half_einsum.defvjp(lambda expression, a, b: (_half_einsum(expression, a, b), (a, b)), _half_einsum_bwd)


def grouped_dot(x_RK: jax.Array, w: Weight, group_sizes_E: jax.Array) -> jax.Array:
    """Rows sorted by expert times that expert's matrix: ``[R, K] x [E, K, N] -> [R, N]``.

    group_sizes_E: int32, rows per expert; rows past their sum (padding) give zeros.
    """
    match w:
        case jax.Array():
            impl = implementation("grouped_matmul", x_RK.dtype)
            return grouped.grouped_matmul(x_RK, w.astype(x_RK.dtype), group_sizes_E, impl=impl)
        case MXFP4():
            impl = implementation("grouped_matmul_mxfp4", x_RK.dtype)
            return mxfp4.grouped_matmul_mxfp4(x_RK, w.packed, w.scale, group_sizes_E, layout=w.layout, impl=impl)
        case LoRA():
            return grouped_dot(x_RK, w.base, group_sizes_E) + _adapter(x_RK, w, group_sizes_E)
        case _:
            assert_never(w)


def grouped_glu(
    x_RK: jax.Array, gate: Weight, up: Weight, group_sizes_E: jax.Array, activation: Activation
) -> jax.Array:
    """``activation(x @ gate, x @ up)`` of rows sorted by expert: ``[R, K] -> [R, F]``. See `grouped_dot`."""
    return _glu(x_RK, gate, up, (), group_sizes_E, activation)


def _glu(x_RK, gate: Weight, up: Weight, added: tuple[jax.Array, ...], group_sizes_E, activation) -> jax.Array:
    """added: nothing, or what adapters add to either product."""
    match gate, up:
        case (LoRA(), _) | (_, LoRA()):
            more = tuple(_adapter(x_RK, w, group_sizes_E) for w in (gate, up))
            below, beside = (w.base if isinstance(w, LoRA) else w for w in (gate, up))
            more = tuple(map(jnp.add, added, more)) if added else more
            return _glu(x_RK, below, beside, more, group_sizes_E, activation)
        case (jax.Array(), jax.Array()):
            impl, dtype = implementation("grouped_matmul", x_RK.dtype), x_RK.dtype
            return grouped.gated_grouped_matmul(
                x_RK, gate.astype(dtype), up.astype(dtype), group_sizes_E, activation, added=added, impl=impl
            )
        case (MXFP4(layout=layout), MXFP4()) if up.layout == layout:
            impl = implementation("grouped_matmul_mxfp4", x_RK.dtype)
            first, second = (gate.packed, gate.scale), (up.packed, up.scale)
            return mxfp4.gated_grouped_matmul_mxfp4(
                x_RK, first, second, group_sizes_E, activation, added=added, layout=layout, impl=impl
            )
        case _:  # stored in two ways
            left_RF, right_RF = (grouped_dot(x_RK, w, group_sizes_E) for w in (gate, up))
            return activate(activation, left_RF, right_RF, added)


def _adapter(x_RK: jax.Array, w: Weight, group_sizes_E: jax.Array) -> jax.Array:
    """What an adapter adds to the product, zeros without one."""
    match w:
        case LoRA():
            h_Rr = _adapter_dot(x_RK, w.a, w.slots, group_sizes_E)
            return _scaled(_adapter_dot(h_Rr, w.b, w.slots, group_sizes_E), w.scaling)
        case _:
            return jnp.zeros((x_RK.shape[0], matrix_shape(w)[-1]), x_RK.dtype)


def dense(w: Weight, dtype: DTypeLike) -> jax.Array:
    """The matrix itself, ``[*b, K, N]`` in `dtype`. For merging and for weights small enough to hold decoded."""
    match w:
        case jax.Array():
            return w.astype(dtype)
        case MXFP4():
            w_nk = mxfp4.decode(w.packed, w.scale, layout=w.layout, dtype=dtype)
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
        return dot(grouped.live_rows(x_RK, group_sizes_E), m)
    return grouped_dot(x_RK, _per_expert(m, slots_E), group_sizes_E)


def _per_expert(m: jax.Array, slots_E: jax.Array | None) -> jax.Array:
    """One adapter matrix per expert, zero where an expert has none."""
    if slots_E is None or m.ndim == 2:
        return m
    return jnp.where((slots_E >= 0)[:, None, None], m[jnp.maximum(slots_E, 0)], 0)


def _scaled(y: jax.Array, scaling: float) -> jax.Array:
    return y * jnp.asarray(scaling, y.dtype)
