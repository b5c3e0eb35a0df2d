"""Adapters trained here, exported and loaded again: the same bits in the same structure, in either naming."""

import dataclasses
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.checkpoint.adapter_tools import (
    FILE,
    Adapter,
    adapted,
    adapters,
    assert_same,
    filled,
    k3,
    linear,
    load_adapter,
    refused,
    repeating,
)
from tests.checkpoint.tools import GOLDENS
from tests.tiny import restacked

import trillion_moe as tm
from trillion_moe.checkpoint import CheckpointError
from trillion_moe.checkpoint.adapter_export import export_adapter
from trillion_moe.checkpoint.adapters import read_adapter
from trillion_moe.checkpoint.fingerprint import fingerprint
from trillion_moe.model import Model
from trillion_moe.ops import dense
from trillion_moe.transforms import GROUPS, LoRAConfig, add_lora, cast, dequantize_experts, quantize_experts
from trillion_moe.transforms.targets import places
from trillion_moe.weights import LoRA, is_weight

NAMES = ["peft", "release"]
ROUTED = {
    "independent": LoRAConfig(rank=2, targets=("routed_experts",), routed="independent"),
    "shared_a": LoRAConfig(rank=3, alpha=7.0, targets=("routed_experts",), routed="shared_a"),
    "shared": LoRAConfig(rank=2, targets=("routed_experts",), routed="shared"),
    "two experts": LoRAConfig(rank=2, targets=("routed_experts",), routed="independent", experts=(2, 0)),
    "one expert, shared a": LoRAConfig(rank=2, targets=("routed_experts",), routed="shared_a", experts=(1,)),
}


def ways_back(model, tmp_path, names: str) -> Adapter:
    """Export, load, compare; -> the exported."""
    plain = tm.remove_lora(model)
    export_adapter(tmp_path / names, model, names=names)
    again = load_adapter(plain, tmp_path / names)
    assert_same(adapters(again), adapters(model))
    assert jax.tree.structure(again) == jax.tree.structure(model)
    return Adapter.read(tmp_path / names)


def product(adapter: Adapter, module: str, expert: int, experts: int) -> np.ndarray:
    """B A of one expert of a fused parameter, in PEFT's layout and scaling, [out, in]."""
    a, b = (adapter.tensors[f"base_model.model.{module}.lora_{f}.weight"].array for f in "AB")
    rank = len(a) // experts
    patterns = ("r", "rank_pattern"), ("lora_alpha", "alpha_pattern")
    r, alpha = (adapter.config[p].get("mlp.experts.gate_up_proj", adapter.config[k]) for k, p in patterns)
    assert r == rank
    return alpha / r * b[:, expert::experts] @ a[expert * rank : (expert + 1) * rank]


# --- structure -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize("cfg", ROUTED.values(), ids=ROUTED)
def test_every_kind_of_expert_adapter_comes_back_as_it_was(cfg, names, tmp_path) -> None:
    exported = ways_back(adapted(repeating(), cfg), tmp_path, names)
    if names == "release":
        chosen = {int(name.split(".")[7]) for name in exported.tensors}
        assert chosen == set(cfg.experts or range(3))


@pytest.mark.parametrize("names", NAMES)
def test_every_group_comes_back(names, tmp_path) -> None:
    model = k3()
    groups = tuple(group for group in GROUPS if group not in ("vision", "kda"))
    exported = ways_back(adapted(model, LoRAConfig(rank=3, targets=groups, rslora=True)), tmp_path, names)
    assert exported.config["lora_alpha"] == pytest.approx(16 / 3**0.5 * 3)


@pytest.mark.parametrize("rank", [3, 4])
def test_an_exported_file_holds_factors_and_nothing_else(rank, tmp_path) -> None:
    """fault 73: of a packed base too, at ranks that are no multiple of 8."""
    model = adapted(quantize_experts(k3()), LoRAConfig(rank=rank, targets=("routed_experts", "attention")))
    for names in NAMES:
        exported = ways_back(model, tmp_path, names)
        for name, tensor in exported.tensors.items():
            assert name.endswith((".lora_A.weight", ".lora_B.weight"))
            assert tensor.dtype == "F32"
            assert "base_model" not in name.removeprefix("base_model.model.")


def test_gate_and_up_with_two_as_become_blocks_of_twice_the_rank(tmp_path) -> None:
    model = adapted(linear(), dataclasses.replace(ROUTED["independent"], alpha=6.0))
    exported = ways_back(model, tmp_path, "peft")
    assert (exported.config["r"], exported.config["lora_alpha"]) == (2, 6)
    assert exported.config["rank_pattern"] == {"mlp.experts.gate_up_proj": 4}
    assert exported.config["alpha_pattern"] == {"mlp.experts.gate_up_proj": 12}
    found = adapters(model)
    for expert in range(3):
        delta = product(exported, "model.layers.1.mlp.experts.base_layer", expert, 3)
        gate, up = (found[f"layers.1.ffn.experts.{name}"] for name in ("gate", "up"))
        expected = [3 * lora.a[expert] @ lora.b[expert] for lora in (gate, up)]
        np.testing.assert_allclose(delta.T, np.concatenate(expected, axis=1), atol=1e-6)


