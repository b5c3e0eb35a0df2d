"""Adapters that would load in part, wrongly or without effect: refused, with file, tensor, shapes and legal values."""

import dataclasses

import numpy as np
import pytest
from tests.checkpoint.adapter_tools import (
    EXPERTS,
    FILE,
    PEFT,
    SHARED,
    TOWER,
    Adapter,
    adapted,
    draw,
    k3,
    linear,
    load_adapter,
    refused,
)
from tests.checkpoint.tools import GOLDENS, Tensor

import trillion_moe as tm
from trillion_moe.checkpoint.adapter_export import export_adapter
from trillion_moe.model import Model
from trillion_moe.transforms import LoRAConfig
from trillion_moe.transforms.adapters import with_lora

Q = "model.layers.0.self_attn.q_proj"
QA, QB = (f"{PEFT}{Q}.lora_{factor}.weight" for factor in "AB")
INNER, OUTER = "model.layers.1.mlp.experts.base_layer", "model.layers.1.mlp.experts"


@pytest.fixture(scope="module")
def base():
    return tm.load(GOLDENS / "kimi_linear" / "a")


@pytest.fixture(scope="module")
def small():
    return linear()


def only_q() -> Adapter:
    adapter = Adapter.of(2, 2)
    adapter.put(Q, draw(2, 64), draw(24, 2))
    return adapter


# --- adapter_config.json ---------------------------------------------------------------------------------------------

CONFIGS = {
    "use_dora": (True, "DoRA"),
    "bias": ("all", "biases"),
    "lora_bias": (True, "biases"),
    "modules_to_save": (["lm_head"], "whole modules"),
    "fan_in_fan_out": (True, "transposed"),
    "layer_replication": ([[0, 2], [1, 3]], "depth"),
    "trainable_token_indices": ([1, 2], "rows of the embedding"),
    "alora_invocation_tokens": ([1], "part of the tokens"),
    "use_qalora": (True, "QA-LoRA"),
    "kasa_config": ({"beta": 1}, "not known"),
    "a_key_of_tomorrow": (3, "not known"),
    "init_lora_weights": ("pissa_niter_4", "changed"),
    "peft_type": ("IA3", "LORA"),
    "r": (0, "an integer >= 1"),
    "lora_alpha": (None, "a finite number"),
    "rank_pattern": ({"q_proj": 2.5}, "integers >= 1"),
    "alpha_pattern": ({"q_proj": "8"}, "finite numbers"),
    "target_parameters": ("mlp.experts.down_proj", "a list of names"),
    "peft_version": (21, "0.21.2"),
}


@pytest.mark.parametrize("key", CONFIGS)
def test_a_config_that_means_something_else_is_refused_by_name(small, key, tmp_path) -> None:
    adapter, (value, why) = only_q(), CONFIGS[key]
    adapter.config[key] = value
    (finding,) = refused(small, adapter.write(tmp_path / "a"))
    assert finding.startswith(f"adapter_config.json: {key}")
    assert why in finding


def test_a_pattern_that_is_no_regular_expression_or_matches_nothing(small, tmp_path) -> None:
    adapter = only_q()
    adapter.config["rank_pattern"] = {"q_proj(": 2}
    (finding,) = refused(small, adapter.write(tmp_path / "a"))
    assert "'q_proj(' is no regular expression" in finding
    adapter.config |= {"rank_pattern": {"k_proj": 4}, "alpha_pattern": {"q_proj": 4, "proj": 8}}
    assert refused(small, adapter.write(tmp_path / "a")) == (
        "adapter_config.json: rank_pattern 'k_proj' matches no tensor of the adapter",
        "adapter_config.json: alpha_pattern 'proj' matches no tensor of the adapter",
    )


def test_keys_of_training_are_read_over(small, tmp_path) -> None:
    adapter = only_q()
    adapter.config |= Adapter.read(SHARED).config | {"r": 2, "lora_dropout": 0.1, "init_lora_weights": "gaussian"}
    assert load_adapter(small, adapter.write(tmp_path / "a")).segments[0][0].attention.q.scaling == 8 / 2


def test_files_that_are_missing_or_spoilt(small, tmp_path) -> None:
    folder = only_q().write(tmp_path / "a")
    assert refused(small, tmp_path / "b") == ("no such folder",)
    (folder / "adapter_config.json").write_text('{"r": 1, "r": 2}')
    assert "distinct" in refused(small, folder)[0]
    only_q().write(folder)
    data = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(data[:-8])
    assert "truncated" in refused(small, folder)[0]
    (folder / FILE).unlink()
    (folder / "adapter_model.bin").write_bytes(b"")
    assert "adapter_model.safetensors missing; adapter_model.bin is a pickle" in refused(small, folder)[0]


