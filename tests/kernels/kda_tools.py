"""Problems of KDA, its Pallas kernels without their chips, and what they are all held to: the recurrence in float64."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu
from tests.numerics import TOLERANCE, rel_rms

from trillion_moe.kernels.linear_attention import CASES, gpu, kda, pallas, tpu

NAMES = ("o", "state", "dq", "dk", "dv", "dg", "dbeta", "dstate")
SIZES = CASES["tiny_odd"]
B, H, K, V = SIZES.B, SIZES.H, SIZES.K, SIZES.V
LONGEST = 257


def close(got, want, dtype, names=NAMES, *, bar=None):
    """bar: relative RMS, the table's for dtype unless given."""
    errors = {name: rel_rms(a, b) for name, a, b in zip(names, got, want, strict=True)}
    assert max(errors.values()) <= (bar or TOLERANCE[dtype]), errors


# --- problems ---------------------------------------------------------------------------------------------------------


def make(T, g=None, *, seed=0, sizes=SIZES):
    """((q, k, v, g, beta), state, (do, dstate)) in float64. g: that log decay everywhere, or None to draw gates between
    0 and -5. Log gates are fed directly: behind a saturated sigmoid dg would be 0."""
    r = np.random.default_rng(seed)
    B, H, K, V = sizes.B, sizes.H, sizes.K, sizes.V
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


def mixed(T):
    """From no decay to one that leaves nothing, channel by channel."""
    (q, k, v, g, beta), *rest = make(T)
    return (q, k, v, np.broadcast_to(np.array([0.0, -5.0, -1e-3, -40.0, -1.0]), g.shape), beta), *rest


def equal_keys(T, *, length=1.0, beta=1.0, g=0.0, sizes=SIZES):
    """One key, written over with that weight: powers of the matrix that is inverted have binomials."""
    (q, k, v, gates, betas), *rest = make(T, g, sizes=sizes)
    return (q, length * np.broadcast_to(k[:, :1], k.shape), v, gates, np.full_like(betas, beta)), *rest


def late(T):
    """Equal keys, all weight on the last token of 64: the inverse of a chunk has norm 8."""
    (q, k, v, g, beta), *rest = equal_keys(T)
    return (q, k, v, g, np.where(np.arange(T)[:, None] % 64 == 63, beta, 0)), *rest


LONG = 1.89**0.5
"""Length of equal keys for which the inverse of 64 tokens has norm 17."""


def zero_rows(T):
    (q, k, v, g, beta), *rest = make(T)
    for a in (q[:, ::3], k[:, 1::4], v[:, 2::5], beta[:, ::7]):
        a[...] = 0
    return (q, k, v, g, beta), *rest


def deep(T):
    """A decay that leaves nothing, and gradients 1e8 times larger behind it."""
    x, state, (do, dstate) = make(T)
    x[3][:, T // 2] = -60
    return x, state, (do * np.where(np.arange(T) < T // 2, 1, 1e8)[None, :, None, None], dstate)


LIMITS = {f"gates of {g}": partial(make, g=g) for g in (0.0, -1e-4, -1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -40.0)} | {
    "drawn": make,
    "mixed": mixed,
    "equal keys": equal_keys,
    "equal keys, late weight": late,
    "long equal keys": partial(equal_keys, length=LONG),
    "zero rows": zero_rows,
}


# --- runs -------------------------------------------------------------------------------------------------------------


def interpreted(kernels: pallas.Kernels, interpret: Any) -> pallas.Kernels:
    return dataclasses.replace(
        kernels,
        forward=partial(kernels.forward, interpret=interpret),
        backward=partial(kernels.backward, interpret=interpret),
    )


RACES = interpreted(tpu.KERNELS, pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2))
KERNELS = {"tpu": interpreted(tpu.KERNELS, True), "gpu": interpreted(gpu.KERNELS, True)}
FORMS: dict[str, Callable[..., Any]] = {"xla": kda} | {
    chip: partial(pallas.kda, each) for chip, each in KERNELS.items()
}


@partial(jax.jit, static_argnames=("form", "chunk"))
def run(form, x, state, cotangents, segments, state_segment, chunk):
    """Arrays of NAMES, of a form with the arguments of `kda`."""

    def call(x, state):
        return form(*x, state=state, segments=segments, state_segment=state_segment, chunk=chunk)

    out, pull = jax.vjp(call, x, state)
    dx, dstate = pull(tuple(c.astype(o.dtype) for c, o in zip(cotangents, out, strict=True)))
    return *out, *dx, dstate


def found(form, data, segments=None, state_segment=None, *, chunk, dtype="float32"):
    """Of numpy arrays (x, state, cotangents)."""
    data = jax.tree.map(lambda a: jnp.asarray(a, dtype), data)
    segments, state_segment = (None if a is None else jnp.asarray(a, jnp.int32) for a in (segments, state_segment))
    return jax.tree.map(np.asarray, run(form, *data, segments, state_segment, chunk))


RECURRENCE = partial(kda, impl="reference")


def exact(data, segments=None, state_segment=None):
    """By the float64 recurrence, padded to one length so that it compiles once: `test_nan_padding_anywhere` shows
    without this function that padding changes nothing in it."""
    x, state, (do, dstate) = data
    T = do.shape[1]
    segments = np.ones(do.shape[:2], int) if segments is None else segments
    extra = max(0, LONGEST - T)
    *x, do, segments = (np.pad(a, [(0, 0), (0, extra)] + [(0, 0)] * (a.ndim - 2)) for a in (*x, do, segments))
    with jax.enable_x64(True):
        got = found(RECURRENCE, (tuple(x), state, (do, dstate)), segments, state_segment, chunk=None, dtype="float64")
    return [a if i in (1, 7) else a[:, :T] for i, a in enumerate(got)]
