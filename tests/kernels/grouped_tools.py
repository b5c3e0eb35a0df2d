"""Problems of grouped matmul, their solutions in float64 group by group, and kernels that run without their chip."""

import dataclasses
from functools import partial
from typing import Any

import numpy as np
from jax.experimental.pallas import tpu as pltpu
from tests.numerics import rel_rms

from trillion_moe.kernels import mxfp4
from trillion_moe.kernels.grouped_matmul import cases, gpu, pallas, tpu
from trillion_moe.kernels.mxfp4 import gpu as mxfp4_gpu
from trillion_moe.kernels.mxfp4 import tpu as mxfp4_tpu

K, N = 13, 9

# name -> (rows, group sizes). 701, 75 and 16 rows take the three sets of tile heights, and are multiples of none.
SIZES = {
    "balanced": (701, cases.balanced(701, 5)),
    "zipf": (701, cases.zipf(701, 5)),
    "all_to_one": (701, cases.all_to_one(701, 5, winner=2)),
    "tall": (701, np.array([300, 0, 1, 256, 144])),
    "tiles_exactly": (701, np.array([64, 0, 256, 16, 0])),
    "all_dead": (701, np.zeros(5, int)),
    "empty_and_one_row": (75, np.array([0, 1, 0, 73, 1])),
    "dead_tail": (75, np.array([7, 0, 33, 1, 12])),
    "decode": (16, np.array([2, 9, 0, 4, 1])),
    "dead_tail_decode": (16, np.array([3, 0, 1, 4, 1])),
    "one_row": (1, np.array([0, 0, 0, 1, 0])),
}


def problem(rows, sizes, transpose_w=False, seed=0, k=K, n=N):
    """x, w, dy float64 numpy; the rows past the last group hold NaN in x and dy."""
    rng = np.random.default_rng(seed)
    x, dy = rng.normal(size=(rows, k)), rng.normal(size=(rows, n))
    w = rng.normal(size=(len(sizes), n, k) if transpose_w else (len(sizes), k, n))
    x[sum(sizes) :] = np.nan
    dy[sum(sizes) :] = np.nan
    return x, w, dy


def expected(x, w, dy, sizes, transpose_w=False):
    """(y, dx, dw) in float64, one group after the other."""
    y, dx, dw = np.zeros(dy.shape), np.zeros(x.shape), np.zeros_like(w)
    start = 0
    for e, size in enumerate(sizes):
        r = slice(start, start + size)
        w_KN = w[e].T if transpose_w else w[e]
        y[r], dx[r] = x[r] @ w_KN, dy[r] @ w_KN.T
        dw[e] = dy[r].T @ x[r] if transpose_w else x[r].T @ dy[r]
        start += size
    return y, dx, dw


def assert_close(got, want, sizes, tolerance):
    """Every group by itself, the dead tail exactly zero, dw of an empty group exactly zero."""
    (y, dx, dw), (y_, dx_, dw_) = got, want
    assert_rows_close((y, dx), (y_, dx_), sizes, tolerance)
    for e, size in enumerate(sizes):
        assert rel_rms(dw[e], dw_[e]) < tolerance, ("dw", e)
        assert size or not np.any(np.asarray(dw[e], np.float64)), ("dw of an empty group", e)


def assert_rows_close(got, want, sizes, tolerance):
    """Arrays [R, ...], every group by itself; the dead tail exactly zero."""
    end = np.cumsum(sizes)
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        for e, size in enumerate(sizes):
            r = slice(end[e] - size, end[e])
            assert rel_rms(a[r], b[r]) < tolerance, (i, e)
        assert not np.any(np.asarray(a[end[-1] :], np.float64)), (i, "dead tail")


def interpreted(kernels: pallas.Kernels, interpret: Any) -> pallas.Kernels:
    grad = kernels.weight_grad and partial(kernels.weight_grad, interpret=interpret)
    return dataclasses.replace(kernels, products=partial(kernels.products, interpret=interpret), weight_grad=grad)


# Uninitialised memory is NaN and a read outside an array an error on the interpreted TPU.
TPU = pltpu.InterpretParams()
DENSE = {"tpu": interpreted(tpu.KERNELS, TPU), "gpu": interpreted(gpu.KERNELS, True)}
PACKED = {"tpu": interpreted(mxfp4_tpu.KERNELS, TPU), "gpu": interpreted(mxfp4_gpu.KERNELS, True)}


def bank(rng, experts: int, n: int, k: int, chip: str) -> tuple[np.ndarray, np.ndarray]:
    """A packed bank in the layout that a chip's kernel reads."""
    stored = mxfp4.encode(rng.normal(size=(experts, n, k)).astype(np.float32))
    return mxfp4.to_layout(*stored, "nk", mxfp4.LAYOUT[chip])