# --- names -----------------------------------------------------------------------------------------------------------

TENSORS = {
    f"{PEFT}{Q}.lora_magnitude_vector": "DoRA",
    f"{PEFT}{Q}.lora_magnitude_vector.weight": "DoRA",
    f"{PEFT}{Q}.lora_B.bias": "bias",
    f"{PEFT}model.embed_tokens.lora_embedding_A": "embedding",
    f"{PEFT}lm_head.modules_to_save.weight": "modules_to_save",
    f"{PEFT}lm_head.weight": "no factor of an adapter",
    f"{PEFT}{Q}.lora_A.default.weight": "no factor of an adapter",
    f"{PEFT}model.layers.1.mlp.gate.lora_A.weight": "router",
    f"{PEFT}model.layers.1.block_sparse_moe.gate.lora_A.weight": "router",
    f"{PEFT}model.layers.0.self_attn.q_conv1d.lora_A.weight": "no matrix",
    f"{PEFT}model.layers.0.self_attn.q_proj_.lora_A.weight": "matches no matrix",
    f"{PEFT}model.layers.1.mlp.experts.3.w1.lora_A.weight": "experts 0 to 2",
    f"{PEFT}language_model.{PEFT}{Q}.lora_A.weight": "matches no matrix",
}


@pytest.mark.parametrize("name", TENSORS)
def test_one_tensor_too_many_and_nothing_is_loaded(small, name, tmp_path) -> None:
    """fault 72 (a prefix twice), fault 73 (other tensors than factors)."""
    adapter = only_q()
    adapter.tensors[name] = Tensor.of("F32", draw(2, 3))
    (finding,) = refused(small, adapter.write(tmp_path / "a"))
    assert finding.startswith(f"{FILE}: {name}: ")
    assert TENSORS[name] in finding


def test_halves_duplicates_and_mixed_prefixes(small, tmp_path) -> None:
    adapter = only_q()
    del adapter.tensors[QB]
    assert refused(small, adapter.write(tmp_path / "a")) == (f"{FILE}: {QA}: its lora_B is missing",)
    adapter = Adapter.of(2, 2)
    for module in ("self_attn.f_a_proj", "self_attn.forget_gate.f_a_proj"):
        adapter.put(f"model.layers.0.{module}", draw(2, 64), draw(8, 2))
    assert all("duplicate" in finding for finding in refused(small, adapter.write(tmp_path / "a")))
    adapter = only_q()
    adapter.put("language_model.model.layers.2.self_attn.q_proj", draw(2, 64), draw(24, 2))
    (finding,) = refused(small, adapter.write(tmp_path / "a"))
    assert "mixed prefixes: 2 under 'language_model.model.' and 2 under 'model.' tensors" in finding


def test_an_expert_fused_and_by_itself(small, tmp_path) -> None:
    adapter = Adapter.of(2, 2)
    adapter.put(OUTER, draw(6, 64), draw(48, 6))
    adapter.put("model.layers.1.mlp.experts.0.w3", draw(2, 64), draw(24, 2))
    (finding,) = refused(small, adapter.write(tmp_path / "a"))
    assert "duplicate" in finding


# --- without effect --------------------------------------------------------------------------------------------------


def test_an_adapter_that_matches_nothing_or_does_nothing(small, tmp_path) -> None:
    """fault 82: served, and the output is the base's, byte for byte."""
    adapter = Adapter.of(2, 2)
    assert "holds no tensor" in refused(small, adapter.write(tmp_path / "a"))[0]
    adapter.put("transformer.h.0.attn.c_attn", draw(2, 64), draw(24, 2))
    assert all("matches no matrix" in finding for finding in refused(small, adapter.write(tmp_path / "a")))
    for factors in ((np.zeros((2, 64)), draw(24, 2)), (draw(2, 64), np.zeros((24, 2)))):
        adapter = Adapter.of(2, 2)
        adapter.put(Q, *factors)
        assert "without effect" in refused(small, adapter.write(tmp_path / "a"))[0]
    adapter = only_q()
    adapter.config["lora_alpha"] = 0
    assert "without effect" in refused(small, adapter.write(tmp_path / "a"))[0]


