"""Grouped matmul and gated grouped matmul with their gradients, over whatever kernels a chip has for two primitives.

    products      rows of one or several arrays times one or several banks, and an epilogue of the products
    weight_grad   dw[e] = sum over the rows r of group e of x[r]^T dy[r]

A bank is a tuple of raw arrays: ``(w,)``, or what a packed format has. Residuals are the inputs: the backward pass of a
gated matmul multiplies by gate and up again rather than keep two products [R, N] in fp32.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .glu import Activation, gradient

Bank = tuple[jax.Array, ...]


@dataclass(frozen=True)
class Tiles(ABC):
    """A bank w [E, K, N] as the arrays that hold it; transposed: rows [R, N] times w^T. A chip's subclasses say how
    parts of an expert's matrix come to a kernel."""

    arrays: Bank
    transposed: bool

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """(E, K, N)"""

    @property
    def experts(self) -> int:
        return self.shape[0]

    @property
    def contraction(self) -> int:
        """How many values a sum of the product has."""
        return self.shape[2 if self.transposed else 1]

    @property
    def out(self) -> int:
        """Columns of the product."""
        return self.shape[1 if self.transposed else 2]


@dataclass(frozen=True)
class Kernels:
    """A chip's primitives for one format of banks.

    tiles(bank, transposed): what `products` reads of a bank; y = x @ w, or x @ w^T where transposed.
    products(xs, tiles, extras, group_sizes, epilogue, outputs): arrays [R, N] ``epilogue(accumulators, extras)``;
        accumulator i is fp32 ``xs[i] @ tiles[i]``, xs may be one array for all; extras [R, N]; `outputs` arrays come.
    weight_grad: None where a bank has no gradient.
    """

    tiles: Callable[[Bank, bool], Any]
    products: Callable[..., tuple[jax.Array, ...]]
    weight_grad: Callable[[jax.Array, jax.Array, jax.Array], jax.Array] | None


def first(accumulators, extras):
    """The epilogue of a plain product."""
    return (accumulators[0],)


def total(accumulators, extras):
    """Of a gradient to rows that went through several banks."""
    return (sum(accumulators[1:], accumulators[0]),)


@dataclass(frozen=True)
class Gated:
    """Activation of two products, to each of which an extra may have been added."""

    activation: Activation

    def __call__(self, accumulators, extras):
        return (self.activation(*_added(accumulators, extras)),)


@dataclass(frozen=True)
class GatedGradient:
    """Gradients to both products; the last extra is the gradient to the activation."""

    activation: Activation

    def __call__(self, accumulators, extras):
        *added, dy = extras
        gate, up = _added(accumulators, added)
        return gradient(self.activation, gate, up, dy.astype(jnp.float32))


def _added(accumulators, extras):
    return [a + e.astype(a.dtype) for a, e in zip(accumulators, extras, strict=True)] if extras else accumulators


# --- one bank ---------------------------------------------------------------------------------------------------------


def matmul(kernels: Kernels, transposed: bool, x_RK: jax.Array, bank: Bank, group_sizes_E: jax.Array) -> jax.Array:
    """y[r] = x[r] @ w[e(r)], or w[e(r)]^T; rows past the last group give zeros."""
    inputs = (x_RK, bank, group_sizes_E)
    return _matmul(kernels, transposed, *inputs)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _matmul(kernels, transposed, x_RK, bank, group_sizes_E):
    (y_RN,) = kernels.products((x_RK,), (kernels.tiles(bank, transposed),), (), group_sizes_E, first, 1)
    return y_RN


def _matmul_fwd(kernels, transposed, x_RK, bank, group_sizes_E):
    return _matmul(kernels, transposed, x_RK, bank, group_sizes_E), (x_RK, bank, group_sizes_E)


def _matmul_bwd(kernels, transposed, residuals, dy_RN):
    x_RK, bank, group_sizes_E = residuals
    dx_RK = matmul(kernels, not transposed, dy_RN, bank, group_sizes_E)
    left, right = (dy_RN, x_RK) if transposed else (x_RK, dy_RN)
    return dx_RK, _bank_grad(kernels, left, right, bank, group_sizes_E), None


_matmul.defvjp(_matmul_fwd, _matmul_bwd)


def _bank_grad(kernels: Kernels, x_RK, dy_RN, bank: Bank, group_sizes_E) -> tuple[Any, ...]:
    if kernels.weight_grad is None:
        return (None,) * len(bank)
    return (kernels.weight_grad(x_RK, dy_RN, group_sizes_E).astype(bank[0].dtype),)


# --- gate and up ------------------------------------------------------------------------------------------------------


def gated(
    kernels: Kernels,
    activation: Activation,
    x_RK: jax.Array,
    gate: Bank,
    up: Bank,
    added: tuple[jax.Array, ...],
    group_sizes_E: jax.Array,
) -> jax.Array:
    """y[r] = activation(x[r] @ gate[e(r)], x[r] @ up[e(r)]); added: nothing, or [R, N] for each product."""
    inputs = (x_RK, gate, up, added, group_sizes_E)
    return _gated(kernels, activation, *inputs)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gated(kernels, activation, x_RK, gate, up, added, group_sizes_E):
    tiles = tuple(kernels.tiles(bank, False) for bank in (gate, up))
    (y_RN,) = kernels.products((x_RK,), tiles, added, group_sizes_E, Gated(activation), 1)
    return y_RN


def _gated_fwd(kernels, activation, x_RK, gate, up, added, group_sizes_E):
    inputs = (x_RK, gate, up, added, group_sizes_E)
    return _gated(kernels, activation, *inputs), inputs


def _gated_bwd(kernels, activation, inputs, dy_RN):
    x_RK, gate, up, added, group_sizes_E = inputs
    forward, back = (tuple(kernels.tiles(bank, turned) for bank in (gate, up)) for turned in (False, True))
    both = kernels.products((x_RK,), forward, (*added, dy_RN), group_sizes_E, GatedGradient(activation), 2)
    (dx_RK,) = kernels.products(both, back, (), group_sizes_E, total, 1)
    banks = (_bank_grad(kernels, x_RK, d_RN, bank, group_sizes_E) for d_RN, bank in zip(both, (gate, up), strict=True))
    return dx_RK, *banks, both if added else (), None


_gated.defvjp(_gated_fwd, _gated_bwd)


# --- in a kernel's body -----------------------------------------------------------------------------------------------


def contract(a: jax.Array, b: jax.Array, dims: tuple[int, int]) -> jax.Array:
    """Sum of products over dim dims[0] of a and dims[1] of b, in fp32; float32 operands are not rounded to bf16."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    dims_ = (((dims[0],), (dims[1],)), ((), ()))
    return lax.dot_general(a, b, dims_, precision=precision, preferred_element_type=jnp.float32)


def take(refs: Iterator[Any], count: int) -> list[Any]:
    """The next `count` of a kernel's refs."""
    return list(islice(refs, count))
