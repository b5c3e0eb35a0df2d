"""A run: what its updates are, what it keeps, and how it goes on where it was stopped."""

import dataclasses
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.numerics import rel_rms

import trillion_moe as tm
from trillion_moe.checkpoint.errors import CheckpointError
from trillion_moe.checkpoint.orbax_arrays import ARRAYS
from trillion_moe.data.rows import DataError
from trillion_moe.optimizer import make_optimizer, schedule
from trillion_moe.run_config import OptimizerConfig, RunConfigError
from trillion_moe.train import NotFiniteError, checkpoints
from trillion_moe.train import trainer as loop
from trillion_moe.train.report import Report, expert_load, read
from trillion_moe.transforms.dropout import drop_inputs
from trillion_moe.transforms.targets import places


def lines(config) -> list[dict]:
    """The metrics of a run, all but the time."""
    found = read(Path(config.output) / "metrics.jsonl")
    return [{name: value for name, value in line.items() if name != "tokens_per_s"} for line in found]


def steps(config, kind: str = "train") -> list[int]:
    return [line["step"] for line in lines(config) if line["kind"] == kind]


def saved(config) -> list[int]:
    return [one.step for one in checkpoints.found(Path(config.output))]


def arrays(tree) -> dict[str, np.ndarray]:
    return {place.names[0]: np.asarray(place.leaf) for place in places(tree, inside=True)[0]}


def equal(a, b) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


def at(update: int, how, monkeypatch) -> None:
    """Calls `how` when the metrics of an update have been written."""
    line = Report.line

    def then(report, kind, step, values, expert_counts=None):
        line(report, kind, step, values, expert_counts)
        if (kind, step) == ("train", update):
            how()

    monkeypatch.setattr(Report, "line", then)


def stop(number: int = signal.SIGTERM):
    return lambda: signal.raise_signal(number)


class Killed(BaseException):
    pass


def kill():
    raise Killed


# --- real updates -----------------------------------------------------------------------------------------------------

# Six updates of two batches, over two epochs of five batches and a part of the third.
RUN = {"train": {"steps": 6, "eval_every": 2, "save_every": 2}, "seed": 3}


@pytest.fixture(scope="module")
def held_out(rows):
    return rows(3, first=10)


@pytest.fixture(scope="module")
def unbroken(trainer, settings, tmp_path_factory, held_out):
    """-> configuration, Result."""
    config = settings(tmp_path_factory.mktemp("unbroken"), **RUN)
    return config, trainer(config, held_out=held_out).run(quiet=True)


def test_a_stopped_run_gives_what_an_unbroken_one_gives(unbroken, trainer, config, held_out, monkeypatch) -> None:
    """fault 72: bit for bit, though it was stopped within epochs, once where a checkpoint was due anyway; with dropout,
    accumulation, a shuffled order, and adapters of experts."""
    config = config(**RUN, data=unbroken[0].data)
    for update in (1, 3, 4):
        with monkeypatch.context() as patch:
            at(update, stop(), patch)
            result = trainer(config, held_out=held_out).run(quiet=True)
        assert (result.signal, result.step, saved(config)[-1]) == (signal.SIGTERM, update, update)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    result = trainer(config, held_out=held_out).run(quiet=True)
    assert (result.signal, result.step) == (None, unbroken[1].step)
    assert lines(config) == lines(unbroken[0])
    assert (steps(config), steps(config, "eval")) == ([1, 2, 3, 4, 5, 6], [2, 4, 6])
    equal(result.model, unbroken[1].model)


