"""What every chunked implementation does before and after its recurrence: documents, padding, and one-token calls."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from .reference import first_document

RESET = -1e9
"""Log decay of a document's first token: exp gives exactly 0, and sums of it stay finite."""

_einsum = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)

# (q, k, v, g, beta [B,T',...], state [B,H,K,V] in the dtype of the arithmetic) -> outputs and final state, where T' is
# what `length` makes of T.
Recurrence = Callable[..., tuple[jax.Array, jax.Array]]


def run(recurrence: Recurrence, length: Callable[[int], int], x, state, segments, state_segment):
    """The public `kda` by means of a recurrence that knows neither segments nor odd lengths; x: q, k, v, g, beta."""
    q_BTHK, _, v_BTHV, _, _ = x
    B, T, H, K = q_BTHK.shape
    dtype = jnp.result_type(jnp.float32, *x, *([] if state is None else [state]))
    state = jnp.zeros((B, H, K, v_BTHV.shape[-1]), dtype) if state is None else state.astype(dtype)
    if segments is not None:
        x, state = separate(x, state, segments, state_segment)
    if T == 1:
        o_BTHV, state = step(x, state)
    else:
        tail = length(T) - T
        x = tuple(pad_time(a, tail) for a in x)
        o_BTHV, state = recurrence(*x, state)
    # Outputs of padding are 0 already; selecting makes them constants, so that no cotangent comes back from them.
    o_BTHV = o_BTHV[:, :T]
    return (o_BTHV if segments is None else jnp.where((segments != 0)[..., None, None], o_BTHV, 0)), state


def step(x, state_BHKV):
    """One token (T = 1) of the recurrence, which reads the state twice (u needs all of it) and writes it once.

    With S' = diag(e^g) S: u = beta (v - S'^T k), o = S'^T q + (q . k) u, new state S' + k u^T.
    """
    q_BHK, k_BHK, v_BHV, g_BHK, beta_BH = (a[:, 0].astype(state_BHKV.dtype) for a in x)
    decay_BHK = jnp.exp(g_BHK)
    qk_BH2K = jnp.stack([q_BHK, k_BHK], axis=2)
    reads_BH2V = _einsum("bhxk,bhkv->bhxv", qk_BH2K * decay_BHK[:, :, None], state_BHKV)
    u_BHV = beta_BH[..., None] * (v_BHV - reads_BH2V[:, :, 1])
    o_BHV = reads_BH2V[:, :, 0] + jnp.sum(q_BHK * k_BHK, axis=-1, keepdims=True) * u_BHV
    new_BHKV = decay_BHK[..., None] * state_BHKV + k_BHK[..., None] * u_BHV[..., None, :]
    return o_BHV[:, None].astype(x[2].dtype), new_BHKV


def separate(x, state_BHKV, segments_BT, state_segment_B):
    """Documents and padding as plain inputs: padding becomes zeros (log decay 0, beta 0: it changes nothing), the first
    token of a document gets the log decay RESET, and a state of another document than the row's first is dropped.

    Returns (inputs, state).
    """
    real_BT = segments_BT != 0
    before_B = first_document(segments_BT) if state_segment_B is None else state_segment_B
    T = segments_BT.shape[1]
    last_BT = lax.cummax(jnp.where(real_BT, jnp.arange(T), -1), axis=1)  # index of the last real token up to here
    last_BT = jnp.pad(last_BT, ((0, 0), (1, 0)), constant_values=-1)[:, :T]
    previous_BT = jnp.take_along_axis(segments_BT, jnp.maximum(last_BT, 0), axis=1)
    previous_BT = jnp.where(last_BT < 0, before_B[:, None], previous_BT)
    reset_BT = real_BT & (segments_BT != previous_BT)
    q, k, v, g, beta = (jnp.where(real_BT.reshape(real_BT.shape + (1,) * (a.ndim - 2)), a, 0) for a in x)
    g = jnp.where(reset_BT[..., None, None], jnp.asarray(RESET, g.dtype), g)
    dropped_B = jnp.any(reset_BT & (last_BT < 0), axis=1)
    state_BHKV = jnp.where(dropped_B[:, None, None, None], 0, state_BHKV)
    return (q, k, v, g, beta), state_BHKV


def pad_time(x, tail):
    """Zeros after the last token: log decay 0 and beta 0 leave the state as it is."""
    return jnp.pad(x, [(0, 0), (0, tail)] + [(0, 0)] * (x.ndim - 2)) if tail else x