def test_gate_and_up_with_one_a_stay_at_its_rank(tmp_path) -> None:
    model = adapted(linear(), ROUTED["independent"])
    gates = {p.names[0].replace(".gate", ".up"): p.leaf for p in places(model)[0] if p.names[0].endswith("ts.gate")}
    found, treedef = places(model)
    same = [dataclasses.replace(p.leaf, a=gates[p.names[0]].a) if p.names[0] in gates else p.leaf for p in found]
    exported = ways_back(treedef.unflatten(same), tmp_path, "peft")
    assert exported.config["rank_pattern"] == exported.config["alpha_pattern"] == {}
    assert exported.tensors["base_model.model.model.layers.1.mlp.experts.base_layer.lora_A.weight"].shape == (6, 64)


def test_gate_or_up_alone_and_two_scalings(tmp_path) -> None:
    """Layer 1: the gate alone; layer 2: gate and up of other rank and scaling. PEFT scales a pair as one."""
    gate = LoRAConfig(rank=2, alpha=3.0, targets=("layers.1.ffn.experts.gate", "layers.2.ffn.experts.gate"))
    model = adapted(linear(), gate, LoRAConfig(rank=3, alpha=12.0, targets=("layers.2.ffn.experts.up",)))
    export_adapter(tmp_path / "peft", model)
    again = load_adapter(tm.remove_lora(model), tmp_path / "peft")
    before, after = adapters(model), adapters(again)
    assert before.keys() == after.keys()
    for name, lora in before.items():
        np.testing.assert_array_equal(after[name].a, lora.a)
        np.testing.assert_allclose(after[name].scaling * after[name].b, lora.scaling * lora.b, rtol=1e-6)
    ways_back(model, tmp_path, "release")


def test_patterns_name_a_layer_where_layers_disagree(tmp_path) -> None:
    wide = LoRAConfig(rank=4, alpha=4.0, targets=("layers.2.attention.q", "layers.2.ffn.experts.down"))
    model = adapted(linear(), LoRAConfig(rank=2, alpha=4.0, targets=("layers.0.attention.q", "mla")), wide)
    config = ways_back(model, tmp_path, "peft").config
    assert config["rank_pattern"] == {"model.layers.2.self_attn.q_proj": 4, "mlp.experts.down_proj": 4}
    assert set(config["target_modules"]) == {
        *("self_attn.kv_a_proj_with_mqa", "self_attn.kv_b_proj"),  # in every layer that has one
        *("model.layers.1.self_attn.o_proj", "self_attn.q_proj"),  # the first not in layers 0 and 2, the second in all
    }
    assert config["target_parameters"] == ["model.layers.2.mlp.experts.down_proj"]
    pattern = ways_back(model, tmp_path, "release").config["rank_pattern"]
    assert pattern[r"block_sparse_moe.experts.\d+.w2"] == 4


@pytest.mark.parametrize("names", NAMES)
def test_bfloat16_adapters_stay_bfloat16(names, tmp_path) -> None:
    model = adapted(linear(), LoRAConfig(rank=2, targets=("mla", "routed_experts"), dtype="bfloat16"))
    exported = ways_back(model, tmp_path, names)
    assert {tensor.dtype for tensor in exported.tensors.values()} == {"BF16"}


# --- going on where one stopped --------------------------------------------------------------------------------------

RESUMED = """
import sys
import jax
jax.config.update("jax_num_cpu_devices", 8)
import trillion_moe as tm
from tests.checkpoint.adapter_tools import load_adapter
from tests.checkpoint.test_adapters_export import BATCH
model = load_adapter(tm.load(sys.argv[1]), sys.argv[2])
print(repr(float(tm.loss(model, BATCH)[0])))
"""
BATCH = {"tokens": np.random.default_rng(3).integers(4, 300, (2, 9))}


@pytest.mark.slow
def test_a_new_process_goes_on_with_the_loss_of_an_unbroken_run(tmp_path) -> None:
    """fault 72: adapters of experts that a resumed run has lost."""
    model = adapted(linear(), LoRAConfig(rank=2, targets=("attention", "routed_experts"), routed="independent"))
    tm.save(tmp_path / "base", tm.remove_lora(model))
    export_adapter(tmp_path / "adapter", model)
    expected = float(tm.loss(model, BATCH)[0])
    command = [sys.executable, "-c", RESUMED, str(tmp_path / "base"), str(tmp_path / "adapter")]
    paths = os.pathsep.join([str(GOLDENS.parent.parent), *sys.path])
    run = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": paths}, cwd=GOLDENS.parent.parent, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) == expected
    assert float(tm.loss(tm.remove_lora(model), BATCH)[0]) != expected


# --- the base --------------------------------------------------------------------------------------------------------


