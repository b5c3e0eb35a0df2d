"""KDA for NVIDIA GPUs (Pallas, Triton), in kernels that are parallel in different ways:

    pairs    every chunk by itself: what tokens have to do with each other, the inverse, and what meets the state
    scan     chunks in order, for every head and block of values: outputs; or, as `states`, what the gradients need
    unscan   chunks in reverse: the gradients to the states, and to what the tokens write
    tokens   every chunk by itself: gradients to q, k and g

The backward pass runs `pairs` and the scan again. Nothing but the inputs is kept. What lives while a pass lasts, for
each token and head, in chunks of C = 64: forward two squares of a chunk (aq and t), 2 C float32, and what meets the
state, 3 K numbers in the dtype of q; backward three squares (and ak), 3 K again, two states of every chunk, 2 K V / C,
and w, u and db, 3 V, all but the squares in the dtype of q. Of bfloat16 and K = V = 128 that is 512 + 768 = 1,280 bytes
forward and 768 + 768 + 1,024 + 768 = 3,328 backward, of which the gradients' own memory takes up to 1,280.

Levels of the halving (`head.py`) are one loop, whose sums over ranges of tokens are products with 0 and 1: registers
hold one level at a time, of a block of keys.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from . import head
from .pallas import Arrays, Kernels

VALUES = 32  # of a program of `scan` and `unscan`
KEYS = 32  # at once in `pairs` and `tokens`
WARPS = {"pairs": 8, "scan": 4, "states": 4, "unscan": 4, "tokens": 8}


def length(C: int, T: int) -> int:
    return T + -T % C


def width(n: int) -> int:
    """A power of two, as Triton's tiles are."""
    return max(16, 1 << (n - 1).bit_length())


def ops(dtype: Any, interpret: bool) -> head.Ops:
    """Where inputs are bfloat16, products of float32 are in TF32, which has two bits more; else, and wherever the
    inverse is made or used, they are as good as float32. An interpreter has nothing else."""
    presets = lax.DotAlgorithmPreset
    full = presets.BF16_BF16_F32_X6  # six products of parts in bfloat16: TF32 in three takes more registers

    def dot(a, b, dims, preset=presets.TF32_TF32_F32 if dtype == jnp.bfloat16 else full):
        common = jnp.promote_types(a.dtype, b.dtype)
        precision = lax.Precision.HIGHEST if interpret else preset if common == jnp.float32 else None
        return lax.dot_general(
            a.astype(common), b.astype(common), (((dims[0],), (dims[1],)), ((), ())),
            precision=precision, preferred_element_type=jnp.float32,
        )  # fmt: skip

    return head.Ops(dot, partial(dot, preset=full), lambda a, b, w, dims: (dot(a, w, dims), dot(b, w, dims)))


