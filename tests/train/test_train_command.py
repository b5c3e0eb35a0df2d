"""`trillion-moe train`: what it prints and leaves, what it refuses, and that it survives being killed."""

import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import trillion_moe as tm
from trillion_moe.cli import main
from trillion_moe.run_config import from_json, to_json
from trillion_moe.train import command
from trillion_moe.train.report import Report, expert_load, picture, read
from trillion_moe.transforms.targets import places


@pytest.fixture
def run(config, write_rows, rows, tmp_path, capsys):
    """Calls the command with a configuration, by default that of `config`, on ten rows -> code, output, error."""

    def run(*flags, settings=None):
        settings = settings or config()
        (tmp_path / "run.json").write_text(to_json(settings))
        write_rows(Path(settings.data), rows(10))
        code = main(["train", "--config", str(tmp_path / "run.json"), *map(str, flags)])
        return code, *capsys.readouterr()

    return run


def metrics(output: Path) -> list[dict]:
    return [
        {name: value for name, value in line.items() if name != "tokens_per_s"}
        for line in read(output / "metrics.jsonl")
    ]


def arrays(model) -> dict[str, np.ndarray]:
    return {place.names[0]: np.asarray(place.leaf) for place in places(model, inside=True)[0]}


# --- whole runs -------------------------------------------------------------------------------------------------------


def test_a_whole_run(run, config, folder, rows, tmp_path) -> None:
    """From rows to an adapter, pictures, and a folder that says what was run; the same again elsewhere."""
    settings = config(train={"epochs": 2, "eval_every": 2}, optimizer={"lr": 0.01}, eval_rows=4)
    out = tmp_path / "out"
    code, said, err = run(settings=settings)
    assert (code, said) == (0, f"{out / 'adapter'}\n")
    assert "supervised tokens" in err
    assert " 3/3 [" in err
    assert "dropped_rows" not in err
    names = {path.name for path in out.iterdir()}
    files = {"adapter", "checkpoints", "config.json", "metrics.jsonl", "loss.png", "experts.png", "tensorboard"}
    assert names == files
    assert from_json((out / "config.json").read_text(), "x") == settings
    lines = metrics(out)
    assert [(line["kind"], line["step"]) for line in lines if line["kind"] == "eval"] == [("eval", 2), ("eval", 3)]
    tokens = sum(len(row["completion"]) + 1 for row in rows(6))
    assert sum(line["tokens"] for line in lines if line["kind"] == "train") == 2 * tokens
    found = arrays(tm.load_adapter(tm.load(folder), out / "adapter"))
    assert all(array.any() for name, array in found.items() if name.endswith((".a", ".b")))
    code, said, err = run(settings=settings)
    assert (code, said) == (1, "")
    assert f"{out}: 1 problem(s)\n  - adapter is there: this run has ended; choose another output" in err
    code, said, err = run("--output", tmp_path / "5", "--quiet", settings=settings)
    assert (code, said) == (0, f"{tmp_path / '5' / 'adapter'}\n")
    assert "%|" not in err
    assert metrics(tmp_path / "5") == lines
    first, second = (folder / "adapter" / "adapter_model.safetensors" for folder in (out, tmp_path / "5"))
    assert first.read_bytes() == second.read_bytes()


def test_every_weight_is_trained(run, config, folder, tmp_path) -> None:
    """To a checkpoint like that which it came from. No gradient reaches the router's bias, nor the weights of a mix of
    one, which the first layer's is."""
    flags = ("--set", "lora=null", "--set", "train.dropout=0", "--set", "optimizer.lr=0.01", "--set", "train.epochs=2")
    code, said, _ = run(*flags)
    assert (code, said) == (0, f"{tmp_path / 'out' / 'model'}\n")
    losses = [line["loss"] for line in metrics(tmp_path / "out")]
    assert losses[-1] < losses[0] - 0.1
    before, after = (arrays(tm.load(path)) for path in (folder, tmp_path / "out" / "model"))
    assert before.keys() == after.keys()
    still = ("layers.0.ffn.router.bias", "layers.0.attn_res.norm", "layers.0.attn_res.query")
    for name, array in after.items():
        assert np.array_equal(array, before[name]) == (name in still), name


