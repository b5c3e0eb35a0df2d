"""Faults that people met: each spoilt checkpoint is refused with file, tensor and numbers, or read rightly."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from tests.checkpoint.tools import (
    GOLDENS,
    Checkpoint,
    Tensor,
    blueprint_of,
    layer,
    load,
    read_index,
    shard,
    write_index,
)

from trillion_moe import checkpoint
from trillion_moe.checkpoint import CheckpointError
from trillion_moe.config import ConfigError
from trillion_moe.transforms import cast

K3, PACKED, LINEAR = "kimi_k3/a", "kimi_k3/a/mxfp4", "kimi_linear/a"
TEXT = "language_model.model."
BIAS = "model.layers.1.block_sparse_moe.gate.e_score_correction_bias"
EXPERT = f"{TEXT}layers.1.block_sparse_moe.experts."


def refused(folder, **options) -> tuple[str, ...]:
    with pytest.raises(CheckpointError) as caught:
        load(folder, **options)
    return caught.value.findings


# --- KDA --------------------------------------------------------------------------------------------------------------


def test_a_padded_a_log_is_one_scalar_per_head() -> None:
    """fault 1: A_log [16] with head_dim 16 is not per channel: 5 heads and 11 zeros."""
    stored = Checkpoint.golden(K3).tensors[f"{TEXT}layers.0.self_attn.A_log"].array
    held = layer(load(GOLDENS / K3), 0).attention.a_log
    assert held.shape == (5,)
    np.testing.assert_array_equal(held, stored[:5])
    assert not stored[5:].any()


def a_log(shape, heads: int = 4, tail: float = 0.0) -> np.ndarray:
    flat = np.zeros(int(np.prod(shape)), np.float32)
    flat[:heads] = np.arange(1, heads + 1)[: len(flat)] / 8
    flat[heads:] = tail
    return flat.reshape(shape)


def with_a_log(array, layers=(0, 1, 3)) -> Checkpoint:
    spoilt = Checkpoint.golden(LINEAR)
    for i in layers:
        spoilt.put(f"model.layers.{i}.self_attn.A_log", "F32", array)
    return spoilt


@pytest.mark.parametrize("shape", [(4,), (1, 1, 4, 1), (5,), (128,)])
def test_a_log_is_trimmed_and_its_stored_shape_restored(shape, tmp_path) -> None:
    """fault 2: padding is cut at load and comes back bit for bit."""
    changed = with_a_log(a_log(shape))
    model = load(changed.write(tmp_path / "in"))
    np.testing.assert_array_equal(layer(model, 3).attention.a_log, np.arange(1, 5) / 8)
    assert model.config.kda.a_log_shape == (None if shape == (4,) else shape)
    checkpoint.save(tmp_path / "out", model)
    assert Checkpoint.read(tmp_path / "out").tensors == changed.tensors


@pytest.mark.parametrize("tail", [1e-3, np.nan, -0.0])
def test_a_log_with_something_behind_the_heads(tail, tmp_path) -> None:
    """fault 2: a tail that is not zero means that the heads are counted wrongly."""
    (finding,) = refused(with_a_log(a_log((6,))).write(tmp_path / "in") and _spoil_tail(tmp_path / "in", tail))
    assert re.search(
        r"model.safetensors: model.layers.1.self_attn.A_log: entry 4 is \S+, but past the 4 heads", finding
    )


def _spoil_tail(folder, tail):
    spoilt = Checkpoint.read(folder)
    spoilt.put("model.layers.1.self_attn.A_log", "F32", a_log((6,), tail=tail))
    return spoilt.write(folder)


@pytest.mark.parametrize("shape", [(2,), (1, 1, 2, 1), (4, 1), (1, 1, 6, 1)])
def test_a_log_of_an_impossible_shape(shape, tmp_path) -> None:
    """fault 2: shorter than the heads, or no vector."""
    findings = refused(with_a_log(a_log(shape)).write(tmp_path / "in"))
    assert len(findings) == 3
    assert f"model.layers.0.self_attn.A_log: wrong shape {list(shape)}: 4 heads need [4], [1, 1, 4, 1]" in findings[0]


def test_a_log_stored_in_two_shapes(tmp_path) -> None:
    """fault 2: only one shape can be remembered, so only one is taken."""
    (finding,) = refused(with_a_log(a_log((6,)), layers=(3,)).write(tmp_path / "in"))
    assert "layers.3.self_attn.A_log: wrong shape [6]: other layers have [1, 1, 4, 1]" in finding


def test_a_log_that_is_not_finite(tmp_path) -> None:
    (finding,) = refused(with_a_log(np.full((1, 1, 4, 1), np.inf), layers=(0,)).write(tmp_path / "in"))
    assert finding.endswith("model.layers.0.self_attn.A_log: entry 0 is inf")


# --- router -----------------------------------------------------------------------------------------------------------


def chosen(model) -> set[int]:
    """Experts that layer 1's router picks when every score is 0.5, so by the bias alone."""
    router = layer(model, 1).ffn.router
    ids, *_ = router(jnp.zeros((1, 64), model.dtype), model.config)
    return set(np.asarray(ids[0]).tolist())