def test_a_killed_run_goes_on_behind_its_last_checkpoint(unbroken, trainer, config, held_out, monkeypatch) -> None:
    """What it wrote after that is forgotten, a line that was cut off too."""
    config = config(**RUN, data=unbroken[0].data)
    run = trainer(config, held_out=held_out)
    with monkeypatch.context() as patch:
        at(3, kill, patch)
        with pytest.raises(Killed):
            run.run(quiet=True)
    assert (saved(config), steps(config)) == ([2], [1, 2, 3])
    with (Path(config.output) / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    again = trainer(config, held_out=held_out)
    assert again.step == 2
    result = again.run(quiet=True)
    assert lines(config) == lines(unbroken[0])
    equal(result.model, unbroken[1].model)


def test_what_an_update_trains_and_says(unbroken, adapted, rows) -> None:
    config, result = unbroken
    first = arrays(adapted)
    for name, array in arrays(result.model).items():
        assert np.array_equal(array, first[name]) != name.endswith((".a", ".b")), name
    train = [line for line in lines(config) if line["kind"] == "train"]
    assert sum(line["tokens"] for line in train[:5]) == 2 * sum(len(row["completion"]) + 1 for row in rows(10))
    for i, line in enumerate(train):
        assert line["lr"] == pytest.approx(float(schedule(config.optimizer, 6)(i)))
        assert np.shape(line["expert_counts"]) == (1, 8)
        assert line["expert_load"] == expert_load(line["expert_counts"])
        assert line["grad_norm"] > 0
    held = [line for line in lines(config) if line["kind"] == "eval"]
    assert held[0].keys() == {"kind", "step", "loss", "accuracy", "best"}
    assert result.step == min(held, key=lambda line: line["loss"])["step"]


def test_dropout_is_part_of_what_is_differentiated(unbroken, trainer, config) -> None:
    """Features that a pass leaves out have no gradient in it."""
    trainable, frozen = tm.partition(unbroken[1].model)
    batch, key = loop.on_devices(next(trainer(config()).batches), None), jax.random.key(5)
    grads, _ = loop._gradients(trainable, frozen, batch, key, remat=False, dropout=0.25, balance=None)
    name = "layers.0.attention.o.a"
    grad, out = arrays(grads)[name], (arrays(drop_inputs(trainable, key, 0.25))[name] == 0).all(axis=-1)
    assert 0 < out.sum() < len(out)
    assert not grad[out].any()
    assert grad[~out].any(axis=-1).all()


def test_the_last_window_may_be_short(trainer, config, rows) -> None:
    """fault 97: five batches in windows of four, the last one filled up: nothing is left out, nothing counts twice."""
    config = config(train={"accumulate": 4, "save_every": 0})
    run = trainer(config, given := rows(9))
    counts = [len(given[i]["completion"]) + 1 for i in run.loader.order(0)]
    result = run.run(quiet=True)
    assert (result.step, run.batches.position) == (2, 5)
    assert [line["tokens"] for line in lines(config)] == [sum(counts[:8]), sum(counts[8:])]


def test_one_window_of_four_is_one_batch(trainer, settings, rows, tmp_path) -> None:
    """fault 97: to rounding, also where the last window is short and batches differ in supervised tokens."""
    found = []
    for name, batch_size, accumulate in (("whole", 8, 1), ("parts", 2, 4)):
        (tmp_path / name).mkdir()
        train = {"batch_size": batch_size, "accumulate": accumulate, "dropout": 0.0, "save_every": 0}
        config = settings(tmp_path / name, train=train, optimizer={"lr": 0.01, "eps": 1e-3})
        found.append((trainer(config, rows(13)).run(quiet=True), lines(config)))
    (whole, first), (parts, second) = found
    assert [line["step"] for line in first] == [1, 2]
    for a, b in zip(first, second, strict=True):
        assert (a["tokens"], a["expert_counts"], a["accuracy"]) == (b["tokens"], b["expert_counts"], b["accuracy"])
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
    trained, expected = (jax.tree.leaves(tm.partition(result.model)[0]) for result in (parts, whole))
    for a, b in zip(trained, expected, strict=True):
        assert rel_rms(a, b) < 1e-4


def test_what_is_not_finite_stops_the_run(trainer, config, adapted, rows) -> None:
    """faults 94 and 95: before the update, with the lines of the batch; checkpoints and metrics stay as they were."""
    model = jax.tree.map(jnp.copy, adapted)
    model.embed = model.embed.at[ord("z")].set(jnp.nan)
    config = config(seed=7)
    run = trainer(config, [*rows(9), {"prompt": "zz=", "completion": "z"}], model=model)
    order = run.loader.order(0).tolist()
    batch = order.index(9) // 2
    update = batch // 2 + 1
    with pytest.raises(NotFiniteError) as raised:
        run.run(quiet=True)
    named = ", ".join(str(i + 1) for i in order[2 * batch : 2 * batch + 2])
    assert str(raised.value) == (
        f"update {update}: loss nan, gradient norm nan, over lines {named} of {config.data}; nothing was updated, the "
        "last checkpoint stands"
    )
    assert update == 2
    assert steps(config) == list(range(1, update))
    assert saved(config) == steps(config)[-2:]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((run.trainable, run.opt_state)))


