"""Layers on the stages of a pipeline, as one program: `jax.shard_map` over "pp" alone, all other axes as everywhere.

What travels from stage to stage are ``[N, B, T, D]`` rows of a microbatch: the residual stream (N = 1), or the bank of
attention residuals, the embedding and a row for every block. The block that a stage begins within has its running sum
in its row, so that stages may be cut anywhere and their payload is always the same.

Gradients are made along the way (`schedule`): a stage keeps what came to it, and when the microbatch comes back it goes
through its layers again. As in `depth`, gradients of a layer are taken on the *final* rows with later ones masked: of
every layer nothing but the sum it goes on with is kept. Final mix, norm and loss are made as soon as the last stage has
its rows, each stage taking its share of the tokens.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec

from trillion_moe.balance import BalanceConfig
from trillion_moe.blueprint import layer_numbers
from trillion_moe.config import ModelConfig
from trillion_moe.layers.balance import LOSS, Balancing
from trillion_moe.layers.block import Block, Context
from trillion_moe.layers.norm import rms_norm
from trillion_moe.layers.schedule import Job, Schedule
from trillion_moe.layers.segments import Plan, schedule_of, staged
from trillion_moe.layers.vocabulary import cross_entropy
from trillion_moe.ops import accumulator
from trillion_moe.sharding import BATCH, Layout

Blocks = tuple[Block, ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tail:
    """What follows the layers: the final mix (None without attention residuals), norm, and the head as a weight."""

    out_res: Any
    norm: Any
    head: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tokens:
    """Of the microbatches: documents, targets and which of these count, each ``[M, B, T]``; the latter for a loss."""

    segments: Any
    targets: Any = None
    counted: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Grid:
    """Of the groups of a stage ``[G]`` and their slots ``[G, P]``: the layer in a slot (-1 for none), its row, whether
    no later layer of the run adds to that row; and the row that a run begins with."""

    number: Any
    row: Any
    last: Any
    start: Any


def grid(plan: Plan, cfg: ModelConfig) -> Grid:
    """Of all groups, as the plan has them."""
    segment, numbers = next(
        (s, np.array([[-1 if n is None else n for n in group] for group in repeats], np.int32))
        for s, repeats in zip(plan, layer_numbers(plan), strict=True)
        if s.numbers
    )
    row = np.maximum(numbers, 0) // cfg.attn_res_block + 1 if cfg.attn_res_block else np.zeros_like(numbers)
    last, start = np.zeros(numbers.shape, bool), np.zeros(len(numbers), np.int32)
    each = len(numbers) // (segment.stages * segment.virtual)
    for run in range(0, len(numbers), each):
        at = slice(run, run + each)
        real = numbers[at] >= 0
        for r in {*row[at][real]}:
            ends = real & (row[at] == r)
            last[at][ends & (numbers[at] == numbers[at][ends].max())] = True
        start[at] = row[at][real][np.argmin(numbers[at][real])]
    return Grid(numbers, row.astype(np.int32), last, start)


@dataclasses.dataclass(frozen=True)
class Pipe:
    """What is fixed for one pass. rows: N of the payload."""

    cfg: ModelConfig
    outer: Layout
    layout: Layout  # of one stage
    schedule: Schedule
    groups: int  # of one run of layers
    rows: int
    balance: BalanceConfig | None

    @classmethod
    def make(cls, cfg: ModelConfig, plan: Plan, layout: Layout, batch: int, balance: BalanceConfig | None) -> "Pipe":
        """batch: rows of tokens, which the layout can cut (`sharding.check_batch`)."""
        segment = staged(plan)
        assert segment is not None
        schedule = schedule_of(segment, layout, batch)
        rows = 1 if cfg.attn_res_block is None else 1 - -cfg.num_layers // cfg.attn_res_block
        return cls(
            cfg, layout, layout.within, schedule, segment.repeats // (segment.stages * segment.virtual), rows, balance
        )

    # --- batches to microbatches --------------------------------------------------------------------------------------

    def parted(self, x_RT: jax.Array, axis: int = 0) -> jax.Array:
        """Rows of a batch, along `axis`, to ``[M, B]`` of microbatches, with nothing moved but between stages."""
        p, d, m = self.schedule.stages, self.layout.size(*BATCH), self.schedule.microbatches
        shape, (before, after) = x_RT.shape, (x_RT.shape[:axis], x_RT.shape[axis + 1 :])
        x = x_RT.reshape(*before, p, d, m // p, shape[axis] // (m * d), *after)
        x = jnp.moveaxis(jnp.moveaxis(x, axis + 2, axis + 1), range(axis, axis + 2), (0, 1))
        return self.pin(x.reshape(m, *before, -1, *after), "batch")

    def whole(self, x_MB: jax.Array) -> jax.Array:
        """The inverse of `parted`, of one with axis 0."""
        p, d, m = self.schedule.stages, self.layout.size(*BATCH), self.schedule.microbatches
        x = x_MB.reshape(p, m // p, d, -1, *x_MB.shape[2:])
        return jnp.moveaxis(x, 1, 2).reshape(-1, *x_MB.shape[2:])

    def pin(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """x ``[..., B, T]`` or ``[..., B, T, D]`` of one or more microbatches, as it lies on a stage."""
        tail = ("batch", "time") if jnp.issubdtype(x.dtype, jnp.integer) or x.dtype == bool else ("batch", "time", None)
        return self.layout.pin(x, *(None,) * (x.ndim - len(tail)), *tail)

    # --- one layer ----------------------------------------------------------------------------------------------------

    def layer(self, block: Block, bank, sum_BTD, number, tokens: "Tokens") -> tuple[jax.Array, dict[str, jax.Array]]:
        """-> the running sum behind a layer, and what it reports. number: -1 changes nothing and routes no token.

        bank: ``[N, B, T, D]``, of which rows up to the layer's block are read; None without attention residuals.
        """
        cfg, size, live = self.cfg, self.cfg.attn_res_block, number >= 0
        block = block.collected(cfg, self.layout)
        segments_BT = jnp.where(live, tokens.segments, 0)
        asked = None if tokens.counted is None else Balancing.of(self.balance, segments_BT, tokens.counted)
        ctx = Context(segments_BT, layout=self.layout, asked=asked)
        if size is None:
            attn_BTD, _ = block.attend(sum_BTD, ctx, None, cfg)
            x_BTD = sum_BTD + attn_BTD
            ffn_BTD, aux = block.feed(x_BTD, ctx, cfg)
        else:
            number = jnp.maximum(number, 0)
            begins, b = number % size == 0, number // size
            h_BTD = block.attn_res(bank, b, sum_BTD, cfg.rms_norm_eps, without=begins)
            attn_BTD, _ = block.attend(h_BTD, ctx, None, cfg)
            x_BTD = jnp.where(begins, 0, sum_BTD) + attn_BTD
            h_BTD = block.ffn_res(bank, b, x_BTD, cfg.rms_norm_eps)
            ffn_BTD, aux = block.feed(h_BTD, ctx, cfg)
        return jnp.where(live, x_BTD + ffn_BTD, sum_BTD), aux

    def lead(self, blocks: Blocks, x_BTD, segments_BT) -> jax.Array:
        """The layers before those on stages, over the whole batch -> rows ``[n, R, T, D]`` that are not empty."""
        whole, size = dataclasses.replace(self, layout=self.outer), self.cfg.attn_res_block
        rows = [x_BTD]
        for number, block in enumerate(blocks):
            if size is not None and number % size == 0:
                rows.append(jnp.zeros_like(x_BTD))

            def layer(block, bank, sum_BTD, number=number):
                return whole.layer(block, bank, sum_BTD, jnp.int32(number), Tokens(segments_BT))[0]

            bank = None if size is None else jnp.stack(rows[:-1])
            rows[-1] = jax.checkpoint(layer)(block, bank, rows[-1])
        return jnp.stack(rows)

    # --- one run of a stage's layers ----------------------------------------------------------------------------------

    def forward(self, blocks: Blocks, grid: Grid, run, rows_NBTD, tokens: "Tokens"):
        """-> its rows behind the run, and by slot the sums that layers go on with ``[G, B, T, D]``, and aux."""

        def group(rows, g):
            kept, auxes = [], []
            for j, block in enumerate(blocks):
                row = grid.row[g, j]
                bank = None if self.cfg.attn_res_block is None else rows
                block = jax.tree.map(lambda leaf: _at(leaf, g), block)
                kept.append(_at(rows, row))
                new, aux = self.layer(block, bank, kept[-1], grid.number[g, j], tokens)
                rows = lax.dynamic_update_index_in_dim(rows, new, row, 0)
                auxes.append(aux)
            return self.pin(rows), (tuple(kept), tuple(auxes))

        rows_NBTD, (kept, aux) = lax.scan(group, rows_NBTD, run * self.groups + jnp.arange(self.groups))
        return rows_NBTD, kept, aux

    def backward(self, slots: "list[Slot]", grid: Grid, run, final_NBTD, kept, ct_NBTD, tokens: "Tokens"):
        """Cotangents of the rows behind a run -> of those before it, and by slot of its trained leaves ``[G, ...]``."""
        banked, acc = self.cfg.attn_res_block is not None, accumulator(final_NBTD.dtype)
        first = run * self.groups

        def group(carry, at):
            ct_NBTD, ct_BTD = carry
            g, kept = at
            ct_slots = []
            for j, slot in reversed(list(enumerate(slots))):

                def layer(train_g, bank, sum_BTD, slot=slot, j=j):
                    block = slot.block(train_g, g)
                    sum_BTD, aux = self.layer(block, bank, sum_BTD, grid.number[g, j], tokens)
                    return sum_BTD, aux.get(LOSS)

                # No later layer reads this one's sum as its own: what is read of it has come together in its row.
                ct_BTD = ct_BTD + jnp.where(grid.last[g, j], _at(ct_NBTD, grid.row[g, j]), 0)
                train_g = [_at(leaf, g) for leaf in slot.train]
                (_, loss), back = jax.vjp(layer, train_g, final_NBTD if banked else None, kept[j])
                ct_loss = None if loss is None else jnp.ones_like(loss)  # it is a part of the loss as it is
                ct_train, ct_bank, ct_BTD = back((self.pin(ct_BTD.astype(final_NBTD.dtype)), ct_loss))
                ct_NBTD = self.pin(ct_NBTD + ct_bank.astype(acc)) if banked else ct_NBTD
                ct_BTD = ct_BTD.astype(acc)
                ct_slots.append(ct_train)
            return (ct_NBTD, ct_BTD), ct_slots[::-1]

        carry = (ct_NBTD.astype(acc), jnp.zeros_like(final_NBTD[0], acc))
        xs = first + jnp.arange(self.groups), kept
        (ct_NBTD, ct_BTD), ct_slots = lax.scan(group, carry, xs, reverse=True)
        at = jnp.arange(self.rows)[:, None, None, None]
        ct_NBTD = jnp.where(at < grid.start[first], ct_NBTD, jnp.where(at == grid.start[first], ct_BTD, 0))
        return self.pin(ct_NBTD.astype(final_NBTD.dtype)), ct_slots

    # --- what follows the last stage ----------------------------------------------------------------------------------

    def mixed(self, out_res, rows_NBTD) -> jax.Array:
        if out_res is None:
            return rows_NBTD[0]
        return out_res(rows_NBTD, rows_NBTD.shape[0] - 1, None, self.cfg.rms_norm_eps)

    def shared(self, x_BT: jax.Array) -> jax.Array:
        """Of tokens ``[B, T, ...]`` this stage's share ``[B, T / P, ...]``, along cp each device's own."""
        x = self._cut(x_BT)
        return self._uncut(lax.dynamic_index_in_dim(x, lax.axis_index("pp"), 2, keepdims=False))

    def handed(self, x_BTD: jax.Array) -> jax.Array:
        """The same where all but one stage hold zeros: the others get their share from that one."""
        return self._uncut(lax.psum_scatter(self._cut(x_BTD), "pp", scatter_dimension=2))

    def _cut(self, x: jax.Array) -> jax.Array:
        b, _, *rest = x.shape
        return x.reshape(b, self.layout.size("cp"), self.schedule.stages, -1, *rest)

    def _uncut(self, x: jax.Array) -> jax.Array:
        return self.pin(x.reshape(x.shape[0], -1, *x.shape[3:]))

    def tail(self, tail: Tail, rows_NBTD, mine, targets_BT, counted_BT) -> tuple[jax.Array, jax.Array]:
        """This stage's share of the loss, and of the targets that were the argmax. mine: whether the rows are the last
        stage's."""
        mixed_BTD = jnp.where(mine, self.mixed(tail.out_res, rows_NBTD), 0)
        hidden_BTD = rms_norm(self.handed(mixed_BTD), tail.norm, self.cfg.rms_norm_eps)
        return cross_entropy(tail.head, hidden_BTD, self.shared(targets_BT), self.shared(counted_BT), self.layout)

    # --- the stages ---------------------------------------------------------------------------------------------------

    def stage(self, f, args, out_specs):
        """f on every stage by itself. args: pairs of a tree and whether its leaves lie on the stages."""
        trees = tuple(tree for tree, _ in args)
        specs = tuple(jax.tree.map(lambda _, on=on: _ON if on else _ALL, tree) for tree, on in args)
        mesh = self.layout.here()
        return jax.shard_map(
            f, mesh=mesh, in_specs=specs, out_specs=out_specs, axis_names={"pp"}, check_vma=False
        )(*trees)  # fmt: skip

    def incoming(self, job: Job, first_MnBTD, buffer_NBTD) -> jax.Array:
        """The rows that a job begins with."""
        begun = _at(first_MnBTD, job.microbatch)
        begun = jnp.pad(begun, ((0, self.rows - begun.shape[0]), (0, 0), (0, 0), (0, 0)))
        return self.pin(jnp.where((lax.axis_index("pp") == 0) & (job.run == 0), begun, buffer_NBTD))

    def of(self, job: Job, tokens: Tokens) -> Tokens:
        """Those of a job's microbatch; all are padding where there is no job."""
        mine = jax.tree.map(lambda x: self.pin(_at(x, job.microbatch)), tokens)
        return dataclasses.replace(mine, segments=jnp.where(job.live, mine.segments, 0))

    def on(self, x: jax.Array, step: int) -> jax.Array:
        """From every stage to the next, or back; around only where a stage has several runs."""
        p = self.schedule.stages
        pairs = [(i, (i + step) % p) for i in range(p) if self.schedule.virtual > 1 or 0 <= i + step < p]
        return self.pin(lax.ppermute(x, "pp", pairs))


