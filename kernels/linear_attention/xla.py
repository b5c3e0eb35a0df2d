"""KDA in chunks of C tokens, portable and differentiable: one `lax.scan` over chunks, all heads inside.

The working set of one chunk stays in cache. Residuals of the hand-written VJP are the inputs and the state before each
chunk (K V / C values per token and head); the backward scan runs in reverse and recomputes the chunk (`chunk.py`).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from . import chunk as chunked
from . import documents

CHUNK = 32  # the fastest on CPU


def kda(q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH, *, state, segments, state_segment, chunk):
    """Arguments as in the public `kda`."""
    C = min(chunk or CHUNK, 1 << (q_BTHK.shape[1] - 1).bit_length())
    x = (q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH)
    return documents.run(functools.partial(_scan, C), lambda T: T + -T % C, x, state, segments, state_segment)


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


def _scan_primal(C, q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH, state_BHKV) -> tuple[jax.Array, jax.Array]:
    """T a multiple of C -> (outputs [B,T,H,V], final state [B,H,K,V])."""
    return _scan_forward(C, q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH, state_BHKV, keep=False)[0]


def _scan_forward(C, q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH, state_BHKV, keep=True):
    dtype, out_dtype = state_BHKV.dtype, v_BTHV.dtype
    inputs = (q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH)

    def body(state, x):
        new, o = chunked.forward(state, *(_heads_first(a, dtype) for a in x))
        return new, (_heads_first(o, out_dtype), state if keep else None)

    final, (o_NBCHV, states_NBHKV) = lax.scan(body, state_BHKV, tuple(_split(a, C) for a in inputs))
    return (_merge(o_NBCHV), final), (inputs, states_NBHKV)


def _scan_backward(C, residuals, cotangents):
    inputs, states_NBHKV = residuals
    do_BTHV, dfinal_BHKV = cotangents
    dtype = states_NBHKV.dtype

    def body(dstate, x):
        state, inputs, do = x
        q, k, v, g, beta = (_heads_first(a, dtype) for a in inputs)
        do = _heads_first(do, dtype)
        dstate, *grads = chunked.transpose(state, q, k, v, g, beta, do, dstate)
        return dstate, tuple(_heads_first(d, a.dtype) for d, a in zip(grads, inputs, strict=True))

    xs = (states_NBHKV, tuple(_split(a, C) for a in inputs), _split(do_BTHV, C))
    dstate_BHKV, grads = lax.scan(body, dfinal_BHKV, xs, reverse=True)
    return (*(_merge(d) for d in grads), dstate_BHKV)


_scan = jax.custom_vjp(_scan_primal, nondiff_argnums=(0,))
_scan.defvjp(_scan_forward, _scan_backward)
