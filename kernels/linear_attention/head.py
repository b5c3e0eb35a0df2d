"""One chunk of one head of KDA in arrays of two dims, for bodies of kernels: the algebra of `chunk.py`, by masks.

The recursive halving of `chunk.py` reshapes blocks of h rows, which registers and vector lanes cannot. Here a level is
a product of whole arrays, of which the pairs that meet at that level are kept: row i and column j with

    i // 2h == j // 2h,   i in the upper half of that block of 2h rows, j in the lower one.

Exponents are sums of log decays over ranges of tokens, built by doubling: never positive, and never a difference, so
nothing cancels where a document begins (`documents.RESET`). Their gradients go back the same way. The inverse of
I + diag(beta) A^k grows by the same halving, without powers of A: `chunk.inverse` says why.

Dims: C tokens of the chunk, K key, V value. The state is held transposed, [V, K], so that decays lie along its rows.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .documents import RESET

NN, NT, TN = (1, 0), (1, 1), (0, 0)  # which dims of left and right a product sums over


class Ops(NamedTuple):
    """What chips do in ways of their own, of float32 arrays.

    dot(a, b, dims): product; exact: in full float32. both(a, b, w, dims): (dot(a, w), dot(b, w)).
    """

    dot: Callable[[jax.Array, jax.Array, tuple[int, int]], jax.Array]
    exact: Callable[[jax.Array, jax.Array, tuple[int, int]], jax.Array]
    both: Callable[[jax.Array, jax.Array, jax.Array, tuple[int, int]], tuple[jax.Array, jax.Array]]


Swap = Callable[[jax.Array, int], jax.Array]  # of rows [C, K]: i and i ^ h change places


class Inputs(NamedTuple):
    q: jax.Array  # [C,K]
    k: jax.Array  # [C,K]
    v: jax.Array  # [C,V]
    beta: jax.Array  # [C,1]


def summable(g_CK: jax.Array) -> jax.Array:
    """Log decays in float32; -inf has no sums, and below `RESET` all is nothing."""
    return jnp.maximum(g_CK.astype(jnp.float32), RESET)


class Decays(NamedTuple):
    """exp of sums of log decays [C,K].

    levels: h; from the start of i's block of h rows to i, inclusive; from after j to the end of its block.
    """

    levels: tuple[tuple[int, jax.Array, jax.Array], ...]
    start: jax.Array  # chunk start to token i, inclusive
    end: jax.Array  # after token j to the chunk's end


class Pairs(NamedTuple):
    """Of the tokens with each other [C,C]: needs no state."""

    aq: jax.Array  # q_i . k_j decayed, i >= j
    ak: jax.Array  # k_i . k_j decayed, i > j
    t: jax.Array  # (I + diag(beta) ak)^-1


def rows_of(h: int, size: int) -> jax.Array:
    """bool [C,1]: in the upper half of a block of 2h rows."""
    return (lax.broadcasted_iota(jnp.int32, (size, 1), 0) & h) != 0


def pairs_of(h: int | jax.Array, size: int) -> jax.Array:
    """bool [C,C]: row and column meet at the level of h."""
    i, j = (lax.broadcasted_iota(jnp.int32, (size, size), dim) for dim in (0, 1))
    return ((i ^ j) < 2 * h) & ((i & h) != 0) & ((j & h) == 0)


def diagonal(size: int) -> jax.Array:
    """bool [C,C]"""
    i, j = (lax.broadcasted_iota(jnp.int32, (size, size), dim) for dim in (0, 1))
    return i == j


def column(row_1C: jax.Array) -> jax.Array:
    """[1,C] -> [C,1]"""
    return jnp.sum(jnp.where(diagonal(row_1C.shape[1]), row_1C, 0), axis=1, keepdims=True)


def decays(swap: Swap, g_CK: jax.Array) -> Decays:
    size, h = g_CK.shape[0], 1
    prefix, suffix, levels = g_CK, jnp.zeros_like(g_CK), []
    while h < size:
        levels.append((h, jnp.exp(prefix), jnp.exp(suffix)))
        other, upper = swap(prefix + suffix, h), rows_of(h, size)
        prefix, suffix = prefix + jnp.where(upper, other, 0), suffix + jnp.where(upper, 0, other)
        h *= 2
    return Decays(tuple(levels), jnp.exp(prefix), jnp.exp(suffix))


def decays_transpose(swap: Swap, levels: list[tuple[int, jax.Array, jax.Array]], dstart_CK, dend_CK) -> jax.Array:
    """Gradient to g from those to the sums whose exp `decays` returns (not to the exp itself)."""
    dprefix, dsuffix = dstart_CK, dend_CK
    for h, dup, dlow in reversed(levels):
        upper = rows_of(h, dprefix.shape[0])
        dtotal = swap(jnp.where(upper, dprefix, dsuffix), h)
        dprefix, dsuffix = dprefix + dtotal + dup, dsuffix + dtotal + dlow
    return dprefix


def pairs(ops: Ops, x: Inputs, decay: Decays) -> Pairs:
    size = x.q.shape[0]
    aq = jnp.where(diagonal(size), jnp.sum(x.q * x.k, axis=1, keepdims=True), 0)
    ak, t = jnp.zeros_like(aq), diagonal(size).astype(aq.dtype)
    for h, up, low in decay.levels:
        meet = pairs_of(h, size)
        aq_h, ak_h = (jnp.where(meet, a, 0) for a in ops.both(x.q * up, x.k * up, x.k * low, NT))
        aq, ak = aq + aq_h, ak + ak_h
        corner = x.beta * ak_h
        if h > 1:
            corner = ops.exact(ops.exact(t, corner, NN), t, NN)
        t = t - corner
    return Pairs(aq, ak, t)


class Edges(NamedTuple):
    """What a chunk has to do with the state before it and the state after it."""

    q: jax.Array  # [C,K] q start
    k: jax.Array  # [C,K] k start
    end: jax.Array  # [C,K] k end
    total: jax.Array  # [1,K] decay of the whole chunk


def edges(x: Inputs, g_CK, decay: Decays) -> Edges:
    total = jnp.exp(jnp.sum(g_CK, axis=0, keepdims=True))
    return Edges(x.q * decay.start, x.k * decay.start, x.k * decay.end, total)


def write(ops: Ops, v_CV, beta_C1, edge: Edges, t_CC, state_VK) -> tuple[jax.Array, jax.Array, jax.Array]:
    """u [C,V]: what the tokens write; error [C,V] = v - (k start) S; reads [C,V] = (q start) S."""
    reads, known = ops.both(edge.q, edge.k, state_VK, NT)
    error = v_CV - known
    return ops.dot(t_CC, beta_C1 * error, NN), error, reads


def outputs(ops: Ops, aq_CC, u_CV, reads_CV) -> jax.Array:
    return reads_CV + ops.dot(aq_CC, u_CV, NN)


def advance(ops: Ops, edge: Edges, u_CV, state_VK) -> jax.Array:
    """The state after the chunk."""
    return edge.total * state_VK + ops.dot(u_CV, edge.end, TN)


def remainder(ops: Ops, ak_CC, u_CV, error_CV) -> jax.Array:
    """w [C,V] = error - ak u, so that u = beta w: the gradient to beta is that to u times it."""
    return error_CV - ops.dot(ak_CC, u_CV, NN)


# --- gradients --------------------------------------------------------------------------------------------------------


def write_transpose(ops: Ops, edge: Edges, aq_CC, t_CC, do_CV, dstate_VK) -> jax.Array:
    """db [C,V]: gradient to beta (v - (k start) S); dstate: after the chunk."""
    du = ops.dot(aq_CC, do_CV, TN) + ops.dot(edge.end, dstate_VK, NT)
    return ops.dot(t_CC, du, TN)


def state_transpose(ops: Ops, edge: Edges, do_CV, dv_CV, dstate_VK) -> jax.Array:
    """Gradient to the state before the chunk."""
    return edge.total * dstate_VK + ops.dot(do_CV, edge.q, TN) - ops.dot(dv_CV, edge.k, TN)


def token_transpose(
    ops: Ops, swap: Swap, x: Inputs, edge: Edges, decay: Decays, u_CV, db_CV, do_CV, state_VK, dstate_VK
):
    """Gradients to q, k and g [C,K]."""
    # u = beta error - diag(beta) ak u, hence the gradient to diag(beta) ak is -db u^T, on ak's pairs.
    daq, dm = ops.both(do_CV, -db_CV, u_CV, NT)
    dak, own = x.beta * dm, jnp.sum(do_CV * u_CV, axis=1, keepdims=True)
    dq, dk, levels = own * x.k, own * x.q, []
    for h, up, low in decay.levels:
        meet = pairs_of(h, x.q.shape[0])
        daq_h, dak_h = jnp.where(meet, daq, 0), jnp.where(meet, dak, 0)
        dq_up, dk_up = (d * up for d in ops.both(daq_h, dak_h, x.k * low, NN))
        dk_low = (ops.dot(daq_h, x.q * up, TN) + ops.dot(dak_h, x.k * up, TN)) * low
        dq, dk = dq + dq_up, dk + dk_up + dk_low
        levels.append((h, x.q * dq_up + x.k * dk_up, x.k * dk_low))
    # Products with the state: q start and k start before the chunk, k end after it.
    dq_start, dk_start = (d * decay.start for d in ops.both(do_CV, -x.beta * db_CV, state_VK, NN))
    dk_end = ops.dot(u_CV, dstate_VK, NN) * decay.end
    dtotal = edge.total * jnp.sum(state_VK * dstate_VK, axis=0, keepdims=True)
    dg = decays_transpose(swap, levels, x.q * dq_start + x.k * dk_start, x.k * dk_end) + dtotal
    return dq + dq_start, dk + dk_start + dk_end, dg