# --- the loop, over updates that compute nothing ----------------------------------------------------------------------


@pytest.fixture
def losses(monkeypatch):
    """An update adds 1 to all that is trained, which is 0 at first (see `zero`); evaluations give these losses."""
    losses = []

    def gradients(trainable, frozen, batch, key, *, remat, dropout, balance):
        return {}, {"tokens": batch["loss_mask"].sum(), "loss": jnp.float32(1)}

    def update(optimizer, trainable, opt_state, grads, sums):
        metrics = {"loss": 1.0, "accuracy": 0.5, "grad_norm": 1.0, "tokens": sums["tokens"]}
        return jax.tree.map(lambda a: a + 1, trainable), opt_state, metrics

    monkeypatch.setattr(loop, "_gradients", gradients)
    monkeypatch.setattr(loop, "_update", update)
    monkeypatch.setattr(loop, "_evaluation", lambda *_: (jnp.float32(losses.pop(0)), jnp.int32(1), *[jnp.int32(0)] * 2))
    return losses


@pytest.fixture
def short(trainer, rows, adapted):
    """Runs a configuration -> its Result. `evaluated` adds two rows to evaluate on: one batch."""
    zero = tm.combine(jax.tree.map(jnp.zeros_like, tm.partition(adapted)[0]), tm.partition(adapted)[1])

    def short(config, *, evaluated=False):
        return trainer(config, held_out=rows(2) if evaluated else None, model=zero).run(quiet=True)

    return short


def trained(result) -> set[float]:
    """All values of what was trained: the number of its updates."""
    return {float(value) for leaf in jax.tree.leaves(tm.partition(result.model)[0]) for value in np.ravel(leaf)}


def test_the_best_is_given_back(losses, short, config) -> None:
    """And patience stops the run, which stays so when it is started again."""
    losses += [3, 2, 2.5, 2, 1]
    config = config(train={"steps": 9, "eval_every": 1, "save_every": 0, "keep": 1, "patience": 2}, eval_rows=1)
    for _ in range(2):
        result = short(config, evaluated=True)
        assert (result.step, trained(result)) == (2, {2.0})
        assert (saved(config), steps(config), losses) == ([2, 4], [1, 2, 3, 4], [1])
    assert [line["best"] for line in lines(config) if line["kind"] == "eval"] == [3, 2, 2, 2]


def test_patience_counts_from_the_best(losses, short, config) -> None:
    losses += [3, 4, 2, 3, 1, 2, 1.5]
    config = config(train={"steps": 14, "eval_every": 2, "save_every": 0, "patience": 3}, eval_rows=1)
    result = short(config, evaluated=True)
    assert (result.step, trained(result), steps(config, "eval")) == (10, {10.0}, [2, 4, 6, 8, 10, 12, 14])


def test_an_evaluation_at_the_end_at_least(losses, short, config) -> None:
    losses += [3]
    config = config(train={"steps": 3, "eval_every": 0, "save_every": 0})
    assert short(config, evaluated=True).step == 3
    assert (steps(config, "eval"), saved(config)) == ([3], [3])


def test_every_pass_has_its_own_key_and_every_epoch_its_own_order(losses, short, trainer, config, monkeypatch) -> None:
    """Both follow from the seed alone: a stopped run goes on with what would have followed."""
    keys, gradients = [], loop._gradients

    def then(trainable, frozen, batch, key, **settings):
        keys.append((jax.random.key_data(key).tolist(), batch["tokens"][0, 0].item()))
        return gradients(trainable, frozen, batch, key, **settings)

    monkeypatch.setattr(loop, "_gradients", then)
    whole, parts = (config(train={"steps": 6}, output=str(Path(config().output) / name)) for name in ("a", "b"))
    short(whole)
    expected, keys[:] = [*keys], []
    with monkeypatch.context() as patch:
        at(3, stop(), patch)
        short(parts)
    short(parts)
    assert keys == expected
    assert len({tuple(key) for key, _ in keys}) == 12
    loader = trainer(config(seed=1)).loader
    orders = [loader.order(0), loader.order(1), trainer(config(seed=2)).loader.order(0), np.arange(10)]
    assert len({tuple(order.tolist()) for order in orders}) == 4


