"""KDA on CPU against tokamax's `xla_chunked`, which needs Python 3.12: 8 heads, 2,048 tokens, 128 x 128."""

from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax
import jax.numpy as jnp

from trillion_moe.bench.clock import alternate, peak_mb, ratio, summary
from trillion_moe.kernels.linear_attention import CASES, kda, kda_gate, l2norm

CASE = CASES["bench_long"]
TOKAMAX = "0.0.17"
BAR = 1e-4  # of outputs and gradients, over their largest value


def measure(rounds: int = 7) -> dict[str, Any]:
    """Forward, and forward with every gradient, float32, from decay logits on; time and memory over tokamax's.

    peak_mb: arguments, results and temporaries of the compiled program. difference: of outputs, gradients_difference:
    of every gradient, the largest over the largest value. Raises SystemExit without tokamax 0.0.17, ArithmeticError
    where the two differ by more than BAR.
    """
    try:
        found = version("tokamax")
    except PackageNotFoundError:
        found = None
    if found != TOKAMAX:
        raise SystemExit(f"this part needs tokamax {TOKAMAX} and has {found}: make bench-kda brings it, on Python 3.12")
    arrays, do = _arrays()
    forms = {"ours": (_ours, arrays, do), "tokamax": (_tokamax, *_heads_first(arrays, do))}
    outputs, *gradients = _differences(forms)
    results: dict[str, Any] = {"jax": version("jax"), "tokamax": found}
    for what, wrap in (("forward", _forward), ("forward and gradients", _both)):
        programs = {name: (wrap(f), x, d) for name, (f, x, d) in forms.items()}
        seconds = alternate({name: partial(f, x, d) for name, (f, x, d) in programs.items()}, rounds)
        results[what] = {name: summary(s) for name, s in seconds.items()}
        results[what]["peak_mb"] = {name: peak_mb(f, x, d) for name, (f, x, d) in programs.items()}
        faster = ratio(seconds["tokamax"], seconds["ours"])
        results[what]["time_over_tokamax"] = {name: 1 / value for name, value in faster.items()}
    return results | {"difference": outputs, "gradients_difference": max(gradients)}


def _arrays() -> tuple[tuple[jax.Array, ...], jax.Array]:
    """q, k, v, decay logits, a_log, beta; and the gradient to the outputs."""
    keys = jax.random.split(jax.random.key(0), 7)
    shape = (CASE.B, CASE.T, CASE.H, CASE.K)
    q, k = (l2norm(jax.random.normal(key, shape)) for key in keys[:2])
    v, z, do = (jax.random.normal(key, shape) for key in keys[2:5])
    a_log = jnp.log(jax.random.uniform(keys[5], (CASE.H,), minval=1.0, maxval=4.0))
    return (q, k, v, z, a_log, jax.nn.sigmoid(jax.random.normal(keys[6], shape[:3]))), do


def _heads_first(arrays: tuple[jax.Array, ...], do: jax.Array) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """tokamax's layout [H, B, T, ...]."""
    moved = (jnp.moveaxis(a, 2, 0) if a.ndim > 1 else a for a in arrays)
    return tuple(moved), jnp.moveaxis(do, 2, 0)


def _ours(q, k, v, z, a_log, beta):
    return kda(q, k, v, kda_gate(z, a_log, lower_bound=CASE.lower_bound), beta)[0]


def _tokamax(q, k, v, z, a_log, beta):
    from tokamax._src.ops.kda import api  # pyright: ignore[reportMissingImports]

    return api.kimi_delta_attention(
        q, k, v, z, beta, a_log=a_log, delta_time_bias=jnp.zeros(CASE.H * CASE.K), scale=1.0, use_gate_in_kernel=True,
        lower_bound=CASE.lower_bound, implementation="xla_chunked",
    )[0]  # fmt: skip


def _forward(f):
    return jax.jit(lambda x, do: f(*x))


def _both(f):
    def run(x, do):
        o, pull = jax.vjp(f, *x)
        return o, pull(do)

    return jax.jit(run)


def _differences(forms: dict[str, Any]) -> list[float]:
    """Of outputs, and of the gradients to q, k, v, decay logits, a_log and beta: largest over the largest value."""
    found = {name: jax.tree.leaves(_both(f)(x, do)) for name, (f, x, do) in forms.items()}
    names, differences = ("o", "dq", "dk", "dv", "dz", "da_log", "dbeta"), []
    for name, ours, theirs in zip(names, found["ours"], found["tokamax"], strict=True):
        theirs = jnp.moveaxis(theirs, 0, 2) if theirs.ndim > 1 else theirs
        differences.append(float(jnp.max(jnp.abs(ours - theirs)) / jnp.max(jnp.abs(ours))))
        if not differences[-1] <= BAR:  # nor NaN
            raise ArithmeticError(f"{name} differs from tokamax's by {differences[-1]:.1e} of its largest value")
    return differences
