"""Grouped matmul for TPU (Pallas, Mosaic): row tiles on a fixed grid, visited by each group that has rows in them.

The grid is (tiles of N, visits), the number of visits known at run time. A step holds a whole contraction, so there is
no loop over K and no accumulator between steps; the bank's block stays while a group's visits follow each other.
A tile that one group owns is one product; of others only the sub-tiles in which the group has rows are multiplied, and
only its rows are stored. MegaBlocks (Gale et al., arXiv 2211.15841) has the idea of ragged groups over fixed tiles.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from . import cases, pallas
from .pallas import Kernels, contract, take
from .tiles import visits


class Tiles(pallas.Tiles):
    """How blocks of a bank come to a step."""

    @property
    def contracted(self) -> int:
        """The dim of a loaded block that is summed over."""
        return int(self.transposed)

    @abstractmethod
    def specs(self, block: int) -> list[pl.BlockSpec]:
        """One for each array: the part of an expert's matrix that gives `block` columns of the product."""

    def scratch(self, block: int, dtype: jnp.dtype) -> list[Any]:
        """VMEM for what `prepare` makes."""
        return []

    def prepare(self, refs: Sequence[Any], scratch: Sequence[Any]) -> None:
        """Once for each group and block of columns."""

    @abstractmethod
    def load(self, refs: Sequence[Any], scratch: Sequence[Any]) -> jax.Array:
        """The block."""


def expert_block(shape: tuple[int, ...], experts: int, dim: int) -> pl.BlockSpec:
    """A block of each expert's matrix [1, *shape] that moves along `dim` with the grid's first axis."""

    def index(n, v, offset, group, tile):
        e = jnp.minimum(group[v], experts - 1)  # dead rows, group E, need none: any will do
        return (e, n, 0) if dim == 0 else (e, 0, n)

    return pl.BlockSpec((1, *shape), index)


