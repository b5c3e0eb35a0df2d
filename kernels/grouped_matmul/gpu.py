"""Grouped matmul for NVIDIA GPUs (Pallas, Triton): tiles that each lie in one group, from its first row on.

A program makes one tile [rows, columns] in a loop over the contraction. Programs of one tile of rows follow each
other, so that its rows are read from the L2 cache, where its group's next tile finds the expert's weights. The number
of tiles is bounded at compile time; those that run-time sizes leave over end at once.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from . import cases, pallas
from .pallas import Kernels, contract, take
from .tiles import offsets, owned


class Tiles(pallas.Tiles):
    """How tiles of a bank come to a program."""

    @property
    @abstractmethod
    def contracted(self) -> int:
        """The dim of a loaded tile that is summed over."""

    @abstractmethod
    def load(self, refs: Sequence[Any], expert: jax.Array, k: "Span", n: "Span") -> jax.Array:
        """The part of an expert's matrix where k, of the contraction, and n meet; zeros outside it."""


@dataclass(frozen=True)
class Span:
    """`count` indices of a dim from `start`, of which those below `end` are there."""

    start: Any
    count: int
    end: Any

    @property
    def at(self) -> Any:
        return pl.ds(self.start, self.count)

    @property
    def there(self) -> jax.Array:
        return self.start + jnp.arange(self.count) < self.end

    def over(self, divisor: int) -> "Span":
        return Span(lax.div(self.start, np.int32(divisor)), self.count // divisor, -(-self.end // divisor))


def load(ref: Any, index: tuple[Any, ...], rows: Span, columns: Span) -> jax.Array:
    """ref[*index, rows, columns], zeros outside."""
    mask = rows.there[:, None] & columns.there[None, :]
    return plgpu.load(ref.at[(*index, rows.at, columns.at)], mask=mask, other=jnp.zeros((), ref.dtype))


class DenseTiles(Tiles):
    """w [E, K, N] as it is."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.arrays[0].shape

    @property
    def contracted(self) -> int:
        return int(self.transposed)

    def load(self, refs, expert, k, n) -> jax.Array:
        return load(refs[0], (expert,), *((n, k) if self.transposed else (k, n)))


def products(
    xs: tuple[jax.Array, ...],
    tiles: tuple[Tiles, ...],
    extras: tuple[jax.Array, ...],
    group_sizes_E: jax.Array,
    epilogue: Callable,
    outputs: int,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, ...]:
    """See `pallas.Kernels`. interpret: for tests."""
    rows, dtype, bank = xs[0].shape[0], xs[0].dtype, tiles[0]
    if rows == 0:
        return (jnp.zeros((0, bank.out), dtype),) * outputs
    sums = 1 if len(xs) > 1 else len(tiles)
    size = cases.gpu_tiles(rows, group_sizes_E.shape[0], bank.contraction, bank.out, sums, dtype.itemsize)
    tile = owned(group_sizes_E, rows, size.rows)
    arrays = [array for each in tiles for array in each.arrays]
    moved = sum(a.nbytes for a in [*xs, *arrays, *extras]) + outputs * rows * bank.out * dtype.itemsize
    return pl.pallas_call(
        partial(_body, tiles, epilogue, len(xs), len(extras), size),
        grid=(pl.cdiv(bank.out, size.columns), tile.group.shape[0]),
        out_shape=[jax.ShapeDtypeStruct((rows, bank.out), dtype)] * outputs,
        compiler_params=plgpu.CompilerParams(num_warps=size.warps, num_stages=size.stages),
        cost_estimate=pl.CostEstimate(
            flops=2 * rows * bank.contraction * bank.out * len(tiles), bytes_accessed=moved, transcendentals=0
        ),
        interpret=interpret,
        name="grouped_matmul",
    )(*tile, *xs, *arrays, *extras)


def _body(tiles, epilogue, lefts, extras, size, group, first, end, *refs) -> None:
    refs = iter(refs)
    xs, arrays = take(refs, lefts), [take(refs, len(each.arrays)) for each in tiles]
    more, outs = take(refs, extras), list(refs)
    bank, t = tiles[0], pl.program_id(1)
    g, rows = group[t], Span(first[t], size.rows, end[t])
    columns = Span(pl.program_id(0) * size.columns, size.columns, bank.out)
    mask = rows.there[:, None] & columns.there[None, :]

    def store(values) -> None:
        for out, value in zip(outs, values, strict=True):
            plgpu.store(out.at[rows.at, columns.at], value.astype(out.dtype), mask=mask)

    @pl.when((first[t] < end[t]) & (g < bank.experts))
    def _():
        def step(i, sums):
            k = Span(i * size.contraction, size.contraction, bank.contraction)
            left = [load(x, (), rows, k) for x in xs]
            found = []
            for j, (each, of) in enumerate(zip(tiles, arrays, strict=True)):
                x = left[min(j, lefts - 1)]
                found.append(contract(x, each.load(of, g, k, columns).astype(x.dtype), (1, each.contracted)))
            # Rows of their own for each bank: only the sum is wanted, and registers hold one of it.
            return tuple(s + f for s, f in zip(sums, [sum(found[1:], found[0])] if lefts > 1 else found, strict=True))

        zeros = (jnp.zeros((size.rows, size.columns), jnp.float32),) * (1 if lefts > 1 else len(tiles))
        sums = lax.fori_loop(np.int32(0), np.int32(pl.cdiv(bank.contraction, size.contraction)), step, zeros)
        store(epilogue(list(sums), [load(extra, (), rows, columns) for extra in more]))

    @pl.when((first[t] < end[t]) & (g == bank.experts))
    def _():
        store([jnp.zeros((size.rows, size.columns), out.dtype) for out in outs])


# --- the gradient to a dense bank -------------------------------------------------------------------------------------


def weight_grad(x_RK: jax.Array, dy_RN: jax.Array, group_sizes_E: jax.Array, *, interpret: bool = False) -> jax.Array:
    """dw [E, K, N] in x's dtype: a program for each tile of each dw[e], in a loop over the rows of the group."""
    (rows, k), n, experts = x_RK.shape, dy_RN.shape[1], group_sizes_E.shape[0]
    if rows == 0:
        return jnp.zeros((experts, k, n), x_RK.dtype)
    size = cases.gpu_grad_tiles(k, n, x_RK.dtype.itemsize)
    return pl.pallas_call(
        partial(_grad_body, size, k, n),
        grid=(pl.cdiv(n, size.columns), pl.cdiv(k, size.rows), experts),
        out_shape=jax.ShapeDtypeStruct((experts, k, n), x_RK.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=size.warps, num_stages=size.stages),
        cost_estimate=pl.CostEstimate(
            flops=2 * rows * k * n,
            bytes_accessed=x_RK.nbytes + dy_RN.nbytes + experts * k * n * x_RK.dtype.itemsize,
            transcendentals=0,
        ),
        interpret=interpret,
        name="grouped_weight_grad",
    )(offsets(group_sizes_E, rows), x_RK, dy_RN)


def _grad_body(size, k, n, offset, x, dy, dw) -> None:
    columns = Span(pl.program_id(0) * size.columns, size.columns, n)
    inputs = Span(pl.program_id(1) * size.rows, size.rows, k)
    e = pl.program_id(2)
    first, end = offset[e], offset[e + 1]

    def step(i, total):
        rows = Span(first + i * size.contraction, size.contraction, end)
        return total + contract(load(x, (), rows, inputs), load(dy, (), rows, columns), (0, 0))

    trips = lax.div(end - first + size.contraction - 1, np.int32(size.contraction))
    total = lax.fori_loop(np.int32(0), trips, step, jnp.zeros((size.rows, size.columns), jnp.float32))
    mask = inputs.there[:, None] & columns.there[None, :]
    plgpu.store(dw.at[e, inputs.at, columns.at], total.astype(dw.dtype), mask=mask)


KERNELS = Kernels(DenseTiles, products, weight_grad)
