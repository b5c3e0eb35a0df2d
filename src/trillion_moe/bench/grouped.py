"""Grouped matmul against one dense matmul of the same FLOPs (weight already sliced) and `jax.lax.ragged_dot`."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trillion_moe.bench.clock import alternate, peak_mb, ratio, summary
from trillion_moe.kernels import mxfp4
from trillion_moe.kernels.grouped_matmul import grouped_matmul
from trillion_moe.kernels.grouped_matmul.cases import balanced, zipf

R, K, N = 4096, 512, 512


def measure(rounds: int = 7) -> list[dict[str, Any]]:
    """R = 4,096, K = N = 512, E = 16 and 64, balanced and Zipf sizes: forward and both gradients, dense and packed.

    peak_mb: arguments, results and temporaries of the compiled program.
    """
    rows = []
    for experts in (16, 64):
        for sizes in (balanced, zipf):
            for what, rivals in _cases(experts, jnp.asarray(sizes(R, experts))).items():
                seconds = alternate({name: partial(f, *args) for name, (f, args) in rivals.items()}, rounds)
                row = {"experts": experts, "sizes": sizes.__name__, "what": what}
                row["peak_mb"] = {name: peak_mb(f, *args) for name, (f, args) in rivals.items()}
                row |= {name: summary(s) for name, s in seconds.items()}
                row["time_over_dense"] = 1 / ratio(seconds["dense"], seconds["ours"])["of_medians"]
                if "ragged_dot" in seconds:
                    row["ragged_dot_over_ours"] = ratio(seconds["ragged_dot"], seconds["ours"])["of_medians"]
                rows.append(row)
    return rows


def _cases(experts: int, sizes_E: jax.Array) -> dict[str, dict[str, tuple[Any, tuple[Any, ...]]]]:
    """Compiled function and arguments of each rival."""
    random = np.random.default_rng(0)
    x, dy = (jnp.asarray(random.standard_normal((R, n)), jnp.float32) for n in (K, N))
    w = jnp.asarray(random.standard_normal((experts, K, N)), jnp.float32)
    packed = [jnp.asarray(a) for a in mxfp4.encode(np.asarray(w).swapaxes(1, 2))]
    one = w[0] + 0

    def gradients(product: Callable, of: int) -> Callable:
        return jax.jit(lambda x, w, dy: jax.vjp(product, x, w)[1](dy)[of])

    def ours(x, w):
        return grouped_matmul(x, w, sizes_E)

    def ragged(x, w):
        return jax.lax.ragged_dot(x, w, sizes_E)

    cases = {}
    for what, of in (("forward", None), ("row gradient", 0), ("weight gradient", 1)):
        forms = {"ours": (ours, w), "ragged_dot": (ragged, w), "dense": (jnp.matmul, one)}
        tail = () if of is None else (dy,)
        cases[what] = {
            n: (jax.jit(f) if of is None else gradients(f, of), (x, weight, *tail)) for n, (f, weight) in forms.items()
        }
    product, dense = jax.jit(mxfp4.grouped_matmul_mxfp4), jax.jit(jnp.matmul)
    unpacked = jax.jit(ours)
    cases["packed forward"] = {
        "ours": (product, (x, *packed, sizes_E)),
        "unpacked": (unpacked, (x, w)),
        "dense": (dense, (x, one)),
    }
    return cases