_ON, _ALL = PartitionSpec("pp"), PartitionSpec()


def _at(x: jax.Array, i: Any) -> jax.Array:
    return lax.dynamic_index_in_dim(x, i, 0, keepdims=False)


def _enter(into: jax.Array, i: Any, new: jax.Array, live: Any) -> jax.Array:
    return lax.dynamic_update_index_in_dim(into, jnp.where(live, new, _at(into, i)), i, 0)


def _add_run(total: Any, new: Any, job: Job, groups: int) -> Any:
    """Counts or gradients ``[G, ...]`` of a run into those of all runs of the stage."""

    def one(a, b):
        was = lax.dynamic_slice_in_dim(a, job.run * groups, groups)
        return lax.dynamic_update_slice_in_dim(a, _added(was, jnp.where(job.live, b, 0)), job.run * groups, 0)

    return jax.tree.map(one, total, new)


# --- forwards only ---------------------------------------------------------------------------------------------------


def run(pipe: Pipe, blocks: Blocks, grid: Grid, out_res: Any, first_MnBTD: jax.Array, tokens: Tokens):
    """-> what follows the layers before the final norm, ``[M, B, T, D]``, and aux by slot ``[G, ...]``."""
    schedule = pipe.schedule

    def stages(blocks, grid, out_res, first, tokens):
        d = lax.axis_index("pp")

        def tick(carry, t):
            buffer, out, total = carry
            job = schedule.forward(t, d)
            rows, _, aux = pipe.forward(blocks, grid, job.run, pipe.incoming(job, first, buffer), pipe.of(job, tokens))
            ends = job.live & (d == schedule.stages - 1) & (job.run == schedule.virtual - 1)
            out = _enter(out, job.microbatch, pipe.mixed(out_res, rows), ends)
            return (pipe.on(rows, 1), out, _add_run(total, aux, job, pipe.groups)), None

        buffer = jnp.zeros((pipe.rows, *first.shape[2:]), first.dtype)
        total = _no_aux(pipe, blocks, grid, buffer, tokens)
        carry = (buffer, jnp.zeros_like(first[:, 0]), total)
        (_, out, total), _ = lax.scan(tick, carry, jnp.arange(schedule.forward_ticks))
        return lax.psum(out, "pp"), total  # zeros but on the last stage

    args = ((blocks, True), (grid, True), (out_res, False), (first_MnBTD, False), (tokens, False))
    return pipe.stage(stages, args, (_ALL, _ON))


