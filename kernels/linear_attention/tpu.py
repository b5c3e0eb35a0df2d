"""KDA for TPU (Pallas, Mosaic): a grid step is a group of chunks of one head, whose state stays in VMEM.

The grid is (heads, rows, groups), groups in order. The backward pass takes them in reverse: it starts a group from the
state that the forward pass kept, makes states, pairs and writes of its chunks again in VMEM, and goes back through
them. Kept: K V floats for every group, which are as few as GROUP chunks allow and equally long.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from . import head
from .pallas import Arrays, Kernels

GROUP = 8  # chunks of a step, at most
LANES = 128
PARAMS = pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=32 * 2**20)


def length(C: int, T: int) -> int:
    """T filled up to whole chunks in equal groups: less than a chunk for each group."""
    groups, chunks = _groups(-(-T // C))
    return groups * chunks * C


def _groups(chunks: int) -> tuple[int, int]:
    """How many, and of how many chunks each."""
    groups = -(-chunks // GROUP)
    return groups, -(-chunks // groups)


def width(n: int) -> int:
    return n + -n % LANES


def _dot(a: jax.Array, b: jax.Array, dims: tuple[int, int]) -> jax.Array:
    """In full float32: the systolic array would round operands to bfloat16."""
    dims_ = (((dims[0],), (dims[1],)), ((), ()))
    return lax.dot_general(a, b, dims_, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def _both(a: jax.Array, b: jax.Array, w: jax.Array, dims: tuple[int, int]) -> tuple[jax.Array, jax.Array]:
    """One product: the array is loaded with w once."""
    found = _dot(jnp.concatenate([a, b], axis=0), w, dims)
    return found[: a.shape[0]], found[a.shape[0] :]


def _swap(x: jax.Array, h: int) -> jax.Array:
    size = x.shape[0]
    return jnp.where(head.rows_of(h, size), pltpu.roll(x, h, 0), pltpu.roll(x, size - h, 0))


OPS = head.Ops(_dot, _dot, _both)


class _Blocks:
    """How arrays come to the steps of a grid (heads, rows, groups); `order` says which group is the n-th."""

    def __init__(self, C: int, x: Arrays, order: Any):
        q_BTHK, _, v_BTHV, _, _ = x
        self.B, self.T, self.H, self.K = q_BTHK.shape
        self.V, self.C = v_BTHV.shape[3], C
        self.groups, self.chunks = _groups(self.T // C)
        self.grid = (self.H, self.B, self.groups)
        order = order(self.groups)
        self.keys, self.values = (
            pl.BlockSpec((1, C * self.chunks, size), lambda h, b, n: (b, order(n), h)) for size in (self.K, self.V)
        )
        self.beta = pl.BlockSpec((1, 1, 1, self.chunks, C), lambda h, b, n: (b, h, order(n), 0, 0))
        self.state = pl.BlockSpec((1, 1, self.V, self.K), lambda h, b, n: (b, h, 0, 0))
        self.states = pl.BlockSpec((1, 1, 1, self.V, self.K), lambda h, b, n: (b, h, order(n), 0, 0))
        self.inputs = [self.keys, self.keys, self.values, self.keys, self.beta]

    def flat(self, a: jax.Array) -> jax.Array:
        """[B,T,H,X] -> [B,T,H X]: a head is a block of columns."""
        return a.reshape(self.B, self.T, -1)

    def arrays(self, x: Arrays) -> list[jax.Array]:
        q, k, v, g, beta = x
        rows = jnp.moveaxis(beta, 1, 2).reshape(self.B, self.H, self.groups, self.chunks, self.C)
        return [self.flat(q), self.flat(k), self.flat(v), self.flat(g.astype(jnp.float32)), rows]

    def shape(self, size: int, dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.B, self.T, self.H * size), dtype)

    def cost(self, flops: int, passes: int, arrays: list[Any]) -> pl.CostEstimate:
        """flops: of one token of one head. passes: how often decays are made. arrays: all that is read or written."""
        tokens, moved = self.B * self.T * self.H, sum(a.size * a.dtype.itemsize for a in arrays)
        exps = passes * tokens * head.exps(self.C, self.K)
        return pl.CostEstimate(flops=tokens * flops, bytes_accessed=moved, transcendentals=exps)


def forward(C: int, x: Arrays, state_BHKV: jax.Array, keep: bool, *, interpret: Any = False):
    """See `pallas.Kernels`. interpret: for tests, `pltpu.InterpretParams()` or True."""
    at = _Blocks(C, x, lambda groups: lambda n: n)
    arrays = [*at.arrays(x), jnp.swapaxes(state_BHKV, 2, 3)]
    states = jax.ShapeDtypeStruct((at.B, at.H, at.groups, at.V, at.K), jnp.float32)
    final = jax.ShapeDtypeStruct((at.B, at.H, at.V, at.K), jnp.float32)
    outs = [at.shape(at.V, x[2].dtype), final, *[states] * keep]
    found = pl.pallas_call(
        partial(_forward_body, at.chunks, C),
        grid=at.grid,
        in_specs=[*at.inputs, at.state],
        out_specs=[at.values, at.state, *[at.states] * keep],
        scratch_shapes=[pltpu.VMEM((at.V, at.K), jnp.float32)],
        out_shape=outs,
        compiler_params=PARAMS,
        cost_estimate=at.cost(forward_flops(C, at.K, at.V), 1, [*arrays, *outs]),
        interpret=interpret,
        name="kda_forward",
    )(*arrays)
    return found[0].reshape(x[2].shape), jnp.swapaxes(found[1], 2, 3), found[2] if keep else None


def _forward_body(chunks, C, q, k, v, g, beta, first, o, final, *rest) -> None:
    *kept, state = rest
    n = pl.program_id(2)

    @pl.when(n == 0)
    def _():
        state[...] = first[0, 0]

    for ref in kept:
        ref[0, 0, 0] = state[...]

    def chunk(c, none):
        at, x, g_CK = _chunk(c, C, q, k, v, g, beta)
        decay = head.decays(_swap, g_CK)
        pair = head.pairs(OPS, x, decay)
        edge = head.edges(x, g_CK, decay)
        reads, known = OPS.both(edge.q, edge.k, state[...], head.NT)
        u_CV, _ = head.write(OPS, x.v, x.beta, pair.t, known)
        o[0, at, :] = head.outputs(OPS, pair.aq, u_CV, reads).astype(o.dtype)
        state[...] = head.advance(OPS, edge.end, edge.total, u_CV, state[...])

    lax.fori_loop(0, chunks, chunk, None)

    @pl.when(n == pl.num_programs(2) - 1)
    def _():
        final[0, 0] = state[...]


def _chunk(c, C, q, k, v, g, beta) -> tuple[Any, head.Inputs, jax.Array]:
    """Where chunk c of the group lies, and what it holds in float32."""
    at = pl.ds(pl.multiple_of(c * C, C), C)
    q_CK, k_CK, v_CV = (ref[0, at, :].astype(jnp.float32) for ref in (q, k, v))
    return at, head.Inputs(q_CK, k_CK, v_CV, head.column(beta[0, 0, 0, pl.ds(c, 1), :])), head.summable(g[0, at, :])


def backward(
    C: int, x: Arrays, states: jax.Array, do_BTHV: jax.Array, dfinal_BHKV: jax.Array, *, interpret: Any = False
):
    """See `pallas.Kernels`."""
    at = _Blocks(C, x, lambda groups: lambda n: groups - 1 - n)
    inputs, dfinal_BHVK = at.arrays(x), jnp.swapaxes(dfinal_BHKV, 2, 3)
    arrays = [*inputs, states, at.flat(do_BTHV), dfinal_BHVK]
    outs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (*inputs, dfinal_BHVK)]
    square, values, state = (C, C), (C, at.V), (at.V, at.K)
    held = [state, (at.chunks + 1, *state), *((at.chunks, *shape) for shape in (square, square, values, values))]
    *wide, dbeta, dstate_BHVK = pl.pallas_call(
        partial(_backward_body, at.chunks, C),
        grid=at.grid,
        in_specs=[*at.inputs, at.states, at.values, at.state],
        out_specs=[*at.inputs, at.state],
        scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in held],
        out_shape=outs,
        compiler_params=PARAMS,
        cost_estimate=at.cost(backward_flops(C, at.K, at.V), 2, [*arrays, *outs]),
        interpret=interpret,
        name="kda_backward",
    )(*arrays)
    grads = tuple(d.reshape(a.shape).astype(a.dtype) for d, a in zip(wide, x, strict=False))
    dbeta_BTH = jnp.moveaxis(dbeta.reshape(at.B, at.H, at.T), 2, 1)
    return (*grads, dbeta_BTH), jnp.swapaxes(dstate_BHVK, 2, 3)


def _backward_body(
    chunks, C, q, k, v, g, beta, kept, do, dfinal, dq, dk, dv, dg, dbeta, dfirst, dstate, states, aq, t, u, w
) -> None:
    n = pl.program_id(2)

    @pl.when(n == 0)
    def _():
        dstate[...] = dfinal[0, 0]

    states[0] = kept[0, 0, 0]

    def again(c, none):
        _, x, g_CK = _chunk(c, C, q, k, v, g, beta)
        decay = head.decays(_swap, g_CK)
        pair = head.pairs(OPS, x, decay)
        edge = head.edges(x, g_CK, decay)
        u_CV, error = head.write(OPS, x.v, x.beta, pair.t, OPS.dot(edge.k, states[c], head.NT))
        aq[c], t[c], u[c], w[c] = pair.aq, pair.t, u_CV, head.remainder(OPS, pair.ak, u_CV, error)
        states[c + 1] = head.advance(OPS, edge.end, edge.total, u_CV, states[c])

    lax.fori_loop(0, chunks, again, None)

    def back(i, none):
        c = chunks - 1 - i
        at, x, g_CK = _chunk(c, C, q, k, v, g, beta)
        decay, do_CV = head.decays(_swap, g_CK), do[0, at, :].astype(jnp.float32)
        edge = head.edges(x, g_CK, decay)
        db = head.write_transpose(OPS, edge, aq[c], t[c], do_CV, dstate[...])
        found = head.token_transpose(OPS, _swap, x, edge, decay, u[c], db, do_CV, states[c], dstate[...])
        for ref, value in zip((dq, dk, dg, dv), (*found, x.beta * db), strict=True):
            ref[0, at, :] = value.astype(ref.dtype)
        dbeta[0, 0, 0, pl.ds(c, 1), :] = _row_sums(db * w[c])
        dstate[...] = head.state_transpose(OPS, edge, do_CV, x.beta * db, dstate[...])

    lax.fori_loop(0, chunks, back, None)

    @pl.when(n == pl.num_programs(2) - 1)
    def _():
        dfirst[0, 0] = dstate[...]


def _row_sums(x_CV: jax.Array) -> jax.Array:
    """Sums over the columns, as a row [1,C]."""
    return _dot(jnp.ones((8, x_CV.shape[1]), x_CV.dtype), x_CV, head.NT)[:1]


def forward_flops(C: int, K: int, V: int) -> int:
    """Of one token of one head."""
    levels = C.bit_length() - 1
    return 4 * levels * C * K + 4 * (levels - 1) * C * C + 4 * C * V + 6 * K * V


def backward_flops(C: int, K: int, V: int) -> int:
    """Of one token of one head, what is made again included."""
    levels = C.bit_length() - 1
    return forward_flops(C, K, V) + 8 * levels * C * K + 8 * C * V + 10 * K * V + 16 * V


KERNELS = Kernels(forward, backward, length, width, chunk=64, smallest=16, largest=256)
