"""Kimi K3 against the release's own outputs, array by array (see goldens/README.md)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.numerics import cosine, rel_rms

import trillion_moe as tm
from trillion_moe.kernels import linear_attention
from trillion_moe.layers.block import Context
from trillion_moe.layers.kda import KDA
from trillion_moe.layers.segments import layer_places
from trillion_moe.transforms import cast

BAR = 1e-4  # two independent float32 implementations differ by 2e-5 after 8 layers
INPUTS = ("input_ids", "input_ids_expanded", "attention_mask", "pixel_values", "grid_thws")


@pytest.fixture(scope="module")
def folder(goldens):
    return goldens / "kimi_k3" / "a"


@pytest.fixture(scope="module")
def model(folder):
    return tm.load(folder)


def compare(arrays, golden):
    """Every golden array is there and agrees; integers exactly."""
    missing = [name for name in golden if name not in arrays and name not in INPUTS]
    assert not missing
    for name in golden:
        if name in INPUTS:
            continue
        found, expected = np.asarray(arrays[name]), golden[name]
        if expected.dtype.kind == "i":
            np.testing.assert_array_equal(found, expected, err_msg=name)
        else:
            assert rel_rms(found, expected) < BAR, name


@pytest.mark.parametrize("padding", [0, 9])
def test_text(model, folder, padding):
    """As it is, and with padding of our own on the left, which changes nothing at the golden's tokens."""
    golden = load_file(folder / "text.safetensors")
    tokens, mask = (np.pad(golden[name], ((0, 0), (padding, 0))) for name in ("input_ids", "attention_mask"))
    arrays = tm.trace(model, tokens, segments=mask)
    compare({name: unpadded(a, tokens.shape, padding) for name, a in arrays.items()}, golden)


def unpadded(array, shape, padding):
    """Without the first `padding` tokens of each row; tokens are the leading dims [B, T], or one dim of B T."""
    array = np.asarray(array)
    if array.shape[:2] == shape:
        return array[:, padding:]
    by_row = array.reshape(*shape, *array.shape[1:])[:, padding:]
    return by_row.reshape(-1, *array.shape[1:])


@pytest.mark.slow
@pytest.mark.parametrize("ids", ["input_ids", "input_ids_expanded"])
def test_images_and_text(model, folder, ids):
    golden = load_file(folder / "image_text.safetensors")
    images = tm.ImageBatch(golden["pixel_values"], golden["grid_thws"])
    arrays = tm.trace(model, golden[ids], images=images)
    compare(arrays, golden)
    logits, _ = tm.forward(model, golden[ids], images=images)
    assert rel_rms(logits, golden["logits"]) < BAR


@pytest.mark.slow
def test_packed_experts(folder):
    packed = tm.load(folder / "mxfp4")
    golden = load_file(folder / "mxfp4" / "text.safetensors")
    compare(tm.trace(packed, golden["input_ids"]), golden)
    decoded = tm.load(folder / "mxfp4", quantization="decode")
    for name, expected in load_file(folder / "mxfp4" / "dequant.safetensors").items():
        layer, expert, which = int(name.split(".")[3]), int(name.split(".")[6]), name.split(".")[7]
        s, j, _ = layer_places(decoded.plan)[layer]
        bank = getattr(decoded.segments[s][j].ffn.experts, {"w1": "gate", "w3": "up", "w2": "down"}[which])
        np.testing.assert_array_equal(np.asarray(bank[expert]).T, expected, err_msg=name)


@pytest.mark.slow
def test_prefill_and_decode(model, folder):
    """Prefill of T - 2 tokens, then two single steps: logits and every cache."""
    golden = load_file(folder / "decode.safetensors")
    tokens = golden["input_ids"]
    logits, caches = tm.forward(model, tokens[:, :-2])
    compare_caches(model, caches, golden, "prefill.")
    assert rel_rms(logits, golden["prefill.logits"]) < BAR
    for step, at in enumerate((-2, -1)):
        logits, caches = tm.forward(model, tokens[:, [at]], caches=caches)
        assert rel_rms(logits, golden[f"decode{step}.logits"]) < BAR
    compare_caches(model, caches, golden, "decode1.")


