"""Adapters that PEFT wrote, loaded: the logits and merged weights that PEFT computes, in every spelling of names."""

import json
import re

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.checkpoint.adapter_tools import (
    EXPERTS,
    PEFT,
    SHARED,
    TOWER,
    Adapter,
    adapters,
    assert_same,
    draw,
    k3,
    linear,
    load_adapter,
    repeating,
)
from tests.checkpoint.tools import GOLDENS
from tests.tiny import restacked

import trillion_moe as tm
from trillion_moe.checkpoint.adapter_export import export_adapter
from trillion_moe.checkpoint.adapters import read_adapter
from trillion_moe.ops import dense, grouped_dot
from trillion_moe.transforms import count_by_group, merge_lora, quantize_experts
from trillion_moe.transforms.targets import places
from trillion_moe.weights import MXFP4, LoRA

BAR = 1e-4
GOLDEN = [SHARED, EXPERTS]
BASE = GOLDENS / "kimi_linear" / "a"


@pytest.fixture(scope="module")
def base():
    return tm.load(BASE)


@pytest.fixture(scope="module")
def ids():
    return load_file(BASE / "inputs.safetensors")["input_ids"]


@pytest.fixture(scope="module")
def merged(base):
    return merge_lora(load_adapter(base, EXPERTS))


def furthest(found, expected) -> float:
    return float(np.abs(np.asarray(found) - expected).max())


# --- what PEFT computes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", GOLDEN, ids=lambda folder: folder.name)
def test_logits_with_the_adapter(base, ids, folder) -> None:
    logits, _ = tm.forward(load_adapter(base, folder), ids)
    assert furthest(logits, load_file(folder / "outputs.safetensors")["logits"]) < BAR


def test_merged_logits(merged, ids) -> None:
    assert furthest(tm.forward(merged, ids)[0], load_file(EXPERTS / "outputs.safetensors")["merged_logits"]) < BAR


def test_merging_changes_what_the_adapter_is_for_and_nothing_else(merged, tmp_path) -> None:
    """fault 86: what merging leaves is a checkpoint of its own."""
    tm.save(tmp_path / "merged", merged)
    before, after = load_file(BASE / "model.safetensors"), load_file(tmp_path / "merged" / "model.safetensors")
    changed = {name for name, array in after.items() if not np.array_equal(array, before[name])}
    assert changed == set(json.loads((EXPERTS / "changed.json").read_text()))
    golden = load_file(EXPERTS / "merged.safetensors")
    assert len(golden) == 35
    assert max(furthest(after[name], array) for name, array in golden.items()) < 1e-6
    tm.load(tmp_path / "merged")


def test_an_adapter_of_experts_alone_moves_the_logits(base, ids, tmp_path) -> None:
    """fault 83: expert factors that load and are wired nowhere. (Zeros elsewhere: no other program to compile.)"""
    adapter = Adapter.read(EXPERTS)
    others = [name for name in adapter.tensors if ".mlp.experts." not in name]
    for name in others:
        if ".lora_B." in name:
            adapter.put_factor(name, np.zeros(adapter.tensors[name].shape))
    logits, _ = tm.forward(load_adapter(base, adapter.write(tmp_path / "others are zero")), ids)
    assert furthest(logits, load_file(BASE / "outputs.safetensors")["logits"]) > 0.1
    for name in others:
        del adapter.tensors[name]
    counts = count_by_group(load_adapter(base, adapter.write(tmp_path / "experts")))
    assert {group: n for group, (n, _) in counts.items() if n} == {"routed_experts": 4 * 8 * 3}


