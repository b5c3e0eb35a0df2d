"""What is read is what was stored, and what is written is what was read, bit for bit."""

import csv
import json
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from tests.checkpoint.tools import FLOAT32, GOLDENS, Checkpoint, blueprint_of, layer, load, read_index, shard

from trillion_moe import checkpoint
from trillion_moe.checkpoint.names import ROWS, slots, tree_leaves
from trillion_moe.config import ModelConfig
from trillion_moe.layers.segments import depth_plan
from trillion_moe.model import Model
from trillion_moe.transforms import quantize_experts
from trillion_moe.weights import MXFP4


@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scanned"])
@pytest.mark.parametrize(
    ("name", "layout"),
    [("kimi_k3/a", "nk"), ("kimi_k3/a/mxfp4", "nk"), ("kimi_k3/a/mxfp4", "kn"), ("kimi_linear/a", "nk")],
)
def test_load_and_save_reproduce_the_file_byte_for_byte(name, layout, scan, tmp_path) -> None:
    """fault 13, fault 29: nothing is changed between file, model and file."""
    model = load(GOLDENS / name, scan=scan, layout=layout)
    checkpoint.save(tmp_path / "out", model)
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert files == ["config.json", "model.safetensors"]
    assert (tmp_path / "out/model.safetensors").read_bytes() == (GOLDENS / name / "model.safetensors").read_bytes()
    written = json.loads((tmp_path / "out/config.json").read_text())
    added = written.pop("trillion_moe")
    assert written == json.loads((GOLDENS / name / "config.json").read_text())
    linear = {"kda": {"a_log_shape": [1, 1, 4, 1]}, "checkpoint": {"names": "transformers"}}
    assert added == (linear if name == "kimi_linear/a" else {"kda": {"a_log_shape": [16]}})
    chex.assert_trees_all_equal(load(tmp_path / "out", scan=scan, layout=layout), model)


def test_release_names_of_kimi_linear(tmp_path) -> None:
    saved = Checkpoint.golden("kimi_linear/a")
    renamed = Checkpoint.golden("kimi_linear/a")
    for old, new in json.loads((GOLDENS / "kimi_linear/a/release_rename.json").read_text()).items():
        renamed.rename(old, new)
    model = load(renamed.write(tmp_path / "release"))
    chex.assert_trees_all_equal(jax.tree.leaves(model), jax.tree.leaves(load(saved.write(tmp_path / "saved"))))
    checkpoint.save(tmp_path / "out", model)
    assert Checkpoint.read(tmp_path / "out").tensors == dict(sorted(renamed.tensors.items()))


