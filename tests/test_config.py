"""`config.json` <-> ModelConfig: nothing is lost, nothing is ignored, every field reaches every spelling."""

import copy
import dataclasses
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trillion_moe import config as config_module
from trillion_moe.config import (
    CheckpointNames,
    ConfigError,
    KDAConfig,
    MLAConfig,
    ModelConfig,
    MoEConfig,
    VisionConfig,
)  # fmt: skip

FOLDER = Path(__file__).parent / "goldens" / "config"
NAMES = K3_RELEASED, K3, MXFP4, LINEAR, BENCH = (
    "kimi_k3_config", "kimi_k3_a", "kimi_k3_a_mxfp4", "kimi_linear_a", "bench_config",
)  # fmt: skip
ABSENT = object()  # as a value to set: take the key away
Edit = dict[str, Any]  # dotted path -> value


def load(name: str) -> dict[str, Any]:
    data = json.loads((FOLDER / f"{name}.json").read_text())
    return {**data["config"], "model_type": "kimi_linear"} if name == "bench_config" else data


def edited(name: str, edit: Edit) -> dict[str, Any]:
    data = load(name)
    for dotted, value in edit.items():
        *parents, last = dotted.split(".")
        node = data
        for parent in parents:
            node = node.setdefault(parent, {})
        if value is ABSENT:
            del node[last]
        else:
            node[last] = copy.deepcopy(value)
    return data


def config(name: str, edit: Edit | None = None) -> ModelConfig:
    return ModelConfig.from_json(edited(name, edit or {}))


