"""Gated multi-head latent attention without positions (MLA: DeepSeek-V2, arXiv 2405.04434; NoPE and gate: Kimi K3)."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from trillion_moe.blueprint import Spec, constant, normal
from trillion_moe.config import ModelConfig
from trillion_moe.layers.norm import rms_norm
from trillion_moe.ops import accumulator, dense, dot

QUERY_BLOCK = 512  # queries scored at a time: bounds the score matrix at [B, H, 512, S]
ABSORB_BELOW = 9  # so few new tokens attend in latent space instead of expanding every cached key and value

Visible = Callable[[slice | jax.Array], jax.Array]


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
        self.q_norm = Spec((rank,), dtype, ("q_lora",), constant(1.0)) if rank else None
        self.q_b = Spec((rank, n_q), dtype, ("q_lora", "heads"), std) if rank else None
        self.kv_a = Spec((d, m.kv_lora_rank + m.qk_rope_head_dim), dtype, ("embed", "kv_lora"), std)
        self.kv_norm = Spec((m.kv_lora_rank,), dtype, ("kv_lora",), constant(1.0))
        n_kv = m.num_heads * (m.qk_nope_head_dim + m.v_head_dim)
        self.kv_b = Spec((m.kv_lora_rank, n_kv), dtype, ("kv_lora", "heads"), std)
        self.gate = Spec((d, n_v), dtype, ("embed", "heads"), std) if m.output_gate else None
        self.o = Spec((n_v, d), dtype, ("heads", "embed"), std)

    def empty_cache(self, cfg: ModelConfig, batch: int, capacity: int, dtype) -> MLACache:
        m = cfg.mla
        return MLACache(
            jnp.zeros((batch, capacity, m.kv_lora_rank), dtype), jnp.zeros((batch, capacity, m.qk_rope_head_dim), dtype)
        )

    def __call__(self, x_BTD, visible: Visible, cfg: ModelConfig, cache: MLACache | None, slots_BT):
        """-> output ``[B, T, D]``, updated cache (None if none was given).

        visible: given an index of query positions, the bool ``[B, t, S]`` that says which keys they may see.
        slots_BT: where in the cache the new tokens go; ignored without a cache.
        """
        q_BTHK = self._queries(x_BTD, cfg)
        latent_BSR, k_pe_BSK = self._latents(x_BTD, cfg)
        if cache is not None:
            put = jax.vmap(lambda into, at, new: into.at[at].set(new.astype(into.dtype), mode="drop"))
            cache = MLACache(put(cache.latent, slots_BT, latent_BSR), put(cache.k_pe, slots_BT, k_pe_BSK))
            latent_BSR, k_pe_BSK = cache.latent.astype(x_BTD.dtype), cache.k_pe.astype(x_BTD.dtype)
        absorbed = cache is not None and x_BTD.shape[1] < ABSORB_BELOW
        attend = self._attend_latent if absorbed else self._attend_expanded
        out_BTHV = attend(q_BTHK, latent_BSR, k_pe_BSK, visible, cfg)
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

    def _attend_expanded(self, q_BTHK, latent_BSR, k_pe_BSK, visible: Visible, cfg: ModelConfig) -> jax.Array:
        """Keys and values of every head are expanded from the latents; best for many queries."""
        m = cfg.mla
        kv_BSHN = dot(latent_BSR, self.kv_b).reshape(*latent_BSR.shape[:2], m.num_heads, -1)
        k_BSHK, v_BSHV = jnp.split(kv_BSHN, [m.qk_nope_head_dim], axis=-1)
        k_pe_BSHK = jnp.broadcast_to(k_pe_BSK[:, :, None], (*k_BSHK.shape[:3], m.qk_rope_head_dim))
        k_BSHK = jnp.concatenate([k_BSHK, k_pe_BSHK], axis=-1)

        def attend(q_BtHK, visible_BtS):
            scores = _einsum("bthk,bshk->bhts", q_BtHK, k_BSHK)
            probs = _softmax(scores, visible_BtS[:, None], q_BTHK.shape[-1])
            return _einsum("bhts,bshv->bthv", probs.astype(v_BSHV.dtype), v_BSHV)

        return _by_query_block(attend, q_BTHK, visible)

    def _attend_latent(self, q_BTHK, latent_BSR, k_pe_BSK, visible: Visible, cfg: ModelConfig) -> jax.Array:
        """kv_b absorbed into queries and outputs, so that all heads read the latents themselves; best for decoding."""
        m = cfg.mla
        kv_b_RHN = dense(self.kv_b, q_BTHK.dtype).reshape(m.kv_lora_rank, m.num_heads, -1)
        k_RHK, v_RHV = jnp.split(kv_b_RHN, [m.qk_nope_head_dim], axis=-1)
        q_nope_BTHK, q_pe_BTHK = jnp.split(q_BTHK, [m.qk_nope_head_dim], axis=-1)
        q_BTHR = _einsum("bthk,rhk->bthr", q_nope_BTHK, k_RHK).astype(q_BTHK.dtype)
        scores = _einsum("bthr,bsr->bhts", q_BTHR, latent_BSR) + _einsum("bthk,bsk->bhts", q_pe_BTHK, k_pe_BSK)
        probs = _softmax(scores, visible(slice(None))[:, None], q_BTHK.shape[-1])
        # Moved afterwards: XLA:CPU refuses this product in bfloat16 with its dims in any other order.
        out_BHTR = _einsum("bhts,bsr->bhtr", probs.astype(latent_BSR.dtype), latent_BSR)
        return _einsum("bthr,rhv->bthv", jnp.moveaxis(out_BHTR, 1, 2).astype(v_RHV.dtype), v_RHV)


def _einsum(expression: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(expression, a, b, preferred_element_type=accumulator(a.dtype))


def _softmax(scores_BHTS: jax.Array, visible_B1TS: jax.Array, head_dim: int) -> jax.Array:
    """Softmax in float32 over the visible keys; a query that sees none (padding) gets zeros, with zero gradient."""
    scores = jnp.where(visible_B1TS, scores_BHTS * head_dim**-0.5, jnp.finfo(scores_BHTS.dtype).min)
    return jnp.where(visible_B1TS, jax.nn.softmax(scores, axis=-1), 0)


def _by_query_block(attend, q_BTHK: jax.Array, visible: Visible) -> jax.Array:
    """`attend` over at most QUERY_BLOCK queries at a time, each block recomputed in the backward pass."""
    t = q_BTHK.shape[1]
    if t <= QUERY_BLOCK:
        return attend(q_BTHK, visible(slice(None)))
    blocks = -(-t // QUERY_BLOCK)
    padded = jnp.pad(q_BTHK, ((0, 0), (0, blocks * QUERY_BLOCK - t), (0, 0), (0, 0)))

    @jax.checkpoint
    def one(start):
        q_BtHK = lax.dynamic_slice_in_dim(padded, start, QUERY_BLOCK, axis=1)
        return attend(q_BtHK, visible(start + jnp.arange(QUERY_BLOCK)))

    out = lax.map(one, jnp.arange(blocks) * QUERY_BLOCK)
    return jnp.moveaxis(out, 0, 1).reshape(q_BTHK.shape[0], blocks * QUERY_BLOCK, *out.shape[3:])[:, :t]