def test_every_kind_of_leaf_against_the_file() -> None:
    """fault 13: the mapping written out once more, by hand."""
    file, model = Checkpoint.golden("kimi_k3/a").tensors, load(GOLDENS / "kimi_k3/a")
    text = "language_model.model."
    kda, mla, moe = layer(model, 0).attention, layer(model, 3).attention, layer(model, 3).ffn
    at = f"{text}layers.3.block_sparse_moe."
    vision = model.vision.blocks
    for held, name, change in (
        (model.embed, f"{text}embed_tokens.weight", lambda w: w),
        (model.head, "language_model.lm_head.weight", lambda w: w.T),
        (model.out_res.query, f"{text}output_attn_res_proj.weight", lambda w: w[0]),
        (layer(model, 5).attn_res.norm, f"{text}layers.5.self_attention_res_norm.weight", lambda w: w),
        (layer(model, 5).ffn_res.query, f"{text}layers.5.mlp_res_proj.weight", lambda w: w[0]),
        (layer(model, 5).ffn_norm, f"{text}layers.5.post_attention_layernorm.weight", lambda w: w),
        (kda.k, f"{text}layers.0.self_attn.k_proj.weight", lambda w: w.T),
        (kda.v_conv, f"{text}layers.0.self_attn.v_conv1d.weight", lambda w: w[:, 0]),
        (kda.decay_b, f"{text}layers.0.self_attn.f_b_proj.weight", lambda w: w.T),
        (kda.beta, f"{text}layers.0.self_attn.b_proj.weight", lambda w: w.T),
        (mla.q_a, f"{text}layers.3.self_attn.q_a_proj.weight", lambda w: w.T),
        (mla.q_norm, f"{text}layers.3.self_attn.q_a_layernorm.weight", lambda w: w),
        (mla.kv_a, f"{text}layers.3.self_attn.kv_a_proj_with_mqa.weight", lambda w: w.T),
        (mla.gate, f"{text}layers.3.self_attn.g_proj.weight", lambda w: w.T),
        (layer(model, 0).ffn.down, f"{text}layers.0.mlp.down_proj.weight", lambda w: w.T),
        (moe.router.weight, f"{at}gate.weight", lambda w: w.T),
        (moe.router.bias, f"{at}gate.e_score_correction_bias", lambda w: w),
        (moe.experts.gate[0], f"{at}experts.0.w1.weight", lambda w: w.T),
        (moe.experts.up[7], f"{at}experts.7.w3.weight", lambda w: w.T),
        (moe.experts.down[11], f"{at}experts.11.w2.weight", lambda w: w.T),
        (moe.shared.up, f"{at}shared_experts.up_proj.weight", lambda w: w.T),
        (moe.latent_down, f"{at}routed_expert_down_proj.weight", lambda w: w.T),
        (moe.latent_norm, f"{at}routed_expert_norm.weight", lambda w: w),
        (model.vision.patch_embed, "vision_tower.patch_embed.proj.weight", lambda w: w.reshape(32, -1).T),
        (model.vision.pos_emb, "vision_tower.patch_embed.pos_emb.weight", lambda w: w),
        (vision.qkv[1], "vision_tower.encoder.blocks.1.wqkv.weight", lambda w: w.T),
        (vision.mlp_norm[0], "vision_tower.encoder.blocks.0.norm1.weight", lambda w: w),
        (vision.down[1], "vision_tower.encoder.blocks.1.mlp.fc1.weight", lambda w: w.T),
        (model.projector.proj_2, "mm_projector.proj.2.weight", lambda w: w.T),
        (model.projector.norm, "mm_projector.post_norm.weight", lambda w: w),
    ):
        np.testing.assert_array_equal(held, change(file[name].array), err_msg=name)


def test_the_table_knows_every_tensor_of_the_real_model() -> None:
    """Names, shapes, dtypes and count (497,220) of Kimi K3 as released; `tensors.tsv` was derived from its headers."""
    cfg = ModelConfig.from_file(GOLDENS / "config/kimi_k3_config.json")
    model = quantize_experts(Model(cfg))
    ours = {}
    for slot in slots(model, cfg):
        if slot.experts is None or slot.part != "weight":
            dtype = "F32" if slot.float32 else "BF16" if slot.part == "weight" else "U8"
            shape = (128,) if slot.names[0].endswith("A_log") else slot.shape
            ours[slot.names[0]] = (shape, dtype, slot.count)
    real = {}
    for row in csv.DictReader((GOLDENS / "kimi_k3/tensors.tsv").open(), delimiter="\t"):
        for number in _numbers(row["layers({L})"]):
            name = row["name_pattern"].replace("{L}", str(number)).replace("{E}", "*")
            real[name] = (
                tuple(map(int, row["shape"].split("x"))),
                row["dtype"],
                896 if "{E}" in row["name_pattern"] else 1,
            )
    assert ours == real
    assert sum(count for *_, count in ours.values()) == 497_220


def _numbers(ranges: str) -> list[int]:
    ends = [part.split("-") for part in ranges.split(",")] if ranges else [["0"]]
    return [i for end in ends for i in range(int(end[0]), int(end[-1]) + 1)]


@pytest.mark.parametrize("name", ["kimi_k3/a", "kimi_linear/a"])
def test_the_table_pins_what_the_blueprint_pins(name) -> None:
    model = Model(ModelConfig.from_file(GOLDENS / name), dtype="bfloat16")
    specs = {
        path.split(".", 3)[-1] if path.startswith("segments") else path: leaf for path, leaf in tree_leaves(model)[0]
    }
    for leaf, spec in specs.items():
        row = ROWS.get(leaf) or ROWS[f"layer.{leaf}"]
        assert row.float32 == (spec.dtype == "float32"), leaf


