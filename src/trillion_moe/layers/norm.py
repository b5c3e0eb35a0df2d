"""Root-mean-square normalisation (Zhang & Sennrich, arXiv 1910.07467)."""

import jax
import jax.numpy as jnp
from jax import lax

from trillion_moe.ops import accumulator


def rms_scale(x: jax.Array, eps: float) -> jax.Array:
    """``1 / sqrt(mean(x^2) + eps)`` over the last dim, kept as a dim of 1, in float32."""
    x = x.astype(accumulator(x.dtype))
    return lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """``x * rms_scale(x)`` in float32, cast back to x's dtype, then times the plain weight (not 1 + weight)."""
    normed = (x.astype(accumulator(x.dtype)) * rms_scale(x, eps)).astype(x.dtype)
    return normed * weight.astype(x.dtype)