def test_experts_that_the_config_names_and_the_file_has_lost(base, tmp_path) -> None:
    """fault 75: of an adapter of attention and experts, the latter were dropped by whoever saved it."""
    adapter = Adapter.read(EXPERTS)
    adapter.tensors = {name: tensor for name, tensor in adapter.tensors.items() if ".mlp.experts." not in name}
    (finding,) = refused(base, adapter.write(tmp_path / "a"))
    assert "mlp.experts.gate_up_proj, mlp.experts.down_proj" in finding


def test_values_that_are_no_numbers(small, tmp_path) -> None:
    adapter, b = only_q(), draw(24, 2)
    b[3, 1] = np.nan
    adapter.put_factor(QB, b)
    assert refused(small, adapter.write(tmp_path / "a")) == (f"{FILE}: {QB}: 1 values are not finite",)
    adapter.tensors[QB] = Tensor("F64", (24, 2), draw(24, 2).astype(np.float64).tobytes())
    assert "wrong dtype F64: legal is BF16 or F16 or F32" in refused(small, adapter.write(tmp_path / "a"))[0]


# --- shapes ----------------------------------------------------------------------------------------------------------


def test_shapes_and_ranks(small, tmp_path) -> None:
    adapter = only_q()
    adapter.put(Q, draw(2, 63), draw(24, 2))
    (finding,) = refused(small, adapter.write(tmp_path / "a"))
    assert f"{QA} [2, 63], its lora_B [24, 2]: wrong shape" in finding
    assert "[64, 24] and needs A [r, 64] and B [24, r]" in finding
    adapter.put(Q, draw(3, 64), draw(24, 3))
    (finding,) = refused(small, adapter.write(tmp_path / "a"))
    assert "rank 3, but adapter_config.json says 2" in finding
    adapter = Adapter.of(2, 2)
    adapter.put(INNER, draw(7, 64), draw(48, 7))
    adapter.put(OUTER, draw(6, 24), draw(64, 6))
    (finding,) = refused(small, adapter.write(tmp_path / "a"))
    assert "A [3 r, 64] and B [48, r 3] of gate_up_proj" in finding


def test_experts_as_wide_as_the_model_do_not_fit_a_latent_one(tmp_path) -> None:
    """fault 81: buffers of the model's width where the experts' latent is half of it."""
    adapter = Adapter.of(2, 2)
    adapter.put("language_model.model.layers.1.mlp.experts", draw(16, 64), draw(64, 16))
    (finding,) = refused(k3(), adapter.write(tmp_path / "a"))
    assert "A [8 r, 32] and B [64, r 8] of gate_up_proj or A [8 r, 32] and B [32, r 8] of down_proj" in finding


def transposed(adapter: Adapter, module: str, experts: int) -> None:
    """As PEFT before 0.19 held a pair: the roles of A and B changed, each in the other's layout."""
    names = [f"{PEFT}{module}.lora_{factor}.weight" for factor in "AB"]
    a, b = (adapter.tensors[name].array for name in names)
    rank = len(a) // experts
    a, b = a.reshape(experts, rank, -1), b.reshape(len(b), rank, experts).transpose(2, 1, 0)
    adapter.put_factor(names[0], b.reshape(experts * rank, -1))
    adapter.put_factor(names[1], a.transpose(2, 1, 0).reshape(-1, rank * experts))


def test_transposed_adapters_of_an_older_peft(base, tmp_path) -> None:
    """In the golden model gate_up_proj is square, [64, 64]: down_proj gives them away."""
    adapter = Adapter.read(EXPERTS)
    for layer in range(1, 5):
        for module in ("experts.base_layer", "experts"):
            transposed(adapter, f"model.layers.{layer}.mlp.{module}", 8)
    findings = refused(base, adapter.write(tmp_path / "a"))
    assert len(findings) == 4
    for layer, finding in enumerate(findings, 1):
        name = f"{PEFT}model.layers.{layer}.mlp.experts.lora_A.weight"
        assert f"{name} [32, 64], its lora_B [32, 32]: transposed: A reads 64 and B writes 32" in finding
        assert "PEFT before 0.19" in finding


@pytest.mark.parametrize("alone", ["gate_up", "down"])
def test_a_transposed_parameter_by_itself(small, alone, tmp_path) -> None:
    adapter = Adapter.of(2, 2)
    adapter.put(OUTER, draw(6, 48 if alone == "gate_up" else 64), draw(64 if alone == "gate_up" else 24, 6))
    (finding,) = refused(small, adapter.write(tmp_path / "a"))
    assert f"{alone}_proj the wrong way round" in finding


