"""What a range of tokens does to a state, so that ranges on different devices need only exchange that.

The recurrence is affine in the state: a range takes S to M S + C, with M [K,K] (each token contributes the factor
(I - beta k k^T) diag(e^g)) and C [K,V], the state that the range makes of nothing. Both come out of the recurrence
itself, for V + K values at once: v next to zeros, from the state 0 next to I.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax


def transition(
    kda: Callable[..., tuple[jax.Array, jax.Array]], k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(M [B,H,K,K], C [B,H,K,V]) by means of the public `kda`."""
    (B, _, H, K), V = k.shape, v.shape[3]
    dtype = jnp.result_type(jnp.float32, k, v, g, beta)
    wide = jnp.concatenate([v, jnp.zeros_like(v, shape=k.shape)], axis=-1)
    unit = jnp.broadcast_to(jnp.eye(K, dtype=dtype), (B, H, K, K))
    state = jnp.concatenate([jnp.zeros((B, H, K, V), dtype), unit], axis=-1)
    _, final = kda(k, k, wide, g, beta, state=state)
    return final[..., V:], final[..., :V]


def kda_join(first: tuple[jax.Array, jax.Array], second: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """(M, C) of two ranges of tokens, the second right behind the first: M = M2 M1, C = M2 C1 + C2.

    M [..., K, K] and C [..., K, V] as `kda_range` gives them, or stacked; associative, so that
    ``jax.lax.associative_scan(kda_join, stacked)`` has what every shard of a sequence and those before it do.
    Raises ValueError for shapes that differ, or are not of a range.
    """
    (m1, c1), (m2, c2) = first, second
    of_ranges = m1.shape[:-1] == c1.shape[:-1] and m1.shape[-2:-1] == m1.shape[-1:]
    if (m1.shape, c1.shape) != (m2.shape, c2.shape) or not of_ranges:
        raise ValueError(f"kda_join: ranges have shapes {m1.shape}, {c1.shape} and {m2.shape}, {c2.shape}")
    return _product(m2, m1), _product(m2, c1) + c2


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum("...ij,...jv->...iv", a, b, precision=lax.Precision.HIGHEST)