class DenseTiles(Tiles):
    """w [E, K, N] as it is."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.arrays[0].shape

    def specs(self, block: int) -> list[pl.BlockSpec]:
        k = self.contraction
        return [expert_block((block, k) if self.transposed else (k, block), self.experts, 1 - self.contracted)]

    def load(self, refs, scratch) -> jax.Array:
        return refs[0][0]


def products(
    xs: tuple[jax.Array, ...],
    tiles: tuple[Tiles, ...],
    extras: tuple[jax.Array, ...],
    group_sizes_E: jax.Array,
    epilogue: Callable,
    outputs: int,
    *,
    interpret: Any = False,
) -> tuple[jax.Array, ...]:
    """See `pallas.Kernels`. interpret: for tests, `pltpu.InterpretParams()` or True."""
    rows, dtype, bank = xs[0].shape[0], xs[0].dtype, tiles[0]
    if rows == 0:
        return (jnp.zeros((0, bank.out), dtype),) * outputs
    size = cases.tpu_tiles(rows, bank.contraction, bank.out, len(xs), len(tiles), dtype.itemsize)
    visit = visits(group_sizes_E, rows, size.rows)
    wide = [pl.BlockSpec((size.rows, bank.contraction), lambda n, v, offset, group, tile: (tile[v], 0))] * len(xs)
    narrow = pl.BlockSpec((size.rows, size.columns), lambda n, v, offset, group, tile: (tile[v], n))
    arrays = [array for each in tiles for array in each.arrays]
    return pl.pallas_call(
        partial(_body, tiles, epilogue, len(xs), len(extras), outputs, size),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(pl.cdiv(bank.out, size.columns), visit.count),
            in_specs=[*wide, *(spec for each in tiles for spec in each.specs(size.columns)), *[narrow] * len(extras)],
            out_specs=[narrow] * outputs,
            scratch_shapes=[shape for each in tiles for shape in each.scratch(size.columns, dtype)],
        ),
        out_shape=[jax.ShapeDtypeStruct((rows, bank.out), dtype)] * outputs,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=cases.TPU_VMEM
        ),
        cost_estimate=_cost(rows, bank, len(tiles), [*xs, *arrays, *extras], outputs),
        interpret=interpret,
        name="grouped_matmul",
    )(visit.offset, visit.group, visit.tile, *xs, *arrays, *extras)


def _body(tiles, epilogue, lefts, extras, outputs, size, offset, group, tile, *refs) -> None:
    refs = iter(refs)
    xs, arrays = take(refs, lefts), [take(refs, len(each.arrays)) for each in tiles]
    more, outs = take(refs, extras), take(refs, outputs)
    scratch = [take(refs, len(each.scratch(1, jnp.dtype("float32")))) for each in tiles]
    v = pl.program_id(1)
    g, row = group[v], tile[v] * size.rows
    live, low, high = g < tiles[0].experts, offset[g] - row, offset[g + 1] - row
    whole = (low <= 0) & (high >= size.rows)

    @pl.when(live & ((v == 0) | (g != group[jnp.maximum(v - 1, 0)])))
    def _():
        for each, of, held in zip(tiles, arrays, scratch, strict=True):
            each.prepare(of, held)

    def computed(at):
        sums = []
        for i, (each, of, held) in enumerate(zip(tiles, arrays, scratch, strict=True)):
            x = xs[min(i, lefts - 1)][at, :]
            sums.append(contract(x, each.load(of, held).astype(x.dtype), (1, each.contracted)))
        return epilogue(sums, [extra[at, :] for extra in more])

    @pl.when(live & whole)
    def _():
        for out, value in zip(outs, computed(slice(None)), strict=True):
            out[...] = value.astype(out.dtype)

    @pl.when(live & ~whole)
    def _():
        def part(s, _):
            at = pl.ds(pl.multiple_of(s * size.part, size.part), size.part)
            mine = owned_rows(s * size.part, size.part, low, high)
            for out, value in zip(outs, computed(at), strict=True):
                out[at, :] = jnp.where(mine, value.astype(out.dtype), out[at, :])
            return _

        lax.fori_loop(*parts(low, high, size), part, 0)

    @pl.when(~live)
    def _():
        mine = owned_rows(0, size.rows, low, high)
        for out in outs:
            out[...] = jnp.where(mine, jnp.zeros_like(out), out[...])


def owned_rows(start, count: int, low, high) -> jax.Array:
    """bool [count, 1]: which of the rows from `start` lie in [low, high)."""
    row = start + lax.broadcasted_iota(jnp.int32, (count, 1), 0)
    return (row >= low) & (row < high)


def parts(low, high, size: "cases.TpuTiles") -> tuple[jax.Array, jax.Array]:
    """The first sub-tile in which a group has rows, and the one behind the last; `low`, `high` count from the tile."""
    low, high = jnp.clip(low, 0, size.rows), jnp.clip(high, 0, size.rows)
    part = np.int32(size.part)
    return lax.div(low, part), lax.div(high + part - 1, part)


def _cost(rows: int, bank: Tiles, count: int, arrays: list[jax.Array], outputs: int) -> pl.CostEstimate:
    """Of ideal work: every row once, every array read once."""
    moved = sum(a.nbytes for a in arrays) + outputs * rows * bank.out * arrays[0].dtype.itemsize
    return pl.CostEstimate(
        flops=2 * rows * bank.contraction * bank.out * count, bytes_accessed=moved, transcendentals=0
    )


# --- the gradient to a dense bank -------------------------------------------------------------------------------------


def weight_grad(x_RK: jax.Array, dy_RN: jax.Array, group_sizes_E: jax.Array, *, interpret: Any = False) -> jax.Array:
    """dw [E, K, N] in x's dtype, summed in fp32 over the visits of a group; zeros for a group without rows."""
    (rows, k), n, experts = x_RK.shape, dy_RN.shape[1], group_sizes_E.shape[0]
    if rows == 0:
        return jnp.zeros((experts, k, n), x_RK.dtype)
    size = cases.tpu_grad_tiles(rows, k, n)
    visit = visits(group_sizes_E, rows, size.rows, empty=True)
    grid = (pl.cdiv(k, size.contraction), pl.cdiv(n, size.columns), visit.count)
    return pl.pallas_call(
        partial(_grad_body, size, experts),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=grid,
            in_specs=[
                pl.BlockSpec((size.rows, size.contraction), lambda i, j, v, offset, group, tile: (tile[v], i)),
                pl.BlockSpec((size.rows, size.columns), lambda i, j, v, offset, group, tile: (tile[v], j)),
            ],
            out_specs=pl.BlockSpec(
                (1, size.contraction, size.columns), lambda i, j, v, offset, group, tile: (group[v], i, j)
            ),
            scratch_shapes=[pltpu.VMEM((size.contraction, size.columns), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((experts, k, n), x_RK.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=cases.TPU_VMEM
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * rows * k * n,
            bytes_accessed=x_RK.nbytes + dy_RN.nbytes + experts * k * n * x_RK.dtype.itemsize,
            transcendentals=0,
        ),
        interpret=interpret,
        name="grouped_weight_grad",
    )(visit.offset, visit.group, visit.tile, x_RK, dy_RN)


def _grad_body(size, experts, offset, group, tile, x, dy, dw, total) -> None:
    v, last = pl.program_id(2), pl.num_programs(2) - 1
    g, row = group[v], tile[v] * size.rows
    low, high = offset[g] - row, offset[g + 1] - row
    whole = (low <= 0) & (high >= size.rows)

    @pl.when((v == 0) | (g != group[jnp.maximum(v - 1, 0)]))
    def _():
        total[...] = jnp.zeros_like(total)

    @pl.when(whole)
    def _():
        total[...] += contract(x[...], dy[...], (0, 0))

    @pl.when(~whole)
    def _():
        def part(s, _):
            at = pl.ds(pl.multiple_of(s * size.part, size.part), size.part)
            mine = owned_rows(s * size.part, size.part, low, high)
            # Both: rows of others, or behind the last one, may hold what no zero cancels.
            left, right = (jnp.where(mine, a[at, :], jnp.zeros((), a.dtype)) for a in (x, dy))
            total[...] += contract(left, right, (0, 0))
            return _

        lax.fori_loop(*parts(low, high, size), part, 0)

    @pl.when((v == last) | (g != group[jnp.minimum(v + 1, last)]))
    def _():
        dw[0] = total[...].astype(dw.dtype)


KERNELS = Kernels(DenseTiles, products, weight_grad)
