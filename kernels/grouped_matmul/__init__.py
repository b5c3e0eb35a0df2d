"""Grouped matmul: one matrix product per group of consecutive rows, group sizes known only at run time.

    y[r] = x[r] @ w[e]          for rows r of group e, e = 0 .. E-1 in order
    y[r] = 0                    for rows past sum(group_sizes)

This is the product of a mixture-of-experts layer after its rows were sorted by expert. Implementations:

    "reference"    the definition, plain autodiff; gathers one weight per row (tests only)
    "xla"          tile loops with run-time trip counts and a hand-written VJP (`xla.py`); any platform, made for CPU
    "ragged_dot"   `jax.lax.ragged_dot`; fast only where XLA has a kernel for it, 10 to 60 x the ideal work on CPU
"""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from . import ragged_dot, reference, xla

F = TypeVar("F")
Array = jax.Array | np.ndarray

__all__ = ["IMPLS", "Array", "check_groups", "choose", "grouped_matmul"]

IMPLS: dict[str, Callable[[jax.Array, jax.Array, jax.Array, bool], jax.Array]] = {
    "reference": reference.grouped_matmul,
    "xla": xla.grouped_matmul,
    "ragged_dot": ragged_dot.grouped_matmul,
}


def grouped_matmul(
    x: Array, w: Array, group_sizes: Array, *, transpose_w: bool = False, impl: str = "xla"
) -> jax.Array:
    """y [R, N] with y[r] = x[r] @ w[e(r)] (w[e(r)]^T with `transpose_w`), e(r) the group that row r belongs to.

    x [R, K]: rows sorted by group. w [E, K, N], or [E, N, K] with `transpose_w`. group_sizes int [E], may be traced,
    each >= 0 and sum <= R (a precondition: values known only at run time cannot be checked here). Rows past the sum
    give zeros in y and in dx and count in nothing, even when they hold NaN.

    Accumulates in fp32 (float64 when x or w is), y in x.dtype. Differentiable in x and w; dw of an empty group is
    exactly 0. Raises ValueError for an unknown `impl` and for shapes that do not fit, TypeError for non-integer sizes.
    """
    run = choose(IMPLS, impl, "grouped_matmul")
    if w.ndim != 3:
        raise ValueError(f"grouped_matmul: w must be [E, K, N], got shape {w.shape}")
    check_groups(x, group_sizes, w.shape[0], w.shape[2 if transpose_w else 1], "grouped_matmul")
    return run(jnp.asarray(x), jnp.asarray(w), jnp.asarray(group_sizes, jnp.int32), transpose_w)


def choose(table: dict[str, F], impl: str, name: str) -> F:
    """The entry of an implementation table; ValueError with the legal names when there is none."""
    if impl not in table:
        raise ValueError(f"{name}: unknown impl {impl!r}; legal: {', '.join(sorted(table))}")
    return table[impl]


def check_groups(x: Array, group_sizes: Array, experts: int, k: int, name: str) -> None:
    """Raise unless x is [R, k] and group_sizes integer [experts]."""
    if x.ndim != 2 or x.shape[1] != k:
        raise ValueError(f"{name}: x must be [R, {k}] to fit the weights, got shape {x.shape}")
    if group_sizes.shape != (experts,):
        raise ValueError(f"{name}: group_sizes must be [{experts}], one per weight, got shape {group_sizes.shape}")
    if not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise TypeError(f"{name}: group_sizes must be integers, got {group_sizes.dtype}")