@pytest.mark.parametrize("how", ["at load", "after load"])
def test_the_router_bias_survives_a_cast(how, tmp_path) -> None:
    """fault 28: 0.5 and 0.5 + 2^-12 are one number in bfloat16; the larger must win."""
    bias = np.array([0.5, 0.5, 0.5 + 2**-12, 0.5, 0.5, 0.9, 0.5, 0.5])
    spoilt = Checkpoint.golden(LINEAR)
    spoilt.put(BIAS, "F32", bias)
    folder = spoilt.write(tmp_path / "in")
    model = load(folder, dtype="bfloat16") if how == "at load" else cast(load(folder), "bfloat16")
    held = layer(model, 1).ffn.router
    assert (held.bias.dtype, held.weight.dtype) == (jnp.float32, jnp.bfloat16)
    assert chosen(model) == {2, 5}


def test_the_router_bias_survives_the_file(tmp_path) -> None:
    """fault 29: saved and read again it is the same 32 bits."""
    bias = np.random.default_rng(0).normal(size=8).astype(np.float32)
    changed = Checkpoint.golden(LINEAR)
    changed.put(BIAS, "F32", bias)
    checkpoint.save(tmp_path / "out", load(changed.write(tmp_path / "in"), dtype="bfloat16"))
    assert Checkpoint.read(tmp_path / "out").tensors[BIAS] == Tensor.of("F32", bias)
    np.testing.assert_array_equal(layer(load(tmp_path / "out"), 1).ffn.router.bias, bias)


@pytest.mark.parametrize("ending", ["gate.e_score_correction_bias", "self_attn.A_log", "self_attn.o_norm.weight"])
@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_float32_tensors_stored_in_less(ending, dtype, tmp_path) -> None:
    """fault 29, fault 30: what was rounded by another exporter is refused, not trained on."""
    spoilt = Checkpoint.golden(LINEAR)
    name = next(n for n in spoilt.tensors if n.endswith(ending))
    spoilt.tensors[name] = spoilt.tensors[name].cast(dtype)
    (finding,) = refused(spoilt.write(tmp_path / "in"))
    assert (
        f"model.safetensors: {name}: wrong dtype {dtype}: legal is F32, because rounding it changes the model"
        in finding
    )


def test_save_refuses_float32_tensors_in_less(tmp_path) -> None:
    """fault 30: a cast of the whole tree that went around `cast` does not reach a file."""
    model = jax.tree.map(lambda a: a.astype("bfloat16"), load(GOLDENS / LINEAR))
    with pytest.raises(CheckpointError) as caught:
        checkpoint.save(tmp_path / "out", model)
    assert len(caught.value.findings) == 3 * 6 + 4
    assert "segments.0.1.ffn.router.bias is bfloat16: legal is float32" in caught.value.findings