def _no_aux(pipe: Pipe, blocks: Blocks, grid: Grid, rows, tokens: Tokens):
    """Zeros for the aux of all runs of a stage."""
    aux = jax.eval_shape(lambda: pipe.forward(blocks, grid, 0, rows, pipe.of(pipe.schedule.forward(0, 0), tokens))[2])
    return jax.tree.map(lambda a: jnp.zeros((a.shape[0] * pipe.schedule.virtual, *a.shape[1:]), a.dtype), aux)


# --- with gradients --------------------------------------------------------------------------------------------------


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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slot:
    """A tree cut into arrays, lists of them, that are frozen and trained. structure: its treedef, and which of them."""

    frozen: Any
    train: Any
    structure: tuple[Any, tuple[bool, ...]] = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, tree: Any, trained: Any) -> "Slot":
        """trained: the same tree of bools."""
        leaves, treedef = jax.tree.flatten(tree)
        flags = tuple(jax.tree.leaves(trained))
        pairs = list(zip(leaves, flags, strict=True))
        return cls([x for x, t in pairs if not t], [x for x, t in pairs if t], (treedef, flags))

    def tree(self, train: list[jax.Array], frozen: list[jax.Array] | None = None) -> Any:
        """With other arrays in the place of those that are trained (and frozen)."""
        treedef, flags = self.structure
        a, b = iter(train), iter(self.frozen if frozen is None else frozen)
        return treedef.unflatten([next(a) if t else next(b) for t in flags])

    def block(self, train_g: list[jax.Array], g: Any) -> Any:
        """Of a stack its repeat g, of which the trained arrays are given."""
        return self.tree(train_g, [_at(leaf, g) for leaf in self.frozen])


