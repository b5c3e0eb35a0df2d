"""Problems of KDA, and its Pallas kernels without their chips."""

import dataclasses
from functools import partial
from typing import Any

import numpy as np
from jax.experimental.pallas import tpu as pltpu
from tests.numerics import rel_rms

from trillion_moe.kernels.linear_attention import CASES, gpu, pallas, tpu

TOLERANCE = {"float64": 1e-11, "float32": 1e-5, "bfloat16": 1e-2}  # relative RMS, by dtype of the arithmetic or output
NAMES = ("o", "state", "dq", "dk", "dv", "dg", "dbeta", "dstate")
SIZES = CASES["tiny_odd"]
B, H, K, V = SIZES.B, SIZES.H, SIZES.K, SIZES.V


def close(got, want, dtype, names=NAMES):
    errors = {name: rel_rms(a, b) for name, a, b in zip(names, got, want, strict=True)}
    assert max(errors.values()) <= TOLERANCE[dtype], errors


def make(T, g=None, *, seed=0):
    """((q, k, v, g, beta), state, (do, dstate)) in float64. g: that log decay everywhere, or None to draw gates between
    0 and -5. Log gates are fed directly: behind a saturated sigmoid dg would be 0."""
    r = np.random.default_rng(seed)
    q, k = (a / np.linalg.norm(a, axis=-1, keepdims=True) for a in r.normal(size=(2, B, T, H, K)))
    drawn = -5 / (1 + np.exp(-3 * r.normal(size=(B, T, H, K)) + 2))
    g = drawn if g is None else np.full_like(drawn, g)
    beta = 1 / (1 + np.exp(-r.normal(size=(B, T, H))))
    x = (q, k, r.normal(size=(B, T, H, V)), g, beta)
    return x, r.normal(size=(B, H, K, V)), (r.normal(size=(B, T, H, V)), r.normal(size=(B, H, K, V)))


def pick(data, index):
    """The tokens (and rows) `index` of x and do; state and dstate as they are."""
    x, state, (do, dstate) = data
    return tuple(a[index] for a in x), state, (do[index], dstate)


def interpreted(kernels: pallas.Kernels, interpret: Any) -> pallas.Kernels:
    return dataclasses.replace(
        kernels,
        forward=partial(kernels.forward, interpret=interpret),
        backward=partial(kernels.backward, interpret=interpret),
    )


RACES = interpreted(tpu.KERNELS, pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2))
KERNELS = {"tpu": interpreted(tpu.KERNELS, True), "gpu": interpreted(gpu.KERNELS, True)}
