"""The loop of a run: windows of batches to updates, evaluation, checkpoints; killed anywhere, it goes on."""

import dataclasses
import json
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trillion_moe.checkpoint.errors import CheckpointError
from trillion_moe.compiler import jitted
from trillion_moe.config import ModelConfig
from trillion_moe.data.examples import Examples
from trillion_moe.data.loader import Batch, Batches, Loader
from trillion_moe.distributed import current, whole
from trillion_moe.layers.balance import LOSS
from trillion_moe.layers.segments import Plan
from trillion_moe.layers.vision import ImageBatch
from trillion_moe.model import Model, bucket, least_tokens, loss_sum
from trillion_moe.optimizer import check_eps, make_optimizer, schedule
from trillion_moe.programs import add as _add
from trillion_moe.programs import balanced as _balanced
from trillion_moe.programs import gradients as _gradients
from trillion_moe.programs import over_all, rows_of_a_pass
from trillion_moe.programs import update as _update
from trillion_moe.run_config import RunConfig, RunConfigError, check_balance
from trillion_moe.sharding import Layout, check_batch, put, relaid, shardings
from trillion_moe.train import checkpoints
from trillion_moe.train.capacity import Capacity
from trillion_moe.train.report import NoReport, Report
from trillion_moe.transforms import combine, partition
from trillion_moe.transforms.segments import restack
from trillion_moe.transforms.targets import is_bias


class NotFiniteError(FloatingPointError):
    """A loss or gradient that is not finite, with the update and its rows. No checkpoint was written from it."""


@dataclasses.dataclass(frozen=True)
class Result:
    """model: of the best evaluation, or the last one without evaluations. step: the update it comes from. signal: what
    ended the run, which goes on when it is started again; None = it has finished."""

    model: Model
    step: int
    signal: int | None = None


Pass = tuple[list[int], jax.Array]
"""The lines of the file that one batch holds, and its loss."""