def test_a_trained_checkpoint_keeps_its_tokenizer(folder, run, tmp_path) -> None:
    """fault 86: what lies beside the base lies beside the result."""
    code, *_ = run("--set", "lora=null", "--set", "train.dropout=0", "--set", "train.steps=1")
    assert code == 0
    beside = {path.name for path in folder.iterdir()} - {"config.json", "model.safetensors"}
    assert beside
    for name in beside:
        assert (tmp_path / "out" / "model" / name).read_bytes() == (folder / name).read_bytes()


# --- a dry run --------------------------------------------------------------------------------------------------------


def test_a_dry_run_says_what_would_be_done(run, config, tmp_path) -> None:
    """The configuration that results, sizes, the first rows; and does nothing."""
    code, said, err = run("--dry-run", "--set", "train.epochs=5", "--set", "output=elsewhere")
    assert code == 0
    end = said.index("\n}\n") + 3
    expected = dataclasses.replace(config(), output="elsewhere", train=dataclasses.replace(config().train, epochs=5))
    assert from_json(said[:end], "x") == expected
    figures, first, second = said[end:].split("\n\n--- ")
    model = tm.load(config().model)
    numbers, size = 2 * (24 + 64) + 2 * 32 + 8 * 2 * 32, 4
    lines = {" ".join(line.split()) for line in figures.splitlines()}
    frozen = sum(leaf.size for leaf in jax.tree.leaves(model))
    assert f"trainable {numbers:,} numbers {numbers * size:,} bytes" in lines
    assert f"optimizer (two moments) {2 * numbers:,} numbers {2 * numbers * size:,} bytes" in lines
    assert f"frozen {frozen:,} numbers {frozen * size:,} bytes" in lines
    assert "adapters on mla 1 matrices 176 parameters" in lines
    assert "adapters on routed_experts 8 matrices 576 parameters" in lines
    assert "adapters on shared_experts 0 matrices 0 parameters" in lines
    assert first == "line 1: 2 of 5 tokens supervised\naa=⟦a<|end_of_msg|>⟧"
    assert second == "line 2: 4 of 7 tokens supervised\nbb=⟦bb.<|end_of_msg|>⟧\n"
    assert "examples           10, of them truncated 0" in err
    assert {path.name for path in tmp_path.iterdir()} == {"run.json", "rows.jsonl"}


def test_a_mesh_by_flag(run, tmp_path, monkeypatch) -> None:
    """A run over four devices; one that cannot be cut is refused before weights are read."""
    four = ("--set", 'mesh={"ep": 2, "cp": 2}', "--set", "train.steps=1", "--set", "train.batch_size=null", "--quiet")
    assert run(*four)[0] == 0
    assert tm.load(json.loads((tmp_path / "out" / "config.json").read_text())["model"]).layout is None
    assert json.loads((tmp_path / "out" / "config.json").read_text())["mesh"] == {"ep": 2, "cp": 2}

    def read(*_, **__):
        raise AssertionError("weights are read")

    monkeypatch.setattr("trillion_moe.api.load", read)
    code, _, err = run("--mesh", "dp=4", "--output", tmp_path / "2", "--dry-run")
    assert code == 1
    assert "2 rows cannot be cut over dp 4: legal are multiples of 4" in err


def test_a_dry_run_over_a_mesh(run, folder) -> None:
    """What a device holds, beside what it is found to hold of the model."""
    code, said, _ = run("--mesh", "ep=2,cp=2", "--set", "train.batch_size=null", "--dry-run")
    assert code == 0
    lines = {" ".join(line.split()) for line in said.splitlines()}
    assert "over ep 2 x cp 2: 4 device(s)" in lines
    leaves = jax.tree.leaves(tm.load(folder, mesh={"ep": 2, "cp": 2}))
    total = sum(leaf.size for leaf in leaves)
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
    assert 2 * total < held < 4 * total
    assert f"frozen {total:,} numbers {4 * total:,} bytes {held:,} on a device" in lines
    h200 = dataclasses.replace(tm.Layout.make({"ep": 2}, transport="ragged", chunks=2), wire="float8_e4m3fn")
    assert command._over(h200) == "over ep 2: 2 device(s), transport ragged, chunks 2, wire float8_e4m3fn"


