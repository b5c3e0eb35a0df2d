"""The vision tower of Kimi K3 (MoonViT, 3D), its projector, and the splice of image rows into the text.

Shape suffixes: P patches, M merged rows, W patches of a merge window, I items, H heads, K head dim; D is the tower's
width, N the text's. The grids are static, so every index below is a constant of the compiled computation.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from trillion_moe.blueprint import Spec, constant, normal, stack
from trillion_moe.config import ModelConfig, VisionConfig
from trillion_moe.layers import Tap, tap_into
from trillion_moe.layers.norm import rms_norm
from trillion_moe.layers.vision_positions import CHANNELS, ImageBatch, Positions, positions, rotation_table, time_table
from trillion_moe.ops import accumulator, dot

QUERY_BLOCK = 512  # queries of one item scored at a time
SCORES = 2**26  # scores held at a time, when items of one length attend together
MAX_GROUPS = 8  # distinct item lengths attended one by one; with more, all items share one masked attention


class VisionBlock(nnx.Module):
    """``x += o(attention(norm x)); x += down(gelu_tanh(up(norm x)))``. qkv is ``[D, 3 H K]``: all q, all k, all v."""

    attn_norm: Any = nnx.data()
    qkv: Any = nnx.data()
    o: Any = nnx.data()
    mlp_norm: Any = nnx.data()
    up: Any = nnx.data()
    down: Any = nnx.data()

    def __init__(self, cfg: ModelConfig, *, dtype: str):
        v, std = _vision(cfg), normal(cfg.initializer_range)
        d = v.hidden_size
        self.attn_norm = Spec((d,), dtype, ("vision_embed",), constant(1.0))
        self.qkv = Spec((d, 3 * v.qkv_size), dtype, ("vision_embed", "vision_heads"), std)
        self.o = Spec((v.qkv_size, d), dtype, ("vision_heads", "vision_embed"), std)
        self.mlp_norm = Spec((d,), dtype, ("vision_embed",), constant(1.0))
        self.up = Spec((d, v.mlp_size), dtype, ("vision_embed", "vision_mlp"), std)
        self.down = Spec((v.mlp_size, d), dtype, ("vision_mlp", "vision_embed"), std)

    def __call__(self, x_PD: jax.Array, rotation_PK: tuple[jax.Array, jax.Array], at: Positions, cfg: VisionConfig):
        qkv = dot(rms_norm(x_PD, self.attn_norm, cfg.norm_eps), self.qkv)
        q, k, v = jnp.unstack(qkv.reshape(len(x_PD), 3, cfg.num_heads, -1), axis=1)
        out_PHK = attend(rotate(q, *rotation_PK), rotate(k, *rotation_PK), v, at)
        x_PD = x_PD + dot(out_PHK.reshape(len(x_PD), -1), self.o)
        hidden_PF = dot(rms_norm(x_PD, self.mlp_norm, cfg.norm_eps), self.up)
        return x_PD + dot(_gelu(hidden_PF, approximate=True), self.down)


class VisionTower(nnx.Module):
    """Patches -> one window of W patches per row of text, ``[M, W, D]``.

    patch_embed: the convolution of the patches as a matrix ``[3 p p, D]``, channels outermost. pos_emb: the learned
    table ``[height, width, D]``, resized to each grid. blocks: one VisionBlock, its leaves stacked over the depth.
    """

    patch_embed: Any = nnx.data()
    pos_emb: Any = nnx.data()
    blocks: Any = nnx.data()
    final_norm: Any = nnx.data()

    def __init__(self, cfg: ModelConfig, *, dtype: str):
        v, std = _vision(cfg), normal(cfg.initializer_range)
        self.patch_embed = Spec((CHANNELS * v.patch_size**2, v.hidden_size), dtype, ("patch", "vision_embed"), std)
        table = (v.pos_emb_height, v.pos_emb_width, v.hidden_size)
        self.pos_emb = Spec(table, dtype, ("pos_height", "pos_width", "vision_embed"), std)
        self.blocks = stack(VisionBlock(cfg, dtype=dtype), v.num_layers)
        self.final_norm = Spec((v.hidden_size,), dtype, ("vision_embed",), constant(1.0))

    def __call__(self, images: ImageBatch, cfg: ModelConfig, tap: Tap = None) -> jax.Array:
        """-> ``[M, W, D]`` in the dtype of the weights, to which the patches are cast. Backward recomputes each block.

        Raises ValueError for grids that the tower cannot take. Taps are in the order of the batch's patches.
        """
        v = _vision(cfg)
        images.check(v)
        at = positions(images.grid_thw, v)
        x_PD = self._embed(jnp.asarray(images.patches), at, v)
        tap_into(tap, **{"vision.patch_embed": x_PD[at.inverse]})
        x_PD = self._encode(x_PD, at, v, tap)
        x_PD = rms_norm(x_PD, self.final_norm, v.norm_eps)
        merged_MWD = merge(x_PD, at)
        tap_into(tap, **{"vision.encoder_out": x_PD[at.inverse], "vision.merged": merged_MWD})
        return merged_MWD

    def _embed(self, patches: jax.Array, at: Positions, cfg: VisionConfig) -> jax.Array:
        """Patches in working order, the resized 2D table and, in items of several frames, time; summed in float32."""
        dtype = self.pos_emb.dtype
        x_PD = dot(patches.reshape(len(patches), -1)[at.order].astype(dtype), self.patch_embed)
        acc = accumulator(dtype)
        table_CD = self.pos_emb.reshape(-1, cfg.hidden_size).astype(acc)
        corners = zip(at.corners, at.corner_weights, strict=True)
        place_PD = sum(share_P[:, None] * table_CD[row_P] for row_P, share_P in corners)
        if np.any(at.frame >= 0):
            place_PD = place_PD + jnp.asarray(time_table(cfg.pos_emb_time, cfg.hidden_size), acc)[at.frame]
        return (x_PD.astype(acc) + place_PD).astype(dtype)

    def _encode(self, x_PD: jax.Array, at: Positions, cfg: VisionConfig, tap: Tap) -> jax.Array:
        rotation_PK = rotations(at, cfg.head_dim, accumulator(x_PD.dtype))

        @jax.checkpoint
        def step(x_PD, block):
            x_PD = block(x_PD, rotation_PK, at, cfg)
            return x_PD, None if tap is None else x_PD[at.inverse]

        if cfg.num_layers == 1:
            x_PD, out = step(x_PD, self.blocks)
            outs = [out]
        else:
            x_PD, outs = lax.scan(step, x_PD, self.blocks)
        if tap is not None:
            tap_into(tap, **{f"vision.block{j}": outs[j] for j in range(cfg.num_layers)})
        return x_PD


class Projector(nnx.Module):
    """``rms_norm(proj_2(gelu(proj_0(window))))``: a window's W patches side by side, exact GELU, N the text's width."""

    proj_0: Any = nnx.data()
    proj_2: Any = nnx.data()
    norm: Any = nnx.data()

    def __init__(self, cfg: ModelConfig, *, dtype: str):
        v, std = _vision(cfg), normal(cfg.initializer_range)
        size = v.projector_size
        self.proj_0 = Spec((size, size), dtype, ("vision_window", "vision_mlp"), std)
        self.proj_2 = Spec((size, v.text_hidden_size), dtype, ("vision_mlp", "embed"), std)
        self.norm = Spec((v.text_hidden_size,), dtype, ("norm",), constant(1.0))

    def __call__(self, merged_MWD: jax.Array, cfg: ModelConfig, tap: Tap = None) -> jax.Array:
        """``[M, W, D] -> [M, N]``."""
        hidden = _gelu(dot(merged_MWD.reshape(len(merged_MWD), -1), self.proj_0), approximate=False)
        out_MN = rms_norm(dot(hidden, self.proj_2), self.norm, _vision(cfg).projector_eps)
        tap_into(tap, **{"vision.projected": out_MN})
        return out_MN


class Features(NamedTuple):
    """What a picture is to the text. rows: ``[M, N]``, one for every image token; count: int32, how many are in use."""

    rows: jax.Array
    count: jax.Array | int


def splice(embeddings_BTN: jax.Array, holds_BT: jax.Array, features: Features) -> jax.Array:
    """Embeddings where `holds` (placeholders) replaced, in row-major order, by the features, cast to their dtype.

    The counts cannot be compared while tracing: if there are not exactly `count` placeholders the result is NaN
    throughout. `vision_positions.expand_placeholders` refuses such a batch on the host.
    """
    index_BT = (jnp.cumsum(holds_BT.reshape(-1), dtype=jnp.int32) - 1).reshape(holds_BT.shape)
    rows_BTN = features.rows.astype(embeddings_BTN.dtype)[jnp.clip(index_BT, 0, len(features.rows) - 1)]
    out_BTN = jnp.where(holds_BT[..., None], rows_BTN, embeddings_BTN)
    return jnp.where(jnp.sum(holds_BT) == features.count, out_BTN, jnp.nan)


def merge(x_PD: jax.Array, at: Positions) -> jax.Array:
    """Mean over an item's frames, its patches grouped by window: ``[P, D] -> [M, W, D]`` (the release's sd2_tpool)."""
    if at.merge.shape[1] == 1:
        return x_PD.at[at.merge[:, 0]].get(unique_indices=True)
    acc = accumulator(x_PD.dtype)
    frames_MTWD = x_PD[at.merge].astype(acc)
    return jnp.einsum("mtwd,mt->mwd", frames_MTWD, at.merge_weights.astype(acc)).astype(x_PD.dtype)


def rotations(at: Positions, head_dim: int, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """cos and sin ``[P, 1, K/2]`` of each channel pair's angle: pair 2i turns with the column, 2i + 1 with the row."""
    tables = rotation_table(1 + int(max(at.row.max(), at.column.max())), head_dim)

    def per_pair(table):
        table = jnp.asarray(table, dtype)
        return jnp.stack([table[at.column], table[at.row]], axis=-1).reshape(len(at.row), 1, head_dim // 2)

    return per_pair(tables[0]), per_pair(tables[1])


def rotate(x_PHK: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """2D RoPE: channels (2c, 2c + 1) are one complex number, turned in float32, cast back."""
    pairs = x_PHK.astype(cos.dtype).reshape(*x_PHK.shape[:-1], -1, 2)
    even, odd = pairs[..., 0], pairs[..., 1]
    turned = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return turned.reshape(x_PHK.shape).astype(x_PHK.dtype)


def attend(q_PHK: jax.Array, k_PHK: jax.Array, v_PHK: jax.Array, at: Positions) -> jax.Array:
    """Softmax attention of every patch to all patches of its item."""
    if len(at.groups) > MAX_GROUPS:
        item_P = jnp.asarray(at.item)
        return _attend_item(q_PHK, k_PHK, v_PHK, item_P, item_P)
    outs, start = [], 0
    for items, length in at.groups:
        rows = slice(start, start + items * length)
        group = [x[rows].reshape(items, length, *x.shape[1:]) for x in (q_PHK, k_PHK, v_PHK)]
        outs.append(_attend_equal(*group).reshape(items * length, *v_PHK.shape[1:]))
        start = rows.stop
    return jnp.concatenate(outs)


def _attend_equal(q_IPHK: jax.Array, k_IPHK: jax.Array, v_IPHK: jax.Array) -> jax.Array:
    """Items of one length, as many at a time as SCORES allows."""
    items, length, heads, _ = q_IPHK.shape
    at_once = max(1, SCORES // (heads * length * min(length, QUERY_BLOCK)))
    if items <= at_once:
        return jax.vmap(_attend_item)(q_IPHK, k_IPHK, v_IPHK)
    one = jax.checkpoint(lambda qkv: _attend_item(*qkv))
    return lax.map(one, (q_IPHK, k_IPHK, v_IPHK), batch_size=at_once)


def _attend_item(q_PHK, k_SHK, v_SHK, item_P: jax.Array | None = None, item_S: jax.Array | None = None) -> jax.Array:
    """All queries to all keys, or to those of the same item; QUERY_BLOCK queries at a time, recomputed in backward."""
    p = len(q_PHK)
    if p <= QUERY_BLOCK:
        return _attend_block(q_PHK, k_SHK, v_SHK, item_P, item_S)
    blocks = -(-p // QUERY_BLOCK)
    extra = blocks * QUERY_BLOCK - p
    q = jnp.pad(q_PHK, ((0, extra), (0, 0), (0, 0))).reshape(blocks, QUERY_BLOCK, *q_PHK.shape[1:])
    item = None if item_P is None else jnp.pad(item_P, (0, extra), constant_values=-1).reshape(blocks, QUERY_BLOCK)
    one = jax.checkpoint(lambda block: _attend_block(block[0], k_SHK, v_SHK, block[1], item_S))
    return lax.map(one, (q, item)).reshape(blocks * QUERY_BLOCK, *v_SHK.shape[1:])[:p]


def _attend_block(q_PHK, k_SHK, v_SHK, item_P: jax.Array | None, item_S: jax.Array | None) -> jax.Array:
    acc = accumulator(q_PHK.dtype)
    scores_HPS = jnp.einsum("phk,shk->hps", q_PHK, k_SHK, preferred_element_type=acc) * q_PHK.shape[-1] ** -0.5
    if item_P is not None and item_S is not None:
        scores_HPS = jnp.where(item_P[:, None] == item_S[None, :], scores_HPS, jnp.finfo(acc).min)
    probs_HPS = jax.nn.softmax(scores_HPS, axis=-1).astype(v_SHK.dtype)
    return jnp.einsum("hps,shk->phk", probs_HPS, v_SHK, preferred_element_type=acc).astype(v_SHK.dtype)


def _gelu(x: jax.Array, *, approximate: bool) -> jax.Array:
    """GELU in float32, by tanh or exact, cast back."""
    return jax.nn.gelu(x.astype(accumulator(x.dtype)), approximate=approximate).astype(x.dtype)


def _vision(cfg: ModelConfig) -> VisionConfig:
    if cfg.vision is None:
        raise ValueError(f"this {cfg.model_type} config has no vision tower (vision is None)")
    return cfg.vision