@pytest.mark.parametrize("home", [BIAS, BIAS.replace(".gate", ""), BIAS.replace("block_sparse_moe", "mlp")])
def test_the_bias_has_three_homes(home, tmp_path) -> None:
    """fault 32: wherever it is stored, it forces expert 7."""
    moved = Checkpoint.golden(LINEAR)
    del moved.tensors[BIAS]
    moved.put(home, "F32", [0, 0, 0.25, 0, 0, 0, 0, 1])
    assert chosen(load(moved.write(tmp_path / "in"))) == {2, 7}


def test_the_bias_in_two_homes_or_none(tmp_path) -> None:
    """fault 32: neither dropped nor chosen between."""
    spoilt = Checkpoint.golden(LINEAR)
    second = BIAS.replace(".gate", "")
    spoilt.tensors[second] = spoilt.tensors[BIAS]
    (finding,) = refused(spoilt.write(tmp_path / "two"))
    assert finding == f"model.safetensors: {second}: duplicate: it is also model.safetensors: {BIAS}"
    del spoilt.tensors[second], spoilt.tensors[BIAS]
    assert refused(spoilt.write(tmp_path / "none")) == (f"missing: {BIAS}",)


# --- shards -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def three(tmp_path):
    return Checkpoint.golden(K3).write(tmp_path / "three", shards=3)


def test_a_shard_shorter_than_its_header(three) -> None:
    """fault 46: bytes there, bytes expected, and the first tensor that is cut."""
    path = three / shard(2, 3)
    data = path.read_bytes()
    path.write_bytes(data[:-100])
    last = sorted(n for n, f in read_index(three).items() if f == path.name)[-1]
    (finding,) = refused(three)
    assert (
        f"{path.name}: truncated: {len(data) - 100} bytes, its header describes {len(data)} (100 are missing)"
        in finding
    )
    assert "1 tensors cut" in finding
    assert finding.endswith(last)


def test_a_shard_that_is_absent(three) -> None:
    """fault 47: named once, with what it should hold; its tensors are not listed as missing one by one."""
    (three / shard(3, 3)).unlink()
    (finding,) = refused(three)
    assert finding.startswith(f"{shard(3, 3)}: missing: model.safetensors.index.json puts ")
    assert " and 158 more there" in finding


def test_a_shard_absent_without_an_index(tmp_path) -> None:
    """fault 47: the shards' own numbers say that one is lost."""
    folder = Checkpoint.golden(K3).write(tmp_path / "in", shards=3, index=False)
    (folder / shard(1, 3)).unlink()
    (finding,) = refused(folder)
    assert finding.startswith(f"{shard(1, 3)}: missing")


def test_an_index_that_lies_in_three_ways(three) -> None:
    """fault 48: listed but in no file, in another shard than listed, in a file but not listed: three named findings."""
    index = read_index(three)
    moved, extra = "vision_tower.patch_embed.proj.weight", f"{TEXT}layers.2.mlp_res_norm.weight"
    index["mtp.fc.weight"] = shard(3, 3)
    index[moved] = shard(1, 3)
    file = index.pop(extra)
    write_index(three, index)
    findings = refused(three)
    assert len(findings) == 3
    assert f"{shard(3, 3)}: {moved}: wrong shard: model.safetensors.index.json puts it in {shard(1, 3)}" in findings
    assert f"{file}: {extra}: model.safetensors.index.json does not list it" in findings
    assert f"{shard(3, 3)}: mtp.fc.weight: model.safetensors.index.json lists it, but it is not in the file" in findings


def test_a_tensor_in_two_shards(three) -> None:
    from tests.checkpoint.tools import read_tensors, write_tensors

    name, path = f"{TEXT}norm.weight", three / shard(1, 3)
    there = read_index(three)[name]
    tensors = read_tensors(path)
    write_tensors(path, tensors | {name: read_tensors(three / there)[name]})
    findings = refused(three)
    assert any(f"{name}: duplicate" in finding for finding in findings)
    assert f"{shard(1, 3)}: {name}: wrong shard: model.safetensors.index.json puts it in {there}" in findings


