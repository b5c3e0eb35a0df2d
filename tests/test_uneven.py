"""Sizes that a mesh cannot cut are refused before anything is read or drawn, by the published name and with what is
legal."""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest
from tests.tiny import KDA, MLA, MOE, tiny_k3

import trillion_moe as tm
from trillion_moe import checkpoint
from trillion_moe.blueprint import layer_numbers, leaf_names, path_parts
from trillion_moe.cli import main
from trillion_moe.layers.segments import depth_plan
from trillion_moe.model import Model
from trillion_moe.sharding import Layout, LayoutError, shardings
from trillion_moe.transforms.targets import places

HEADS = {"kda": dataclasses.replace(KDA, num_heads=4, a_log_shape=None), "mla": dataclasses.replace(MLA, num_heads=4)}
SIZES = HEADS | {"vocab_size": 320}
ATTENTION = {"num_layers": 1, "attention": ("mla",), "mlp": ("moe",), "kda": None}


@pytest.fixture
def folder(tmp_path):
    """Writes a folder that has no more than a config: whatever reads on, fails otherwise."""

    def folder(**changes):
        (tmp_path / "config.json").write_text(json.dumps(tiny_k3(**SIZES | changes).to_json()))
        return tmp_path

    return folder


CASES = [
    # experts over ep
    ({"moe": dataclasses.replace(MOE, num_experts=6)}, {"ep": 4},
     "layers.1.ffn.experts.down has 6 along 'expert', not a multiple of 4 (ep); legal are 1, 2, 3, 6"),
    # heads over tp, also where the matrix that holds them all could be cut
    ({"kda": dataclasses.replace(HEADS["kda"], num_heads=6)}, {"tp": 4},
     "layers.0.attention.a_log has 6 along 'heads', not a multiple of 4 (tp); legal are 1, 2, 3, 6"),
    (ATTENTION, {"tp": 8}, "mla.num_heads has 4 along 'heads', not a multiple of 8 (tp); legal are 1, 2, 4"),
    # the vocabulary over tp
    ({"vocab_size": 302}, {"tp": 4}, "embed has 302 along 'vocab', not a multiple of 4 (tp); legal are 1, 2, 151, 302"),
    # the hidden size of a layer, of which there are two in a stack: the first one's name
    ({"num_layers": 6, "attention": ("kda", "mla") * 3, "mlp": ("dense",) + ("moe",) * 5,
      "moe": dataclasses.replace(MOE, latent_size=31)}, {"tp": 2},
     "layers.1.ffn.latent_down has 31 along 'latent', not a multiple of 2 (tp); legal are 1, 31"),
    # what is stored apart
    ({"hidden_size": 60}, {"fsdp": 2, "ep": 4},
     "embed has 60 along 'embed', not a multiple of 8 (fsdp x ep); legal are 1, 2, 3, 4, 5, 6, 10, 12, 15, 20, 30, 60"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "sizes", "says"), CASES)
def test_refused_before_weights_or_data_are_read(folder, changes, sizes, says: str, monkeypatch, capsys) -> None:
    path = folder(**changes)
    monkeypatch.setattr(checkpoint, "read_config", lambda _: tiny_k3(**SIZES | changes))
    monkeypatch.setattr(checkpoint, "load_into", None)
    with pytest.raises(LayoutError, match=f"^{re.escape(says)}$"):
        tm.load(path, mesh=sizes)
    flags = ["--model", str(path), "--data", str(path / "none.jsonl"), "--output", str(path / "out")]
    flags += ["--set", f"mesh={json.dumps(sizes)}", "--set", 'lora.targets=["attention"]']
    assert main(["train", "--config", "lora", *flags]) == 1
    assert capsys.readouterr().err == f"trillion-moe train: {says}\n"
    assert [file.name for file in path.iterdir()] == ["config.json"]


def test_what_divides_is_cut(folder) -> None:
    """The sizes that the messages call legal are."""
    for changes, sizes, _ in CASES[:4]:
        fits = dict.fromkeys(sizes, 2)
        assert shardings(Model(tiny_k3(**SIZES | changes)), Layout.make(fits))


def test_adapters_that_a_model_cannot_have_are_found_first(folder, capsys) -> None:
    path = folder()
    flags = ["--model", str(path), "--data", str(path / "none.jsonl"), "--output", str(path / "out")]
    flags += ["--set", 'mesh={"ep": 2}', "--set", 'lora.targets=["layers.9.attention.q"]']
    assert main(["train", "--config", "lora", *flags]) == 1
    assert f"lora, on {path}: target 'layers.9.attention.q' matches nothing" in capsys.readouterr().err


def test_names_are_those_of_adapters_and_files() -> None:
    """Of every array of a model with a stack, a tower and layers by themselves."""
    cfg = tiny_k3(num_layers=6, attention=("kda", "mla") * 3, mlp=("dense",) + ("moe",) * 5, **SIZES)
    model = Model(cfg, plan=depth_plan(cfg, scan=True))
    starts = layer_numbers(model.plan)
    flat, _ = jax.tree_util.tree_flatten_with_path(model)
    names = [leaf_names(starts, path_parts(path)) for path, _ in flat]
    assert names == [place.names for place in places(model)[0]]
    assert max(len(of) for of in names) > 1
    assert len({name for of in names for name in of}) == sum(len(of) for of in names)


def test_heads_that_are_cut_would_not_be_seen_by_their_matrices() -> None:
    """48 columns of 4 heads over 8 devices: it is the number of heads that says no."""
    model = Model(tiny_k3(**SIZES | ATTENTION))
    columns = model.segments[0][0].attention.q_b.shape[1]
    assert columns % 8 == 0
    assert np.gcd(columns, model.config.mla.num_heads) % 8