def test_one_checkpoint_has_one_fingerprint_however_it_is_held() -> None:
    model = quantize_experts(k3())
    known = fingerprint(model)
    assert known == fingerprint(quantize_experts(dequantize_experts(model), layout="kn"))
    assert known == fingerprint(dequantize_experts(model, "float32"))
    stacked = repeating()
    flat = restacked(stacked, scan=False)
    assert fingerprint(stacked) == fingerprint(flat) == fingerprint(cast(stacked, "bfloat16"))


def test_other_weights_or_another_computation_have_another_fingerprint() -> None:
    model = linear()
    known = fingerprint(model)
    assert known == fingerprint(linear()) != fingerprint(linear(seed=1))
    cfg = dataclasses.replace(model.config, moe=dataclasses.replace(model.config.moe, top_k=1))
    assert known != fingerprint(filled(Model(cfg)))
    moved = jax.tree.map(lambda x: x, model)
    moved.norm = moved.norm.at[3].add(0.5)
    assert known != fingerprint(moved)


def test_an_adapter_of_another_base_is_refused(tmp_path) -> None:
    model, other = linear(), linear(seed=1)
    export_adapter(tmp_path / "a", adapted(model, LoRAConfig(rank=2, targets=("mla",))))
    (finding,) = refused(other, tmp_path / "a")
    assert fingerprint(model) in finding
    assert fingerprint(other) in finding
    assert "check_base=False" in finding
    assert_same(read_adapter(tmp_path / "a", other, check_base=False), read_adapter(tmp_path / "a", model))
    assert_same(read_adapter(tmp_path / "a", cast(model, "bfloat16")), read_adapter(tmp_path / "a", model))


# --- refusals, and the folder ----------------------------------------------------------------------------------------


def test_what_cannot_be_exported_is_refused(tmp_path) -> None:
    """fault 82: an adapter without effect; and a model without one, a blueprint, values that are no numbers."""
    model = linear()
    mla = adapted(model, LoRAConfig(rank=2, targets=("mla",)))

    def with_b(change):
        def one(w):
            return dataclasses.replace(w, b=change(w.b)) if isinstance(w, LoRA) else w

        return jax.tree.map(one, mla, is_leaf=is_weight)

    cases = {
        "no adapter": model,
        "without effect": with_b(jnp.zeros_like),
        "not finite": with_b(lambda b: b.at[0, 0].set(jnp.nan)),
        "blueprint": add_lora(Model(model.config), LoRAConfig(rank=2, targets=("mla",))),
    }
    for what, case in cases.items():
        with pytest.raises(CheckpointError, match=what):
            export_adapter(tmp_path / "a", case)
    assert not list(tmp_path.iterdir())


def test_a_folder_is_there_complete_or_not_at_all(tmp_path, monkeypatch) -> None:
    model = adapted(linear(), LoRAConfig(rank=2, targets=("mla",)))

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("trillion_moe.checkpoint.adapter_export.write_text", killed)
        with pytest.raises(KeyboardInterrupt):
            export_adapter(tmp_path / "a", model)
    assert not list(tmp_path.iterdir())
    export_adapter(tmp_path / "a", model)
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["adapter_config.json", FILE]
    before = (tmp_path / "a" / FILE).read_bytes()
    with pytest.raises(CheckpointError, match="exists already"):
        export_adapter(tmp_path / "a", model)
    assert (tmp_path / "a" / FILE).read_bytes() == before
    (tmp_path / "a" / "adapter_config.json").unlink()
    assert "adapter_config.json missing" in refused(tm.remove_lora(model), tmp_path / "a")[0]


def test_the_config_is_plain_json_with_peft_s_keys_only(tmp_path) -> None:
    export_adapter(tmp_path / "a", adapted(linear(), ROUTED["two experts"]))
    ours = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    theirs = json.loads((GOLDENS / "lora" / "attn_shared" / "adapter_config.json").read_text())
    assert ours.keys() <= theirs.keys()


def test_merging_a_loaded_adapter_of_packed_experts_adds_it(tmp_path) -> None:
    """fault 70: dequant(merged) - base is the adapter's product to within a step of the 4-bit numbers."""
    model = quantize_experts(k3())
    grown = adapted(model, LoRAConfig(rank=2, alpha=20.0, targets=("layers.1.ffn.experts.down",)))
    export_adapter(tmp_path / "a", grown, names="release")
    again = load_adapter(model, tmp_path / "a")
    base, exact, merged = (
        np.asarray(dense({p.names[0]: p.leaf for p in places(m)[0]}["layers.1.ffn.experts.down"], np.float32))
        for m in (model, again, tm.merge_lora(again))
    )
    assert np.abs(exact - base).max() > 0.5
    step = np.abs(exact).reshape(8, -1, 32, exact.shape[-1]).max(axis=2, keepdims=True) / 2
    error = np.abs(merged - exact).reshape(8, -1, 32, exact.shape[-1])
    assert (error <= step).all()
    assert np.sqrt(np.mean((merged - exact) ** 2) / np.mean(exact**2)) < 0.15