def test_an_output_that_cannot_be_written(run, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    code, said, err = run("--dry-run", "--output", tmp_path / "file" / "out")
    assert (code, said) == (1, "")
    assert f"cannot be written: {tmp_path / 'file'} is no folder" in err


def test_a_dry_run_of_every_weight(run, folder) -> None:
    flags = ("--set", "lora=null", "--set", "train.dropout=0", "--dry-run")
    code, said, _ = run(*flags)
    lines = {" ".join(line.split()) for line in said.splitlines()}
    found = places(tm.load(folder))[0]
    total = sum(place.leaf.size for place in found)
    experts = sum(place.leaf.size for place in found if place.group == "routed_experts")
    assert code == 0
    assert f"trainable {total - 8:,} numbers {4 * (total - 8):,} bytes" in lines
    assert "frozen 8 numbers 32 bytes" in lines  # the router's bias
    assert f"of routed_experts {experts:,} numbers" in lines


# --- what is shown ----------------------------------------------------------------------------------------------------

VALUES = {"loss": 1.23456, "lr": 2e-4, "grad_norm": 0.5, "tokens": 7, "tokens_per_s": 1234.5}
COUNTS = np.array([[2, 2, 2, 2], [1, 0, 6, 1]])


def test_the_progress_bar(tmp_path, capsys) -> None:
    report = Report(tmp_path, start=2, total=10, dropped=3)
    report.line("train", 3, VALUES, COUNTS)
    report.line("eval", 3, {"loss": 2.0})
    report.close()
    shown = capsys.readouterr().err
    last = shown.split("\r")[-1]
    assert " 3/10 [" in last
    for part in ("loss=1.235", "lr=0.0002", "grad_norm=0.5", "tokens_per_s=1234", "expert_load=3,", "dropped_rows=3"):
        assert part in last
    assert "GB" in last.split("memory=")[1]
    assert "<" in last.split("[")[1]  # elapsed<left
    assert "update 3: evaluation loss 2.0000\n" in shown


def test_metrics_as_lines_and_for_tensorboard(tmp_path, capsys) -> None:
    report = Report(tmp_path, start=0, total=10, quiet=True)
    report.line("train", 1, VALUES, COUNTS)
    report.line("eval", 1, {"loss": 2.0})
    report.close()
    assert "%|" not in capsys.readouterr().err
    first, second = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert first == {"kind": "train", "step": 1, **VALUES, "expert_load": 3.0, "expert_counts": COUNTS.tolist()}
    assert second == {"kind": "eval", "step": 1, "loss": 2.0}
    (events,) = (tmp_path / "tensorboard").iterdir()
    for tag in (b"train/loss", b"train/tokens_per_s", b"train/expert_load", b"eval/loss"):
        assert tag in events.read_bytes()


def test_pictures(tmp_path) -> None:
    """A heat map only of a model with experts."""
    for counts in (None, COUNTS):
        report = Report(tmp_path, start=0, total=10, quiet=True)
        for step in (1, 2, 3):
            report.line("train", step, VALUES, counts)
        report.close()
        assert picture(tmp_path) == tmp_path / "loss.png"
        assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
        assert (tmp_path / "experts.png").exists() == (counts is not None)


def test_expert_load() -> None:
    assert expert_load(COUNTS) == 3.0
    assert expert_load(COUNTS[:1]) == 1.0
    assert expert_load([[0, 0, 5, 0]]) == 4.0


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def packed(folder, tmp_path_factory):
    """The same model, its experts in 4 bits."""
    packed = tmp_path_factory.mktemp("packed") / "tiny"
    tm.save(packed, tm.quantize_experts(tm.load(folder)))
    for path in folder.iterdir():
        if not (packed / path.name).exists():
            shutil.copy(path, packed)
    return packed


def test_packed_experts_are_not_trained_themselves(run, packed, tmp_path) -> None:
    """Adapters on them are."""
    flags = ("--model", packed, "--set", "train.dropout=0")
    code, said, err = run(*flags, "--set", "lora=null")
    assert (code, said) == (1, "")
    assert f"lora is null, but the experts of {packed} are packed: train adapters (lora), or decode them first" in err
    assert not (tmp_path / "out").exists()
    assert run(*flags, "--dry-run")[0] == 0


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (["--config", "lora"], "lora does not say data and model: give --data --model\n"),
        (["--config", "lora", "--data", "x"], "lora does not say model: give --model\n"),
        (["--config", "lara"], "no configuration 'lara': legal are "),
        (["--set", "output="], "does not say output: give --output\n"),
        (["--set", "train.lr=1"], "train.lr: no such field; legal here: epochs, "),
        (["--set", "eval_rows=10"], "rows.jsonl: 1 problem(s)\n  - eval_rows = 10 of 10 rows leaves none to train on"),
        (["--set", 'lora.targets=["kda"]'], "tiny: target 'kda' is a group of which this model has no matrix"),
        (["--data", "no.jsonl"], "No such file or directory: 'no.jsonl'"),
        (["--model", "no"], "No such file or directory: 'no'"),
        (["--set", "eval_data=no.jsonl"], "No such file or directory: 'no.jsonl'"),
    ],
)
def test_what_is_refused(run, flags, what, tmp_path) -> None:
    code, said, err = run(*flags)
    assert (code, said) == (1, "")
    assert "trillion-moe train: " in err
    assert what in err
    assert not (tmp_path / "out").exists()