# --- dtypes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["kimi_k3/a", "kimi_k3/a/mxfp4", "kimi_linear/a"])
def test_a_cast_spares_what_is_float32_by_definition(name, tmp_path) -> None:
    """fault 28, fault 30: load and export in bfloat16 keep the FP32 list, and doing it again changes nothing."""
    model = load(GOLDENS / name, dtype="bfloat16")
    checkpoint.save(tmp_path / "once", model)
    golden, once = Checkpoint.golden(name), Checkpoint.read(tmp_path / "once")
    golden.cast("BF16")
    assert once.tensors == golden.tensors
    assert model.embed.dtype == jnp.bfloat16
    assert {n for n, t in once.tensors.items() if t.dtype == "F32"} == {n for n in once.tensors if n.endswith(FLOAT32)}
    checkpoint.save(tmp_path / "twice", load(tmp_path / "once", dtype="bfloat16"))
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "once" / file).read_bytes() == (tmp_path / "twice" / file).read_bytes()
    assert ModelConfig.from_file(tmp_path / "once").dtype == "bfloat16"


@pytest.mark.parametrize(("stored", "name"), [("BF16", "bfloat16"), ("F16", "float16")])
def test_without_a_dtype_the_files_decide(stored, name, tmp_path) -> None:
    """config.json says float32; the files are narrower, but for a router weight: all stay as they are stored."""
    narrow = Checkpoint.golden("kimi_linear/a")
    router = "model.layers.1.block_sparse_moe.gate.weight"
    wide = narrow.tensors[router]
    narrow.cast(stored)
    narrow.tensors[router] = wide
    model = load(narrow.write(tmp_path / "in"))
    assert model.dtype == model.config.dtype == str(model.embed.dtype) == name
    assert layer(model, 1).ffn.router.weight.dtype == jnp.float32
    assert layer(model, 2).ffn.router.weight.dtype == name
    checkpoint.save(tmp_path / "out", model)
    assert Checkpoint.read(tmp_path / "out").tensors == narrow.tensors


def test_a_stacked_leaf_has_one_dtype(tmp_path) -> None:
    mixed = Checkpoint.golden("kimi_linear/a")
    name = "model.layers.3.self_attn.q_proj.weight"
    mixed.tensors[name] = mixed.tensors[name].cast("BF16")
    folder = mixed.write(tmp_path / "in")
    assert layer(load(folder, scan=False), 3).attention.q.dtype == jnp.bfloat16
    with pytest.raises(checkpoint.CheckpointError, match=r"q_proj.weight is BF16; both are held in one array"):
        load(folder, scan=True)
    assert load(folder, dtype="float32", scan=True).embed.dtype == jnp.float32


def test_a_cast_that_overflows_is_refused(tmp_path) -> None:
    big = Checkpoint.golden("kimi_linear/a")
    big.put("model.norm.weight", "F32", np.full(64, 1e6))
    with pytest.raises(checkpoint.CheckpointError, match=r"model.norm.weight: holds values too large for float16"):
        load(big.write(tmp_path / "in"), dtype="float16")


# --- packed experts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_decoded_experts_equal_the_reference_decoder(dtype, tmp_path) -> None:
    """fault 55 among others: expected values are compressed-tensors'."""
    model = load(GOLDENS / "kimi_k3/a/mxfp4", dtype=dtype, quantization="decode")
    checkpoint.save(tmp_path / "out", model)
    out = Checkpoint.read(tmp_path / "out")
    expected = Checkpoint.read(GOLDENS / "kimi_k3/a/mxfp4").tensors
    plain = {name: t for name, t in expected.items() if ".experts." in name and name.endswith(".weight")}
    assert len(plain) == 2 * 12 * 3  # two layers' are given
    for name, tensor in plain.items():
        np.testing.assert_array_equal(out.tensors[name].array, tensor.array.astype(out.tensors[name].array.dtype))
    assert "quantization_config" not in out.config["text_config"]
    assert model.config.quantization is None
    assert not [name for name in out.tensors if "weight_packed" in name or "weight_scale" in name]


def test_packed_layouts_are_byte_transposes() -> None:
    as_stored, turned = (load(GOLDENS / "kimi_k3/a/mxfp4", layout=layout) for layout in ("nk", "kn"))
    a, b = (layer(model, 1).ffn.experts.down for model in (as_stored, turned))
    assert isinstance(b, MXFP4)
    np.testing.assert_array_equal(a.packed, jnp.swapaxes(b.packed, 1, 2))
    np.testing.assert_array_equal(a.scale, jnp.swapaxes(b.scale, 1, 2))