def test_without_evaluations_the_last_update_counts(losses, short, config) -> None:
    config = config(train={"epochs": 2, "accumulate": 3, "save_every": 0})
    result = short(config)
    assert (result.step, trained(result), saved(config)) == (4, {4.0}, [4])


def test_old_checkpoints_go_but_the_best_and_the_last(losses, short, config, monkeypatch) -> None:
    losses += [4, 2, 3, 3, 1, 3, 3]
    kept, save = [], checkpoints.save

    def then(*args, **settings):
        save(*args, **settings)
        kept.append(saved(config))

    monkeypatch.setattr(checkpoints, "save", then)
    config = config(train={"steps": 7, "eval_every": 1, "keep": 2})
    assert short(config, evaluated=True).step == 5
    assert kept == [[1], [1, 2], [2, 3], [2, 3, 4], [4, 5], [5, 6], [5, 6, 7]]


def test_what_killed_processes_left_is_passed_over(losses, short, config, monkeypatch) -> None:
    """And removed with the next save: a save that was not finished, by its hidden name, and a removal."""
    config, folder = config(train={"steps": 4, "keep": 1}), Path(config().output) / checkpoints.FOLDER
    with monkeypatch.context() as patch:
        at(2, stop(), patch)
        short(config)
    hidden, half = folder / ".00000003.unfinished-1-a", folder / "00000003"
    for left in (hidden, half):
        (left / ARRAYS).mkdir(parents=True)
    (hidden / checkpoints.STATE).write_text("{")
    assert saved(config) == [2]
    result = short(config)
    assert (trained(result), steps(config)) == ({4.0}, [1, 2, 3, 4])
    assert [path.name for path in folder.iterdir()] == ["00000004"]


def cut(file: Path, _) -> None:
    file.write_bytes(file.read_bytes()[:50])


def no_json(_, state: Path) -> None:
    state.write_text("{")


def no_state(_, state: Path) -> None:
    state.write_text("{}")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Orbax leaves coroutines behind
@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (cut, "Orbax cannot restore: "),
        (no_json, "state.json is not JSON: "),
        (no_state, "state.json: step: Field required"),
    ],
)
def test_a_spoilt_checkpoint_is_refused(losses, short, config, spoil, what) -> None:
    """The latest, by name; the run does not silently begin elsewhere."""
    config = config(train={"steps": 2})
    short(config)
    folder = checkpoints.found(Path(config.output))[-1].folder
    files = [path for path in folder.rglob("*") if path.is_file()]
    spoil(max(files, key=lambda path: path.stat().st_size), folder / checkpoints.STATE)
    with pytest.raises(CheckpointError, match=what) as raised:
        short(config)
    assert raised.value.where == str(folder)
    assert folder.name == "00000002"


def test_the_best_checkpoint_may_not_be_gone(losses, short, config) -> None:
    losses += [1, 2]
    config = config(train={"steps": 2, "eval_every": 1})
    short(config, evaluated=True)
    first, _ = checkpoints.found(Path(config.output))
    (first.folder / checkpoints.STATE).unlink()
    with pytest.raises(CheckpointError, match="the checkpoint of update 1, the best one, is gone"):
        short(config, evaluated=True)


def test_a_run_of_another_configuration_is_refused(losses, short, config) -> None:
    """With the fields. What it is called and how often it is saved may change."""
    experts = dataclasses.replace(config().lora, experts=((0, (1, 5)),))
    first = config(train={"steps": 2}, lora=experts)
    short(first)
    train = dataclasses.replace(first.train, steps=3, accumulate=1, keep=7, save_every=3)
    lora = dataclasses.replace(experts, experts=((0, (1, 4)),))
    with pytest.raises(RunConfigError) as raised:
        short(dataclasses.replace(first, train=train, lora=lora))
    assert str(raised.value) == (
        f"{first.output} holds a run of another configuration: lora.experts was [[0, [1, 5]]], is [[0, [1, 4]]], "
        "train.accumulate was 2, is 1, train.steps was 2, is 3; choose another output"
    )
    short(dataclasses.replace(first, train=dataclasses.replace(first.train, keep=7, save_every=3)))
    assert steps(first) == [1, 2]


