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
    """What two ranges in a row do, the earlier one first; associative."""
    (m1, c1), (m2, c2) = first, second
    return _product(m2, m1), _product(m2, c1) + c2


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum("bhij,bhjv->bhiv", a, b, precision=lax.Precision.HIGHEST)
