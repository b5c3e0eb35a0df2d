"""Orbax: the tree as it is held, whatever its weights, and nothing that was not finished."""

import gc
import json
import shutil

import chex
import jax
import jax.numpy as jnp
import pytest
from tests.checkpoint.tools import GOLDENS, blueprint_of, build, layer, load
from tests.tiny import filled, tiny_k3

import trillion_moe as tm
from trillion_moe import checkpoint
from trillion_moe.checkpoint import CheckpointError, load_orbax, save_orbax
from trillion_moe.weights import LoRA


def same(a, b) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    chex.assert_trees_all_equal(a, b)
    chex.assert_trees_all_equal_dtypes(a, b)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("kimi_k3/a/mxfp4", {"layout": "kn"}),
        ("kimi_linear/a", {"scan": True, "dtype": "bfloat16"}),
    ],
)
def test_restored_bit_for_bit(name, options, tmp_path) -> None:
    """fault 13, fault 29: also what a safetensors file could not hold, such as the layout and the depth plan."""
    model = load(GOLDENS / name, **options)
    save_orbax(tmp_path / "out", model)
    assert checkpoint.is_orbax(tmp_path / "out")
    assert not checkpoint.is_orbax(GOLDENS / name)
    again = load_orbax(tmp_path / "out", build)
    same(again, model)
    assert (again.plan, again.dtype, again.config) == (model.plan, model.dtype, model.config)


def test_adapters_are_restored(tmp_path) -> None:
    model = load(GOLDENS / "kimi_k3/a/mxfp4")
    experts, keys = layer(model, 1).ffn.experts, jax.random.split(jax.random.key(0), 2)
    a, b = jax.random.normal(keys[0], (32, 3)), jax.random.normal(keys[1], (2, 3, 64))
    slots = jnp.asarray([-1, 0, *[-1] * 9, 1], jnp.int32)
    experts.gate = LoRA(experts.gate, a, b, slots, scaling=0.3)
    layer(model, 0).ffn.down = LoRA(layer(model, 0).ffn.down, jnp.ones((96, 2)), jnp.zeros((2, 64)))
    save_orbax(tmp_path / "out", model)
    same(load_orbax(tmp_path / "out", build), model)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("orbax") / "out"
    save_orbax(folder, load(GOLDENS / "kimi_linear/a"))
    return folder


def refused(saved, tmp_path, spoil) -> str:
    folder = tmp_path / "spoilt"
    shutil.copytree(saved, folder)
    spoil(folder)
    with pytest.raises(CheckpointError) as caught:
        load_orbax(folder, build)
    return caught.value.findings[0]


def test_half_a_checkpoint(saved, tmp_path) -> None:
    finding = refused(saved, tmp_path, lambda folder: (folder / "model.json").unlink())
    assert finding == "no model.json, which is written last: the save was not finished"


@pytest.mark.filterwarnings("ignore")  # tensorstore leaves futures behind that nobody awaits
def test_lost_arrays(saved, tmp_path) -> None:
    finding = refused(saved, tmp_path, lambda folder: shutil.rmtree(folder / "arrays/ocdbt.process_0"))
    assert finding.startswith("Orbax cannot restore: ")
    gc.collect()


def edited(**changes):
    def spoil(folder) -> None:
        about = json.loads((folder / "model.json").read_text())
        (folder / "model.json").write_text(json.dumps(about | changes))

    return spoil


def test_another_format_or_model(saved, tmp_path) -> None:
    assert "is not of the format" in refused(saved, tmp_path / "1", edited(format="other"))
    assert refused(saved, tmp_path / "2", edited(weights={})) == "embed: not in the checkpoint"
    assert "is not JSON" in refused(saved, tmp_path / "3", lambda folder: (folder / "model.json").write_text("{"))
    with pytest.raises(CheckpointError, match="no such folder"):
        load_orbax(tmp_path / "nowhere", build)


def changed(change):
    def spoil(folder) -> None:
        about = json.loads((folder / "model.json").read_text())
        change(about)
        (folder / "model.json").write_text(json.dumps(about))

    return spoil


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        (lambda about: about.pop("plan"), "model.json: plan: "),
        (lambda about: about.update(dtype="int3"), "model.json: dtype: "),
        (lambda about: about["weights"].update(embed={"kind": "none"}), "model.json: weights.embed"),
        (lambda about: about["weights"].update(embed=7), "model.json: weights.embed"),
        (lambda about: about["arrays"].update(embed=["float32", [-1], 0]), "model.json: "),
        (lambda about: about["arrays"].update(embed=["object", [1], 0]), "model.json: "),
        (lambda about: about["arrays"].pop("embed"), "model.json: no array embed"),
        (lambda about: about["arrays"].update(x=["float32", [1], 0]), "model.json: array x is of no weight"),
        (lambda about: about["plan"].pop(), "model.json: the plan has "),
        (lambda about: about["plan"][0].__setitem__("repeats", 10**9), "model.json: the plan has "),
        (
            lambda about: about["plan"][0].__setitem__("numbers", [[0]]),
            "model.json: plan.0: Value error, numbers ((0,),): legal are 1 rows of ",
        ),
        (
            lambda about: about["plan"][0].__setitem__("stages", 0),
            "model.json: plan.0: Value error, repeats 1, stages 0, virtual 1: legal are numbers from 1",
        ),
        (
            lambda about: about["plan"][0]["layers"].__setitem__(0, {"attention": "mla", "ffn": "moe"}),
            "model.json: layer 0 is ",
        ),
        (
            lambda about: about["arrays"]["embed"].__setitem__(1, [4, 4]),
            "embed is [4, 4], config.json makes it [160, 64]",
        ),
    ],
)
def test_a_description_that_is_wrong(saved, tmp_path, change, finding) -> None:
    assert refused(saved, tmp_path, changed(change)).startswith(finding)


def test_blueprints_are_refused(saved, tmp_path) -> None:
    stored = checkpoint.read_config(GOLDENS / "kimi_linear/a")
    with pytest.raises(ValueError, match="embed holds no array but a Spec"):
        save_orbax(tmp_path / "out", blueprint_of(stored))
    assert not (tmp_path / "out").exists()


def test_values_that_changed_on_disk_are_noticed(tmp_path) -> None:
    """One flipped byte in the store, which has no checksum of its own."""
    kinds = {"num_layers": 2, "attention": ("kda", "mla"), "mlp": ("dense", "moe")}
    tm.save(tmp_path / "o", filled(tiny_k3(**kinds)), format="orbax")
    largest = max((tmp_path / "o" / "arrays").rglob("d/*"), key=lambda file: file.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 0xFF
    largest.write_bytes(data)
    with pytest.raises(tm.CheckpointError, match=r"has other values than were saved|Orbax cannot restore"):
        tm.load(tmp_path / "o")


def test_what_lies_beside_can_be_copied(tmp_path) -> None:
    kinds = {"num_layers": 2, "attention": ("kda", "mla"), "mlp": ("dense", "moe")}
    model = filled(tiny_k3(**kinds))
    source = tmp_path / "source"
    tm.save(source, model)
    with pytest.raises(tm.CheckpointError, match="holds no file to copy"):
        tm.save(tmp_path / "none", model, beside=source)
    assert not (tmp_path / "none").exists()
    (source / "tokenizer_config.json").write_text("{}")
    (source / "tiktoken.model").write_text("x")
    for form in ("hf", "orbax"):
        tm.save(tmp_path / form, model, format=form, beside=source)
        assert (tmp_path / form / "tiktoken.model").read_text() == "x"
        assert (tmp_path / form / "tokenizer_config.json").is_file()
        tm.load(tmp_path / form)
