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


def measure(rounds: int = 7) -> dict[str, Any]:
    """Forward, and forward with every gradient, float32, from decay logits on; time and memory over tokamax's.

    peak_mb: arguments, results and temporaries of the compiled program. Raises SystemExit without tokamax 0.0.17.
    """
    try:
        found = version("tokamax")
    except PackageNotFoundError:
        found = None
    if found != TOKAMAX:
        raise SystemExit(f"this part needs tokamax {TOKAMAX} and has {found}: make bench-kda brings it, on Python 3.12")
    results: dict[str, Any] = {"jax": version("jax"), "tokamax": found}
    arrays, do = _arrays()
    forms = {"ours": (_ours, arrays, do), "tokamax": (_tokamax, *_heads_first(arrays, do))}
    for what, wrap in (("forward", _forward), ("forward and gradients", _both)):
        programs = {name: (wrap(f), x, d) for name, (f, x, d) in forms.items()}
        seconds = alternate({name: partial(f, x, d) for name, (f, x, d) in programs.items()}, rounds)
        results[what] = {name: summary(s) for name, s in seconds.items()}
        results[what]["peak_mb"] = {name: peak_mb(f, x, d) for name, (f, x, d) in programs.items()}
        faster = ratio(seconds["tokamax"], seconds["ours"])
        results[what]["time_over_tokamax"] = {name: 1 / value for name, value in faster.items()}
    results["difference"] = _difference(forms)
    return results


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


def _difference(forms: dict[str, Any]) -> float:
    """Largest difference of outputs over their largest value."""
    ours, theirs = (f(*x) for f, x, _ in forms.values())
    return float(jnp.max(jnp.abs(ours - jnp.moveaxis(theirs, 0, 2))) / jnp.max(jnp.abs(ours)))
