"""Kimi Delta Attention as a recurrence over tokens: the definition, written to be read.

Per head, with the state S in R^{K x V}, per token t:

    S <- diag(exp g_t) S                     decay, one factor per key channel
    S <- S + beta_t k_t (v_t - S^T k_t)^T    delta rule; the error uses the decayed state
    o_t = S^T q_t                            reads the updated state

Source: Kimi Linear, arXiv 2510.26692, section 3 (gated delta rule: arXiv 2412.06464, with a decay per channel).
Differentiable by plain autodiff. Slow: T sequential steps.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

_einsum = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)


def kda(q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH, *, state, segments, state_segment, chunk):
    """The definition; arguments as in the public `kda`. `chunk` has no meaning here (one signature for all impls)."""
    del chunk
    given = (q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH, *([] if state is None else [state]))
    dtype = jnp.result_type(jnp.float32, *given)
    B, T, H, K = q_BTHK.shape
    V = v_BTHV.shape[-1]
    state_BHKV = jnp.zeros((B, H, K, V), dtype) if state is None else state.astype(dtype)
    segments_BT = jnp.ones((B, T), jnp.int32) if segments is None else segments
    document_B = first_document(segments_BT) if state_segment is None else state_segment

    def token(carry, x):
        state_BHKV, document_B = carry
        q_BHK, k_BHK, v_BHV, g_BHK, beta_BH, segment_B = x
        real_B = segment_B != 0
        fresh_B = real_B & (segment_B != document_B)
        old_BHKV = jnp.where(_rows(fresh_B, 4), 0, state_BHKV)
        # Select the inputs, not only the results: garbage in padding must not reach a product, nor a gradient.
        q_BHK, k_BHK, v_BHV, g_BHK, beta_BH = (
            jnp.where(_rows(real_B, x.ndim), x, 0).astype(dtype) for x in (q_BHK, k_BHK, v_BHV, g_BHK, beta_BH)
        )
        s_BHKV = jnp.exp(g_BHK)[..., None] * old_BHKV
        error_BHV = v_BHV - _einsum("bhkv,bhk->bhv", s_BHKV, k_BHK)
        s_BHKV = s_BHKV + (beta_BH[..., None] * k_BHK)[..., None] * error_BHV[..., None, :]
        o_BHV = jnp.where(_rows(real_B, 3), _einsum("bhkv,bhk->bhv", s_BHKV, q_BHK), 0)
        new_BHKV = jnp.where(_rows(real_B, 4), s_BHKV, state_BHKV)
        return (new_BHKV, jnp.where(real_B, segment_B, document_B)), o_BHV

    by_time = tuple(jnp.moveaxis(x, 1, 0) for x in (q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH, segments_BT))
    (state_BHKV, _), o_TBHV = lax.scan(token, (state_BHKV, document_B), by_time)
    return jnp.moveaxis(o_TBHV, 0, 1).astype(v_BTHV.dtype), state_BHKV


def first_document(segments_BT: jax.Array) -> jax.Array:
    """Segment of each row's first real token (0 for a row of only padding)."""
    first_B1 = jnp.argmax(segments_BT != 0, axis=1)[:, None]
    return jnp.take_along_axis(segments_BT, first_B1, axis=1)[:, 0]


def _rows(mask_B, ndim):
    return mask_B.reshape(mask_B.shape + (1,) * (ndim - 1))
