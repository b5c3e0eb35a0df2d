"""Grouped matmul: one matrix product per group of consecutive rows, group sizes known only at run time.

    y[r] = x[r] @ w[e]          for rows r of group e, e = 0 .. E-1 in order
    y[r] = 0                    for rows past sum(group_sizes)

This is the product of a mixture-of-experts layer after its rows were sorted by expert. Implementations:

    "reference"    the definition, plain autodiff; gathers one weight per row (tests only)
    "xla"          tile loops with run-time trip counts and a hand-written VJP (`xla.py`); any platform, made for CPU
    "ragged_dot"   `jax.lax.ragged_dot`; fast only where XLA has a kernel for it, 10 to 60 x the ideal work on CPU
    "tpu"          Pallas, Mosaic (`tpu.py`)
    "gpu"          Pallas, Triton (`gpu.py`)

`gated_grouped_matmul` is the same for gate and up at once, with the activation between them and the next product.
"""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from . import gpu, pallas, ragged_dot, reference, tpu, xla
from .glu import Activation, Silu, Situ, activate

F = TypeVar("F")
Array = jax.Array | np.ndarray

__all__ = [
    "GATED",
    "IMPLS",
    "Activation",
    "Array",
    "Silu",
    "Situ",
    "activate",
    "check_groups",
    "choose",
    "fused",
    "gated_grouped_matmul",
    "grouped_matmul",
    "live_rows",
    "unfused",
]


def _kernels(kernels: pallas.Kernels) -> Callable[[jax.Array, jax.Array, jax.Array, bool], jax.Array]:
    return lambda x, w, group_sizes, transpose_w: pallas.matmul(kernels, transpose_w, x, (w,), group_sizes)


# The gated product of an implementation: activation, x, gate and up (each a tuple of arrays), added, group_sizes, and
# what the plain product takes last.
Gated = Callable[..., jax.Array]


def fused(kernels: pallas.Kernels) -> Gated:
    return lambda activation, x, gate, up, added, group_sizes, _: pallas.gated(
        kernels, activation, x, gate, up, added, group_sizes
    )


def unfused(product: Callable[..., jax.Array]) -> Gated:
    """Two products, then the activation."""

    def gated(activation, x, gate, up, added, group_sizes, last):
        left, right = (product(x, *bank, group_sizes, last) for bank in (gate, up))
        live = tuple(live_rows(each, group_sizes) for each in added)  # else their NaN would reach their gradient
        return live_rows(activate(activation, left, right, live), group_sizes)

    return gated


