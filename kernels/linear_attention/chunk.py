"""Algebra of one chunk of C tokens of KDA, all heads at once, with its hand-written transpose.

With G_i = sum of g up to and including token i of the chunk, and S the state before the chunk:

    A^q_ij = sum_c q_ic k_jc exp(G_ic - G_jc)   (i >= j)       A^k likewise with k_i, strictly i > j
    u = T beta (v - (k e^G) S),   T = (I + diag(beta) A^k)^-1   the corrections each token writes
    o = (q e^G) S + A^q u
    S' = e^{G_C} S + (k e^{G_C - G})^T u

Every exponent is a sum of log decays over a range of tokens, hence never positive: it underflows only where the true
value does, and nothing can overflow (factoring exp(G_i) exp(-G_j) overflows beyond 88 in float32). The sums are built
range by range rather than as differences G_i - G_j, so nothing cancels either: a log decay of `documents.RESET` in
the middle of a chunk separates two documents exactly. Gradients to g go back through the same ranges, so that those
before a deep decay are not lost in the rounding of larger ones behind it.

Scores by recursive halving: for h = 1, 2, ..., C/2 the rows of the upper half of each block of 2h meet the columns of
its lower half; `prefix` runs from the start of the upper half to row i, `suffix` from after column j to the end of the
lower half, and exp(G_i - G_j) = exp(prefix_i) exp(suffix_j).

Dims: B batch, H heads, C tokens of a chunk, K key, V value; n blocks of 2h tokens, h half a block.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

_BASE = 8  # rows solved one by one before the inverse goes on by blocks

_einsum = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)


class Level(NamedTuple):
    """Decays of one halving: upper rows from the start of their half, lower rows to the end of theirs; [B,H,n,h,K]."""

    up: jax.Array
    low: jax.Array


class Decays(NamedTuple):
    levels: tuple[Level, ...]
    start: jax.Array  # [B,H,C,K] exp(G_i): chunk start to token i, inclusive
    end: jax.Array  # [B,H,C,K] exp(G_C - G_j): after token j to the chunk's end


def halves(x, h):
    """[..., C, K] -> lower and upper halves of its blocks of 2h rows, each [..., C/2h, h, K]."""
    x = x.reshape(*x.shape[:-2], x.shape[-2] // (2 * h), 2, h, x.shape[-1])
    return x[..., 0, :, :], x[..., 1, :, :]


def join(low, up):
    """Inverse of `halves`."""
    x = jnp.concatenate([low, up], axis=-2)
    return x.reshape(*x.shape[:-3], -1, x.shape[-1])


def decays(g_BHCK) -> Decays:
    """All decay factors of a chunk, from sums over ranges of log decays (units: natural log)."""
    prefix, suffix, levels, h = g_BHCK, jnp.zeros_like(g_BHCK), [], 1
    while h < g_BHCK.shape[-2]:
        (prefix_low, prefix_up), (suffix_low, suffix_up) = halves(prefix, h), halves(suffix, h)
        levels.append(Level(jnp.exp(prefix_up), jnp.exp(suffix_low)))
        total_low, total_up = prefix_low[..., -1:, :], prefix_up[..., -1:, :]
        prefix = join(prefix_low, prefix_up + total_low)
        suffix = join(suffix_low + total_up, suffix_up)
        h *= 2
    return Decays(tuple(levels), jnp.exp(prefix), jnp.exp(suffix))


def decays_transpose(dlevels, dstart_BHCK, dend_BHCK):
    """Cotangent of g from those of the sums whose exp `decays` returns (not of the exp itself)."""
    dprefix, dsuffix, h = dstart_BHCK, dend_BHCK, dstart_BHCK.shape[-2] // 2
    for level in reversed(dlevels):
        (prefix_low, prefix_up), (suffix_low, suffix_up) = halves(dprefix, h), halves(dsuffix, h)
        dprefix = join(prefix_low + prefix_up, prefix_up + suffix_low + level.up)
        dsuffix = join(suffix_low + prefix_up + level.low, suffix_up + suffix_low)
        h //= 2
    return dprefix


def scores(q_BHCK, k_BHCK, levels):
    """A^q (with its diagonal q_i . k_i) and A^k (strictly lower), each [B,H,C,C]."""
    diagonal_BHC = jnp.sum(q_BHCK * k_BHCK, axis=-1)
    aq, ak, h = diagonal_BHC[..., None, None], jnp.zeros_like(diagonal_BHC)[..., None, None], 1
    for level in levels:
        rows, columns = _level_factors(q_BHCK, k_BHCK, level, h)
        a = _einsum("...ik,...jk->...ij", rows, columns)
        aq, ak = _grow(aq, a[..., :h, :]), _grow(ak, a[..., h:, :])
        h *= 2
    return aq[..., 0, :, :], ak[..., 0, :, :]


def scores_transpose(q_BHCK, k_BHCK, levels, daq_BHCC, dak_BHCC):
    """Cotangents of `scores`: (dq, dk, and for each level, `Level` of those to its exponents)."""
    diagonal_BHC1 = jnp.diagonal(daq_BHCC, axis1=-2, axis2=-1)[..., None]
    dq, dk, dlevels, h = diagonal_BHC1 * k_BHCK, diagonal_BHC1 * q_BHCK, [], q_BHCK.shape[-2] // 2
    daq, dak = daq_BHCC[..., None, :, :], dak_BHCC[..., None, :, :]
    for level in reversed(levels):
        rows, columns = _level_factors(q_BHCK, k_BHCK, level, h)
        da = jnp.concatenate([daq[..., h:, :h], dak[..., h:, :h]], axis=-2)
        drows = _einsum("...ij,...jk->...ik", da, columns)
        dcolumns = _einsum("...ij,...ik->...jk", da, rows)
        dq_up, dk_up = drows[..., :h, :] * level.up, drows[..., h:, :] * level.up
        dq, dk = dq + join(jnp.zeros_like(dq_up), dq_up), dk + join(dcolumns * level.low, dk_up)
        dexponents = rows * drows
        dlevels.append(Level(dexponents[..., :h, :] + dexponents[..., h:, :], columns * dcolumns))
        daq, dak, h = _shrink(daq, h), _shrink(dak, h), h // 2
    return dq, dk, tuple(reversed(dlevels))


def _level_factors(q_BHCK, k_BHCK, level, h):
    """Rows [q; k] of the upper halves and columns k of the lower halves, each times its decay."""
    k_low, k_up = halves(k_BHCK, h)
    rows = jnp.concatenate([halves(q_BHCK, h)[1] * level.up, k_up * level.up], axis=-2)
    return rows, k_low * level.low


def _grow(m, a):
    """Blocks [..., 2n, h, h] and the block a below the diagonal of each pair -> lower-triangular [..., n, 2h, 2h]."""
    m = m.reshape(*a.shape[:-2], 2, *a.shape[-2:])
    top = jnp.concatenate([m[..., 0, :, :], jnp.zeros_like(a)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([a, m[..., 1, :, :]], axis=-1)], axis=-2)


def _shrink(m, h):
    """[..., n, 2h, 2h] -> its diagonal blocks [..., 2n, h, h]."""
    pair = jnp.stack([m[..., :h, :h], m[..., h:, h:]], axis=-3)
    return pair.reshape(*m.shape[:-3], -1, h, h)


def inverse(a_BHCC):
    """(I + A)^-1 of a strictly lower-triangular A: rows of 8x8 blocks one by one, then 2x2 blocks,

        [[L, 0], [X, U]]^-1 = [[L^-1, 0], [-U^-1 X L^-1, U^-1]].

    No powers of A are formed (Neumann doubling): for repeated keys with beta near 1 they grow before they cancel.
    """
    C = a_BHCC.shape[-1]
    h, blocks, below = C, a_BHCC[..., None, :, :], []
    while h > _BASE:
        h //= 2
        below.append(blocks[..., h:, :h])
        blocks = _shrink(blocks, h)
    m = _substitute(blocks)
    for x in reversed(below):
        pair = m.reshape(*x.shape[:-2], 2, h, h)
        corner = _einsum("...ij,...jk->...ik", pair[..., 1, :, :], _einsum("...ij,...jk->...ik", x, pair[..., 0, :, :]))
        m, h = _grow(m, -corner), 2 * h
    return m[..., 0, :, :]


def _substitute(a):
    """(I + A)^-1 of small strictly lower-triangular blocks [..., s, s], row by row: T_i = e_i - sum_j<i A_ij T_j."""
    size = a.shape[-1]
    eye = jnp.eye(size, dtype=a.dtype)
    rows = []
    for i in range(size):
        row = jnp.broadcast_to(eye[i], (*a.shape[:-2], size))
        for j in range(i):
            row = row - a[..., i, j, None] * rows[j]
        rows.append(row)
    return jnp.stack(rows, axis=-2)


class Solved(NamedTuple):
    """What both directions need of a chunk."""

    decay: Decays
    aq: jax.Array  # [B,H,C,C]
    ak: jax.Array  # [B,H,C,C]
    t: jax.Array  # [B,H,C,C]  (I + beta A^k)^-1
    reads: jax.Array  # [B,H,2C,V]  [q e^G; k e^G] S
    error: jax.Array  # [B,H,C,V]  v - (k e^G) S
    u: jax.Array  # [B,H,C,V]


def solve(state_BHKV, q_BHCK, k_BHCK, v_BHCV, g_BHCK, beta_BHC) -> Solved:
    decay = decays(g_BHCK)
    aq, ak = scores(q_BHCK, k_BHCK, decay.levels)
    t = inverse(beta_BHC[..., None] * ak)
    qk = jnp.concatenate([q_BHCK * decay.start, k_BHCK * decay.start], axis=-2)
    reads = _einsum("bhck,bhkv->bhcv", qk, state_BHKV)
    error = v_BHCV - reads[..., q_BHCK.shape[-2] :, :]
    u = _einsum("bhij,bhjv->bhiv", t, beta_BHC[..., None] * error)
    return Solved(decay, aq, ak, t, reads, error, u)


def forward(state_BHKV, q_BHCK, k_BHCK, v_BHCV, g_BHCK, beta_BHC):
    """One chunk: (state after it, outputs [B,H,C,V])."""
    s = solve(state_BHKV, q_BHCK, k_BHCK, v_BHCV, g_BHCK, beta_BHC)
    o_BHCV = s.reads[..., : q_BHCK.shape[-2], :] + _einsum("bhij,bhjv->bhiv", s.aq, s.u)
    written_BHKV = _einsum("bhck,bhcv->bhkv", k_BHCK * s.decay.end, s.u)
    return s.decay.start[..., -1, :, None] * state_BHKV + written_BHKV, o_BHCV


def transpose(state_BHKV, q_BHCK, k_BHCK, v_BHCV, g_BHCK, beta_BHC, do_BHCV, dstate_BHKV):
    """Cotangents of `forward`, recomputing the chunk: (dstate before it, dq, dk, dv, dg, dbeta)."""
    C = q_BHCK.shape[-2]
    s = solve(state_BHKV, q_BHCK, k_BHCK, v_BHCV, g_BHCK, beta_BHC)
    start, end = s.decay.start, s.decay.end
    du = _einsum("bhij,bhiv->bhjv", s.aq, do_BHCV) + _einsum("bhck,bhkv->bhcv", k_BHCK * end, dstate_BHKV)
    db = _einsum("bhij,bhiv->bhjv", s.t, du)
    dv = beta_BHC[..., None] * db
    # T and A^k: u = b - beta A^k u, hence d(beta A^k) = -db u^T below the diagonal.
    pairs = _einsum("bhiv,bhjv->bhij", jnp.concatenate([do_BHCV, -db], axis=-2), s.u)
    daq, dm = jnp.tril(pairs[..., :C, :]), jnp.tril(pairs[..., C:, :], -1)
    dbeta = jnp.sum(db * s.error, axis=-1) + jnp.sum(dm * s.ak, axis=-1)
    dq, dk, dlevels = scores_transpose(q_BHCK, k_BHCK, s.decay.levels, daq, beta_BHC[..., None] * dm)
    # Products with the state: q e^G and k e^G before the chunk, k e^{G_C - G} after it.
    dreads = jnp.concatenate([do_BHCV, -dv], axis=-2)
    dqk = _einsum("bhcv,bhkv->bhck", dreads, state_BHKV)
    dq_start, dk_start = dqk[..., :C, :] * start, dqk[..., C:, :] * start
    dk_end = _einsum("bhcv,bhkv->bhck", s.u, dstate_BHKV) * end
    qk = jnp.concatenate([q_BHCK * start, k_BHCK * start], axis=-2)
    total = start[..., -1, :, None]
    dstate = total * dstate_BHKV + _einsum("bhck,bhcv->bhkv", qk, dreads)
    dg = decays_transpose(dlevels, q_BHCK * dq_start + k_BHCK * dk_start, k_BHCK * dk_end)
    dg = dg + jnp.sum(total * state_BHKV * dstate_BHKV, axis=-1)[..., None, :]
    return dstate, dq + dq_start, dk + dk_start + dk_end, dv, dg, dbeta