def test_a_square_parameter_by_itself_needs_the_version_that_trained_it(base, tmp_path) -> None:
    adapter = Adapter.read(EXPERTS)
    adapter.tensors = {
        name.replace(".base_layer", ""): tensor
        for name, tensor in adapter.tensors.items()
        if ".experts.base_layer." in name
    }
    adapter.config["target_parameters"] = ["mlp.experts.gate_up_proj"]
    assert load_adapter(base, adapter.write(tmp_path / "a"))
    for version in ("0.18.1", None):
        adapter.config["peft_version"] = version
        findings = refused(base, adapter.write(tmp_path / "a"))
        assert len(findings) == 4
        assert "gate_up_proj is [64, 64]" in findings[0]
        assert "0.19 or later" in findings[0]
    adapter.config["peft_version"] = "0.19.0"
    export_adapter(tmp_path / "ours", load_adapter(base, adapter.write(tmp_path / "a")))
    assert load_adapter(base, tmp_path / "ours")  # we need no version to know how we wrote it


# --- what one array cannot hold --------------------------------------------------------------------------------------


def test_experts_of_one_layer_with_different_ranks(small, tmp_path) -> None:
    adapter = Adapter.of(2, 2, rank_pattern={"experts.1.w1": 3})
    for expert, rank in ((0, 2), (1, 3)):
        adapter.put(f"model.layers.1.mlp.experts.{expert}.w1", draw(rank, 64), draw(24, rank))
    (finding,) = refused(small, adapter.write(tmp_path / "a"))
    assert "layers.1.ffn.experts.gate: the experts of a layer must have one rank" in finding
    assert "rank 2, scaling 1" in finding


def test_an_exported_note_that_the_tensors_contradict(small, tmp_path) -> None:
    """Someone has changed the file since, and kept the note of what was one array."""
    cfg = LoRAConfig(rank=2, targets=("layers.1.ffn.experts.down",), routed="shared_a", experts=(0, 2))
    export_adapter(tmp_path / "a", adapted(small, cfg))
    path = tmp_path / "a" / FILE
    data = bytearray(path.read_bytes())
    length = 8 + int.from_bytes(data[:8], "little")
    assert b'lora_A.weight":{"dtype":"F32","shape":[6,24],"data_offsets":[0,' in data[:length]
    data[length : length + 4] = np.float32(3).tobytes()
    path.write_bytes(data)
    (finding,) = refused(small, tmp_path / "a")
    assert "layers.1.ffn.experts.down: a was one for all experts when exported" in finding
    path.write_bytes(data[:8] + data[8:length].replace(b"[0, 2]", b"[0, 1]") + data[length:])
    (finding,) = refused(small, tmp_path / "a")
    assert "B is not 0 in the others" in finding


def test_a_part_of_the_tower(tmp_path) -> None:
    adapter = Adapter.of(2, 2)
    adapter.put("vision_tower.encoder.blocks.1.wo", draw(2, 32), draw(32, 2))
    (finding,) = refused(k3(vision=TOWER), adapter.write(tmp_path / "a"))
    assert "blocks [0] have no adapter" in finding


# --- models ----------------------------------------------------------------------------------------------------------


def test_models_that_cannot_take_an_adapter(small, tmp_path) -> None:
    folder = only_q().write(tmp_path / "a")
    assert "has adapters already" in refused(load_adapter(small, folder), folder)[0]
    assert "a blueprint" in refused(Model(small.config), folder)[0]


def test_all_is_put_on_or_nothing(small) -> None:
    bare = dataclasses.replace(
        adapted(small, LoRAConfig(rank=2, targets=("mla",))).segments[0][1].attention.q, base=None
    )
    with pytest.raises(ValueError, match="no adapters are given"):
        with_lora(small, {})
    for name in ("layers.1.attention.q_norm", "layers.9.attention.q", "layers.1.ffn.router.weight"):
        with pytest.raises(ValueError, match=f"'{name}' is no matrix"):
            with_lora(small, {"layers.1.attention.q": bare, name: bare})
    once = with_lora(small, {"layers.1.attention.q": bare})
    with pytest.raises(ValueError, match="has an adapter already"):
        with_lora(once, {"layers.1.attention.q": bare})
