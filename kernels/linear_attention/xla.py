"""KDA in chunks of C tokens, portable and differentiable: one `lax.scan` over chunks, all heads inside.

The working set of one chunk stays in cache. Residuals of the hand-written VJP are the inputs and the state before each
chunk (K V / C values per token and head); the backward scan runs in reverse and recomputes the chunk (`chunk.py`).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from . import chunk as chunked
from .reference import first_document

_einsum = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)


def kda(q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH, *, state, segments, state_segment, chunk):
    """Arguments as in the public `kda`; one token takes `step`, without chunk machinery."""
    if q_BTHK.shape[1] == 1:
        return step(
            q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH, state=state, segments=segments, state_segment=state_segment
        )
    _, state_BHKV = _start(q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH, state)
    x = (q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH)
    document_BT = None
    if segments is not None:
        x, state_BHKV, document_BT = _separate(x, state_BHKV, segments, state_segment)
    T = q_BTHK.shape[1]
    C = min(chunk, 1 << (T - 1).bit_length())
    tail = -T % C
    x = tuple(_pad_time(a, tail) for a in x)
    document_BT = None if document_BT is None else _pad_time(document_BT, tail)
    o_BTHV, state_BHKV = _scan(C, *x, state_BHKV, document_BT)
    return _blank_padding(o_BTHV[:, :T], segments), state_BHKV


def step(q_B1HK, k_B1HK, v_B1HV, g_B1HK, beta_B1H, *, state=None, segments=None, state_segment=None):
    """One token (T = 1) of the recurrence; the state is read once and written once.

    With S' = diag(e^g) S: u = beta (v - S'^T k), o = S'^T q + (q . k) u, new state S' + k u^T.
    """
    dtype, state_BHKV = _start(q_B1HK, k_B1HK, v_B1HV, g_B1HK, beta_B1H, state)
    x = (q_B1HK, k_B1HK, v_B1HV, g_B1HK, beta_B1H)
    if segments is not None:
        x, state_BHKV, _ = _separate(x, state_BHKV, segments, state_segment)
    q_BHK, k_BHK, v_BHV, g_BHK, beta_BH = (a[:, 0].astype(dtype) for a in x)
    decay_BHK = jnp.exp(g_BHK)
    qk_BH2K = jnp.stack([q_BHK, k_BHK], axis=2)
    reads_BH2V = _einsum("bhxk,bhkv->bhxv", qk_BH2K * decay_BHK[:, :, None], state_BHKV)
    u_BHV = beta_BH[..., None] * (v_BHV - reads_BH2V[:, :, 1])
    o_BHV = reads_BH2V[:, :, 0] + jnp.sum(q_BHK * k_BHK, axis=-1, keepdims=True) * u_BHV
    new_BHKV = decay_BHK[..., None] * state_BHKV + k_BHK[..., None] * u_BHV[..., None, :]
    return _blank_padding(o_BHV[:, None].astype(v_B1HV.dtype), segments), new_BHKV


def _start(q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH, state):
    """(dtype of the arithmetic, initial state in it): float32, or float64 if an input is."""
    dtype = jnp.result_type(jnp.float32, q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH)
    B, _, H, K = q_BTHK.shape
    if state is None:
        return dtype, jnp.zeros((B, H, K, v_BTHV.shape[-1]), dtype)
    return dtype, state.astype(dtype)


def _separate(x, state_BHKV, segments_BT, state_segment_B):
    """Documents and padding as plain inputs: padding becomes zeros (log decay 0, beta 0: it changes nothing), the first
    token of a document gets the log decay RESET, and a state of another document than the row's first is dropped.

    Returns (inputs, state, document_BT); document_BT counts the resets, padding belongs to the document before it.
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
    g = jnp.where(reset_BT[..., None, None], jnp.asarray(chunked.RESET, g.dtype), g)
    dropped_B = jnp.any(reset_BT & (last_BT < 0), axis=1)
    state_BHKV = jnp.where(dropped_B[:, None, None, None], 0, state_BHKV)
    return (q, k, v, g, beta), state_BHKV, jnp.cumsum(reset_BT, axis=1, dtype=jnp.int32)


def _blank_padding(o_BTHV, segments_BT):
    """Outputs of padding are 0 already; selecting makes them constants, so that no cotangent comes back from them."""
    return o_BTHV if segments_BT is None else jnp.where((segments_BT != 0)[..., None, None], o_BTHV, 0)


def _pad_time(x, tail):
    """Zeros after the last token: log decay 0 and beta 0 leave the state as it is."""
    return jnp.pad(x, [(0, 0), (0, tail)] + [(0, 0)] * (x.ndim - 2)) if tail else x


def _split(x, C):
    """[B,T,...] -> [N,B,C,...], the chunks along the scan."""
    return jnp.moveaxis(x.reshape(x.shape[0], -1, C, *x.shape[2:]), 1, 0)


def _merge(x):
    """Inverse of `_split`."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _heads_first(x, dtype):
    """[B,C,H,...] as stored <-> [B,H,C,...] as computed."""
    return jnp.swapaxes(x, 1, 2).astype(dtype)


def _scan_primal(C, q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH, state_BHKV, document_BT) -> tuple[jax.Array, jax.Array]:
    """T a multiple of C -> (outputs [B,T,H,V], final state [B,H,K,V]). document_BT only serves the backward pass."""
    return _scan_forward(C, q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH, state_BHKV, document_BT, keep=False)[0]


def _scan_forward(C, q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH, state_BHKV, document_BT, keep=True):
    dtype, out_dtype = state_BHKV.dtype, v_BTHV.dtype
    inputs = (q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH)

    def body(state, x):
        new, o = chunked.forward(state, *(_heads_first(a, dtype) for a in x))
        return new, (_heads_first(o, out_dtype), state if keep else None)

    final, (o_NBCHV, states_NBHKV) = lax.scan(body, state_BHKV, tuple(_split(a, C) for a in inputs))
    return (_merge(o_NBCHV), final), (inputs, states_NBHKV, document_BT)


def _scan_backward(C, residuals, cotangents):
    inputs, states_NBHKV, document_BT = residuals
    do_BTHV, dfinal_BHKV = cotangents
    dtype = states_NBHKV.dtype

    def body(dstate, x):
        state, inputs, do, document = x
        ranges = chunked.decay_ranges(document, C, dtype)
        q, k, v, g, beta = (_heads_first(a, dtype) for a in inputs)
        do = _heads_first(do, dtype)
        dstate, *grads = chunked.transpose(state, q, k, v, g, beta, ranges, do, dstate)
        return dstate, tuple(_heads_first(d, a.dtype) for d, a in zip(grads, inputs, strict=True))

    documents = None if document_BT is None else _split(document_BT, C)
    xs = (states_NBHKV, tuple(_split(a, C) for a in inputs), _split(do_BTHV, C), documents)
    dstate_BHKV, grads = lax.scan(body, dfinal_BHKV, xs, reverse=True)
    return (*(_merge(d) for d in grads), dstate_BHKV, None)


_scan = jax.custom_vjp(_scan_primal, nondiff_argnums=(0,))
_scan.defvjp(_scan_forward, _scan_backward)
