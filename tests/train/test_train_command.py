"""`trillion-moe train`: what it prints and leaves, what it refuses, and that it survives being killed."""

import dataclasses
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

import trillion_moe as tm
from trillion_moe.cli import main
from trillion_moe.run_config import from_json, to_json
from trillion_moe.train.report import read
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
    assert f"{packed}: 1 problem(s)\n  - its experts are packed: train adapters (lora), or decode them first" in err
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