def test_all_findings_come_at_once(tmp_path) -> None:
    """Missing, unexpected, shape and dtype, contents: one error, which shows 50 lines and counts the rest."""
    spoilt = Checkpoint.golden(PACKED)
    del spoilt.tensors[f"{TEXT}norm.weight"]
    spoilt.put("model.mtp.weight", "F32", [1.0])
    spoilt.put(f"{TEXT}embed_tokens.weight", "F32", np.zeros((512, 63)))
    spoilt.tensors["language_model.lm_head.weight"] = Tensor("F64", (512, 64), b"\0" * 512 * 64 * 8)
    spoilt.put(f"{TEXT}layers.0.self_attn.A_log", "F32", a_log((16,), heads=5, tail=1.0))
    spoilt.put(f"{EXPERT}0.w1.weight_scale", "U8", np.zeros((64, 1)))
    findings = refused(spoilt.write(tmp_path / "in"))
    words = ("missing: ", "unexpected", "wrong shape [512, 63]", "wrong dtype F64", "entry 5", "every scale code is 0")
    for word in words:
        assert sum(word in finding for finding in findings) == 1, word
    assert len(findings) == len(words) + 1  # a scale code of 0 with values is said as well
    for i in range(60):
        spoilt.put(f"extra.{i}", "F32", [0.0])
    with pytest.raises(CheckpointError, match=r"67 problem\(s\)") as caught:
        load(spoilt.write(tmp_path / "more"))
    assert str(caught.value).endswith("... and 17 more")
    assert str(caught.value).count("\n") == 51


# --- names ------------------------------------------------------------------------------------------------------------


def test_both_prefixes_load_alike(tmp_path) -> None:
    """fault 51: the text model below "language_model.model." or "model."."""
    plain = Checkpoint.golden(K3)
    plain.rename("language_model.model.", "model.")
    plain.rename("language_model.lm_head", "lm_head")
    assert "model.layers.0.self_attn.A_log" in plain.tensors
    assert "lm_head.weight" in plain.tensors
    model = load(plain.write(tmp_path / "in"))
    for a, b in zip(jax.tree.leaves(model), jax.tree.leaves(load(GOLDENS / K3)), strict=True):
        np.testing.assert_array_equal(a, b)
    checkpoint.save(tmp_path / "out", model)
    assert Checkpoint.read(tmp_path / "out").tensors.keys() == plain.tensors.keys()
    assert load(tmp_path / "out").config.checkpoint.prefix == "model."


@pytest.mark.parametrize("part", ["language_model.model.layers.5.", "language_model.lm_head."])
def test_mixed_prefixes(part, tmp_path) -> None:
    """fault 51: half a conversion is one finding, not hundreds of missing tensors."""
    spoilt = Checkpoint.golden(K3)
    moved = sum(part in name for name in spoilt.tensors)
    spoilt.rename(part, part.removeprefix("language_model."))
    (finding,) = refused(spoilt.write(tmp_path / "in"))
    assert f"mixed prefixes: {moved} tensors are under 'model.', the others under 'language_model.model.'" in finding


# --- MXFP4 ------------------------------------------------------------------------------------------------------------


def one_row(codes, packed: int = 0x22) -> Checkpoint:
    """Expert 0's w1 with the same nibbles everywhere (0x2 = 1.0) and these scale codes in its first rows."""
    made = Checkpoint.golden(PACKED)
    scale = np.full((64, 1), 127)
    scale[: len(codes), 0] = codes
    made.put(f"{EXPERT}0.w1.weight_packed", "U8", np.full((64, 16), packed))
    made.put(f"{EXPERT}0.w1.weight_scale", "U8", scale)
    return made


@pytest.mark.parametrize("dtype", ["U8", "F8_E8M0"])
def test_scale_codes_are_exponents_under_both_names(dtype, tmp_path) -> None:
    """fault 52, fault 53, fault 54: a code u is 2^(u - 127), never the number u, for expert 0 too; 127 is 1."""
    made = one_row([120, 125, 127, 130, 140])
    made.tensors = {n: t._replace(dtype=dtype) if n.endswith("_scale") else t for n, t in made.tensors.items()}
    folder = made.write(tmp_path / "in")
    held = layer(load(folder, quantization="decode"), 1).ffn.experts.gate[0]
    np.testing.assert_array_equal(held[0, :5], [2**-7, 0.25, 1, 8, 8192])
    kept = layer(load(folder), 1).ffn.experts.gate
    np.testing.assert_array_equal(kept.scale[0, :5, 0], [120, 125, 127, 130, 140])