def test_counts_are_told_by_group(base) -> None:
    """fault 74, fault 75: what is adapted, and trainable, is seen by kind of matrix and equals the formula."""
    d, i, e, r, layers = 64, 32, 8, 4, 4
    kda, mla = 3 * 4 * r * (d + 64), 2 * r * ((d + 96) + (d + 32) + (24 + 128) + (64 + d))
    found = count_by_group(load_adapter(base, EXPERTS))
    assert found["kda"] == (3 * 4, kda)
    assert found["mla"] == (2 * 4, mla)
    assert found["shared_experts"] == (layers * 3, layers * 3 * r * (d + i))
    assert found["routed_experts"] == (layers * e * 3, layers * e * 3 * r * (d + i))
    assert found["dense_mlp"] == found["lm_head"] == (0, 0)
    assert sum(n for n, _ in found.values()) == len(json.loads((EXPERTS / "changed.json").read_text()))


# --- names -----------------------------------------------------------------------------------------------------------


def test_gate_and_up_read_through_one_a(base) -> None:
    found = adapters(load_adapter(base, EXPERTS))
    np.testing.assert_array_equal(found["layers.1.ffn.experts.gate"].a, found["layers.1.ffn.experts.up"].a)


@pytest.mark.parametrize("folder", GOLDEN, ids=lambda folder: folder.name)
def test_exported_it_is_the_file_that_peft_wrote(base, folder, tmp_path) -> None:
    export_adapter(tmp_path / "again", load_adapter(base, folder))
    ours, theirs = Adapter.read(tmp_path / "again"), Adapter.read(folder)
    assert ours.tensors == theirs.tensors
    for key in ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "peft_type", "task_type", "bias", "use_rslora"):
        assert ours.config[key] == theirs.config[key], key
    assert sorted(ours.config["target_parameters"] or []) == sorted(theirs.config["target_parameters"] or [])
    ends = {tuple(target.split(".")[-2:]) for target in ours.config["target_modules"]}
    assert {end[-1] for end in ends} == {target.split(".")[-1] for target in theirs.config["target_modules"]}


SPELLINGS = {
    "release": (),
    "without PEFT's prefix": ((f"^{re.escape(PEFT)}", ""),),
    "of a model in a model": ((f"^{re.escape(PEFT)}model", f"{PEFT}language_model.model"),),
    "gate, up, down": ((r"\.w1\.", ".gate_proj."), (r"\.w3\.", ".up_proj."), (r"\.w2\.", ".down_proj.")),
    "mlp": ((r"block_sparse_moe\.", "mlp."),),
}


@pytest.mark.parametrize("renames", SPELLINGS.values(), ids=SPELLINGS)
def test_every_spelling_is_the_same_adapter(base, renames, tmp_path) -> None:
    """fault 69: experts called w1, w3, w2 or gate, up, down are adapted alike."""
    adapted = load_adapter(base, EXPERTS)
    export_adapter(tmp_path / "release", adapted, names="release")
    adapter = Adapter.read(tmp_path / "release")
    assert f"{PEFT}model.layers.1.block_sparse_moe.experts.7.w3.lora_B.weight" in adapter.tensors
    assert len(adapter.tensors) == 2 * 128
    for old, new in renames:
        adapter.tensors = {re.sub(old, new, name): tensor for name, tensor in adapter.tensors.items()}
    assert_same(read_adapter(adapter.write(tmp_path / "other"), base), adapters(adapted))


def test_release_names_of_dense_mlp_and_decay(tmp_path) -> None:
    """What transformers calls by other names than the release: accepted, and written, in both."""
    model, adapter = linear(), Adapter.of(2, 2)
    pairs = {"mlp.down_proj": (96, 64), "self_attn.forget_gate.f_a_proj": (64, 8), "self_attn.g_b_proj": (8, 24)}
    for module, (k, n) in pairs.items():
        adapter.put(f"model.layers.0.{module}", draw(2, k), draw(n, 2))
    adapted = load_adapter(model, adapter.write(tmp_path / "a"))
    assert set(adapters(adapted)) == {f"layers.0.{x}" for x in ("ffn.down", "attention.decay_a", "attention.gate_b")}
    for names, decay in (("peft", "forget_gate.f_a_proj"), ("release", "f_a_proj")):
        export_adapter(tmp_path / names, adapted, names=names)
        exported = Adapter.read(tmp_path / names)
        assert f"{PEFT}model.layers.0.self_attn.{decay}.lora_A.weight" in exported.tensors
        assert f"{PEFT}model.layers.0.mlp.down_proj.lora_A.weight" in exported.tensors
        assert_same(read_adapter(tmp_path / names, model), adapters(adapted))
    saved = {name.replace(".mlp.", ".block_sparse_moe."): t for name, t in adapter.tensors.items()}
    adapter.tensors = saved  # as save_pretrained spells the dense MLP
    assert_same(read_adapter(adapter.write(tmp_path / "saved"), model), adapters(adapted))


