"""Gated multi-head latent attention without positions (MLA: DeepSeek-V2, arXiv 2405.04434; NoPE and gate: Kimi K3)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from trillion_moe.blueprint import Spec, constant, normal
from trillion_moe.config import ModelConfig
from trillion_moe.layers.norm import rms_norm
from trillion_moe.ops import dense, dot, einsum
from trillion_moe.sharding import Layout, dims, island, pin

SCORES = 2**26  # numbers in the score matrix [B, H, t, S] of one block of queries, and
QUERY_BLOCK = 64, 512  # the fewest and the most queries in one
ABSORB_BELOW = 9  # so few new tokens attend in latent space instead of expanding every cached key and value


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Positions:
    """Which keys a query may see: those at and before its own slot that are of its document.

    slots_BT: int32, position of each query among the keys. segments_BT: int32, its document, 0 = padding, which
    sees none. keys_BS: int32, the document of each key, 0 = none there.
    """

    slots_BT: Any
    segments_BT: Any
    keys_BS: Any

    def visible(self, queries: slice | jax.Array) -> jax.Array:
        """bool ``[B, t, S]``, for these queries of T."""
        slots_Bt1, segments_Bt1 = self.slots_BT[:, queries, None], self.segments_BT[:, queries, None]
        causal = jnp.arange(self.keys_BS.shape[1]) <= slots_Bt1
        return causal & (self.keys_BS[:, None] == segments_Bt1) & (segments_Bt1 > 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MLACache:
    """What a token leaves behind: normed latent ``[B, S, R]`` and shared key part ``[B, S, dr]``."""

    latent: jax.Array
    k_pe: jax.Array


class MLA(nnx.Module):
    """q (low rank if configured), latent keys and values, softmax attention, output gate if configured."""

    q: Any = nnx.data()
    q_a: Any = nnx.data()
    q_norm: Any = nnx.data()
    q_b: Any = nnx.data()
    kv_a: Any = nnx.data()
    kv_norm: Any = nnx.data()
    kv_b: Any = nnx.data()
    gate: Any = nnx.data()
    o: Any = nnx.data()

    def __init__(self, cfg: ModelConfig, *, dtype: str):
        m, d, std = cfg.mla, cfg.hidden_size, normal(cfg.initializer_range)
        n_q = m.num_heads * (m.qk_nope_head_dim + m.qk_rope_head_dim)
        n_v, rank = m.num_heads * m.v_head_dim, m.q_lora_rank
        self.q = None if rank else Spec((d, n_q), dtype, ("embed", "heads"), std)
        self.q_a = Spec((d, rank), dtype, ("embed", "q_lora"), std) if rank else None
        self.q_norm = Spec((rank,), dtype, ("norm",), constant(1.0)) if rank else None
        self.q_b = Spec((rank, n_q), dtype, ("q_lora", "heads"), std) if rank else None
        self.kv_a = Spec((d, m.kv_lora_rank + m.qk_rope_head_dim), dtype, ("embed", "kv_lora"), std)
        self.kv_norm = Spec((m.kv_lora_rank,), dtype, ("norm",), constant(1.0))
        n_kv = m.num_heads * (m.qk_nope_head_dim + m.v_head_dim)
        self.kv_b = Spec((m.kv_lora_rank, n_kv), dtype, ("kv_lora", "heads"), std)
        self.gate = Spec((d, n_v), dtype, ("embed", "heads"), std) if m.output_gate else None
        self.o = Spec((n_v, d), dtype, ("heads", "embed"), std)

    def empty_cache(self, cfg: ModelConfig, batch: int, capacity: int, dtype) -> MLACache:
        m = cfg.mla
        return MLACache(
            jnp.zeros((batch, capacity, m.kv_lora_rank), dtype), jnp.zeros((batch, capacity, m.qk_rope_head_dim), dtype)
        )

    def __call__(
        self, x_BTD, positions: Positions, cfg: ModelConfig, cache: MLACache | None, layout: Layout | None = None
    ):
        """-> output ``[B, T, D]``, updated cache (None if none was given): the new tokens go where `positions` say."""
        q_BTHK = self._queries(x_BTD, cfg)
        latent_BSR, k_pe_BSK = self._latents(x_BTD, cfg)
        if cache is not None:
            put = jax.vmap(lambda into, at, new: into.at[at].set(new.astype(into.dtype), mode="drop"))
            slots_BT = positions.slots_BT
            cache = MLACache(put(cache.latent, slots_BT, latent_BSR), put(cache.k_pe, slots_BT, k_pe_BSK))
            latent_BSR, k_pe_BSK = cache.latent.astype(x_BTD.dtype), cache.k_pe.astype(x_BTD.dtype)
        absorbed = cache is not None and x_BTD.shape[1] < ABSORB_BELOW
        if absorbed:
            out_BTHV = self._attend_latent(q_BTHK, latent_BSR, k_pe_BSK, positions, cfg)
        else:
            out_BTHV = self._attend_expanded(q_BTHK, latent_BSR, k_pe_BSK, positions, cfg, layout)
        out_BTN = out_BTHV.reshape(*x_BTD.shape[:2], -1)
        if self.gate is not None:
            gate_BTN = jax.nn.sigmoid(dot(x_BTD, self.gate).astype(out_BTN.dtype))
            out_BTN = out_BTN * gate_BTN
        return dot(out_BTN.astype(x_BTD.dtype), self.o), cache

    def _queries(self, x_BTD, cfg: ModelConfig) -> jax.Array:
        if self.q is not None:
            q_BTN = dot(x_BTD, self.q)
        else:
            q_BTN = dot(rms_norm(dot(x_BTD, self.q_a), self.q_norm, cfg.mla.lora_norm_eps), self.q_b)
        return q_BTN.reshape(*x_BTD.shape[:2], cfg.mla.num_heads, -1)

    def _latents(self, x_BTD, cfg: ModelConfig) -> tuple[jax.Array, jax.Array]:
        m = cfg.mla
        latent_BTR, k_pe_BTK = jnp.split(dot(x_BTD, self.kv_a), [m.kv_lora_rank], axis=-1)
        return rms_norm(latent_BTR, self.kv_norm, m.lora_norm_eps), k_pe_BTK

    def _attend_expanded(
        self, q_BTHK, latent_BSR, k_pe_BSK, positions: Positions, cfg: ModelConfig, layout: Layout | None
    ) -> jax.Array:
        """Keys and values of every head are expanded from the latents; best for many queries.

        Every device has the queries of its tokens, and the keys of its heads for the whole sequence.
        """
        m = cfg.mla
        kv_BSHN = dot(pin(layout, latent_BSR, "batch", None, None), self.kv_b)
        k_BSHK, v_BSHV = jnp.split(
            kv_BSHN.reshape(*latent_BSR.shape[:2], m.num_heads, -1), [m.qk_nope_head_dim], axis=-1
        )
        keys = dims("batch", None, "heads", None)
        places = Positions(dims("batch", "time"), dims("batch", "time"), dims("batch", None))
        attend = island(
            layout, _attend, (dims("batch", "time", "heads", None), keys, keys, dims("batch", None, None), places),
            dims("batch", "time", "heads", None),
        )  # fmt: skip
        return attend(q_BTHK, k_BSHK, v_BSHV, k_pe_BSK, positions)

    def _attend_latent(self, q_BTHK, latent_BSR, k_pe_BSK, positions: Positions, cfg: ModelConfig) -> jax.Array:
        """kv_b absorbed into queries and outputs, so that all heads read the latents themselves; best for decoding."""
        m = cfg.mla
        kv_b_RHN = dense(self.kv_b, q_BTHK.dtype).reshape(m.kv_lora_rank, m.num_heads, -1)
        k_RHK, v_RHV = jnp.split(kv_b_RHN, [m.qk_nope_head_dim], axis=-1)
        q_nope_BTHK, q_pe_BTHK = jnp.split(q_BTHK, [m.qk_nope_head_dim], axis=-1)
        q_BTHR = einsum("bthk,rhk->bthr", q_nope_BTHK, k_RHK).astype(q_BTHK.dtype)
        scores = einsum("bthr,bsr->bhts", q_BTHR, latent_BSR) + einsum("bthk,bsk->bhts", q_pe_BTHK, k_pe_BSK)
        probs = _softmax(scores, positions.visible(slice(None))[:, None], q_BTHK.shape[-1])
        # Moved afterwards: XLA:CPU refuses this product in bfloat16 with its dims in any other order.
        out_BHTR = einsum("bhts,bsr->bhtr", probs.astype(latent_BSR.dtype), latent_BSR)
        return einsum("bthr,rhv->bthv", jnp.moveaxis(out_BHTR, 1, 2).astype(v_RHV.dtype), v_RHV)


def _attend(q_BTHK, k_BSHK, v_BSHV, k_pe_BSK, positions: Positions) -> jax.Array:
    """Softmax attention of each head; the last part of a key is the same for all of them."""
    k_pe_BSHK = jnp.broadcast_to(k_pe_BSK[:, :, None], (*k_BSHK.shape[:3], k_pe_BSK.shape[-1]))
    k_BSHK = jnp.concatenate([k_BSHK, k_pe_BSHK], axis=-1)

    def attend(q_BtHK, visible_BtS):
        scores = einsum("bthk,bshk->bhts", q_BtHK, k_BSHK)
        probs = _softmax(scores, visible_BtS[:, None], q_BTHK.shape[-1])
        return einsum("bhts,bshv->bthv", probs.astype(v_BSHV.dtype), v_BSHV)

    return _by_query_block(attend, q_BTHK, positions)


def _softmax(scores_BHTS: jax.Array, visible_B1TS: jax.Array, head_dim: int) -> jax.Array:
    """Softmax in float32 over the visible keys; a query that sees none (padding) gets zeros, with zero gradient."""
    scores = jnp.where(visible_B1TS, scores_BHTS * head_dim**-0.5, jnp.finfo(scores_BHTS.dtype).min)
    return jnp.where(visible_B1TS, jax.nn.softmax(scores, axis=-1), 0)


def _by_query_block(attend, q_BTHK: jax.Array, positions: Positions) -> jax.Array:
    """`attend` over some queries at a time, each block recomputed in the backward pass."""
    b, t, h, _ = q_BTHK.shape
    block = QUERY_BLOCK[1]
    while block > QUERY_BLOCK[0] and b * h * block * positions.keys_BS.shape[1] > SCORES:
        block //= 2
    if t <= block:
        return attend(q_BTHK, positions.visible(slice(None)))
    blocks = -(-t // block)
    padded = jnp.pad(q_BTHK, ((0, 0), (0, blocks * block - t), (0, 0), (0, 0)))

    @jax.checkpoint
    def one(start):
        q_BtHK = lax.dynamic_slice_in_dim(padded, start, block, axis=1)
        return attend(q_BtHK, positions.visible(start + jnp.arange(block)))

    out = lax.map(one, jnp.arange(blocks) * block)
    return jnp.moveaxis(out, 0, 1).reshape(q_BTHK.shape[0], blocks * block, *out.shape[3:])[:, :t]
