"""The loss over pipeline stages, with its gradients made along the way; see `layers.pipeline`."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from trillion_moe.layers.norm import rms_norm
from trillion_moe.layers.pipeline import ALL, ON, Blocks, Pipe, add_run, added, enter, no_aux_of, run
from trillion_moe.layers.schedule import Job
from trillion_moe.layers.stages import Grid, Slot, Tail, Tokens, nth
from trillion_moe.layers.vocabulary import cross_entropy
from trillion_moe.ops import accumulator


def loss(pipe: Pipe, blocks: Blocks, grid: Grid, tail: Tail, first_MnBTD: jax.Array, tokens: Tokens):
    """-> sum of the cross-entropies of the counted targets, how many were the argmax, and aux by slot.

    Where it is differentiated, it goes forwards and back at once, for the leaves that have tangents; else forwards.
    """
    leaves, treedef = jax.tree.flatten((blocks, tail, first_MnBTD))

    def plain(leaves, grid, tokens):
        blocks, tail, first = treedef.unflatten(leaves)
        mixed_MBTD, aux = run(pipe, blocks, grid, tail.out_res, first, tokens)
        rows = [pipe.whole(x) for x in (mixed_MBTD, tokens.targets, tokens.counted)]
        hidden = rms_norm(rows[0], tail.norm, pipe.cfg.rms_norm_eps)
        return *cross_entropy(tail.head, hidden, rows[1], rows[2], pipe.outer), aux

    def forwards(leaves, grid, tokens):
        trained = tuple(leaf.perturbed for leaf in leaves)
        leaves, grid, tokens = jax.tree.map(
            lambda p: p.value, (leaves, grid, tokens), is_leaf=lambda p: hasattr(p, "perturbed")
        )
        out, grads = _there_and_back(pipe, leaves, treedef, trained, grid, tokens)
        return out, grads

    def backwards(grads, cotangents):
        ct = cotangents[0]
        none = isinstance(ct, SymbolicZero)
        return [None if g is None or none else (g * ct).astype(g.dtype) for g in grads], None, None

    f = jax.custom_vjp(plain)
    f.defvjp(forwards, backwards, symbolic_zeros=True)
    return f(leaves, grid, tokens)


def _there_and_back(pipe: Pipe, leaves, treedef, trained: tuple[bool, ...], grid: Grid, tokens: Tokens):
    """Loss, hits and aux, and gradients of the trained leaves (None for the others)."""
    (blocks, tail, first), flags = treedef.unflatten(leaves), treedef.unflatten(trained)
    slots = [Slot.of(block, flag) for block, flag in zip(blocks, flags[0], strict=True)]
    end = Slot.of(tail, flags[1])
    args = ((slots, True), (end, False), (first, True), (grid, True), (tokens, False))
    on, everywhere = [[ON] * len(slot.train) for slot in slots], [ALL] * len(end.train)
    specs = (ALL, ALL, ON, on, everywhere, ON if flags[2] else None)
    total, correct, aux, *grads = pipe.stage(partial(_ticks, pipe, flags[2]), args, specs)
    found = iter(jax.tree.leaves(grads))  # in the order of the leaves
    return (total, correct, aux), [next(found) if t else None for t in trained]


def _ticks(pipe: Pipe, wanted: bool, slots: list[Slot], end: Slot, first, grid: Grid, tokens: Tokens):
    """One stage's whole pass -> its part of loss, hits, aux, and gradients. wanted: whether those of `first` are."""
    schedule, d = pipe.schedule, lax.axis_index("pp")
    blocks = tuple(slot.tree(slot.train) for slot in slots)
    wide = [[jnp.zeros(x.shape, accumulator(x.dtype)) for x in slot.train] for slot in slots]
    wide_end = [jnp.zeros(x.shape, accumulator(x.dtype)) for x in end.train]
    rows = jnp.zeros((pipe.rows, *first.shape[2:]), first.dtype)
    zero = jnp.zeros((), accumulator(first.dtype))

    def there(job: Job, incoming):
        out, _, aux = pipe.forward(blocks, grid, job.run, incoming, pipe.of(job, tokens))
        return out, aux

    def loss_of(last: Job, final):
        """Of the microbatch that comes out of the last stage: loss, hits, cotangents of its rows and of the tail."""

        def f(train, final):
            mine, at = d == schedule.stages - 1, last.microbatch
            return pipe.tail(end.tree(train), final, mine, nth(tokens.targets, at), nth(tokens.counted, at))

        total, back, correct = jax.vjp(f, end.train, final, has_aux=True)
        ct_tail, ct_rows = back(jnp.ones_like(total))
        return total, correct, ct_rows, ct_tail

    def back(job: Job, last: Job, kept, ct_rows):
        mine = pipe.of(job, tokens)
        final, sums, _ = pipe.forward(blocks, grid, job.run, kept, mine)
        nothing = zero, zero.astype(jnp.float32), jnp.zeros_like(rows), no_end
        comes_out = last.live & (last.run == schedule.virtual - 1)
        total, correct, ct_out, ct_tail = lax.cond(comes_out, loss_of, lambda *_: nothing, last, final)
        is_last = (d == schedule.stages - 1) & (job.run == schedule.virtual - 1)
        ct_rows = jnp.where(job.live, jnp.where(is_last, ct_out, ct_rows), 0)
        ct_rows, ct_train = pipe.backward(slots, grid, job.run, final, sums, ct_rows, mine)
        return total, correct, ct_rows, ct_train, ct_tail

    def tick(carry, t):
        (coming, returning), waiting, ct_first, grads, sums = carry
        on, off, last = schedule.forward(t, d), schedule.backward(t, d), schedule.backward(t, schedule.stages - 1)
        incoming = pipe.incoming(t, first, coming)
        waiting = pipe.lean(enter(waiting, on.index % schedule.kept, pipe.lean(incoming), on.live))
        out, aux = lax.cond(t < schedule.forward_ticks, there, lambda *_: (rows, no_aux), on, incoming)
        kept = pipe.pin(nth(waiting, off.index % schedule.kept))
        nothing = zero, zero.astype(jnp.float32), rows, no_grads, no_end
        total, correct, ct_rows, ct_train, ct_tail = lax.cond(
            t >= schedule.first_backward, back, lambda *_: nothing, off, last, kept, pipe.pin(returning)
        )
        grads = add_run(grads[0], ct_train, off, pipe.groups), jax.tree.map(added, grads[1], ct_tail)
        if ct_first is not None:
            begun = schedule.backward(t, 0)
            begun = dataclasses.replace(begun, live=begun.live & (begun.run == 0))
            ct_first = pipe.kept_by_owner(ct_first, begun, ct_rows[: first.shape[1]], d == 0)
        sums = sums[0] + total, sums[1] + correct, add_run(sums[2], aux, on, pipe.groups)
        return ((pipe.on(out, 1), pipe.on(ct_rows, -1)), waiting, ct_first, grads, sums), None

    no_grads = [[jnp.zeros((pipe.groups, *x.shape[1:]), x.dtype) for x in slot.train] for slot in slots]
    no_end = [jnp.zeros_like(x) for x in end.train]
    all_aux = no_aux_of(pipe, blocks, grid, rows, tokens)
    no_aux = jax.tree.map(lambda a: jnp.zeros((pipe.groups, *a.shape[1:]), a.dtype), all_aux)
    ct_first = jnp.zeros_like(first) if wanted else None
    waiting = pipe.lean(jnp.zeros((schedule.kept, *rows.shape), rows.dtype))
    sums = zero, zero.astype(jnp.float32), all_aux
    carry = (pipe.lean(rows), pipe.lean(rows)), waiting, ct_first, (wide, wide_end), sums
    (_, _, ct_first, grads, sums), _ = lax.scan(tick, carry, jnp.arange(schedule.ticks))
    found = [
        [g.astype(x.dtype) for g, x in zip(gs, slot.train, strict=True)]
        for gs, slot in zip(grads[0], slots, strict=True)
    ]
    found_end = [lax.psum(g, "pp").astype(x.dtype) for g, x in zip(grads[1], end.train, strict=True)]
    return lax.psum(sums[0], "pp"), lax.psum(sums[1], "pp"), sums[2], found, found_end, ct_first