class _Call:
    """Sizes, and how a program finds its part of the arrays."""

    def __init__(self, C: int, x: Arrays, interpret: bool):
        q_BTHK, _, v_BTHV, _, _ = x
        self.B, self.T, self.H, self.K = q_BTHK.shape
        self.V, self.C, self.N = v_BTHV.shape[3], C, self.T // C
        self.dtype = jnp.result_type(*x[:3])
        self.interpret, self.use = interpret, ops(self.dtype, interpret)
        self.values, self.keys = min(self.V, VALUES), min(self.K, KEYS)
        self.levels = C.bit_length() - 1

    def shape(self, *dims: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.B, *dims), dtype)

    def per_token(self, size: int, dtype: Any = None) -> jax.ShapeDtypeStruct:
        return self.shape(self.T, self.H, size, dtype=dtype or self.dtype)

    @property
    def states(self) -> jax.ShapeDtypeStruct:
        """Of every chunk, transposed."""
        return self.shape(self.H, self.N, self.V, self.K, dtype=self.dtype)

    def run(self, name: str, body: Any, grid: tuple[int, ...], outs: list[jax.ShapeDtypeStruct], *arrays: jax.Array):
        tokens = self.B * self.T * self.H
        flops, exps = tokens * self.flops[name], tokens * head.exps(self.C, self.K) * (name in ("pairs", "tokens"))
        moved = sum(a.size * a.dtype.itemsize for a in (*arrays, *outs))
        return pl.pallas_call(
            partial(body, self),
            grid=grid,
            out_shape=outs,
            compiler_params=plgpu.CompilerParams(num_warps=WARPS[name], num_stages=1),
            cost_estimate=pl.CostEstimate(flops=flops, bytes_accessed=moved, transcendentals=exps),
            interpret=self.interpret,
            name=f"kda_{name}",
        )(*arrays)

    @property
    def flops(self) -> dict[str, int]:
        """Of one token of one head, sums over ranges as the three products that they are."""
        C, K, V, levels = self.C, self.K, self.V, self.levels
        return {
            "pairs": (12 + 16 * levels) * C * K + 4 * levels * C * C,
            "scan": 6 * K * V + 4 * C * V,
            "states": 4 * K * V + 4 * C * V,
            "unscan": 6 * K * V + 4 * C * V,
            "tokens": (24 + 32 * levels) * C * K + 6 * K * V + 4 * C * V * (K // self.keys),
        }

    def tokens(self, ref: Any, b, n, h, first=0, count: int | None = None) -> jax.Array:
        """[C, count] of [B,T,H,X]: chunk n of head h, from index `first`."""
        count = ref.shape[3] if count is None else count
        return plgpu.load(ref.at[b, pl.ds(n * self.C, self.C), h, pl.ds(first, count)])

    def put(self, ref: Any, b, n, h, value: jax.Array, first=0) -> None:
        at = ref.at[b, pl.ds(n * self.C, self.C), h, pl.ds(first, value.shape[1])]
        plgpu.store(at, value.astype(ref.dtype))

    def beta(self, ref: Any, b, n, h) -> jax.Array:
        return plgpu.load(ref.at[b, pl.ds(n * self.C, self.C), h])[:, None]

    def edges(self, b, n, h, q_start: Any, k_start: Any, k_end: Any, total: Any) -> head.Edges:
        q, k, end = (self.tokens(ref, b, n, h) for ref in (q_start, k_start, k_end))
        return head.Edges(q, k, end, plgpu.load(total.at[b, h, n])[None])

    def blocks(self, body: Any, start: Any) -> Any:
        """A loop over blocks of keys."""
        return _loop(self.K // self.keys, lambda j, carry: body(j * self.keys, carry), start)

    def halvings(self, body: Any, start: Any) -> Any:
        """A loop over levels h = 1, 2, ..., C / 2."""
        return _loop(self.levels, lambda i, carry: body(lax.shift_left(np.int32(1), i), carry), start)


def _loop(count: int, body: Any, start: Any) -> Any:
    """Counted in 32 bits, also where Python's integers are wider."""
    return lax.fori_loop(0, count, lambda i, carry: body(lax.convert_element_type(i, np.int32), carry), start)


def _decays(g_CK: jax.Array, h: int | jax.Array) -> tuple[jax.Array, jax.Array]:
    """exp of the sums from the start of i's block of h rows to i, and from after j to the end of its block."""
    i, t, together = _blocks(g_CK.shape[0], h)
    return jnp.exp(_sums(together & (t <= i), g_CK)), jnp.exp(_sums(together & (t > i), g_CK))


def _decays_transpose(dupto_CK: jax.Array, dafter_CK: jax.Array, h: int | jax.Array) -> jax.Array:
    """Gradient to g from those to the sums of `_decays`."""
    t, i, together = _blocks(dupto_CK.shape[0], h)
    return _sums(together & (t <= i), dupto_CK) + _sums(together & (t > i), dafter_CK)


def _blocks(size: int, h: int | jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """[C,C]: row, column, and whether they are in one block of h."""
    i, j = (lax.broadcasted_iota(jnp.int32, (size, size), dim) for dim in (0, 1))
    return i, j, (i ^ j) < h


def _sums(which: jax.Array, x: jax.Array) -> jax.Array:
    """Of rows of x: products with 0 and 1, to full float32 in three parts of bfloat16."""
    total, mask = jnp.zeros_like(x), which.astype(jnp.bfloat16)
    for _ in range(3):
        part = x.astype(jnp.bfloat16)
        x = x - part.astype(jnp.float32)
        total = total + jnp.dot(mask, part, preferred_element_type=jnp.float32)
    return total


# --- pairs ------------------------------------------------------------------------------------------------------------


def _pairs(call: _Call, x: Arrays, keep: bool) -> tuple[head.Edges, jax.Array, Arrays]:
    """q start, k start and k end [B,T,H,K], the decay of each chunk [B,H,N,K]; t [B,H,N,C,C]; aq, to keep also ak."""
    q, k, _, g, beta = x
    edges, square = [call.per_token(call.K)] * 3, call.shape(call.H, call.N, call.C, call.C)
    outs = [*edges, call.shape(call.H, call.N, call.K), square, square, *[square] * keep]
    found = call.run("pairs", _pairs_body, (call.N, call.H, call.B), outs, q, k, g, beta)
    return head.Edges(*found[:4]), found[4], tuple(found[5:])


def _pairs_body(call, q, k, g, beta, q_start, k_start, k_end, total, t, *squares) -> None:
    n, h, b = (pl.program_id(axis) for axis in range(3))
    zeros = jnp.zeros((call.C, call.C), jnp.float32)

    def block(first, sums):
        q_CK, k_CK = (call.tokens(ref, b, n, h, first, call.keys).astype(jnp.float32) for ref in (q, k))
        g_CK = head.summable(call.tokens(g, b, n, h, first, call.keys))
        start, end = _decays(g_CK, call.C)
        for ref, value in zip((q_start, k_start, k_end), (q_CK * start, k_CK * start, k_CK * end), strict=True):
            call.put(ref, b, n, h, value, first)
        plgpu.store(total.at[b, h, n, pl.ds(first, call.keys)], jnp.exp(jnp.sum(g_CK, axis=0)))

        def level(size, sums):
            up, low = _decays(g_CK, size)
            found = call.use.both(q_CK * up, k_CK * up, k_CK * low, head.NT)
            meet = head.pairs_of(size, call.C)
            return tuple(s + jnp.where(meet, a, 0) for s, a in zip(sums, found, strict=True))

        own = jnp.sum(q_CK * k_CK, axis=1, keepdims=True)
        aq_CC, ak_CC = call.halvings(level, sums)
        return aq_CC + jnp.where(head.diagonal(call.C), own, 0), ak_CC

    aq_CC, ak_CC = call.blocks(block, (zeros, zeros))
    scaled = call.beta(beta, b, n, h) * ak_CC

    def invert(size, t):
        corner = jnp.where(head.pairs_of(size, call.C), scaled, 0)
        return t - call.use.exact(call.use.exact(t, corner, head.NN), t, head.NN)

    t_CC = call.halvings(invert, head.diagonal(call.C).astype(jnp.float32))
    for ref, value in zip((t, *squares), (t_CC, aq_CC, ak_CC), strict=False):
        plgpu.store(ref.at[b, h, n], value)


# --- scan -------------------------------------------------------------------------------------------------------------


def _scan(call: _Call, x: Arrays, edge: head.Edges, t, square, state_BHKV: jax.Array, keep: bool):
    """With aq: outputs and the final state [B,H,V,K]. To keep, with ak: w, u [B,T,H,V] and the states before chunks."""
    outs = [call.per_token(call.V), call.per_token(call.V), call.states] if keep else [
        call.per_token(call.V, x[2].dtype), call.shape(call.H, call.V, call.K)]  # fmt: skip
    arrays = (x[2], x[4], square, t, *edge, jnp.swapaxes(state_BHKV, 2, 3))
    name, grid = "states" if keep else "scan", (call.V // call.values, call.H, call.B)
    return call.run(name, partial(_scan_body, keep), grid, outs, *arrays)


def _scan_body(keep, call, v, beta, square, t, q_start, k_start, k_end, total, first_state, *outs) -> None:
    *wide, states = outs
    j, h, b = (pl.program_id(axis) for axis in range(3))
    first = j * call.values
    rows = pl.ds(first, call.values)

    def chunk(n, state_VK):
        """Arrays are loaded where they are needed, not before: all of them at once are more than the registers hold."""
        held = state_VK.astype(call.dtype)
        known = call.use.dot(call.tokens(k_start, b, n, h), held, head.NT)
        v_CV = call.tokens(v, b, n, h, first, call.values).astype(jnp.float32)
        u_CV, error = head.write(call.use, v_CV, call.beta(beta, b, n, h), plgpu.load(t.at[b, h, n]), known)
        if keep:
            plgpu.store(states.at[b, h, n, rows], held)
            found = head.remainder(call.use, plgpu.load(square.at[b, h, n]), u_CV, error), u_CV
        else:
            reads = call.use.dot(call.tokens(q_start, b, n, h), held, head.NT)
            found = (head.outputs(call.use, plgpu.load(square.at[b, h, n]), u_CV, reads),)
        for ref, value in zip(wide, found, strict=True):
            call.put(ref, b, n, h, value, first)
        end, decay = call.tokens(k_end, b, n, h), plgpu.load(total.at[b, h, n])[None]
        return head.advance(call.use, end, decay, u_CV.astype(call.dtype), state_VK)

    last = _loop(call.N, chunk, plgpu.load(first_state.at[b, h, rows]))
    if not keep:
        plgpu.store(states.at[b, h, rows], last)


# --- gradients --------------------------------------------------------------------------------------------------------


def _unscan(call: _Call, beta_BTH, edge: head.Edges, t, aq, do_BTHV: jax.Array, dfinal_BHKV: jax.Array):
    """Gradients to the state after each chunk and to the first state [B,H,V,K]; db [B,T,H,V]."""
    outs = [call.states, call.shape(call.H, call.V, call.K), call.per_token(call.V)]
    arrays = (beta_BTH, aq, t, *edge, do_BTHV, jnp.swapaxes(dfinal_BHKV, 2, 3))
    return call.run("unscan", _unscan_body, (call.V // call.values, call.H, call.B), outs, *arrays)


def _unscan_body(call, beta, aq, t, q_start, k_start, k_end, total, do, dfinal, dstates, dfirst, db) -> None:
    j, h, b = (pl.program_id(axis) for axis in range(3))
    first = j * call.values
    rows = pl.ds(first, call.values)

    def chunk(i, dstate_VK):
        n = call.N - 1 - i
        edge = call.edges(b, n, h, q_start, k_start, k_end, total)
        aq_CC, t_CC = (plgpu.load(ref.at[b, h, n]) for ref in (aq, t))
        do_CV = call.tokens(do, b, n, h, first, call.values)
        held = dstate_VK.astype(call.dtype)
        plgpu.store(dstates.at[b, h, n, rows], held)
        db_CV = head.write_transpose(call.use, edge, aq_CC, t_CC, do_CV, held)
        call.put(db, b, n, h, db_CV, first)
        dv_CV = (call.beta(beta, b, n, h) * db_CV).astype(call.dtype)
        return head.state_transpose(call.use, edge, do_CV.astype(call.dtype), dv_CV, dstate_VK)

    plgpu.store(dfirst.at[b, h, rows], _loop(call.N, chunk, plgpu.load(dfinal.at[b, h, rows])))


def _tokens(call: _Call, x: Arrays, u, db, do_BTHV, states, dstates) -> Arrays:
    """Gradients to q, k and g."""
    q, k, _, g, beta = x
    outs = [call.per_token(call.K, a.dtype) for a in (q, k, g)]
    arrays = (q, k, g, beta, u, db, do_BTHV, states, dstates)
    grid = (call.K // call.keys, call.N, call.B * call.H)
    return call.run("tokens", _tokens_body, grid, outs, *arrays)


def _tokens_body(call, q, k, g, beta, u, db, do, states, dstates, *outs) -> None:
    j, n, bh = (pl.program_id(axis) for axis in range(3))
    b, h, first = lax.div(bh, np.int32(call.H)), lax.rem(bh, np.int32(call.H)), j * call.keys
    use, beta_C1 = call.use, call.beta(beta, b, n, h)
    q_CK, k_CK = (call.tokens(ref, b, n, h, first, call.keys).astype(jnp.float32) for ref in (q, k))
    g_CK = head.summable(call.tokens(g, b, n, h, first, call.keys))
    u_CV, db_CV, do_CV = (call.tokens(ref, b, n, h).astype(call.dtype) for ref in (u, db, do))
    state_VK, dstate_VK = (plgpu.load(ref.at[b, h, n, :, pl.ds(first, call.keys)]) for ref in (states, dstates))

    start, end = _decays(g_CK, call.C)
    dq, dk_start, dk_end = head.start_transpose(use, beta_C1, start, end, u_CV, db_CV, do_CV, state_VK, dstate_VK)
    dg = _decays_transpose(q_CK * dq + k_CK * dk_start, k_CK * dk_end, call.C)
    dg = dg + head.total_transpose(jnp.exp(jnp.sum(g_CK, axis=0, keepdims=True)), state_VK, dstate_VK)
    daq_CC, dak_CC, own = head.pairs_transpose(use, beta_C1, u_CV, db_CV, do_CV)

    def level(size, sums):
        up, low = _decays(g_CK, size)
        dq_h, dk_h, dup, dlow = head.level_transpose(use, size, q_CK, k_CK, up, low, daq_CC, dak_CC)
        return tuple(a + b for a, b in zip(sums, (dq_h, dk_h, _decays_transpose(dup, dlow, size)), strict=True))

    sums = call.halvings(level, (dq + own * k_CK, dk_start + dk_end + own * q_CK, dg))
    for ref, value in zip(outs, sums, strict=True):
        call.put(ref, b, n, h, value, first)


def forward(C: int, x: Arrays, state_BHKV: jax.Array, keep: bool, *, interpret: bool = False):
    """See `pallas.Kernels`; what is kept is the first state. interpret: for tests."""
    call = _Call(C, x, interpret)
    edge, t, (aq,) = _pairs(call, x, False)
    o_BTHV, final_BHVK = _scan(call, x, edge, t, aq, state_BHKV, False)
    return o_BTHV, jnp.swapaxes(final_BHVK, 2, 3), state_BHKV if keep else None


def backward(C: int, x: Arrays, state_BHKV, do_BTHV, dfinal_BHKV, *, interpret: bool = False):
    """See `pallas.Kernels`."""
    call = _Call(C, x, interpret)
    edge, t, (aq, ak) = _pairs(call, x, True)
    w_BTHV, u_BTHV, states = _scan(call, x, edge, t, ak, state_BHKV, True)
    dstates, dfirst_BHVK, db_BTHV = _unscan(call, x[4], edge, t, aq, do_BTHV, dfinal_BHKV)
    dq, dk, dg = _tokens(call, x, u_BTHV, db_BTHV, do_BTHV, states, dstates)
    wide, beta_BTH = db_BTHV.astype(jnp.float32), x[4]
    dv = (beta_BTH[..., None] * wide).astype(x[2].dtype)
    dbeta = jnp.sum(wide * w_BTHV.astype(jnp.float32), axis=-1)
    return (dq, dk, dv, dg, dbeta), jnp.swapaxes(dfirst_BHVK, 2, 3)


KERNELS = Kernels(forward, backward, length, width, chunk=64, smallest=16, largest=128)