def test_a_run_on_other_rows_is_refused(losses, short, trainer, config, rows) -> None:
    config = config(train={"steps": 2})
    short(config)
    with pytest.raises(DataError, match=r"cannot go on from this state: examples was '\w+' when the state"):
        trainer(config, rows(10, first=1))


def test_an_evaluation_that_is_not_finite_stops_the_run(losses, short, config) -> None:
    losses += [1, np.nan]
    config = config(train={"steps": 3, "eval_every": 1})
    with pytest.raises(NotFiniteError, match=r"evaluation behind update 2: loss nan, over lines 1, 2 of .*eval.jsonl"):
        short(config, evaluated=True)
    assert saved(config) == [1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals(losses, short, config, number, monkeypatch, capsys) -> None:
    """The update at hand is ended and saved; what a signal did before it does again."""
    before, config = signal.getsignal(number), config(train={"steps": 4, "save_every": 0})
    with monkeypatch.context() as patch:
        at(3, stop(number), patch)
        result = short(config)
    assert (result.signal, result.step, saved(config)) == (number, 3, [3])
    assert signal.getsignal(number) is before
    said = f"signal {number.value}: checkpoint of update 3 saved; start again to go on\n"
    assert capsys.readouterr().err.endswith(said)


# --- the optimizer ----------------------------------------------------------------------------------------------------


def test_schedule() -> None:
    """Up in a line over the warm-up, which does not begin at 0, then half a cosine down to a share."""
    rate = schedule(OptimizerConfig(lr=2.0, warmup=0.2, final=0.1), 20)
    found = [float(rate(i)) for i in range(21)]
    np.testing.assert_allclose(found[:5], [0.4, 0.8, 1.2, 1.6, 2.0], rtol=1e-6)
    expected = [2 * (0.1 + 0.9 * (1 + np.cos(np.pi * i / 16)) / 2) for i in range(17)]
    np.testing.assert_allclose(found[4:], expected, rtol=1e-5)
    assert float(schedule(OptimizerConfig(lr=2.0), 1)(0)) == 2.0
    assert float(schedule(OptimizerConfig(lr=0.0), 3)(1)) == 0.0


@pytest.mark.parametrize(("clip", "expected"), [(None, [0.75, 0.8]), (1.0, [0.375, 4 / 9]), (10.0, [0.75, 0.8])])
def test_gradients_are_clipped_by_their_norm(clip, expected) -> None:
    """With moments that forget at once and eps 1, an update is lr * g / (g + 1)."""
    config = OptimizerConfig(lr=1.0, warmup=0.0, b1=0.0, b2=0.0, eps=1.0, clip=clip)
    optimizer, grads = make_optimizer(config, 5), {"x": jnp.array([3.0]), "y": jnp.array([4.0])}
    updates, _ = optimizer.update(grads, optimizer.init(grads), grads)
    np.testing.assert_allclose(np.concatenate([updates["x"], updates["y"]]), -np.array(expected), rtol=1e-6)


def test_weight_decay() -> None:
    """Apart from the moments: lr * decay * weight."""
    optimizer = make_optimizer(OptimizerConfig(lr=0.5, warmup=0.0, weight_decay=0.1), 5)
    weights = {"x": jnp.array([8.0])}
    updates, _ = optimizer.update({"x": jnp.zeros(1)}, optimizer.init(weights), weights)
    np.testing.assert_allclose(updates["x"], [-0.4], rtol=1e-6)


def test_eps_must_be_a_number_of_the_dtype(trainer, config, adapted) -> None:
    """In float16, 1e-8 is 0, and 0 / 0 would be the first update of all that has no gradient yet."""
    model = jax.tree.map(lambda a: a.astype(jnp.float16), adapted)
    with pytest.raises(RunConfigError, match=r"optimizer.eps = 1e-08 is too small for float16, .* at least 6.1\d*e-05"):
        trainer(config(), model=model)
    trainer(config(optimizer={"eps": 1e-4}), model=model)