def _there_and_back(pipe: Pipe, leaves, treedef, trained: tuple[bool, ...], grid: Grid, tokens: Tokens):
    """Loss, hits and aux, and gradients of the trained leaves (None for the others)."""
    (blocks, tail, first), flags = treedef.unflatten(leaves), treedef.unflatten(trained)
    slots = [Slot.of(block, flag) for block, flag in zip(blocks, flags[0], strict=True)]
    end = Slot.of(tail, flags[1])
    args = ((slots, True), (end, False), (first, False), (grid, True), (tokens, False))
    on, everywhere = [[_ON] * len(slot.train) for slot in slots], [_ALL] * len(end.train)
    specs = (_ALL, _ALL, _ON, on, everywhere, _ALL if flags[2] else None)
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
            return pipe.tail(end.tree(train), final, mine, _at(tokens.targets, at), _at(tokens.counted, at))

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
        incoming = pipe.incoming(on, first, coming)
        waiting = _enter(waiting, on.index % schedule.kept, incoming, on.live)
        out, aux = lax.cond(t < schedule.forward_ticks, there, lambda *_: (rows, no_aux), on, incoming)
        kept = _at(waiting, off.index % schedule.kept)
        nothing = zero, zero.astype(jnp.float32), rows, no_grads, no_end
        total, correct, ct_rows, ct_train, ct_tail = lax.cond(
            t >= schedule.first_backward, back, lambda *_: nothing, off, last, kept, returning
        )
        grads = _add_run(grads[0], ct_train, off, pipe.groups), jax.tree.map(_added, grads[1], ct_tail)
        if ct_first is not None:
            begun = off.live & (d == 0) & (off.run == 0)
            ct_first = _enter(ct_first, off.microbatch, ct_rows[: first.shape[1]], begun)
        sums = sums[0] + total, sums[1] + correct, _add_run(sums[2], aux, on, pipe.groups)
        return ((pipe.on(out, 1), pipe.on(ct_rows, -1)), waiting, ct_first, grads, sums), None

    no_grads = [[jnp.zeros((pipe.groups, *x.shape[1:]), x.dtype) for x in slot.train] for slot in slots]
    no_end = [jnp.zeros_like(x) for x in end.train]
    all_aux = _no_aux(pipe, blocks, grid, rows, tokens)
    no_aux = jax.tree.map(lambda a: jnp.zeros((pipe.groups, *a.shape[1:]), a.dtype), all_aux)
    ct_first = jnp.zeros_like(first) if wanted else None
    waiting = jnp.zeros((schedule.kept, *rows.shape), rows.dtype)
    sums = zero, zero.astype(jnp.float32), all_aux
    carry = (rows, rows), waiting, ct_first, (wide, wide_end), sums
    (_, _, ct_first, grads, sums), _ = lax.scan(tick, carry, jnp.arange(schedule.ticks))
    found = [
        [g.astype(x.dtype) for g, x in zip(gs, slot.train, strict=True)]
        for gs, slot in zip(grads[0], slots, strict=True)
    ]
    found_end = [lax.psum(g, "pp").astype(x.dtype) for g, x in zip(grads[1], end.train, strict=True)]
    ct_first = None if ct_first is None else lax.psum(ct_first, "pp")  # zeros but on the first stage
    return lax.psum(sums[0], "pp"), lax.psum(sums[1], "pp"), sums[2], found, found_end, ct_first


def _added(total: jax.Array, new: jax.Array) -> jax.Array:
    return total + new.astype(total.dtype)