def refusal(data: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_json(data, where="some/config.json")
    assert str(caught.value).startswith("some/config.json: ")
    return caught.value


def reread(cfg: ModelConfig) -> ModelConfig:
    return ModelConfig.from_json(json.loads(json.dumps(cfg.to_json())))


# --- reading real files -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_json_to_config_to_json_is_the_identity(name: str) -> None:
    data = load(name)
    cfg = ModelConfig.from_json(data)
    assert json.dumps(cfg.to_json()) == json.dumps(data)  # order and 1 against 1.0 included
    assert hash(cfg) == hash(ModelConfig.from_json(data))
    assert pickle.loads(pickle.dumps(cfg)).to_json() == data
    assert "source" not in repr(cfg)


def test_the_released_k3() -> None:
    cfg = ModelConfig.from_file(FOLDER / "kimi_k3_config.json")
    mla = [i for i, kind in enumerate(cfg.attention) if kind == "mla"]
    assert mla == [*range(3, 92, 4), 92]
    assert (cfg.attention.count("kda"), cfg.attention.count("mla"), len(cfg.attention)) == (69, 24, 93)
    assert cfg.attention[0] == "kda"
    assert cfg.mlp == ("dense",) + ("moe",) * 92
    assert cfg.kda == KDAConfig(num_heads=96, head_dim=128, conv_width=4, gate_lower_bound=-5.0, full_rank_gate=True)
    assert cfg.mla == MLAConfig(
        num_heads=96, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        output_gate=True, lora_norm_eps=1e-6,
    )  # fmt: skip
    assert cfg.mla.qk_head_dim == 192
    assert cfg.moe == MoEConfig(
        num_experts=896, top_k=16, hidden_size=3072, latent_size=3584, latent_norm=True, num_shared=2,
        renormalize=True, scaling_factor=1.0, num_groups=1, topk_groups=1,
    )  # fmt: skip
    assert cfg.vision == VisionConfig(
        hidden_size=1024, num_layers=27, num_heads=12, qkv_size=1536, mlp_size=4096, patch_size=14, merge=(2, 2),
        pos_emb_height=64, pos_emb_width=64, pos_emb_time=4, projector_eps=1e-5, norm_eps=1.1920929e-07,
        text_hidden_size=7168,
    )  # fmt: skip
    assert (cfg.vision.head_dim, cfg.vision.projector_size) == (128, 4096)
    assert (cfg.activation, cfg.situ_beta, cfg.situ_linear_beta, cfg.attn_res_block) == ("situ", 4.0, 25.0, 12)
    assert (cfg.bos_id, cfg.eos_ids, cfg.pad_id, cfg.media_id) == (163584, (163586,), 163839, 163605)
    assert (cfg.dtype, cfg.tie_embeddings, cfg.quantization) == ("bfloat16", False, "mxfp4")
    assert cfg.checkpoint == CheckpointNames("language_model.model.", "release")


def test_kimi_linear_has_neither_gate_bound_nor_latent() -> None:
    cfg = config(LINEAR)
    assert cfg.attention == ("kda", "kda", "mla", "kda", "mla")
    assert cfg.kda == KDAConfig(num_heads=4, head_dim=16, conv_width=4)
    assert (cfg.kda.gate_lower_bound, cfg.kda.full_rank_gate, cfg.kda.a_log_shape) == (None, False, None)
    assert cfg.moe is not None
    assert cfg.mla is not None
    assert (cfg.moe.latent_size, cfg.moe.latent_norm, cfg.moe.scaling_factor) == (None, False, 2.446)
    assert (cfg.mla.q_lora_rank, cfg.mla.output_gate, cfg.activation, cfg.vision) == (None, False, "silu", None)
    assert cfg.checkpoint == CheckpointNames("model.", "release")


def test_transformers_spelling_alone_takes_transformers_defaults() -> None:
    cfg = config(BENCH)
    assert cfg.attention == ("kda", "kda", "kda", "mla") * 2
    assert cfg.mlp == ("dense",) + ("moe",) * 7
    assert cfg.moe == MoEConfig(num_experts=16, top_k=4, hidden_size=192, num_shared=1, scaling_factor=2.446)
    assert (cfg.rms_norm_eps, cfg.dtype, cfg.eos_ids, cfg.bos_id) == (1e-5, "float32", (), None)


RUNTIME_KEYS = ("layer_types", "mlp_layer_types", "linear_conv_kernel_dim", "linear_head_dim", "linear_num_heads")
RELEASE_ONLY: Edit = dict.fromkeys(RUNTIME_KEYS, ABSENT)
RUNTIME_ONLY: Edit = {"linear_attn_config": ABSENT, "first_k_dense_replace": ABSENT}


def test_each_spelling_alone_says_the_same() -> None:
    assert config(LINEAR) == config(LINEAR, RELEASE_ONLY) == config(LINEAR, RUNTIME_ONLY)


def test_defaults_that_differ_between_libraries_are_required_in_the_release_spelling() -> None:
    gone: Edit = {"rms_norm_eps": ABSENT, "routed_scaling_factor": ABSENT}
    error = refusal(edited(LINEAR, RELEASE_ONLY | gone))
    assert all(name in str(error) for name in gone)
    assert config(LINEAR, RUNTIME_ONLY | gone) == config(LINEAR)


def test_aliases_lists_and_nulls_survive() -> None:
    edit: Edit = {
        "torch_dtype": "float32", "dtype": ABSENT, "norm_topk_prob": True, "moe_renormalize": ABSENT, "n_group": 1,
        "num_expert_group": ABSENT, "num_local_experts": 8, "eos_token_id": [2, 3], "pad_token_id": None,
        "rope_scaling": None, "rope_theta": 10000.0, "num_key_value_heads": None, "attn_res_block_size": 0,
        "mla_use_nope": True, "attention_dropout": 0, "routed_scaling_factor": 2,
    }  # fmt: skip
    data = edited(LINEAR, edit)
    cfg = ModelConfig.from_json(data)
    assert json.dumps(cfg.to_json()) == json.dumps(data)
    assert (cfg.eos_ids, cfg.pad_id, cfg.attn_res_block) == ((2, 3), None, None)


def test_top_level_quantization_config_is_the_same() -> None:
    data = load(MXFP4)
    data["quantization_config"] = data["text_config"].pop("quantization_config")
    assert ModelConfig.from_json(data) == config(MXFP4)
    assert ModelConfig.from_json(data).to_json() == data


def test_from_file_takes_a_folder_and_names_the_file_in_errors(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(load(K3)))
    assert ModelConfig.from_file(tmp_path) == ModelConfig.from_file(str(file)) == config(K3)
    for text, says in (("{", "JSON"), ('{"a": 1, "a": 2}', "'a' is there twice"), ("[]", "model_type is missing")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=says) as caught:
            ModelConfig.from_file(tmp_path)
        assert str(file) in str(caught.value)


def test_every_inert_key_has_a_reason_and_no_other_meaning() -> None:
    assert all(len(reason) > 10 for reason in config_module.INERT.values())
    read = {p for row in config_module.SCHEMA.keys for s in row.spellings for p in s.paths}
    read |= {check.path for check in config_module.SCHEMA.checks}
    assert not read & set(config_module.INERT)


# --- refusals ---------------------------------------------------------------------------------------------------------

TEXT, KDA, VISION = "text_config.", "text_config.linear_attn_config.", "vision_config."
QUANT, WEIGHTS = "text_config.quantization_config.", "text_config.quantization_config.config_groups.group_0.weights."
ALL_KDA = [*range(1, 9)]

REFUSED: list[tuple[str, Edit, tuple[str, ...]]] = [
    # unknown keys, with their dotted path
    (K3, {"frobnicate": 1}, ("unknown key frobnicate",)),
    (K3, {TEXT + "frobnicate": None}, ("unknown key text_config.frobnicate",)),
    (K3, {TEXT + "num_expert": 3}, ("unknown key text_config.num_expert (is num_experts meant?)",)),
    (K3, {KDA + "frobnicate": 1}, ("unknown key text_config.linear_attn_config.frobnicate",)),
    (K3, {KDA + "num_v_heads": 5}, ("unknown key text_config.linear_attn_config.num_v_heads",)),
    (K3, {VISION + "frobnicate": 1}, ("unknown key vision_config.frobnicate",)),
    (K3, {"trillion_moe.kda.frobnicate": 1}, ("unknown key trillion_moe.kda.frobnicate",)),
    (K3, {"hidden_size": 64}, ("unknown key hidden_size",)),
    (MXFP4, {QUANT + "frobnicate": 1}, ("unknown key text_config.quantization_config.frobnicate",)),
    (LINEAR, {"linear_num_value_heads": 8}, ("unknown key linear_num_value_heads",)),
    (LINEAR, {"linear_num_key_heads": 4}, ("unknown key linear_num_key_heads",)),
    (LINEAR, {"vision_config": {}}, ("unknown key vision_config",)),
    (LINEAR, {"media_placeholder_token_id": 3}, ("unknown key media_placeholder_token_id",)),
    (K3, {"text_config": [1]}, ("text_config = [1]: legal is an object",)),
    # the model type
    (K3, {"model_type": "gpt2"}, ("model_type = 'gpt2'", "'kimi_k3' or 'kimi_linear'")),
    (K3, {"model_type": ABSENT}, ("model_type is missing",)),
    (K3, {TEXT + "model_type": "llama"}, ("text_config.model_type = 'llama'", "'kimi_linear'")),
    # two spellings that disagree: both keys, both values
    *((LINEAR, {b: y}, (f"{a} = {x}", f"{b} = {y}")) for a, x, b, y in (
        ("linear_attn_config.head_dim", 16, "linear_head_dim", 32), ("num_experts", 8, "num_local_experts", 9),
        ("linear_attn_config.num_heads", 4, "linear_num_heads", 8), ("num_shared_experts", 1, "n_shared_experts", 2),
        ("linear_attn_config.short_conv_kernel_size", 4, "linear_conv_kernel_dim", 3),
        ("num_experts_per_token", 2, "num_experts_per_tok", 3), ("num_expert_group", 1, "n_group", 2))),
    (LINEAR, {"norm_topk_prob": False}, ("moe_renormalize = True", "norm_topk_prob = False")),
    (LINEAR, {"torch_dtype": "bfloat16"}, ("dtype = 'float32'", "torch_dtype = 'bfloat16'")),
    (LINEAR, {"layer_types": ["full_attention"] + ["linear_attention"] * 4},
     ("kda_layers", "full_attn_layers", "layer_types", "layer 1 kda, layer 3 mla, layer 5 mla",
      "layer 1 mla, layer 3 kda, layer 5 kda")),
    (LINEAR, {"first_k_dense_replace": 2}, ("first_k_dense_replace: layer 2 dense", "mlp_layer_types: layer 2 moe")),
    (K3, {"bos_token_id": 1}, ("text_config.bos_token_id = 505", "bos_token_id = 1")),
    (K3, {"eos_token_id": [506, 7]}, ("text_config.eos_token_id = 506", "eos_token_id = [506, 7]")),
    (K3, {"pad_token_id": None}, ("text_config.pad_token_id = 511", "pad_token_id = None")),
    (K3, {"dtype": "bfloat16"}, ("text_config.dtype = 'float32'", "dtype = 'bfloat16'")),
    (K3, {"tie_word_embeddings": True}, ("text_config.tie_word_embeddings = False", "tie_word_embeddings = True")),
    # layer lists
    (K3, {KDA + "kda_layers": [0, 1, 2, 3, 5, 6, 7]}, ("kda_layers holds [0]", "from 1")),
    (K3, {KDA + "full_attn_layers": [4, 8, 9]}, ("full_attn_layers holds [9]", "num_hidden_layers = 8")),
    (K3, {KDA + "full_attn_layers": [3, 4, 8]}, ("name layers [3] more than once",)),
    (K3, {KDA + "full_attn_layers": [4, 4, 8]}, ("name layers [4] more than once",)),
    (K3, {KDA + "full_attn_layers": [4]}, ("leave out layers [8] of 1..8",)),
    (K3, {KDA + "kda_layers": [0, 1, 2, 4, 5, 6], KDA + "full_attn_layers": [3, 7]}, ("[0]", "layers [8]")),
    (K3, {KDA + "full_attn_layers": ABSENT}, ("full_attn_layers is missing beside",)),
    (K3, {KDA + "kda_layers": "1-7"}, ("kda_layers = '1-7'",)),
    (K3, {TEXT + "num_hidden_layers": 9}, ("leave out layers [9]",)),
    (K3, {KDA + "kda_layers": ABSENT, KDA + "full_attn_layers": ABSENT},
     ("missing", "kda_layers + text_config.linear_attn_config.full_attn_layers or text_config.layer_types")),
    (K3, {TEXT + "first_k_dense_replace": 9}, ("first_k_dense_replace = 9", "from 0 to num_hidden_layers = 8")),
    (K3, {TEXT + "first_k_dense_replace": ABSENT}, ("first_k_dense_replace or text_config.mlp_layer_types",)),
    (LINEAR, {"layer_types": ["linear_attention"] * 4}, ("layer_types has 4 entries", "num_hidden_layers = 5")),
    (LINEAR, {"layer_types": ["sliding_attention"] * 5}, ("'sliding_attention' at layer 1", "'full_attention'")),
    # values that would change the computation
    (K3, {TEXT + "num_nextn_predict_layers": 1}, ("num_nextn_predict_layers = 1", "is 0")),
    (K3, {TEXT + "mla_use_nope": False}, ("mla_use_nope = False", "is True")),
    (K3, {TEXT + "moe_router_activation_func": "softmax"}, ("moe_router_activation_func = 'softmax'", "'sigmoid'")),
    (K3, {TEXT + "topk_method": "greedy"}, ("topk_method = 'greedy'", "'noaux_tc'")),
    (K3, {TEXT + "moe_layer_freq": 2}, ("moe_layer_freq = 2", "is 1")),
    (K3, {TEXT + "hidden_act": "gelu"}, ("hidden_act = 'gelu'", "'situ' or 'silu'")),
    (LINEAR, {"attention_bias": True}, ("attention_bias = True", "is False")),
    (LINEAR, {"attention_bias": 0}, ("attention_bias = 0", "is False")),
    (LINEAR, {"attention_dropout": 0.1}, ("attention_dropout = 0.1", "is 0")),
    (LINEAR, {"num_key_value_heads": 2}, ("num_key_value_heads = 2", "need 4")),
    (LINEAR, {"qk_head_dim": 25}, ("qk_head_dim = 25", "need 24")),
    (K3, {TEXT + "pruned_heads": {"1": [0]}}, ("pruned_heads",)),
    *((K3, {VISION + name: True}, (f"vision_config.{name} = True", "is False")) for name in (
        "attn_bias", "linear_bias", "patch_embed_proj_bias")),
    *((K3, {VISION + name: "other"}, (f"vision_config.{name} = 'other'", legal)) for name, legal in (
        ("norm_type", "rmsnorm"), ("activation_func", "gelu_pytorch_tanh"), ("mlp_type", "mlp2"),
        ("merge_type", "sd2_tpool"), ("mm_projector_type", "patchmergerv2"), ("pos_emb_type", "divided_fixed"),
        ("pos_emb_interpolation_mode", "bilinear"), ("projector_hidden_act", "gelu"))),
    # quantization
    (MXFP4, {QUANT + "format": "pack-quantized"}, ("quantization_config.format = 'pack-quantized'", "'mxfp4-pack-")),
    (MXFP4, {QUANT + "format": ABSENT}, ("quantization_config.format is missing", "'mxfp4-pack-quantized'")),
    (MXFP4, {QUANT + "config_groups.group_0.format": "nvfp4-pack-quantized"}, ("group_0.format = 'nvfp4-pack-",)),
    (MXFP4, {QUANT + "quant_method": "gptq"}, ("quant_method = 'gptq'", "'compressed-tensors'")),
    (MXFP4, {QUANT + "kv_cache_scheme": {"num_bits": 8}}, ("kv_cache_scheme",)),
    (MXFP4, {QUANT + "config_groups.group_1": {}}, ("one group in config_groups",)),
    (MXFP4, {QUANT + "config_groups.group_0.input_activations": {"num_bits": 8}}, ("input_activations",)),
    (MXFP4, {TEXT + "quantization_config": "mxfp4"}, ("quantization_config must be an object",)),
    *((MXFP4, {WEIGHTS + name: value}, (f"weights.{name} = {value!r}", legal)) for name, value, legal in (
        ("group_size", 16, "32"), ("num_bits", 8, "4"), ("type", "int", "'float'"), ("symmetric", False, "True"),
        ("strategy", "channel", "'group'"))),
    (MXFP4, {WEIGHTS + "strategy": ABSENT}, ("weights.strategy is missing", "'group'")),
    (MXFP4, {TEXT + "routed_expert_hidden_size": 40}, ("(40, 64)", "multiples of 32")),
    # numbers that do not fit each other
    (LINEAR, {"num_experts_per_token": 9}, ("moe.top_k = 9 exceeds moe.num_experts = 8",)),
    (LINEAR, {"num_expert_group": 3}, ("moe.num_groups = 3 does not divide moe.num_experts = 8",)),
    (LINEAR, {"num_expert_group": 8}, ("moe.num_groups = 8 leaves 1",)),
    (LINEAR, {"topk_group": 2}, ("moe.topk_groups = 2 exceeds moe.num_groups = 1",)),
    (LINEAR, {"num_expert_group": 4, "num_experts_per_token": 3}, ("moe.top_k = 3 exceeds the 2 experts",)),
    (LINEAR, {"num_expert_group": 2, "use_grouped_topk": False}, ("use_grouped_topk = False", "need True")),
    (LINEAR, {"latent_moe_use_norm": True}, ("moe.latent_norm = True has no effect",)),
    (LINEAR, {"activation_situ_beta": 4.0}, ("situ_beta = 4.0 has no effect",)),
    (LINEAR, {"eos_token_id": [2, 160]}, ("eos_ids = 160 is outside vocab_size = 160",)),
    (LINEAR, {"trillion_moe.kda.a_log_shape": [3]}, ("a_log_shape = (3,)", "num_heads = 4")),
    (LINEAR, {"trillion_moe.kda.a_log_shape": [2, 2]}, ("a_log_shape = (2, 2)",)),
    (K3, {VISION + "text_hidden_size": 65}, ("vision.text_hidden_size = 65 must equal hidden_size = 64",)),
    (K3, {VISION + "mm_hidden_size": 33}, ("vision_config.mm_hidden_size = 33", "need 32")),
    (K3, {VISION + "qkv_hidden_size": 49}, ("vision.qkv_size = 49 is not a multiple of vision.num_heads = 2",)),
    (K3, {VISION + "qkv_hidden_size": 44}, ("44 / 2 = 22", "multiple of 4")),
    (K3, {"media_placeholder_token_id": ABSENT}, ("media_placeholder_token_id",)),
    # types and ranges
    (K3, {TEXT + "hidden_size": "64"}, ("text_config.hidden_size = '64'", "an integer >= 1")),
    (K3, {TEXT + "num_experts": True}, ("text_config.num_experts = True", "an integer from 1 to 100000")),
    (K3, {TEXT + "num_hidden_layers": 8.0}, ("text_config.num_hidden_layers = 8.0",)),
    (K3, {TEXT + "rms_norm_eps": float("nan")}, ("text_config.rms_norm_eps = nan", "a finite number > 0")),
    (K3, {TEXT + "q_lora_rank": 0}, ("text_config.q_lora_rank = 0", "an integer >= 1 or null")),
    (K3, {TEXT + "dtype": "float8", "dtype": "float8"}, ("text_config.dtype = 'float8'", "'bfloat16'")),
    (K3, {KDA + "gate_lower_bound": 5.0}, ("gate_lower_bound = 5.0", "< 0")),
    (K3, {VISION + "merge_kernel_size": [2]}, ("merge_kernel_size = [2]", "two integers")),
    (LINEAR, {"tie_word_embeddings": 0}, ("tie_word_embeddings = 0", "true or false")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "edit", "says"), REFUSED, ids=[", ".join(edit) for _, edit, _ in REFUSED])
def test_refused_by_name(name: str, edit: Edit, says: tuple[str, ...]) -> None:
    error = refusal(edited(name, edit))
    assert all(part in str(error) for part in says), str(error)
    assert len(error.findings) <= 2, str(error)  # no cascade of consequences


def test_all_findings_come_at_once() -> None:
    gone = ("vocab_size", "kv_lora_rank", "num_experts", "moe_intermediate_size")
    edit: Edit = dict.fromkeys(gone, ABSENT) | {"num_key_value_heads": 4, "frobnicate": 1, "attention_bias": True}
    error = refusal(edited(LINEAR, edit | {"linear_head_dim": 3}))
    assert len(error.findings) == 4
    assert all(
        name in str(error) for name in (*gone, "num_local_experts", "frobnicate", "attention_bias", "linear_head_dim")
    )
    both = refusal(edited(LINEAR, {"num_experts_per_token": 9, "eos_token_id": 999, "frobnicate": 1}))
    assert all(word in str(both) for word in ("moe.top_k", "unknown key"))
    assert pickle.loads(pickle.dumps(both)).findings == both.findings


def test_groups_are_read() -> None:
    cfg = config(LINEAR, {"num_expert_group": 4, "topk_group": 2, "use_grouped_topk": True})
    assert cfg.moe is not None
    assert (cfg.moe.num_groups, cfg.moe.topk_groups) == (4, 2)
    config(LINEAR, {"use_grouped_topk": False})  # one group: inert


# --- writing ----------------------------------------------------------------------------------------------------------


def change(cfg: ModelConfig, **changes: Any) -> ModelConfig:
    """`cfg` with fields replaced; `kda__head_dim` is a field of a section."""
    parts: dict[str, dict[str, Any]] = {}
    for name, value in changes.items():
        section, _, field = name.rpartition("__")
        parts.setdefault(section, {})[field] = value
    top = parts.pop("", {})
    return dataclasses.replace(cfg, **top, **{s: dataclasses.replace(getattr(cfg, s), **p) for s, p in parts.items()})


CHANGES: dict[str, st.SearchStrategy[Any]] = {
    "dtype": st.sampled_from(["bfloat16", "float32", "float16"]), "rms_norm_eps": st.floats(1e-8, 1e-3),
    "tie_embeddings": st.booleans(), "attn_res_block": st.none() | st.integers(1, 20),
    "bos_id": st.none() | st.integers(0, 159), "eos_ids": st.lists(st.integers(0, 159), max_size=3).map(tuple),
    "kda__num_heads": st.integers(1, 64), "kda__head_dim": st.integers(1, 256), "kda__conv_width": st.integers(1, 8),
    "kda__gate_lower_bound": st.none() | st.floats(-20, -0.5),
    "kda__a_log_shape": st.sampled_from([None, (128,), (1, 1, 128, 1)]), "mla__num_heads": st.integers(1, 64),
    "mla__q_lora_rank": st.none() | st.integers(1, 64), "mla__lora_norm_eps": st.sampled_from([1e-6, 1e-5]),
    "mla__output_gate": st.booleans(), "moe__num_experts": st.integers(4, 1000), "moe__num_shared": st.integers(0, 3),
    "moe__renormalize": st.booleans(), "moe__scaling_factor": st.floats(0.1, 10),
    "checkpoint__names": st.sampled_from(["release", "transformers"]),
    "checkpoint__prefix": st.sampled_from(["model.", "language_model.model.", "backbone."]),
}  # fmt: skip


@pytest.mark.parametrize("name", [MXFP4, LINEAR, BENCH])
@settings(max_examples=10, deadline=None)
@given(changes=st.fixed_dictionaries({}, optional=CHANGES))
def test_a_replaced_field_reaches_the_json_and_comes_back(name: str, changes: dict[str, Any]) -> None:
    cfg = change(config(name), **changes)
    assert reread(cfg) == cfg
    assert reread(dataclasses.replace(cfg, source=None)) == cfg  # as a new file


@pytest.mark.parametrize("name", NAMES)
def test_layers_are_rewritten(name: str) -> None:
    cfg = config(name)
    short = dataclasses.replace(cfg, num_layers=3, attention=("mla", "kda", "mla"), mlp=("dense", "dense", "moe"))
    assert reread(short) == short
    mixed = dataclasses.replace(short, mlp=("moe", "dense", "moe"))  # no first_k_dense_replace says this
    assert reread(mixed) == mixed
    all_mla = dataclasses.replace(short, attention=("mla",) * 3, kda=None)
    assert reread(all_mla) == all_mla
    dense = dataclasses.replace(short, mlp=("dense",) * 3, moe=None, quantization=None)
    assert reread(dense) == dense


def test_every_spelling_present_is_changed() -> None:
    cfg = config(LINEAR)
    cfg = change(cfg, kda__head_dim=32, attention=("mla",) + ("kda",) * 4, mlp=("dense",) * 2 + ("moe",) * 3)
    data = cfg.to_json()
    assert (data["linear_attn_config"]["head_dim"], data["linear_head_dim"]) == (32, 32)
    assert data["linear_attn_config"]["kda_layers"] == [2, 3, 4, 5]
    assert data["linear_attn_config"]["full_attn_layers"] == [1]
    assert data["layer_types"] == ["full_attention"] + ["linear_attention"] * 4
    assert (data["first_k_dense_replace"], data["mlp_layer_types"]) == (2, ["dense"] * 2 + ["sparse"] * 3)
    assert {k for k in data if data[k] != load(LINEAR)[k]} == {
        "linear_attn_config", "linear_head_dim", "layer_types", "first_k_dense_replace", "mlp_layer_types",
    }  # fmt: skip
    k3 = dataclasses.replace(config(K3), dtype="bfloat16", eos_ids=(1, 2)).to_json()
    assert k3["dtype"] == k3["text_config"]["dtype"] == "bfloat16"
    assert k3["eos_token_id"] == k3["text_config"]["eos_token_id"] == [1, 2]


def test_derived_keys_follow() -> None:
    cfg = config(LINEAR)
    data = change(cfg, mla__num_heads=6, mla__qk_nope_head_dim=20).to_json()
    assert (data["num_attention_heads"], data["num_key_value_heads"], data["qk_head_dim"]) == (6, 6, 28)
    grouped = config(LINEAR, {"use_grouped_topk": False})
    assert change(grouped, moe__num_groups=2).to_json()["use_grouped_topk"] is True


def test_ours_go_into_one_key_only_when_they_differ() -> None:
    cfg = config(K3)
    assert "trillion_moe" not in cfg.to_json()
    cfg = change(cfg, kda__a_log_shape=(16,), mla__lora_norm_eps=1e-5, vision__norm_eps=1e-7)
    data = dataclasses.replace(cfg, checkpoint=CheckpointNames("model.", "release")).to_json()
    assert data.pop("trillion_moe") == {
        "kda": {"a_log_shape": [16]}, "mla": {"lora_norm_eps": 1e-5}, "vision": {"norm_eps": 1e-7},
        "checkpoint": {"prefix": "model."},
    }  # fmt: skip
    assert data == load(K3)


def test_quantization_and_vision_can_be_taken_away_and_put_back() -> None:
    quantized, plain = config(MXFP4), config(K3)
    assert dataclasses.replace(quantized, quantization=None).to_json() == load(K3)
    assert dataclasses.replace(plain, quantization="mxfp4").to_json() == load(MXFP4)  # the block as released
    text = dataclasses.replace(plain, vision=None)
    assert "vision_config" not in text.to_json()
    assert reread(text) == text
    seeing = dataclasses.replace(ModelConfig.from_json(text.to_json()), vision=plain.vision)
    assert reread(seeing) == plain
    assert seeing.to_json()["vision_config"]["norm_type"] == "rmsnorm"


def test_another_model_type_starts_a_new_file() -> None:
    cfg = config(K3)
    text = dataclasses.replace(cfg, model_type="kimi_linear", vision=None, media_id=None)
    assert "text_config" not in text.to_json()
    assert reread(text) == text


# --- configs built by programs ----------------------------------------------------------------------------------------


def small(**more: Any) -> ModelConfig:
    fields: dict[str, Any] = {
        "model_type": "kimi_linear", "vocab_size": 96, "hidden_size": 32, "num_layers": 3, "dense_hidden_size": 48,
        "attention": ("kda", "kda", "mla"), "mlp": ("dense", "moe", "moe"), "activation": "silu", "rms_norm_eps": 1e-5,
        "dtype": "float32", "kda": KDAConfig(num_heads=3, head_dim=8, conv_width=4),
        "mla": MLAConfig(num_heads=2, q_lora_rank=None, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4,
                         v_head_dim=8),
        "moe": MoEConfig(num_experts=6, top_k=2, hidden_size=16, num_shared=1, scaling_factor=1.5),
    }  # fmt: skip
    return ModelConfig(**fields | more)


def test_a_built_config_writes_a_release_file() -> None:
    cfg = small()
    data = cfg.to_json()
    assert reread(cfg) == cfg
    assert data["linear_attn_config"]["kda_layers"] == [1, 2]
    assert (data["mla_use_nope"], data["topk_method"], data["num_key_value_heads"]) == (True, "noaux_tc", 2)
    assert data["architectures"] == ["KimiLinearForCausalLM"]
    assert "trillion_moe" not in data
    assert "layer_types" not in data


def test_a_rebuilt_k3_writes_every_key_of_the_release_that_is_not_inert() -> None:
    data, name = load(K3_RELEASED), "kimi_k3"
    rebuilt = dataclasses.replace(ModelConfig.from_json(data), source=None).to_json()
    schema = config_module.SCHEMA
    inert = {schema.resolve(path, name) for path in config_module.INERT}
    unwritten = {schema.resolve(check.path, name) for check in schema.checks if not check.fresh}
    for path in schema.leaves(name) - inert - unwritten:
        assert config_module.cj.get(rebuilt, path) == config_module.cj.get(data, path), path


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: KDAConfig(num_heads=0, head_dim=8, conv_width=4), "kda.num_heads = 0: legal is an integer >= 1"),
        (lambda: KDAConfig(num_heads=6, head_dim=8, conv_width=4, a_log_shape=(5,)), "at least num_heads = 6"),
        (lambda: change(small(), moe__top_k=7), "moe.top_k = 7 exceeds moe.num_experts = 6"),
        (lambda: small(kda=None), "kda is None, but layer 0"),
        (lambda: small(mla=None), "mla is None, but layer 2"),
        (lambda: small(moe=None), "moe is None, but layer 1"),
        (lambda: small(num_layers=4), "attention has 3 entries for num_layers = 4"),
        (lambda: small(media_id=3), "media_id = 3: a kimi_linear config.json has no place for it"),
        (lambda: small(vision=config(K3).vision), "vision.hidden_size = 32: a kimi_linear"),
        (lambda: small(quantization="mxfp4"), "(32, 16) are multiples of 32"),
        (lambda: small(bos_id=96), "bos_id = 96 is outside vocab_size = 96"),
        (lambda: small(dtype="int8"), "dtype = 'int8': legal is 'bfloat16' or"),
        (lambda: small(rms_norm_eps=0.0), "rms_norm_eps = 0.0: legal is a finite number > 0"),
    ],
)
def test_a_built_config_is_checked(build: Callable[[], Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build()
    assert says in str(caught.value)
