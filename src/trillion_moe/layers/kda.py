"""Kimi Delta Attention (Kimi Linear, arXiv 2510.26692): short convolutions, per-channel decay, gated delta rule."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from trillion_moe.blueprint import Spec, constant, log_uniform, normal, uniform
from trillion_moe.config import ModelConfig
from trillion_moe.kernels import linear_attention
from trillion_moe.layers import Tap, tap_into
from trillion_moe.layers.norm import rms_scale
from trillion_moe.ops import accumulator, dot, implementation


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KDACache:
    """conv_q, conv_k, conv_v: the last W-1 inputs of each convolution [B, W-1, C]; state float32 [B, H, K, V]."""

    conv_q: jax.Array
    conv_k: jax.Array
    conv_v: jax.Array
    state: jax.Array


class KDA(nnx.Module):
    """q, k, v, decay (rank head_dim), beta and output gate (full rank or rank head_dim) from one input."""

    q: Any = nnx.data()
    k: Any = nnx.data()
    v: Any = nnx.data()
    q_conv: Any = nnx.data()
    k_conv: Any = nnx.data()
    v_conv: Any = nnx.data()
    decay_a: Any = nnx.data()
    decay_b: Any = nnx.data()
    a_log: Any = nnx.data()
    dt_bias: Any = nnx.data()
    beta: Any = nnx.data()
    gate: Any = nnx.data()
    gate_a: Any = nnx.data()
    gate_b: Any = nnx.data()
    o_norm: Any = nnx.data()
    o: Any = nnx.data()

    def __init__(self, cfg: ModelConfig, *, dtype: str):
        m, d, std = cfg.kda, cfg.hidden_size, normal(cfg.initializer_range)
        c = m.num_heads * m.head_dim
        for name in ("q", "k", "v"):
            setattr(self, name, Spec((d, c), dtype, ("embed", "heads"), std))
            bound = m.conv_width**-0.5
            conv = Spec((c, m.conv_width), "float32", ("heads", "conv"), uniform(-bound, bound))
            setattr(self, f"{name}_conv", conv)
        self.decay_a = Spec((d, m.head_dim), dtype, ("embed", "head_dim"), std)
        self.decay_b = Spec((m.head_dim, c), dtype, ("head_dim", "heads"), std)
        self.a_log = Spec((m.num_heads,), "float32", ("heads",), log_uniform(1.0, 16.0))
        self.dt_bias = Spec((c,), "float32", ("heads",), uniform(-6.9, -2.3))  # softplus^-1 of dt in 0.001 .. 0.1
        self.beta = Spec((d, m.num_heads), dtype, ("embed", "heads"), std)
        full = m.full_rank_gate
        self.gate = Spec((d, c), dtype, ("embed", "heads"), std) if full else None
        self.gate_a = None if full else Spec((d, m.head_dim), dtype, ("embed", "head_dim"), std)
        self.gate_b = None if full else Spec((m.head_dim, c), dtype, ("head_dim", "heads"), std)
        self.o_norm = Spec((m.head_dim,), "float32", ("head_dim",), constant(1.0))
        self.o = Spec((c, d), dtype, ("heads", "embed"), std)

    def empty_cache(self, cfg: ModelConfig, batch: int, dtype) -> KDACache:
        m = cfg.kda
        conv = (batch, m.conv_width - 1, m.num_heads * m.head_dim)
        state = jnp.zeros((batch, m.num_heads, m.head_dim, m.head_dim), accumulator(dtype))
        return KDACache(jnp.zeros(conv, dtype), jnp.zeros(conv, dtype), jnp.zeros(conv, dtype), state)

    def __call__(self, x_BTD, segments_BT, cfg: ModelConfig, cache: KDACache | None, cached_segment_B, tap: Tap = None):
        """-> output ``[B, T, D]``, updated cache (None if none was given).

        cached_segment_B: the document the cache belongs to; a row that starts another one starts from zero.
        """
        m, acc = cfg.kda, accumulator(x_BTD.dtype)
        heads = (*x_BTD.shape[:2], m.num_heads, m.head_dim)
        inputs = [dot(x_BTD, projection) for projection in (self.q, self.k, self.v)]
        tap_into(tap, conv_in_q=inputs[0], conv_in_k=inputs[1], conv_in_v=inputs[2])
        history = (None, None, None) if cache is None else (cache.conv_q, cache.conv_k, cache.conv_v)
        conv = partial(linear_attention.short_conv, segments=segments_BT, history_segment=cached_segment_B)
        convolved, conv_caches = zip(
            *map(
                lambda x, taps, past: conv(x, taps, history=past),
                inputs,
                (self.q_conv, self.k_conv, self.v_conv),
                history,
            ),
            strict=True,
        )
        q, k, v = (c.reshape(heads) for c in convolved)
        q, k = linear_attention.l2norm(q), linear_attention.l2norm(k)
        q = q * jnp.asarray(m.head_dim**-0.5, q.dtype)
        out_BTHV, state = linear_attention.kda(
            q,
            k,
            v,
            self.log_decay(x_BTD, cfg),
            jax.nn.sigmoid(dot(x_BTD, self.beta).astype(acc)),
            state=None if cache is None else cache.state,
            segments=segments_BT,
            state_segment=cached_segment_B,
            impl=implementation("kda", x_BTD.dtype),
        )
        y_BTC = self._gated_norm(out_BTHV, x_BTD, cfg).reshape(*x_BTD.shape[:2], -1)
        if cache is not None:
            cache = KDACache(conv_caches[0], conv_caches[1], conv_caches[2], state)
        return dot(y_BTC, self.o), cache

    def log_decay(self, x_BTD: jax.Array, cfg: ModelConfig) -> jax.Array:
        """g ``[B, T, H, K]`` <= 0 in log space, float32: bounded below by `gate_lower_bound` if configured."""
        m, acc = cfg.kda, accumulator(x_BTD.dtype)
        z_BTC = dot(dot(x_BTD, self.decay_a), self.decay_b).astype(acc) + self.dt_bias.astype(acc)
        z_BTHK = z_BTC.reshape(*x_BTD.shape[:2], m.num_heads, m.head_dim)
        return linear_attention.kda_gate(z_BTHK, self.a_log.astype(acc), lower_bound=m.gate_lower_bound)

    def _gated_norm(self, o_BTHV: jax.Array, x_BTD: jax.Array, cfg: ModelConfig) -> jax.Array:
        """``rms_norm(o) * weight * sigmoid(gate)`` per head, all in float32, one cast at the end."""
        acc = accumulator(x_BTD.dtype)
        gate_BTC = dot(x_BTD, self.gate) if self.gate is not None else dot(dot(x_BTD, self.gate_a), self.gate_b)
        normed = o_BTHV.astype(acc) * rms_scale(o_BTHV, cfg.rms_norm_eps) * self.o_norm.astype(acc)
        return (normed * jax.nn.sigmoid(gate_BTC.astype(acc)).reshape(normed.shape)).astype(x_BTD.dtype)
