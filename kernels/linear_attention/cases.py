"""Named shapes of real models and odd tiny ones, shared by tests, benchmarks and tuning."""

import dataclasses

import jax
import jax.numpy as jnp

from .gate import l2norm


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes of one call: B rows, T tokens, H heads, K key and V value channels per head. lower_bound: of `kda_gate`."""

    B: int
    T: int
    H: int
    K: int
    V: int
    lower_bound: float | None = -5.0


CASES = {
    "kimi_k3": Case(B=1, T=4096, H=96, K=128, V=128),
    "kimi_linear": Case(B=1, T=4096, H=32, K=128, V=128, lower_bound=None),
    "bench_long": Case(B=1, T=2048, H=8, K=128, V=128),
    "tiny_odd": Case(B=2, T=37, H=3, K=5, V=7),
    "tiny_equal": Case(B=4, T=4, H=4, K=4, V=4),
}


def inputs(case: Case, *, seed: int = 0, dtype=jnp.float32):
    """Random (q, k, v, g, beta) as a model makes them: unit q, k, log decays around -1, beta in (0, 1)."""
    keys = jax.random.split(jax.random.key(seed), 5)
    keys_shape, heads = (case.B, case.T, case.H, case.K), (case.B, case.T, case.H)
    q, k = (l2norm(jax.random.normal(key, keys_shape, dtype)) for key in keys[:2])
    v = jax.random.normal(keys[2], (*heads, case.V), dtype)
    g = -jax.nn.softplus(jax.random.normal(keys[3], keys_shape)) / jnp.log(2.0)
    beta = jax.nn.sigmoid(jax.random.normal(keys[4], heads)).astype(dtype)
    return q, k, v, jnp.maximum(g, case.lower_bound) if case.lower_bound is not None else g, beta
