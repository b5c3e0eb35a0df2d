"""What comes before the recurrence: the log-decay gate and the l2 norm of queries and keys."""

import math

import jax
import jax.numpy as jnp


def kda_gate(z: jax.Array, a_log: jax.Array, *, lower_bound: float | None) -> jax.Array:
    """Log decay g [B,T,H,K] (natural log, <= 0; float32, or float64 if z is) from decay logits.

        lower_bound = l < 0:  g = l * sigmoid(exp(a_log_h) z)      (Kimi K3: l = -5; no softplus, no clamp)
        lower_bound = None:   g = -exp(a_log_h) * softplus(z)      (Kimi Linear; no bound)

    z [B,T,H,K] already contains dt_bias. a_log [H]: one log scale per *head*, never per channel; a stored a_log with
    padding (K3 keeps 128 entries for 96 heads) must be cut before. Source: Kimi K3 report; arXiv 2510.26692.

    Raises ValueError: z has not four dims, a_log is not [H]; lower_bound is not negative and finite.
    """
    if z.ndim != 4:
        raise ValueError(f"kda_gate: z has shape {z.shape}; want [B,T,H,K]")
    if a_log.shape != z.shape[2:3]:
        raise ValueError(
            f"kda_gate: a_log has shape {a_log.shape}, but z {z.shape} has H={z.shape[2]} heads: want ({z.shape[2]},)"
        )
    if lower_bound is not None and not -math.inf < lower_bound < 0:
        raise ValueError(
            f"kda_gate: lower_bound is {lower_bound}; it bounds a log decay: legal is negative and finite, or None"
        )
    dtype = jnp.result_type(jnp.float32, z)
    z, scale_H1 = z.astype(dtype), jnp.exp(a_log.astype(dtype))[:, None]
    if lower_bound is None:
        return -scale_H1 * jax.nn.softplus(z)
    return lower_bound * jax.nn.sigmoid(scale_H1 * z)


def l2norm(x: jax.Array, eps: float = 1e-6) -> jax.Array:
    """x / sqrt(sum x^2 + eps) over the last dim, in float32 (float64 stays), back in x.dtype.

    eps is inside the root and on the sum, not the mean: an all-zero row gives 0 with the finite gradient 1/sqrt(eps).
    Raises TypeError for integers, which could not hold the result.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"l2norm: x has dtype {x.dtype}, want a floating one")
    y = x.astype(jnp.result_type(jnp.float32, x))
    return (y * jax.lax.rsqrt(jnp.sum(y * y, axis=-1, keepdims=True) + eps)).astype(x.dtype)
