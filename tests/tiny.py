"""Tiny models of both families for the tests, and their arrays by logical name."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import trillion_moe as tm
from trillion_moe.blueprint import init
from trillion_moe.config import KDAConfig, MLAConfig, MoEConfig, VisionConfig
from trillion_moe.data.tiktoken_model import K3_ADDED, K3_RANKS, write_tiktoken
from trillion_moe.layers.segments import depth_plan, layer_places
from trillion_moe.model import Model, at_repeat
from trillion_moe.transforms.targets import places

KDA = KDAConfig(num_heads=3, head_dim=8, conv_width=4, gate_lower_bound=-5.0, full_rank_gate=True, a_log_shape=(4,))
MLA = MLAConfig(
    num_heads=3, q_lora_rank=16, kv_lora_rank=32, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, output_gate=True
)
MOE = MoEConfig(
    num_experts=8, top_k=2, hidden_size=32, latent_size=32, latent_norm=True, num_shared=1, scaling_factor=1.0
)


def tiny_k3(**changes) -> tm.ModelConfig:
    """Hidden 64; 3 KDA, MLA, MLA last; 3 heads of 8 (A_log padded to 4), 8 experts top-2, residual blocks of 2."""
    return tm.ModelConfig(
        **{
            "model_type": "kimi_k3",
            "vocab_size": 300,
            "hidden_size": 64,
            "num_layers": 5,
            "dense_hidden_size": 96,
            "attention": ("kda", "kda", "kda", "mla", "mla"),
            "mlp": ("dense", "moe", "moe", "moe", "moe"),
            "activation": "situ",
            "situ_beta": 4.0,
            "situ_linear_beta": 25.0,
            "attn_res_block": 2,
            "rms_norm_eps": 1e-5,
            "dtype": "float32",
            "bos_id": 1,
            "eos_ids": (2,),
            "pad_id": 2,
            "media_id": 3,
            "initializer_range": 0.1,
            "kda": KDA,
            "mla": MLA,
            "moe": MOE,
        }
        | changes
    )


LINEAR = {
    "model_type": "kimi_linear",
    "activation": "silu",
    "situ_beta": None,
    "situ_linear_beta": None,
    "attn_res_block": None,
    "media_id": None,
    "kda": dataclasses.replace(KDA, gate_lower_bound=None, full_rank_gate=False, a_log_shape=None),
    "mla": dataclasses.replace(MLA, q_lora_rank=None, output_gate=False),
    "moe": dataclasses.replace(MOE, latent_size=None, latent_norm=False, scaling_factor=2.4),
}
"""Changes that make `tiny_k3` a Kimi Linear."""

SHORT = {"num_layers": 3, "attention": ("kda", "mla", "kda"), "mlp": ("dense", "moe", "moe")}
"""Changes after which every kind of layer is there once or twice, in two residual blocks: quick to compile."""

SIX = {"num_layers": 6, "attention": ("kda", "mla") * 3, "mlp": ("dense",) + ("moe",) * 5}
"""Changes after which the last two blocks (or pairs of layers) repeat."""


RANKS = [bytes([i]) for i in range(256)] + [b"message", b"assistant", b"response", b" role", b"user"]
IDS = {token.name: (len(RANKS) + i - K3_RANKS, token.special) for i, token in K3_ADDED.items()}
"""A vocabulary of all single bytes, a few words, and K3's control tokens."""


def text_checkpoint(folder: Path, *, packed: bool = False) -> Path:
    """A tiny Kimi K3 that reads text and pictures: two layers, saved with its tokenizer."""
    vision = VisionConfig(
        hidden_size=32, num_layers=1, num_heads=2, qkv_size=32, mlp_size=64, patch_size=14, text_hidden_size=64,
        pos_emb_height=4, pos_emb_width=4, pos_emb_time=4,
    )  # fmt: skip
    kinds = {"num_layers": 2, "attention": ("kda", "mla"), "mlp": ("dense", "moe")}
    cfg = tiny_k3(
        **kinds, vocab_size=len(RANKS) + 256, vision=vision, initializer_range=0.3, bos_id=IDS["[BOS]"][0],
        eos_ids=(IDS["<|end_of_msg|>"][0],), pad_id=IDS["[PAD]"][0], media_id=IDS["<|media_pad|>"][0],
    )  # fmt: skip
    model = filled(cfg)
    tm.save(folder, tm.quantize_experts(model) if packed else model)
    write_tiktoken(folder, RANKS, IDS, bos="[BOS]", eos="[EOS]", pad="[PAD]", unk="[UNK]")
    return folder


def filled(cfg, seed=0, **kwargs) -> Model:
    return init(Model(cfg, **kwargs), jax.random.key(seed))


def restacked(model: Model, scan: bool) -> Model:
    """The same parameters under another plan."""
    new = Model(model.config, dtype=model.dtype, plan=depth_plan(model.config, scan=scan))
    layers = [at_repeat(model.segments[s][j], r) for s, j, r in layer_places(model.plan)]
    flat, treedef = jax.tree_util.tree_flatten_with_path(new)
    old = dict(jax.tree_util.tree_flatten_with_path(model)[0])
    by_place: dict = {}
    for layer, (s, j, r) in zip(layers, layer_places(new.plan), strict=True):
        by_place.setdefault((s, j), []).append((r, layer))

    def leaf(path):
        if path[0].name != "segments":
            return old[path]
        found = by_place[path[1].idx, path[2].idx]
        leaves = [dict(jax.tree_util.tree_flatten_with_path(layer)[0])[path[3:]] for _, layer in found]
        return leaves[0] if found[0][0] is None else jnp.stack(leaves)

    return treedef.unflatten([leaf(path) for path, _ in flat])


def value_and_grads(model, batch, **kwargs):
    def objective(model):
        return tm.loss(model, batch, **kwargs)[0]

    return jax.jit(jax.value_and_grad(objective))(model)


def by_name(tree, model) -> dict[str, np.ndarray]:
    """Arrays by logical name, so that trees under different plans can be compared."""
    found = {}
    for place in places(tree)[0]:
        stacked = len(place.names) > 1
        for r, name in enumerate(place.names):
            found[name] = np.asarray(place.leaf[r] if stacked else place.leaf)
    return found
