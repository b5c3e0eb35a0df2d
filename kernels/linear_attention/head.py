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

    The inverse is made and used exactly: where keys repeat, what it is multiplied with cancels.
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


def exps(C: int, K: int) -> int:
    """How many `decays` and `edges` take, of one token of one head, rounded up."""
    return (2 * C.bit_length() + 1) * K


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


def write(ops: Ops, v_CV, beta_C1, t_CC, known_CV) -> tuple[jax.Array, jax.Array]:
    """u [C,V]: what the tokens write; error [C,V] = v - known, where known = (k start) S."""
    error = v_CV - known_CV
    return ops.exact(t_CC, beta_C1 * error, NN), error


def outputs(ops: Ops, aq_CC, u_CV, reads_CV) -> jax.Array:
    """reads: (q start) S."""
    return reads_CV + ops.dot(aq_CC, u_CV, NN)


def advance(ops: Ops, end_CK, total_1K, u_CV, state_VK) -> jax.Array:
    """The state after the chunk."""
    return total_1K * state_VK + ops.dot(u_CV, end_CK, TN)


def remainder(ops: Ops, ak_CC, u_CV, error_CV) -> jax.Array:
    """w [C,V] = error - ak u, so that u = beta w: the gradient to beta is that to u times it."""
    return error_CV - ops.exact(ak_CC, u_CV, NN)


# --- gradients --------------------------------------------------------------------------------------------------------


def write_transpose(ops: Ops, edge: Edges, aq_CC, t_CC, do_CV, dstate_VK) -> jax.Array:
    """db [C,V]: gradient to beta (v - (k start) S); dstate: after the chunk."""
    du = ops.dot(aq_CC, do_CV, TN) + ops.dot(edge.end, dstate_VK, NT)
    return ops.exact(t_CC, du, TN)


def state_transpose(ops: Ops, edge: Edges, do_CV, dv_CV, dstate_VK) -> jax.Array:
    """Gradient to the state before the chunk."""
    return edge.total * dstate_VK + ops.dot(do_CV, edge.q, TN) - ops.dot(dv_CV, edge.k, TN)


def start_transpose(ops: Ops, beta_C1, start_CK, end_CK, u_CV, db_CV, do_CV, state_VK, dstate_VK):
    """Gradients [C,K] by way of the states: to q and k before the chunk, to k after it."""
    dq, dk = ops.both(do_CV, db_CV, state_VK, NN)
    return dq * start_CK, -beta_C1 * dk * start_CK, ops.dot(u_CV, dstate_VK, NN) * end_CK


def total_transpose(total_1K, state_VK, dstate_VK) -> jax.Array:
    """Gradient [1,K] to the sum of the chunk's log decays, by way of its decay of the state."""
    return total_1K * jnp.sum(state_VK.astype(jnp.float32) * dstate_VK.astype(jnp.float32), axis=0, keepdims=True)


def pairs_transpose(ops: Ops, beta_C1, u_CV, db_CV, do_CV) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients [C,C] to aq and ak, right where tokens meet, and [C,1] to aq's diagonal.

    u = beta error - diag(beta) ak u, hence the gradient to diag(beta) ak is -db u^T.
    """
    own = jnp.sum(do_CV.astype(jnp.float32) * u_CV.astype(jnp.float32), axis=1, keepdims=True)
    daq, dm = ops.both(do_CV, db_CV, u_CV, NT)
    return daq, -beta_C1 * dm, own


def level_transpose(ops: Ops, h: int | jax.Array, q_CK, k_CK, up_CK, low_CK, daq_CC, dak_CC):
    """Of the level of h: gradients [C,K] to q and k, and to the two sums that give its decays."""
    meet = pairs_of(h, q_CK.shape[0])
    daq, dak = jnp.where(meet, daq_CC, 0), jnp.where(meet, dak_CC, 0)
    dq_up, dk_up = (d * up_CK for d in ops.both(daq, dak, k_CK * low_CK, NN))
    dk_low = (ops.dot(daq, q_CK * up_CK, TN) + ops.dot(dak, k_CK * up_CK, TN)) * low_CK
    return dq_up, dk_up + dk_low, q_CK * dq_up + k_CK * dk_up, k_CK * dk_low


def token_transpose(
    ops: Ops, swap: Swap, x: Inputs, edge: Edges, decay: Decays, u_CV, db_CV, do_CV, state_VK, dstate_VK
):
    """Gradients to q, k and g [C,K]."""
    daq, dak, own = pairs_transpose(ops, x.beta, u_CV, db_CV, do_CV)
    dq, dk, levels = own * x.k, own * x.q, []
    for h, up, low in decay.levels:
        dq_h, dk_h, dup, dlow = level_transpose(ops, h, x.q, x.k, up, low, daq, dak)
        dq, dk = dq + dq_h, dk + dk_h
        levels.append((h, dup, dlow))
    dq_start, dk_start, dk_end = start_transpose(
        ops, x.beta, decay.start, decay.end, u_CV, db_CV, do_CV, state_VK, dstate_VK
    )
    dg = decays_transpose(swap, levels, x.q * dq_start + x.k * dk_start, x.k * dk_end)
    return dq + dq_start, dk + dk_start + dk_end, dg + total_transpose(edge.total, state_VK, dstate_VK)