def compare_caches(model, caches, golden, prefix):
    for i, (s, j, _) in enumerate(layer_places(model.plan)):
        cache, at = caches.layers[s][j], f"{prefix}layer{i}."
        if model.config.attention[i] == "kda":
            for name in "qkv":  # the release keeps one input more than the convolution needs
                kept = np.swapaxes(getattr(cache, f"conv_{name}"), 1, 2)
                assert rel_rms(kept, golden[f"{at}conv_{name}"][..., 1:]) < BAR
            assert rel_rms(np.swapaxes(cache.state, 2, 3), golden[f"{at}state_v_first"]) < BAR
            continue
        m, length = model.config.mla, int(caches.length[0])
        expanded = cache.latent[0, :length] @ model.segments[s][j].attention.kv_b
        k, v = np.split(expanded.reshape(length, m.num_heads, -1), [m.qk_nope_head_dim], axis=-1)
        shared = np.broadcast_to(cache.k_pe[0, :length, None], (length, m.num_heads, m.qk_rope_head_dim))
        k = np.concatenate([k, shared], axis=-1)
        assert rel_rms(k.swapaxes(0, 1)[None], golden[f"{at}key"]) < BAR
        assert rel_rms(v.swapaxes(0, 1)[None], golden[f"{at}value"]) < BAR


@pytest.mark.slow
def test_greedy_ids(model, folder):
    golden = load_file(folder / "greedy.safetensors")
    completions = tm.generate(model, golden["prompt_ids"].tolist(), max_new_tokens=16, eos_ids=())
    np.testing.assert_array_equal([c.ids for c in completions], golden["greedy_ids"])


@pytest.mark.slow
def test_every_gradient(model, folder, tmp_path):
    """Through images, both attentions, experts and residual mixes; remat is on, as in training."""
    golden, inputs = load_file(folder / "grads.safetensors"), load_file(folder / "image_text.safetensors")
    images = tm.ImageBatch(inputs["pixel_values"], inputs["grid_thws"])
    batch = {"tokens": inputs["input_ids_expanded"], "images": images}
    options = {"xla_backend_optimization_level": 3}  # rounding without it (3.4e-4 at worst) is not what users see
    (value, _), grads = jax.jit(jax.value_and_grad(tm.loss, has_aux=True), compiler_options=options)(model, batch)
    assert abs(float(value) - golden.pop("loss")[0]) < 1e-5
    tm.save(tmp_path / "grads", grads)  # names and layout of the checkpoint
    found = load_file(tmp_path / "grads" / "model.safetensors")
    for name, expected in golden.items():
        assert rel_rms(found[name].astype(np.float32), expected) < 3e-4, name
    assert all(np.all(found[name] == 0) for name in found if name.endswith("e_score_correction_bias"))


def test_kda_operator(folder):
    """The operator alone, with rows so small that the epsilon of the L2 norm matters."""
    golden = {k: jnp.asarray(v) for k, v in load_file(folder / "kda_op.safetensors").items()}
    heads = golden["g_raw"].shape[2:]
    z = golden["g_raw"] + golden["dt_bias"].reshape(heads)
    g = linear_attention.kda_gate(z, golden["A_log"], lower_bound=-5.0)
    assert rel_rms(g, golden["log_decay"]) < 1e-6
    q, k = linear_attention.l2norm(golden["q"]), linear_attention.l2norm(golden["k"])
    beta = jax.nn.sigmoid(golden["beta_raw"])
    for impl in ("reference", "xla"):
        out, state = linear_attention.kda(
            q * heads[-1] ** -0.5, k, golden["v"], g, beta, state=golden["initial_state_kv"], impl=impl
        )
        assert rel_rms(out, golden["out"]) < 1e-5
        assert rel_rms(state, golden["final_state_kv"]) < 1e-5


def test_bf16_layer_by_layer(model, folder):
    """Each layer in bf16, fed the golden's own input, points the same way as the float32 golden."""
    golden = load_file(folder / "text.safetensors")
    half = cast(model, "bfloat16")
    segments = jnp.asarray(golden["attention_mask"][:1], jnp.int32)

    @jax.jit
    def layer(block, attn_in, ffn_in):
        out, _ = block.attend(attn_in, Context(segments), None, half.config)
        return out, block.feed(ffn_in, Context(segments), half.config)[0]

    for i, (s, j, _) in enumerate(layer_places(half.plan)):
        block = half.segments[s][j]
        assert block.ffn_norm.dtype == jnp.bfloat16
        if isinstance(block.attention, KDA):
            assert block.attention.a_log.dtype == jnp.float32
        attn_in, ffn_in = (jnp.asarray(golden[f"layer{i}.{n}"][:1], jnp.bfloat16) for n in ("attn_mix", "mlp_mix"))
        attn_out, ffn_out = layer(block, attn_in, ffn_in)
        assert cosine(attn_out, golden[f"layer{i}.attn_out"][:1]) > 0.999, i
        assert cosine(ffn_out, golden[f"layer{i}.mlp_out"][:1]) > 0.999, i