def live_rows(x: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """x [R, ...] with zeros past the last group."""
    return jnp.where((jnp.arange(x.shape[0]) < jnp.sum(group_sizes))[:, None], x, 0)


IMPLS: dict[str, Callable[[jax.Array, jax.Array, jax.Array, bool], jax.Array]] = {
    "reference": reference.grouped_matmul,
    "xla": xla.grouped_matmul,
    "ragged_dot": ragged_dot.grouped_matmul,
    "tpu": _kernels(tpu.KERNELS),
    "gpu": _kernels(gpu.KERNELS),
}
GATED: dict[str, Gated] = {
    "reference": unfused(reference.grouped_matmul),
    "xla": unfused(xla.grouped_matmul),
    "ragged_dot": unfused(ragged_dot.grouped_matmul),
    "tpu": fused(tpu.KERNELS),
    "gpu": fused(gpu.KERNELS),
}


def grouped_matmul(
    x: Array, w: Array, group_sizes: Array, *, transpose_w: bool = False, impl: str = "xla"
) -> jax.Array:
    """y [R, N] with y[r] = x[r] @ w[e(r)] (w[e(r)]^T with `transpose_w`), e(r) the group that row r belongs to.

    x [R, K]: rows sorted by group. w [E, K, N], or [E, N, K] with `transpose_w`. group_sizes int [E], may be traced,
    each >= 0 and sum <= R (a precondition: values known only at run time cannot be checked here). Rows past the sum
    give zeros in y and in dx and count in nothing, even when they hold NaN.

    Accumulates in fp32 (float64 when x or w is), y in x.dtype. Differentiable in x and w; dw of an empty group is
    exactly 0. Raises ValueError for an unknown `impl` and for shapes that do not fit, TypeError for non-integer sizes
    and for a dtype that the implementation has not.
    """
    run = choose(IMPLS, impl, "grouped_matmul", x, w)
    if w.ndim != 3:
        raise ValueError(f"grouped_matmul: w must be [E, K, N], got shape {w.shape}")
    check_groups(x, group_sizes, w.shape[0], w.shape[2 if transpose_w else 1], "grouped_matmul")
    return run(jnp.asarray(x), jnp.asarray(w), jnp.asarray(group_sizes, jnp.int32), transpose_w)


def gated_grouped_matmul(
    x: Array,
    gate: Array,
    up: Array,
    group_sizes: Array,
    activation: Activation,
    *,
    added: tuple[Array, ...] = (),
    impl: str = "xla",
) -> jax.Array:
    """y [R, F] with y[r] = activation(x[r] @ gate[e(r)], x[r] @ up[e(r)]), the activation in fp32.

    gate, up [E, K, F]; added: nothing, or two arrays [R, F] that are added to the products first (adapters). Rows,
    sizes, errors as in `grouped_matmul`. Differentiable in x, gate, up and added. The kernels store no product: the
    backward pass makes them again from x.
    """
    run = choose(GATED, impl, "gated_grouped_matmul", x, gate, up, *added)
    if gate.ndim != 3 or gate.shape != up.shape:
        raise ValueError(f"gated_grouped_matmul: gate and up must be [E, K, F], got {gate.shape} and {up.shape}")
    check_groups(x, group_sizes, gate.shape[0], gate.shape[1], "gated_grouped_matmul")
    check_added(added, x.shape[0], gate.shape[2], "gated_grouped_matmul")
    banks, more = [(jnp.asarray(w),) for w in (gate, up)], tuple(map(jnp.asarray, added))
    return run(activation, jnp.asarray(x), banks[0], banks[1], more, jnp.asarray(group_sizes, jnp.int32), False)


def check_added(added: tuple[Array, ...], rows: int, n: int, name: str) -> None:
    """Raise unless `added` is empty or holds two arrays [rows, n]."""
    if added and [a.shape for a in added] != [(rows, n)] * 2:
        raise ValueError(f"{name}: added must be two arrays [{rows}, {n}], got {[a.shape for a in added]}")


def choose(table: dict[str, F], impl: str, name: str, x: Array, *others: Array) -> F:
    """The entry of an implementation table; ValueError with the legal names when there is none, TypeError where a
    kernel would have to round x or what it is multiplied by or added to."""
    if impl not in table:
        raise ValueError(f"{name}: unknown impl {impl!r}; legal: {', '.join(sorted(table))}")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{name}: rows are {x.dtype}; they must be floating")
    if impl in ("tpu", "gpu"):
        if jnp.dtype(x.dtype).name not in ("float32", "bfloat16"):
            raise TypeError(f"{name}: impl {impl!r} takes rows of float32 or bfloat16, got {x.dtype}")
        if odd := sorted({str(a.dtype) for a in others if a.dtype != x.dtype}):
            raise TypeError(f"{name}: rows are {x.dtype}, other operands {', '.join(odd)}: kernels take one dtype")
    return table[impl]


def check_groups(x: Array, group_sizes: Array, experts: int, k: int, name: str) -> None:
    """Raise unless x is [R, k] and group_sizes integer [experts], at least one."""
    if experts < 1:
        raise ValueError(f"{name}: the weights hold no group")
    if x.ndim != 2 or x.shape[1] != k:
        raise ValueError(f"{name}: x must be [R, {k}] to fit the weights, got shape {x.shape}")
    if group_sizes.shape != (experts,):
        raise ValueError(f"{name}: group_sizes must be [{experts}], one per weight, got shape {group_sizes.shape}")
    if not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise TypeError(f"{name}: group_sizes must be integers, got {group_sizes.dtype}")
