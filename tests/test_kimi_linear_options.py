"""Kimi Linear with every option that the golden model does not use, all at once; and the golden model in bf16."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.numerics import TOLERANCE, cosine, rel_rms
from tests.tiny import LINEAR, filled, tiny_k3, value_and_grads

import trillion_moe as tm
from trillion_moe.config import MoEConfig
from trillion_moe.layers.block import Context
from trillion_moe.layers.kda import KDA
from trillion_moe.layers.moe import MoE
from trillion_moe.layers.segments import layer_places
from trillion_moe.model import Model, grow
from trillion_moe.transforms import cast
from trillion_moe.transforms.targets import places

F32 = TOLERANCE["float32"]

# No two sizes are equal that need not be.
ODD = LINEAR | {
    "num_layers": 4,
    "attention": ("kda", "mla", "kda", "mla"),
    "mlp": ("dense", "dense", "moe", "moe"),
    "tie_embeddings": True,
    "kda": dataclasses.replace(LINEAR["kda"], conv_width=3),
    "mla": dataclasses.replace(
        LINEAR["mla"], num_heads=5, q_lora_rank=20, kv_lora_rank=24, qk_nope_head_dim=8, qk_rope_head_dim=6,
        v_head_dim=12,
    ),
    "moe": MoEConfig(
        num_experts=9, num_groups=3, topk_groups=2, top_k=4, hidden_size=28, num_shared=2, scaling_factor=1.7,
        renormalize=False,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def model():
    model = filled(tiny_k3(**ODD))
    for block in model.segments[0][2:]:  # so large that it decides
        block.ffn.router.bias = 0.3 * jax.random.normal(jax.random.key(1), (9,))
    return model


@pytest.fixture(scope="module")
def tokens():
    return jax.random.randint(jax.random.key(2), (2, 14), 4, 300)


@pytest.fixture(scope="module")
def halves(model, tokens):
    """The first and the last 7 tokens, each alone: logits and caches."""
    return tm.forward(model, tokens[:, :7]), tm.forward(model, tokens[:, 7:])


def test_the_options_shape_the_parameters(model) -> None:
    """One of each: the names and shapes that follow from the options."""
    shapes = {place.names[0]: place.leaf.shape for place in places(model)[0]}
    assert "head" not in shapes
    assert "layers.1.attention.q" not in shapes
    assert shapes["layers.1.attention.q_b"] == (20, 5 * (8 + 6))
    assert shapes["layers.1.attention.kv_b"] == (24, 5 * (8 + 12))
    assert shapes["layers.1.attention.o"] == (5 * 12, 64)
    assert shapes["layers.0.attention.q_conv"] == (24, 3)
    assert shapes["layers.1.ffn.gate"] == (64, 96)
    assert shapes["layers.2.ffn.experts.gate"] == (9, 64, 28)
    assert shapes["layers.2.ffn.shared.gate"] == (64, 2 * 28)


def test_prefill_and_decode_equal_one_pass(model, tokens, halves) -> None:
    whole, _ = tm.forward(model, tokens)
    (first, caches), _ = halves
    caches, pieces = grow(caches, 14), [first]
    for at in range(7, 14):
        logits, caches = tm.forward(model, tokens[:, at : at + 1], caches=caches)
        pieces.append(logits)
    assert rel_rms(jnp.concatenate(pieces, axis=1), whole) < F32
    assert caches.length.tolist() == [14, 14]


def test_packed_documents_equal_rows_alone(model, tokens, halves) -> None:
    packed, _ = tm.forward(model, tokens, segments=[[1] * 7 + [2] * 7] * 2)
    for at, (alone, _) in zip((0, 7), halves, strict=True):
        assert rel_rms(packed[:, at : at + 7], alone) < F32


def test_save_and_load_bit_for_bit(model, tmp_path) -> None:
    tm.save(tmp_path / "odd", model)
    assert not [name for name in load_file(tmp_path / "odd" / "model.safetensors") if "lm_head" in name]
    loaded = tm.load(tmp_path / "odd")
    assert loaded.config == model.config
    assert loaded.head is None
    chex.assert_trees_all_equal(loaded, model)


@pytest.fixture(scope="module")
def trained(model, tokens):
    """The loss and its gradients."""
    return value_and_grads(model, {"tokens": tokens})


def test_every_parameter_but_the_routers_bias_has_a_gradient(trained) -> None:
    for place in places(trained[1])[0]:
        assert np.isfinite(place.leaf).all(), place.names[0]
        assert np.any(place.leaf) != place.names[0].endswith("router.bias"), place.names[0]


def test_a_tied_embedding_gets_the_gradients_of_both_uses(model, tokens, trained) -> None:
    """As in an untied copy, whose head is the transposed embedding."""
    value, grads = trained
    untied = Model(dataclasses.replace(model.config, tie_embeddings=False))
    untied.embed, untied.segments, untied.norm, untied.head = model.embed, model.segments, model.norm, model.embed.T
    same, apart = value_and_grads(untied, {"tokens": tokens})
    assert abs(value - same) < 1e-6
    assert min(np.abs(apart.embed).max(), np.abs(apart.head).max()) > 0
    assert rel_rms(grads.embed, apart.embed + apart.head.T) < 5 * F32
    for a, b in zip(jax.tree.leaves(grads.segments), jax.tree.leaves(apart.segments), strict=True):
        assert rel_rms(a, b) < 5 * F32


def decided(logits_NE, bias_E, top_k: int) -> np.ndarray:
    """Which tokens' choice of experts is no near tie, that bf16 may decide otherwise."""
    choice = np.sort(1 / (1 + np.exp(-logits_NE)) + np.asarray(bias_E), axis=1)
    return choice[:, -top_k] - choice[:, -top_k - 1] > 1e-3


def test_bf16_layer_by_layer(goldens) -> None:
    """Each layer of the golden model in bf16, fed the golden's own input, points the same way as the float32 golden."""
    folder = goldens / "kimi_linear" / "a"
    golden = load_file(folder / "outputs.safetensors")
    half = cast(tm.load(folder), "bfloat16")

    @jax.jit
    def layer(block, attn_in, ffn_in):
        out, _ = block.attend(attn_in, Context(), None, half.config)
        return out, block.feed(ffn_in, Context(), half.config)[0]

    for i, (s, j, _) in enumerate(layer_places(half.plan)):
        block = half.segments[s][j]
        assert block.ffn_norm.dtype == jnp.bfloat16
        if isinstance(block.attention, KDA):
            assert block.attention.a_log.dtype == jnp.float32
        hidden = golden[f"hidden.layer.{i - 1}" if i else "hidden.embed"]
        attn_expected, ffn_expected = golden[f"attn_out.layer.{i}"], golden[f"mlp_out.layer.{i}"]
        inputs = (jnp.asarray(x, jnp.bfloat16) for x in (hidden, hidden + attn_expected))
        attn_out, ffn_out = layer(block, *inputs)
        kept = np.ones(hidden.shape[:2], bool)
        if isinstance(block.ffn, MoE):
            kept = decided(golden[f"router.layer.{i}.logits"], block.ffn.router.bias, half.config.moe.top_k)
            kept = kept.reshape(hidden.shape[:2])
        assert kept.mean() > 0.95, i
        assert cosine(attn_out, attn_expected) > 0.999, i
        assert cosine(ffn_out[kept], ffn_expected[kept]) > 0.999, i