# --- the layout of fused experts -------------------------------------------------------------------------------------


def fused(e: int, r: int, k: int, n: int, seed: int) -> tuple[np.ndarray, ...]:
    """A and B of PEFT, and the product of every expert, written out one number at a time."""
    a, b = draw(e, r, k, seed=seed), draw(e, n, r, seed=seed + 1)
    flat_a, flat_b = np.zeros((e * r, k), np.float32), np.zeros((n, r * e), np.float32)
    for expert in range(e):
        for rank in range(r):
            flat_a[expert * r + rank] = a[expert, rank]
            flat_b[:, rank * e + expert] = b[expert, :, rank]
    return flat_a, flat_b, np.stack([b[expert] @ a[expert] for expert in range(e)])


def test_every_expert_gets_its_own_factors(tmp_path) -> None:
    """fault 66: A is expert by expert, B rank by rank, with 3 experts of rank 2; merged and unmerged are the same."""
    model, adapter = linear(), Adapter.of(2, 3)
    *gate_up, delta = fused(3, 2, 64, 48, 0)
    *down, down_delta = fused(3, 2, 24, 64, 2)
    adapter.put("model.layers.1.mlp.experts.base_layer", *gate_up)
    adapter.put("model.layers.1.mlp.experts", *down)
    adapted = load_adapter(model, adapter.write(tmp_path / "a"))
    wanted = {"gate": delta[:, :24], "up": delta[:, 24:], "down": down_delta}
    leaves = {place.names[0].rpartition(".")[2]: place.leaf for place in places(adapted)[0] if of_layer_1(place)}
    assert leaves.keys() == wanted.keys()
    for name, leaf in leaves.items():
        change = np.asarray(dense(leaf, np.float32)) - np.asarray(leaf.base)
        np.testing.assert_allclose(change.transpose(0, 2, 1), 1.5 * wanted[name], atol=1e-5, err_msg=name)
        if name == "down":
            weight = np.asarray(leaf.base) + 1.5 * wanted[name].transpose(0, 2, 1)
            rows, sizes = draw(6, weight.shape[1]), np.array([1, 3, 2], np.int32)
            together = np.concatenate([part @ w for part, w in zip(np.split(rows, [1, 4]), weight, strict=True)])
            apart = grouped_dot(jax.numpy.asarray(rows), leaf, jax.numpy.asarray(sizes))
            np.testing.assert_allclose(apart, together, atol=2e-4)


def of_layer_1(place) -> bool:
    return isinstance(place.leaf, LoRA) and place.layers == (1,)


@pytest.mark.parametrize("parameter", ["gate_up_proj", "down_proj"])
def test_a_fused_parameter_alone_is_known_by_its_shape(parameter, tmp_path) -> None:
    """PEFT then calls it ...experts, whichever of the two it is."""
    model, adapter = linear(), Adapter.of(2, 2, target_parameters=[f"mlp.experts.{parameter}"])
    k, n = (64, 48) if parameter == "gate_up_proj" else (24, 64)
    a, b, delta = fused(3, 2, k, n, 0)
    adapter.put("model.layers.2.mlp.experts", a, b)
    found = read_adapter(adapter.write(tmp_path / "a"), model)
    names = ["gate", "up"] if parameter == "gate_up_proj" else ["down"]
    assert list(found) == [f"layers.2.ffn.experts.{name}" for name in names]
    sums = np.concatenate([lora.a @ lora.b for lora in found.values()], axis=-1)
    np.testing.assert_allclose(sums.transpose(0, 2, 1), delta, atol=1e-5)
    export_adapter(tmp_path / "again", load_adapter(model, tmp_path / "a"))
    assert Adapter.read(tmp_path / "again").tensors == adapter.tensors


