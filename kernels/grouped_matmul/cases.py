"""Named shapes of real models, skewed group sizes, and the tile sizes of loops and kernels.

Shared by tests, benchmarks and tuning, so that all of them speak of the same cases.
"""

import math
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

Entry = TypeVar("Entry")


@dataclass(frozen=True)
class Case:
    """One routed matrix: `rows` = tokens x top-k, `k` inputs, `n` outputs."""

    experts: int
    top_k: int
    k: int
    n: int

    def rows(self, tokens: int) -> int:
        return tokens * self.top_k


# The up-projection of each model's expert: k = width that enters the experts, n = hidden width of one expert.
CASES: dict[str, Case] = {
    "kimi_k3": Case(experts=896, top_k=16, k=3584, n=3072),  # 3584 is the latent width of Stable LatentMoE
    "kimi_k25": Case(experts=384, top_k=8, k=7168, n=2048),
    "deepseek_v3": Case(experts=256, top_k=8, k=7168, n=2048),
    "kimi_linear": Case(experts=256, top_k=8, k=2304, n=1024),
    "bench": Case(experts=16, top_k=4, k=512, n=192),
    "tiny_odd": Case(experts=5, top_k=3, k=33, n=17),
}

# (rows per group up to, tile heights tall to short). Measured on 2 CPU cores, fp32, K = N = 512; see `xla.tile_loop`.
ROW_TILES: tuple[tuple[float, tuple[int, ...]], ...] = (
    (4.0, (8, 2)),
    (16.0, (64, 8)),
    (float("inf"), (256, 64, 16)),
)
# (rows per group up to, height of dw's tiles): one height, as every tile costs a pass over [K, N].
GRAD_TILES: tuple[tuple[float, int], ...] = ((8.0, 8), (32.0, 32), (128.0, 64), (float("inf"), 256))


def row_tiles(rows: int, groups: int) -> tuple[int, ...]:
    """Tile heights, tall to short, for `rows` rows in `groups` groups; none is taller than `rows`."""
    heights = _row_of(ROW_TILES, rows, groups)
    return tuple(sorted({min(height, rows) for height in heights}, reverse=True))


def grad_tile(rows: int, groups: int) -> int:
    """Height of the tiles of dw for `rows` rows in `groups` groups; not taller than `rows`."""
    return min(_row_of(GRAD_TILES, rows, groups), rows)


def _row_of(table: tuple[tuple[float, Entry], ...], rows: int, groups: int) -> Entry:
    """The first entry whose limit on rows per group holds."""
    return next(entry for limit, entry in table if rows <= limit * groups)


def balanced(rows: int, groups: int) -> np.ndarray:
    """Group sizes that differ by at most one and sum to `rows`."""
    return (np.arange(groups) < rows % groups).astype(np.int32) + np.int32(rows // groups)


def zipf(rows: int, groups: int, seed: int = 0) -> np.ndarray:
    """Group sizes drawn with popularity 1/rank (Zipf, exponent 1), the ranks in a random order; sum is `rows`."""
    rng = np.random.default_rng(seed)
    weight = 1.0 / np.arange(1, groups + 1)
    return rng.multinomial(rows, rng.permutation(weight / weight.sum())).astype(np.int32)


def all_to_one(rows: int, groups: int, winner: int = 0) -> np.ndarray:
    """Every row in group `winner`."""
    return np.where(np.arange(groups) == winner, rows, 0).astype(np.int32)


# --- TPU --------------------------------------------------------------------------------------------------------------

TPU_VMEM = 56 << 20
"""Bytes a kernel may use: v5p and tpu7x have 64 MiB, v6e 128 (what the compiler enforces)."""
TPU_BLOCKS = 30 << 20  # of which for operands; the rest is for results and what the compiler spills


@dataclass(frozen=True)
class TpuTiles:
    """rows: of a tile; part: of a sub-tile, in which a tile that several groups share is multiplied; columns: of the
    product; contraction: rows of dw, or all of them."""

    rows: int
    part: int
    columns: int
    contraction: int


def tpu_tiles(rows: int, k: int, n: int, lefts: int, banks: int, itemsize: int) -> TpuTiles:
    """The largest tiles whose operands fit twice (one block is read while another is multiplied). ValueError for a
    contraction of which not even the smallest do: a step holds all of it."""
    for high, wide in ((512, 512), (512, 256), (256, 256), (128, 256), (64, 256), (64, 128)):
        if 2 * itemsize * k * (lefts * high + banks * wide) <= TPU_BLOCKS:
            break
    else:
        raise ValueError(f"grouped_matmul: a contraction of {k:,} values does not fit a TPU's VMEM in one step")
    high = min(high, -(-rows // 16) * 16)
    return TpuTiles(high, math.gcd(high, 64), min(wide, n), k)


def tpu_grad_tiles(rows: int, k: int, n: int) -> TpuTiles:
    high = min(512, -(-rows // 16) * 16)
    return TpuTiles(high, math.gcd(high, 64), min(512, n), min(512, k))


# --- NVIDIA -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GpuTiles:
    """rows, columns: of the tile that a program makes; contraction: of one step of its loop."""

    rows: int
    columns: int
    contraction: int
    warps: int
    stages: int


def gpu_tiles(rows: int, groups: int, k: int, n: int, sums: int, itemsize: int) -> GpuTiles:
    """For `sums` accumulators in registers; low tiles where groups have few rows. docs/kernels.md has the registers."""
    high = 128 if rows >= 64 * groups else 32
    if itemsize > 2:
        return GpuTiles(min(high, 64), _power(n, 64 // sums), _power(k, 32), 4, 2)
    return GpuTiles(high, _power(n, 128 // sums), _power(k, 64), 8 if high == 128 and n > 64 else 4, 3)


def gpu_grad_tiles(k: int, n: int, itemsize: int) -> GpuTiles:
    """rows are those of dw."""
    if itemsize > 2:
        return GpuTiles(_power(k, 64), _power(n, 64), 32, 4, 2)
    return GpuTiles(_power(k, 128), _power(n, 128), 64, 8 if min(k, n) > 64 else 4, 3)


def _power(size: int, most: int) -> int:
    """The power of two, 16 (what tensor cores take) to `most`, that covers `size` best."""
    return min(most, max(16, 1 << (size - 1).bit_length()))