def test_rows_are_checked_before_the_model_is_read(run, config, monkeypatch, write_rows, rows) -> None:
    def load(*args, **kwargs):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("trillion_moe.api.load", load)
    eval_rows = write_rows(Path(config().data).with_name("eval.jsonl"), [*rows(2), {"prompt": "", "completion": ""}])
    code, _, err = run("--set", f"eval_data={eval_rows}")
    assert code == 1
    assert "eval.jsonl: 1 problem(s)\n  - line 3, completion: is empty: there is nothing to learn" in err


# --- processes --------------------------------------------------------------------------------------------------------

STEPS = 200


class Process:
    """The command in a process of its own."""

    def __init__(self, config: Path, folder: Path, output: Path):
        cache = {
            "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        flags = ["--config", str(config), "--output", str(output), "--quiet"]
        self.output = output
        self.log = (folder / "log.txt").open("a")
        command = [sys.executable, "-m", "trillion_moe.cli", "train", *flags]
        self.process = subprocess.Popen(command, env=os.environ | cache, stdout=self.log, stderr=self.log)

    def wait(self) -> int:
        code = self.process.wait(timeout=900)
        self.log.close()
        return code

    def wait_for_lines(self, more: int) -> None:
        """Until so many lines of metrics have come on top of those that were there, or the end."""
        path = self.output / "metrics.jsonl"
        wanted = len(read(path)) + more
        while self.process.poll() is None and len(read(path)) < wanted:
            time.sleep(0.005)


@pytest.fixture(scope="module")
def long(tmp_path_factory, write_rows, rows, settings, packed):
    """Starts runs of 200 updates of adapters on packed experts, with all that may go wrong when one goes on -> start,
    the output of one that nothing has stopped."""
    folder = tmp_path_factory.mktemp("long")
    write_rows(folder / "rows.jsonl", rows(13))
    train = {"steps": STEPS, "eval_every": 7, "keep": 1}
    config = settings(folder, model=str(packed), eval_rows=2, train=train, optimizer={"lr": 0.01})
    (folder / "run.json").write_text(to_json(config))

    def start(name: str) -> Process:
        return Process(folder / "run.json", folder, folder / name)

    assert start("unbroken").wait() == 0, (folder / "log.txt").read_text()
    return start, folder / "unbroken"


def same(output: Path, unbroken: Path) -> None:
    assert metrics(output) == metrics(unbroken)
    first, second = (folder / "adapter" / "adapter_model.safetensors" for folder in (output, unbroken))
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_ends(long, number, code) -> None:
    """And the next start goes on to what an unbroken run gives."""
    start, unbroken = long
    stopped = start(f"stopped-{code}")
    stopped.wait_for_lines(20)
    stopped.process.send_signal(number)
    assert stopped.wait() == code
    assert 20 <= len(metrics(stopped.output)) < len(metrics(unbroken))
    assert not (stopped.output / "adapter").exists()
    assert start(f"stopped-{code}").wait() == 0
    same(stopped.output, unbroken)


@pytest.mark.slow
def test_killed_twenty_times(long) -> None:
    """fault 72: at random times, of which some lie before the first update of a process, some within a save: losses and
    adapter are bit for bit those of an unbroken run."""
    start, unbroken = long
    chance = random.Random(0)
    for _ in range(20):
        run = start("killed")
        if chance.random() < 0.2:
            time.sleep(chance.uniform(0, 10))
        else:
            run.wait_for_lines(1)
            time.sleep(chance.uniform(0, 0.5))
        assert run.process.poll() is None, "it ended before it was killed"
        run.process.kill()
        assert run.wait() == -signal.SIGKILL
    assert start("killed").wait() == 0
    same(unbroken.with_name("killed"), unbroken)
    assert len(list((unbroken.with_name("killed") / "checkpoints").iterdir())) <= 2