def test_experts_of_a_latent_model_have_its_width(tmp_path) -> None:
    """fault 81: Kimi K3's experts read 32 wide latents, not the model's 64."""
    model, adapter = k3(), Adapter.of(2, 2)
    adapter.put("language_model.model.layers.1.block_sparse_moe.experts.5.w1", draw(2, 32), draw(32, 2))
    lora = read_adapter(adapter.write(tmp_path / "a"), model)["layers.1.ffn.experts.gate"]
    assert lora.a.shape == (1, 32, 2)
    assert lora.slots.tolist() == [-1, -1, -1, -1, -1, 0, -1, -1]


# --- ranks, scaling, dtypes ------------------------------------------------------------------------------------------


def test_rank_and_alpha_patterns_match_as_in_peft(tmp_path) -> None:
    """Keys are regular expressions for the end of a path; the first that fits decides, else r and lora_alpha."""
    model = linear()
    adapter = Adapter.of(
        2,
        3,
        rank_pattern={"o_proj": 4, r"model\.layers\.[01]\..*_proj": 5, "experts.gate_up_proj": 3},
        alpha_pattern={"layers.2.self_attn.q_proj": 10, "experts.gate_up_proj": 6.5},
    )
    ranks = {"0.self_attn.o_proj": 4, "0.self_attn.q_proj": 5, "2.self_attn.q_proj": 2}
    for module, rank in ranks.items():
        adapter.put(f"model.layers.{module}", draw(rank, 64 if "q_proj" in module else 24), draw(24, rank))
    adapter.put("model.layers.0.self_attn.o_proj", draw(4, 24), draw(64, 4))
    adapter.put("model.layers.2.mlp.experts", draw(9, 64), draw(48, 9))
    found = read_adapter(adapter.write(tmp_path / "a"), model)
    scaling = {name.removeprefix("layers."): lora.scaling for name, lora in found.items()}
    experts = {"2.ffn.experts.gate": 6.5 / 3, "2.ffn.experts.up": 6.5 / 3}
    assert scaling == {"0.attention.o": 3 / 4, "0.attention.q": 3 / 5, "2.attention.q": 10 / 2} | experts


def test_rank_stabilised_scaling(tmp_path) -> None:
    adapter = Adapter.of(4, 6, use_rslora=True)
    adapter.put("model.layers.0.self_attn.q_proj", draw(4, 64), draw(24, 4))
    found = read_adapter(adapter.write(tmp_path / "a"), linear())
    assert found["layers.0.attention.q"].scaling == 3.0


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
def test_factors_keep_their_dtype_there_and_back(dtype, tmp_path) -> None:
    model, adapter = linear(), Adapter.of(2, 2)
    adapter.put("model.layers.0.self_attn.q_proj", draw(2, 64), draw(24, 2), dtype)
    adapter.put("model.layers.1.mlp.experts", draw(6, 64), draw(48, 6), dtype)
    adapted = load_adapter(model, adapter.write(tmp_path / "a"))
    export_adapter(tmp_path / "b", adapted)
    assert Adapter.read(tmp_path / "b").tensors == adapter.tensors
    assert {tensor.dtype for tensor in adapter.tensors.values()} == {dtype}


# --- segments, packed bases ------------------------------------------------------------------------------------------


