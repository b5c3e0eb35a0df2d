"""A save leaves all or nothing, and refuses what a checkpoint cannot hold."""

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest
from tests.checkpoint.tools import GOLDENS, blueprint_of, layer, load

from trillion_moe import checkpoint
from trillion_moe.checkpoint import CheckpointError, safetensors_io, save
from trillion_moe.weights import MXFP4, LoRA

LINEAR = GOLDENS / "kimi_linear/a"
KILLED = """
import itertools, os, signal, sys
import jax
jax.config.update("jax_platforms", "cpu")
from tests.checkpoint.tools import GOLDENS, load
from trillion_moe import checkpoint
from trillion_moe.checkpoint import orbax_io, safetensors_io

calls = itertools.count()

def dying(function, last):
    def wrapped(*args):
        if next(calls) == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args)
    return wrapped

model = load(GOLDENS / "kimi_linear/a")
if sys.argv[1] == "safetensors":
    safetensors_io._bytes_of = dying(safetensors_io._bytes_of, 100)
    checkpoint.save(sys.argv[2], model, shard_bytes=4e5)
else:
    orbax_io.write_text = dying(orbax_io.write_text, 1)
    checkpoint.save_orbax(sys.argv[2], model)
"""


@pytest.mark.parametrize("kind", ["safetensors", "orbax"])
def test_a_killed_save_leaves_nothing_that_loads(kind, tmp_path) -> None:
    root = Path(__file__).parents[2]
    run = subprocess.run([sys.executable, "-c", KILLED, kind, str(tmp_path / "out")], cwd=root, env=os.environ)
    assert run.returncode == -signal.SIGKILL
    (remains,) = tmp_path.iterdir()
    assert remains.name.startswith(".out.unfinished-")
    assert any(remains.iterdir())
    for folder in (tmp_path / "out", remains):
        assert not checkpoint.is_orbax(folder) or kind == "orbax"
        with pytest.raises(CheckpointError):
            checkpoint.read_config(folder)
        with pytest.raises(CheckpointError):
            checkpoint.load_orbax(folder, lambda *_: None)
    save(tmp_path / "out", load(LINEAR))  # the remains are in nobody's way
    assert load(tmp_path / "out").config.num_layers == 5


def test_a_failed_save_leaves_nothing(tmp_path, monkeypatch) -> None:
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors_io, "_bytes_of", full)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path / "out", load(LINEAR))
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten(tmp_path) -> None:
    model = load(LINEAR)
    (tmp_path / "empty").mkdir()
    save(tmp_path / "empty", model)
    before = (tmp_path / "empty/model.safetensors").stat().st_mtime_ns
    for write in (save, checkpoint.save_orbax):
        with pytest.raises(CheckpointError, match="exists already"):
            write(tmp_path / "empty", model)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="exists already"):
        save(tmp_path / "file", model)
    assert (tmp_path / "empty/model.safetensors").stat().st_mtime_ns == before
    save(tmp_path / "new/deep", model)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "new"]


def why(folder, model) -> str:
    with pytest.raises(CheckpointError) as caught:
        save(folder, model)
    assert not folder.exists()
    return caught.value.findings[0]


def test_adapters_are_not_part_of_a_checkpoint(tmp_path) -> None:
    model = load(LINEAR)
    mlp = layer(model, 0).ffn
    mlp.up = LoRA(mlp.up, jnp.zeros((64, 2)), jnp.zeros((2, 96)))
    assert why(tmp_path / "out", model) == (
        "1 leaves have an adapter (segments.0.0.ffn.up): merge_lora or export_adapter first"
    )
    blueprint = blueprint_of(model.config)
    layer(blueprint, 0).ffn.up = mlp.up
    with pytest.raises(ValueError, match=r"segments.0.0.ffn.up\): load the model first, then add_lora"):
        checkpoint.load_into(blueprint, LINEAR, model.config)


def test_models_that_are_not_ready(tmp_path) -> None:
    model = load(GOLDENS / "kimi_k3/a/mxfp4")
    assert "leaves hold no array (embed: Spec(" in why(tmp_path / "out", blueprint_of(model.config))
    experts = layer(model, 1).ffn.experts
    experts.up = jnp.zeros((12, 32, 64))
    assert "20 of 21 banks of experts are packed, segments.0.1.ffn.experts.up is not" in why(tmp_path / "out", model)
    model = load(LINEAR)
    model.embed = model.embed.astype(jnp.int32)
    assert why(tmp_path / "out", model) == "embed is int32: legal is float32 or bfloat16 or float16"
    model = load(LINEAR)
    layer(model, 0).ffn.up = MXFP4(jnp.zeros((96, 32), jnp.uint8), jnp.zeros((96, 2), jnp.uint8))
    with pytest.raises(ValueError, match=r"segments.0.0.ffn.up is MXFP4: only routed experts"):
        save(tmp_path / "out", model)


def test_the_config_says_what_the_arrays_are(tmp_path) -> None:
    """The config that a model carries may be older than its arrays."""
    model = load(GOLDENS / "kimi_k3/a/mxfp4", dtype="bfloat16")
    assert model.config.dtype == "float32"
    model.config = dataclasses.replace(model.config, quantization=None)
    save(tmp_path / "out", model)
    again = load(tmp_path / "out")
    assert (again.config.dtype, again.config.quantization) == ("bfloat16", "mxfp4")