@pytest.mark.parametrize("quantization", ["keep", "decode"])
def test_stacked_and_unrolled_models_write_the_same_files(quantization, tmp_path) -> None:
    """A Kimi K3 of 11 layers, whose second and third blocks repeat: stacked leaves with experts, packed and not."""
    golden = Checkpoint.golden("kimi_k3/a/mxfp4")
    text = golden.config["text_config"]
    text |= {"num_hidden_layers": 11}
    text["linear_attn_config"] |= {"full_attn_layers": [3, 6, 9, 11], "kda_layers": [1, 2, 4, 5, 7, 8, 10]}
    cfg = ModelConfig.from_json(golden.config)
    rng = np.random.default_rng(0)
    model = jax.tree.map(
        lambda spec: jnp.asarray(rng.integers(60, 200, spec.shape), spec.dtype),
        quantize_experts(Model(cfg, plan=depth_plan(cfg, scan=True)), layout="kn"),
    )
    assert [segment.repeats for segment in model.plan] == [1, 2, 1]
    checkpoint.save(tmp_path / "in", model)
    outs = []
    for scan in (False, True):
        again = load(tmp_path / "in", quantization=quantization, scan=scan)
        checkpoint.save(tmp_path / f"{scan}", again)
        outs.append((tmp_path / f"{scan}/model.safetensors").read_bytes())
    assert outs[0] == outs[1]
    if quantization == "keep":
        assert outs[0] == (tmp_path / "in/model.safetensors").read_bytes()
        chex.assert_trees_all_equal(load(tmp_path / "in", scan=True, layout="kn"), model)


# --- shards -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", [True, False], ids=["index", "numbered"])
def test_shards_load_like_one_file(index, tmp_path) -> None:
    golden = Checkpoint.golden("kimi_k3/a/mxfp4")
    whole, cut = load(golden.write(tmp_path / "1")), load(golden.write(tmp_path / "3", shards=3, index=index))
    chex.assert_trees_all_equal(cut, whole)


def test_saved_shards(tmp_path) -> None:
    golden = Checkpoint.golden("kimi_k3/a")
    model = load(golden.write(tmp_path / "in"))
    checkpoint.save(tmp_path / "out", model, shard_bytes=1.2e6)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert files == [shard(i + 1, 4) for i in range(4)]
    assert all((tmp_path / "out" / file).stat().st_size < 1.3e6 for file in files)
    assert Checkpoint.read(tmp_path / "out").tensors == golden.tensors
    assert read_index(tmp_path / "out").keys() == golden.tensors.keys()
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(len(t.data) for t in golden.tensors.values())
    chex.assert_trees_all_equal(load(tmp_path / "out"), model)


def test_the_written_file_is_one_for_the_safetensors_library(tmp_path) -> None:
    from safetensors.numpy import load_file

    checkpoint.save(tmp_path / "out", load(GOLDENS / "kimi_linear/a", dtype="bfloat16"))
    read = load_file(tmp_path / "out/model.safetensors")
    golden = Checkpoint.golden("kimi_linear/a").tensors
    assert read.keys() == golden.keys()
    assert read["model.norm.weight"].dtype == ml_dtypes.bfloat16


def test_lm_head_in_another_shard_than_the_embedding(tmp_path) -> None:
    """fault 64: untied is decided by the config, not by what one shard holds."""
    golden = Checkpoint.golden("kimi_linear/a")
    head = golden.tensors.pop("lm_head.weight")
    golden.tensors["lm_head.weight"] = head  # last, so in the last shard
    model = load(golden.write(tmp_path / "in", shards=3))
    np.testing.assert_array_equal(model.head, head.array.T)
    assert not np.array_equal(model.head, model.embed.T)


def test_blueprint_is_not_changed() -> None:
    stored = checkpoint.read_config(GOLDENS / "kimi_linear/a")
    blueprint = blueprint_of(stored)
    before = jax.tree.leaves(blueprint)
    checkpoint.load_into(blueprint, Path(GOLDENS / "kimi_linear/a"), stored)
    assert jax.tree.leaves(blueprint) == before