def test_u8_and_e8m0_are_the_same_bytes(tmp_path) -> None:
    """fault 53: identical leaves, packed and decoded."""
    made = Checkpoint.golden(PACKED)
    made.tensors = {n: t._replace(dtype="F8_E8M0") if n.endswith("_scale") else t for n, t in made.tensors.items()}
    folder = made.write(tmp_path / "in")
    for quantization in ("keep", "decode"):
        ours, golden = (load(f, quantization=quantization) for f in (folder, GOLDENS / PACKED))
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(golden), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("expert", [0, 7])
def test_scales_that_were_never_written(expert, tmp_path) -> None:
    """fault 52: a matrix of zero codes is refused, expert 0 like any other; zero codes of zero groups are legal."""
    golden = Checkpoint.golden(PACKED)
    assert 0 in golden.tensors[f"{EXPERT}1.w1.weight_scale"].array
    golden.put(f"{EXPERT}{expert}.w2.weight_scale", "U8", np.zeros((32, 2)))
    findings = refused(golden.write(tmp_path / "in"))
    assert len(findings) == 2
    assert f"model.safetensors: {EXPERT}{expert}.w2.weight_scale: " in findings[0]
    assert "every scale code is 0, the scales were never written" in findings[0]


@pytest.mark.parametrize(("code", "why"), [(255, "is NaN"), (254, "overflows fp32"), (1, "is legal only where all 32")])
def test_scale_codes_without_a_value(code, why, tmp_path) -> None:
    """fault 52, fault 54: codes that no quantizer writes."""
    (finding,) = refused(one_row([127, 127, code], packed=0x77).write(tmp_path / "in"))
    assert f"{EXPERT}0.w1.weight_scale: row 2, group 0: scale code {code} {why}" in finding


def test_a_wrong_bias_shows_against_the_original(tmp_path) -> None:
    """fault 54: experts encoded with bias 125 decode to four times their norm."""
    plain = load(GOLDENS / PACKED, quantization="decode")
    checkpoint.save(tmp_path / "original", plain)
    blueprint = blueprint_of(plain.config)
    assert checkpoint.compare_experts(blueprint, GOLDENS / PACKED, tmp_path / "original") == []
    wrong = Checkpoint.golden(PACKED)
    for e in (0, 3):
        name = f"{EXPERT}{e}.w3.weight_scale"
        wrong.put(name, "U8", wrong.tensors[name].array + 2)
    findings = checkpoint.compare_experts(blueprint, wrong.write(tmp_path / "in"), tmp_path / "original")
    assert [finding.split(": ")[1] for finding in findings] == [f"{EXPERT}{e}.w3.weight_packed" for e in (0, 3)]
    assert all("4 times as much" in finding for finding in findings)


def test_the_low_nibble_comes_first(tmp_path) -> None:
    """fault 55: byte 0x42 under scale code 128 is [1, 2] times 2."""
    folder = one_row([128], packed=0x42).write(tmp_path / "in")
    held = layer(load(folder, quantization="decode"), 1).ffn.experts.gate[0]
    np.testing.assert_array_equal(held[:4, 0], [2, 4, 2, 4])
    made = one_row([128], packed=0x21).write(tmp_path / "two")
    np.testing.assert_array_equal(layer(load(made, quantization="decode"), 1).ffn.experts.gate[0][:2, 0], [1, 2])