class Trainer:
    """One run over a model that has its adapters already. It begins where the latest checkpoint in the output ended.
    The model's trained arrays, router biases that are balanced too, are given up: updates take their memory.

    Raises: RunConfigError for an output that holds a run of another configuration, and for an eps that is 0 in a dtype
        that is trained; CheckpointError for a latest checkpoint that cannot be restored.
    """

    def __init__(self, model: Model, config: RunConfig, train: Examples, held_out: Examples | None):
        t = config.train
        self.layout = model.layout
        self.processes = current()
        self.config, self.output = config, Path(config.output)
        check_rows(config, model.config, self.layout, (train, held_out))
        check_balance(config, model.config)
        self.trainable, self.frozen = partition(model, trainable="all" if config.lora is None else "lora")
        rows = rows_of_a_pass(config, self.layout)
        self.loader = _loader(train, config, rows, seed=config.seed, epochs=None if t.steps else t.epochs)
        self.held_out = None if held_out is None else _loader(held_out, config, rows, seed=None, epochs=1)
        self.batches: Batches = iter(self.loader)
        self.total = t.steps or -(-self.loader.batches_per_epoch * t.epochs // t.accumulate)
        check_eps(config.optimizer, self.trainable)
        self.optimizer = make_optimizer(config.optimizer, self.total)
        self.lr = schedule(config.optimizer, self.total)
        self.opt_state = over_all(self.optimizer.init(self.trainable), self.layout)
        self.step, self.tokens, self.stale = 0, 0, 0
        self.capacity = Capacity.of(self.layout)
        self.best: float | None = None
        self.best_step: int | None = None
        self.saved_step: int | None = None
        self.dropped_rows = len(train.dropped)
        self._signal: int | None = None
        self._compiled: set[Any] = set()
        self._resume()

    def run(self, *, quiet: bool = False) -> Result:
        """Raises NotFiniteError. SIGTERM and SIGINT save a checkpoint behind the update at hand and end the run; of
        several processes, all of them wherever one is sent it. Then the trainer has the arrays of the result; where
        these are not the last ones, no state of the optimizer."""
        report = (
            Report(self.output, start=self.step, total=self.total, dropped=self.dropped_rows, quiet=quiet)
            if self.processes.first
            else NoReport()
        )
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            while self.step < self.total and not self._is_stale():
                self._one(report)
                if (number := self._signalled()) is not None:
                    self.save()
                    report.say(f"signal {number}: checkpoint of update {self.step} saved; start again to go on")
                    return Result(combine(self.trainable, self.frozen), self.step, number)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            report.close()
        return self._best()

    # --- updates ------------------------------------------------------------------------------------------------------

    def _one(self, report: Report | NoReport) -> None:
        """An update, then evaluation and checkpoint where they are due."""
        began, t, last = time.perf_counter(), self.config.train, self.step + 1 == self.total
        grads, sums, passes = self._window()
        updated = self._run(_update, self.optimizer, self.trainable, self.opt_state, grads, sums)
        self.trainable, self.opt_state, metrics = updated
        found = {name: float(metrics[name]) for name in ("loss", "accuracy", "grad_norm")}
        if not np.isfinite([found["loss"], found["grad_norm"]]).all():
            raise NotFiniteError(
                f"update {self.step + 1}: loss {found['loss']}, gradient norm {found['grad_norm']}, over lines "
                f"{_suspects(passes)} of {self.config.data}; nothing was updated, the last checkpoint stands"
            )
        if t.balance is not None:
            self.frozen = self._run(_balanced, t.balance, self.frozen, metrics)
            found |= {name: float(metrics[name]) for name in (LOSS,) if name in metrics}
        count, self.step = int(metrics["tokens"]), self.step + 1
        self.tokens += count
        seconds = time.perf_counter() - began
        found |= {"lr": float(np.asarray(self.lr(self.step - 1))), "tokens": count, "tokens_per_s": count / seconds}
        found |= self._dropped(metrics)
        self._follow(metrics)
        counts = metrics.get("expert_counts")
        report.line("train", self.step, found, None if counts is None else whole(counts))
        if self.held_out is not None and (last or _due(self.step, t.eval_every)):
            report.line("eval", self.step, self._evaluated())
        if last or _due(self.step, t.save_every) or self.best_step == self.step or self._is_stale():
            self.save()

    def _follow(self, metrics: Mapping[str, Any]) -> None:
        """The next update's capacity, where it follows what was asked for; another is another program."""
        if self.capacity is None or self.layout is None or "exchange" not in metrics:
            return
        now = self.capacity.seen(whole(metrics["exchange"]["asked"]))
        if now != self.layout.capacity:
            self._take(now)

    def _take(self, capacity: float) -> None:
        assert self.layout is not None
        self.layout = dataclasses.replace(self.layout, capacity=capacity)
        parts = self.trainable, self.frozen, self.opt_state
        self.trainable, self.frozen, self.opt_state = (relaid(part, self.layout) for part in parts)

    def _window(self) -> tuple[Any, Any, list[Pass]]:
        """Summed gradients and sums of the next `accumulate` batches, fewer at the end of the data."""
        grads: Any = None
        sums: Any = None
        passes: list[Pass] = []
        for _ in range(self.config.train.accumulate):
            number = self.batches.position
            batch = next(self.batches, None)
            if batch is None:
                break
            key = jax.random.fold_in(jax.random.key(self.config.seed), number)
            t, given = self.config.train, on_devices(batch, self.layout)
            static = {"remat": t.remat, "dropout": t.dropout, "balance": t.balance}
            jax.block_until_ready(sums)  # two passes underway are enough; 33 programs over a mesh of CPUs may never end
            new = self._run(_gradients, self.trainable, self.frozen, given, key, shaped=given, **static)
            passes.append((_lines(batch), new[1]["loss"]))
            grads, sums = new if grads is None else self._run(_add, grads, sums, new)
        return grads, sums, passes

    def _run(self, f: Any, *args: Any, shaped: Any = None, **static: Any) -> Any:
        """f of these. Where it is new for a batch of this shape all processes compile it before one runs it: who runs
        first would wait for the others inside of it, where nobody can say for whom."""
        if self.processes.count > 1:
            leaves, treedef = jax.tree.flatten(shaped)
            program = f, self.layout, treedef, tuple(leaf.shape for leaf in leaves)
            if program not in self._compiled:
                f.lower(*args, **static).compile()
                self.processes.wait("compile")
                self._compiled.add(program)
        return f(*args, **static)

    # --- evaluation ---------------------------------------------------------------------------------------------------

    def _evaluated(self) -> dict[str, float]:
        """Mean loss over all held-out tokens; keeps count of the best."""
        assert self.held_out is not None
        passes, sums = [], []
        for batch in self.held_out:
            given = on_devices(batch, self.layout)
            jax.block_until_ready(sums[-1:])
            sums.append(self._run(_evaluation, self.trainable, self.frozen, given, shaped=given))
            passes.append((_lines(batch), sums[-1][0]))
        total, tokens, correct, dropped = (sum(map(float, x)) for x in zip(*sums, strict=True))
        loss = total / tokens
        if not np.isfinite(loss):
            raise NotFiniteError(
                f"evaluation behind update {self.step}: loss {loss}, over lines {_suspects(passes)} of "
                f"{self.held_out.examples.path}; no checkpoint of this update was written, the last one stands"
            )
        if self.best is None or loss < self.best:
            self.best, self.best_step, self.stale = loss, self.step, 0
        else:
            self.stale += 1
        found = {"loss": loss, "accuracy": correct / tokens, "best": self.best}
        return found | self._dropped({"dropped": dropped})

    def _dropped(self, sums: Mapping[str, Any]) -> dict[str, int | float]:
        """Assignments that were over the capacity, and so no expert was given; nothing where none can be dropped."""
        if self.layout is None or self.layout.capacity is None:
            return {}
        found: dict[str, int | float] = {"dropped_assignments": int(sums.get("dropped", 0))}
        return found if self.capacity is None else found | {"capacity": self.layout.capacity}

    def _is_stale(self) -> bool:
        return self.config.train.patience is not None and self.stale >= self.config.train.patience

    def _best(self) -> Result:
        if self.best_step is None or self.best_step == self.step:
            return Result(combine(self.trainable, self.frozen), self.step)
        saved = checkpoints.agreed(self.output, self.best_step)
        if saved is None:
            raise CheckpointError(self.output, [f"the checkpoint of update {self.best_step}, the best one, is gone"])
        weights, state, *biases = self._arrays()
        jax.tree.map(lambda x: x.delete(), state)
        self.trainable, self.opt_state, *biases = self._restored(saved, (weights, None, *biases))
        self.frozen = self._with(biases)
        return Result(combine(self.trainable, self.frozen), self.best_step)

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Write a checkpoint of the last update, unless there is one."""
        if self.saved_step == self.step:
            return
        names = ("step", "tokens", "best", "best_step", "stale")
        state = {name: getattr(self, name) for name in names} | {"data": self.batches.get_state()}
        state["config"] = comparable(self.config)
        state["depth"] = [dataclasses.asdict(segment) for segment in self.trainable.plan]
        state["capacity"] = None if self.layout is None else self.layout.capacity
        checkpoints.save(self.output, self._arrays(), state, keep=self.config.train.keep, best=self.best_step)
        self.saved_step = self.step

    def _arrays(self) -> tuple[Any, ...]:
        """All that updates change: what is trained, the optimizer's state, and biases of routers where they move."""
        if self.config.train.balance is None:
            return self.trainable, self.opt_state
        return self.trainable, self.opt_state, partition(self.frozen, trainable=is_bias)[0]

    def _restored(self, saved: checkpoints.Saved, now: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arrays of a checkpoint where `now` lies, which is given up. No state of the optimizer if that is None.

        A checkpoint from other pipeline stages, which stack layers otherwise, needs room for both ways.
        """
        plan, was, part = self.trainable.plan, checkpoints.depth(saved), now[1] is None
        if was == plan:
            return checkpoints.restore(saved, now, part=part)
        where, into = jax.tree.map(lambda x: x.sharding, now), self._as_stacked(was, now)
        jax.tree.map(lambda x: x.delete(), now)
        found = _under(plan, checkpoints.restore(saved, into, part=part))
        return jax.tree.map(jax.device_put, found, where)

    def _as_stacked(self, plan: Plan, now: tuple[Any, ...]) -> Any:
        """What `now` would be under another depth plan: no arrays, but their shapes, dtypes and shardings; of stages
        every device has all."""
        model = jax.eval_shape(lambda m: restack(m, plan), combine(self.trainable, self.frozen))
        one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        at = shardings(model, self.layout, whole=("stages",)) if self.layout else jax.tree.map(lambda _: one, model)

        def laid(x, sharding):
            return None if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        def one_of(was, x):
            alone = not isinstance(was, Model)
            return laid(x, was.sharding) if alone else jax.tree.map(laid, x, at, is_leaf=lambda x: x is None)

        return jax.tree.map(one_of, now, jax.eval_shape(lambda t: _under(plan, t), now), is_leaf=_is_model)

    def _with(self, biases: Sequence[Any]) -> Any:
        """What is frozen, with the biases of a checkpoint that has them."""
        return combine(biases[0], partition(self.frozen, trainable=is_bias)[1]) if biases else self.frozen

    def _resume(self) -> None:
        latest, ours = checkpoints.agreed(self.output), comparable(self.config)
        if latest is None:
            return
        if different := sorted(
            k for k in {*ours, *latest.state["config"]} if ours.get(k) != latest.state["config"].get(k)
        ):
            was = ", ".join(f"{k} was {latest.state['config'].get(k)!r}, is {ours.get(k)!r}" for k in different)
            raise RunConfigError(f"{self.output} holds a run of another configuration: {was}; choose another output")
        self.trainable, self.opt_state, *biases = self._restored(latest, self._arrays())
        self.frozen = self._with(biases)
        if self.layout is not None and (was := latest.state["capacity"]) in self.layout.capacities:
            self._take(was)
            self.capacity = Capacity.of(self.layout)
        for name in ("step", "tokens", "best", "best_step", "stale"):
            setattr(self, name, latest.state[name])
        self.batches.set_state(latest.state["data"])
        self.saved_step = self.step

    def _on_signal(self, number: int, frame: Any) -> None:
        self._signal = number

    def _signalled(self) -> int | None:
        """The signal that this process or another one was sent: all hear of it behind the same update."""
        found = self.processes.gather(f"update {self.step}", self._signal)
        return next((found[i] for i in sorted(found) if found[i] is not None), None)


def _under(plan: Plan, tree: Any) -> Any:
    """With every model in the tree, of weights or of their moments, under a depth plan."""
    return jax.tree.map(lambda x: restack(x, plan) if isinstance(x, Model) else x, tree, is_leaf=_is_model)


def _is_model(x: Any) -> bool:
    return isinstance(x, Model)


def comparable(config: RunConfig) -> dict[str, Any]:
    """What must be the same for a run to go on: all but where it lies, how often it is saved, and on how many devices
    it runs."""
    free = ("output", "mesh", "train.save_every", "train.keep")
    return {name: value for name, value in flat(config).items() if name not in free and not name.startswith("mesh.")}


def flat(config: RunConfig) -> dict[str, Any]:
    """Every field of a run by its dotted name, as JSON gives it back."""
    found: dict[str, Any] = {}

    def walk(value: Any, name: str) -> None:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                walk(inner, f"{name}.{key}" if name else key)
        else:
            found[name] = value

    walk(json.loads(json.dumps(dataclasses.asdict(config))), "")
    return found


def _lines(batch: Batch) -> list[int]:
    return [line for row in batch["rows"] for line in row]


def _suspects(passes: Sequence[Pass]) -> str:
    """The lines of the batches whose loss is not finite; of all if none is, and the gradient alone was not."""
    bad = [lines for lines, loss in passes if not np.isfinite(float(loss))] or [lines for lines, _ in passes]
    return ", ".join(str(line) for lines in bad for line in lines)


@jitted
def _evaluation(trainable: Any, frozen: Any, batch: Any) -> tuple[Any, ...]:
    """Sums: loss, counted targets, those that were the argmax, dropped assignments."""
    total, sums = loss_sum(combine(trainable, frozen), batch, remat=False)
    return total, sums["tokens"], sums["correct"], sums.get("dropped", 0)


def on_devices(batch: Batch, layout: Layout | None) -> dict[str, Any]:
    """A batch as `model.loss_sum` takes it, over a mesh if there is one."""
    images = None if batch["patches"] is None else ImageBatch(batch["patches"], batch["grids"])

    def put_tokens(array: np.ndarray) -> jax.Array:
        return jnp.asarray(array) if layout is None else put(array, layout.sharding("batch", "time"))

    return {name: put_tokens(batch[name]) for name in ("tokens", "segments", "loss_mask")} | {"images": images}


def _loader(examples: Examples, config: RunConfig, rows: int, *, seed: int | None, epochs: int | None) -> Loader:
    lengths = _lengths(examples, config)
    return Loader(examples, batch_size=rows, lengths=lengths, seed=seed, epochs=epochs, pack=config.train.pack)


def _lengths(examples: Examples, config: RunConfig) -> list[int]:
    """Powers of two from 64 on, so that few programs are compiled; max_length, or what holds all, is the greatest."""
    top = config.examples.max_length or bucket(max(len(item.ids) for item in examples.items))
    return [length for length in _powers(top) if length < top] + [top]


def check_rows(config: RunConfig, cfg: ModelConfig, layout: Layout | None, parts: Sequence[Examples | None]) -> None:
    """LayoutError for batches, of training or evaluation, that the mesh cannot cut."""
    rows = rows_of_a_pass(config, layout)
    for examples in filter(None, parts):
        for length in _lengths(examples, config):
            check_batch(layout, rows, length, least=least_tokens(cfg))


def _powers(limit: int) -> Iterator[int]:
    power = 64
    while power < limit:
        yield power
        power *= 2


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def count_updates(config: RunConfig, examples: Examples, rows: int) -> int:
    """Updates of a whole run, of so many rows a pass."""
    t = config.train
    batches = _loader(examples, config, rows, seed=None, epochs=1).batches_per_epoch * t.epochs
    return t.steps or -(-batches // t.accumulate)
