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
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from trillion_moe.balance import BalanceConfig
from trillion_moe.config import ModelConfig
from trillion_moe.layers.balance import LOSS, Balancing
from trillion_moe.layers.block import Block, Context
from trillion_moe.layers.norm import rms_norm
from trillion_moe.layers.schedule import Job, Schedule
from trillion_moe.layers.segments import Plan, schedule_of, staged
from trillion_moe.layers.stages import Grid, Slot, Tail, Tokens, nth
from trillion_moe.layers.vocabulary import cross_entropy
from trillion_moe.ops import accumulator
from trillion_moe.sharding import BATCH, Layout, dims, island

Blocks = tuple[Block, ...]


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

    def parted(self, x_RT: jax.Array, axis: int = 0, *, apart: bool = False) -> jax.Array:
        """Rows of a batch, along `axis`, to ``[M, B]`` of microbatches, every stage with all of them or a part, with
        nothing moved but between stages."""
        p, d, m = self.schedule.stages, self.layout.size(*BATCH), self.schedule.microbatches
        shape, (before, after) = x_RT.shape, (x_RT.shape[:axis], x_RT.shape[axis + 1 :])
        x = x_RT.reshape(*before, p, d, m // p, shape[axis] // (m * d), *after)
        x = jnp.moveaxis(jnp.moveaxis(x, axis + 2, axis + 1), range(axis, axis + 2), (0, 1))
        return self.pin(x.reshape(m, *before, -1, *after), "stages" if apart else None)

    def whole(self, x_MB: jax.Array) -> jax.Array:
        """The inverse of `parted`, of one with axis 0."""
        p, d, m = self.schedule.stages, self.layout.size(*BATCH), self.schedule.microbatches
        x = x_MB.reshape(p, m // p, d, -1, *x_MB.shape[2:])
        return jnp.moveaxis(x, 1, 2).reshape(-1, *x_MB.shape[2:])

    def pin(self, x: jax.Array, first: str | None = None) -> jax.Array:
        """x ``[..., B, T]`` or ``[..., B, T, D]`` of one or more microbatches, as it lies on a stage."""
        tail = ("batch", "time") if jnp.issubdtype(x.dtype, jnp.integer) or x.dtype == bool else ("batch", "time", None)
        axes = [*(None,) * (x.ndim - len(tail)), *tail]
        return self.layout.pin(x, *([first, *axes[1:]] if first else axes))

    def lean(self, x: jax.Array) -> jax.Array:
        """x ``[..., B, T, D]`` as it waits or travels: "tp", whose devices would all have it, cuts its tokens too."""
        cut = ("cp", "tp")
        if x.shape[-2] % self.layout.size(*cut):
            return x
        spec = PartitionSpec(*(None,) * (x.ndim - 3), self.layout.over("batch"), cut, None)
        return lax.with_sharding_constraint(x, NamedSharding(self.layout.here(), spec))

    # --- one layer ----------------------------------------------------------------------------------------------------

    def layer(self, block: Block, bank, sum_BTD, number, tokens: Tokens) -> tuple[jax.Array, dict[str, jax.Array]]:
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

    def forward(self, blocks: Blocks, grid: Grid, run, rows_NBTD, tokens: Tokens):
        """-> its rows behind the run, and by slot the sums that layers go on with ``[G, B, T, D]``, and aux."""

        def group(rows, g):
            kept, auxes = [], []
            for j, block in enumerate(blocks):
                row = grid.row[g, j]
                bank = None if self.cfg.attn_res_block is None else rows
                block = jax.tree.map(lambda leaf: nth(leaf, g), block)
                sum_BTD = self.pin(nth(rows, row))
                kept.append(self.lean(sum_BTD))
                new, aux = self.layer(block, bank, sum_BTD, grid.number[g, j], tokens)
                rows = lax.dynamic_update_index_in_dim(rows, new, row, 0)
                auxes.append(aux)
            return self.pin(rows), (tuple(kept), tuple(auxes))

        rows_NBTD, (kept, aux) = lax.scan(group, rows_NBTD, run * self.groups + jnp.arange(self.groups))
        return rows_NBTD, kept, aux

    def backward(self, slots: list[Slot], grid: Grid, run, final_NBTD, kept, ct_NBTD, tokens: Tokens):
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
                ct_BTD = ct_BTD + jnp.where(grid.last[g, j], nth(ct_NBTD, grid.row[g, j]), 0)
                train_g = [nth(leaf, g) for leaf in slot.train]
                (_, loss), back = jax.vjp(layer, train_g, final_NBTD if banked else None, self.pin(kept[j]))
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
        """Of tokens ``[B, T]`` this stage's share ``[B, T / P]``: on every device a part of its own."""

        def mine(x_bt):
            each = x_bt.shape[1] // self.schedule.stages
            return lax.dynamic_slice_in_dim(x_bt, lax.axis_index("pp") * each, each, axis=1)

        return island(self.layout, mine, (dims("batch", "time"),), dims("batch", "time"))(x_BT)

    def handed(self, x_BTD: jax.Array) -> jax.Array:
        """The same where all but one stage hold zeros: the others get their share from that one."""
        scattered = partial(lax.psum_scatter, axis_name="pp", scatter_dimension=1, tiled=True)
        at = dims("batch", "time", None)
        return island(self.layout, scattered, (at,), at)(x_BTD)

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
        specs = tuple(jax.tree.map(lambda _, on=on: ON if on else ALL, tree) for tree, on in args)
        mesh = self.layout.here()
        return jax.shard_map(
            f, mesh=mesh, in_specs=specs, out_specs=out_specs, axis_names={"pp"}, check_vma=False
        )(*trees)  # fmt: skip

    def incoming(self, tick, first_mnBTD, buffer_NBTD) -> jax.Array:
        """The rows that this stage's job begins with. first_mnBTD: this stage's part of what comes to the first."""
        job, of_first = (self.schedule.forward(tick, d) for d in (lax.axis_index("pp"), 0))

        def fetch():
            owner, i = self._home(of_first, len(first_mnBTD))
            mine = jnp.where(lax.axis_index("pp") == owner, nth(first_mnBTD, i), 0)
            return self.from_one(mine)

        nothing = jnp.zeros_like(first_mnBTD[0])
        begun = lax.cond(of_first.live & (of_first.run == 0), fetch, lambda: nothing)
        begun = jnp.pad(begun, ((0, self.rows - begun.shape[0]), (0, 0), (0, 0), (0, 0)))
        return self.pin(jnp.where((lax.axis_index("pp") == 0) & (job.run == 0), begun, buffer_NBTD))

    def kept_by_owner(self, into_m: jax.Array, job: Job, x: jax.Array, mine) -> jax.Array:
        """x of a job's microbatch entered into the part of all microbatches of the stage that has it. mine: whether
        this is the stage that has x."""

        def write():
            owner, i = self._home(job, len(into_m))
            found = self.from_one(jnp.where(mine, x, 0))
            return enter(into_m, i, found, lax.axis_index("pp") == owner)

        return lax.cond(job.live, write, lambda: into_m)

    def from_one(self, x: jax.Array) -> jax.Array:
        """What one stage has, on all; the others hold zeros."""
        # A psum of a 16-bit dtype ends the process on CPU (XLA) where some mesh axes are manual and others are not.
        wide = x.astype(accumulator(x.dtype)) if self.layout.platform == "cpu" else x
        return lax.psum(wide, "pp").astype(x.dtype)

    def _home(self, job: Job, each: int):
        """The stage that has a microbatch of which every stage has `each`, and its place there."""
        return job.microbatch // each, job.microbatch % each

    def of(self, job: Job, tokens: Tokens) -> Tokens:
        """Those of a job's microbatch; all are padding where there is no job."""
        mine = jax.tree.map(lambda x: self.pin(nth(x, job.microbatch)), tokens)
        return dataclasses.replace(mine, segments=jnp.where(job.live, mine.segments, 0))

    def on(self, x: jax.Array, step: int) -> jax.Array:
        """From every stage to the next, or back; around only where a stage has several runs."""
        p = self.schedule.stages
        pairs = [(i, (i + step) % p) for i in range(p) if self.schedule.virtual > 1 or 0 <= i + step < p]
        return self.lean(lax.ppermute(self.lean(x), "pp", pairs))


ON, ALL = PartitionSpec("pp"), PartitionSpec()


def enter(into: jax.Array, i: Any, new: jax.Array, live: Any) -> jax.Array:
    return lax.dynamic_update_index_in_dim(into, jnp.where(live, new, nth(into, i)), i, 0)


def add_run(total: Any, new: Any, job: Job, groups: int) -> Any:
    """Counts or gradients ``[G, ...]`` of a run into those of all runs of the stage."""

    def one(a, b):
        was = lax.dynamic_slice_in_dim(a, job.run * groups, groups)
        return lax.dynamic_update_slice_in_dim(a, added(was, jnp.where(job.live, b, 0)), job.run * groups, 0)

    return jax.tree.map(one, total, new)


# --- forwards only ---------------------------------------------------------------------------------------------------


def run(pipe: Pipe, blocks: Blocks, grid: Grid, out_res: Any, first_MnBTD: jax.Array, tokens: Tokens):
    """-> what follows the layers before the final norm, ``[M, B, T, D]``, and aux by slot ``[G, ...]``."""
    schedule = pipe.schedule

    def stages(blocks, grid, out_res, first, tokens):
        d = lax.axis_index("pp")

        def tick(carry, t):
            buffer, out, total = carry
            job, last = schedule.forward(t, d), schedule.forward(t, schedule.stages - 1)
            rows, _, aux = pipe.forward(blocks, grid, job.run, pipe.incoming(t, first, buffer), pipe.of(job, tokens))
            ends = dataclasses.replace(last, live=last.live & (last.run == schedule.virtual - 1))
            out = pipe.kept_by_owner(out, ends, pipe.mixed(out_res, rows), d == schedule.stages - 1)
            return (pipe.on(rows, 1), out, add_run(total, aux, job, pipe.groups)), None

        buffer = pipe.lean(jnp.zeros((pipe.rows, *first.shape[2:]), first.dtype))
        total = no_aux_of(pipe, blocks, grid, buffer, tokens)
        carry = (buffer, jnp.zeros_like(first[:, 0]), total)
        (_, out, total), _ = lax.scan(tick, carry, jnp.arange(schedule.forward_ticks))
        return out, total

    args = ((blocks, True), (grid, True), (out_res, False), (first_MnBTD, True), (tokens, False))
    return pipe.stage(stages, args, (ON, ON))


def no_aux_of(pipe: Pipe, blocks: Blocks, grid: Grid, rows, tokens: Tokens):
    """Zeros for the aux of all runs of a stage."""
    aux = jax.eval_shape(lambda: pipe.forward(blocks, grid, 0, rows, pipe.of(pipe.schedule.forward(0, 0), tokens))[2])
    return jax.tree.map(lambda a: jnp.zeros((a.shape[0] * pipe.schedule.virtual, *a.shape[1:]), a.dtype), aux)


def added(total: jax.Array, new: jax.Array) -> jax.Array:
    return total + new.astype(total.dtype)