@pytest.mark.parametrize(("gone", "left"), [("weight_scale", "weight_packed"), ("weight_packed", "weight_scale")])
def test_half_of_a_pair(gone, left, tmp_path) -> None:
    """fault 56: packed bytes without their scales, or scales alone."""
    spoilt = Checkpoint.golden(PACKED)
    del spoilt.tensors[f"{EXPERT}3.w2.{gone}"]
    (finding,) = refused(spoilt.write(tmp_path / "in"))
    assert finding == f"model.safetensors: {EXPERT}3.w2.{left}: its other half {EXPERT}3.w2.{gone} is missing"


def test_an_expert_that_is_absent_or_too_many(tmp_path) -> None:
    """fault 56: a pair goes missing as one finding; an expert number beyond the config's is no tensor."""
    spoilt = Checkpoint.golden(PACKED)
    for half in ("packed", "scale"):
        spoilt.rename(f"{EXPERT}3.w2.weight_{half}", f"{EXPERT}12.w2.weight_{half}")
    findings = refused(spoilt.write(tmp_path / "in"))
    assert sorted(f.split(": ", 1)[0] for f in findings) == ["missing", "model.safetensors", "model.safetensors"]
    assert f"missing: {EXPERT}3.w2.weight_packed" in findings


def test_some_experts_packed_and_some_not(tmp_path) -> None:
    """fault 56: one expert decoded by a converter that excluded it."""
    spoilt, plain = Checkpoint.golden(PACKED), Checkpoint.golden(K3)
    for half in ("packed", "scale"):
        del spoilt.tensors[f"{EXPERT}3.w2.weight_{half}"]
    spoilt.tensors[f"{EXPERT}3.w2.weight"] = plain.tensors[f"{EXPERT}3.w2.weight"]
    (finding,) = refused(spoilt.write(tmp_path / "in"))
    assert f"{EXPERT}3.w2.weight: mixed experts: 1 matrices are plain, 251 packed" in finding


def test_packed_experts_without_a_format_tag(tmp_path) -> None:
    """fault 57: no quantization_config, no reading."""
    spoilt = Checkpoint.golden(PACKED)
    del spoilt.config["text_config"]["quantization_config"]
    for quantization in ("keep", "decode"):
        (finding,) = refused(spoilt.write(tmp_path / "in"), quantization=quantization)
        assert "packed, but config.json has no quantization_config that says in what format" in finding


@pytest.mark.parametrize("tag", [None, "int4-pack-quantized", "nvfp4-pack-quantized"])
def test_a_wrong_format_tag(tag, tmp_path) -> None:
    """fault 57: a label is not a format."""
    spoilt = Checkpoint.golden(PACKED)
    block = spoilt.config["text_config"]["quantization_config"]
    block["format"] = tag
    with pytest.raises(ConfigError, match=r"quantization_config.format"):
        load(spoilt.write(tmp_path / "in"))


def test_plain_experts_under_a_format_tag(tmp_path) -> None:
    """fault 57: the config says packed, the files are not."""
    spoilt = Checkpoint.golden(K3)
    spoilt.config = Checkpoint.golden(PACKED).config
    for quantization in ("keep", "decode"):
        (finding,) = refused(spoilt.write(tmp_path / "in"), quantization=quantization)
        assert "plain, but the quantization_config in config.json says mxfp4" in finding


def test_a_packed_blueprint_for_plain_files() -> None:
    stored = checkpoint.read_config(GOLDENS / K3)
    blueprint = blueprint_of(dataclasses.replace(stored, quantization="mxfp4"))
    with pytest.raises(CheckpointError, match=r"experts.gate of the blueprint is packed: load first, then quantize"):
        checkpoint.load_into(blueprint, GOLDENS / K3, stored)


def test_packed_bytes_of_another_dtype(tmp_path) -> None:
    """fault 53: U8 bytes under another name are not taken for numbers."""
    spoilt = Checkpoint.golden(PACKED)
    name = f"{EXPERT}2.w1.weight_scale"
    spoilt.tensors[name] = Tensor.of("BF16", np.ones((64, 1), ml_dtypes.bfloat16))
    findings = refused(spoilt.write(tmp_path / "in"))
    assert findings == (f"model.safetensors: {name}: wrong dtype BF16: legal is U8 or F8_E8M0",)