def test_a_stacked_segment_takes_the_adapters_of_all_its_layers(tmp_path) -> None:
    model, adapter = repeating(), Adapter.of(2, 2)
    assert [segment.repeats for segment in model.plan] == [1, 3]
    for layer in (1, 2, 3):
        adapter.put(f"model.layers.{layer}.self_attn.q_proj", draw(2, 64, seed=layer), draw(24, 2, seed=layer))
        adapter.put(f"model.layers.{layer}.mlp.experts", draw(6, 64, seed=layer), draw(48, 6, seed=layer))
    adapted = load_adapter(model, adapter.write(tmp_path / "a"))
    assert adapted.plan == model.plan
    flat = load_adapter(restacked(model, scan=False), tmp_path / "a")
    assert_same(adapters(adapted), adapters(flat))
    for one in (adapted, flat):
        folder = tmp_path / str(len(one.plan))
        export_adapter(folder, one)
        assert Adapter.read(folder).tensors == adapter.tensors


def test_layers_that_differ_are_cut_apart(tmp_path) -> None:
    """Layers 1 to 3 are stacked; 1 has no adapter, 2 one of rank 2, 3 one of rank 5: nothing is lost or padded."""
    model, adapter = repeating(), Adapter.of(2, 2, rank_pattern={"layers.3.self_attn.q_proj": 5})
    for layer, rank in ((2, 2), (3, 5)):
        adapter.put(f"model.layers.{layer}.self_attn.q_proj", draw(rank, 64), draw(24, rank))
    adapted = load_adapter(model, adapter.write(tmp_path / "a"))
    assert [segment.repeats for segment in adapted.plan] == [1, 1, 1, 1]
    assert_same(adapters(adapted), read_adapter(tmp_path / "a", model))
    export_adapter(tmp_path / "b", adapted)
    assert Adapter.read(tmp_path / "b").tensors == adapter.tensors
    targets = [f"model.layers.{layer}.self_attn.q_proj" for layer in (2, 3)]
    assert Adapter.read(tmp_path / "b").config["target_modules"] == targets


def test_packed_experts_stay_packed_under_their_adapter(tmp_path) -> None:
    """fault 70: the adapter of a packed bank is neither dropped nor does it unpack it."""
    model, adapter = quantize_experts(k3()), Adapter.of(2, 4)
    a, b, delta = fused(8, 2, 32, 32, 0)
    adapter.put("language_model.model.layers.1.mlp.experts", a, b)
    adapted = load_adapter(model, adapter.write(tmp_path / "a"))
    before = {place.names[0]: place.leaf for place in places(model)[0]}
    (place,) = (place for place in places(adapted)[0] if isinstance(place.leaf, LoRA))
    packed = before["layers.1.ffn.experts.down"]
    assert isinstance(packed, MXFP4)
    assert place.leaf.base.packed is packed.packed
    assert place.leaf.base.scale is packed.scale
    change = np.asarray(dense(place.leaf, np.float32)) - np.asarray(dense(packed, np.float32))
    np.testing.assert_allclose(change.transpose(0, 2, 1), 2 * delta, atol=1e-5)


def test_patches_and_blocks_of_the_tower(tmp_path) -> None:
    """A convolution's A has the shape of its kernel; the blocks are one stacked leaf."""
    model, adapter = k3(vision=TOWER), Adapter.of(2, 2)
    adapter.put("vision_tower.patch_embed.proj", draw(2, 3, 14, 14), draw(32, 2, 1, 1))
    for block in range(2):
        adapter.put(f"vision_tower.encoder.blocks.{block}.mlp.fc0", draw(2, 32, seed=block), draw(48, 2, seed=block))
    adapted = load_adapter(model, adapter.write(tmp_path / "a"))
    found = adapters(adapted)
    assert found["vision.patch_embed"].a.shape == (3 * 14 * 14, 2)
    np.testing.assert_array_equal(found["vision.blocks.up"].a[1], draw(2, 32, seed=1).T)
    export_adapter(tmp_path / "b", adapted)
    assert Adapter.read(tmp_path / "b").tensors == adapter.tensors
