"""Kimi Delta Attention (Kimi Linear, arXiv 2510.26692): short convolutions, per-channel decay, gated delta rule."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from trillion_moe.blueprint import Spec, constant, log_uniform, normal, uniform
from trillion_moe.config import ModelConfig
from trillion_moe.kernels import linear_attention
from trillion_moe.layers import Tap, tap_into
from trillion_moe.layers.norm import rms_scale
from trillion_moe.ops import accumulator, dot, implementation
from trillion_moe.sharding import Layout, dims, island


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KDACache:
    """conv_q, conv_k, conv_v: the last W-1 inputs of each convolution [B, W-1, C]; state float32 [B, H, K, V]."""

    conv_q: Any
    conv_k: Any
    conv_v: Any
    state: Any


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

    def __call__(
        self,
        x_BTD,
        segments_BT,
        cfg: ModelConfig,
        cache: KDACache | None,
        cached_segment_B,
        layout: Layout | None = None,
        tap: Tap = None,
    ):
        """-> output ``[B, T, D]``, updated cache (None if none was given).

        cached_segment_B: the document the cache belongs to; a row that starts another one starts from zero. A sequence
        that is cut over devices starts from nothing.
        """
        acc = accumulator(x_BTD.dtype)
        inputs = tuple(dot(x_BTD, projection) for projection in (self.q, self.k, self.v))
        tap_into(tap, conv_in_q=inputs[0], conv_in_k=inputs[1], conv_in_v=inputs[2])
        channels, heads = dims("batch", "time", "heads"), dims("batch", "time", "heads", None)
        states = None
        if cache is not None:
            conv = dims("batch", None, "heads")
            states = KDACache(conv, conv, conv, dims("batch", "heads", None, None))
        mix = island(
            layout,
            partial(_mix, head_dim=cfg.kda.head_dim, cut=layout is not None and layout.size("cp") > 1),
            (channels, dims("heads", None), heads, channels, dims("batch", "time"), states, dims("batch")),
            (heads, states),
        )
        taps = (self.q_conv, self.k_conv, self.v_conv)
        beta_BTH = jax.nn.sigmoid(dot(x_BTD, self.beta).astype(acc))
        out_BTHV, cache = mix(inputs, taps, self.log_decay(x_BTD, cfg), beta_BTH, segments_BT, cache, cached_segment_B)
        y_BTC = self._gated_norm(out_BTHV, x_BTD, cfg).reshape(*x_BTD.shape[:2], -1)
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


def _mix(
    inputs: tuple[jax.Array, ...], taps: tuple[jax.Array, ...], g_BTHK, beta_BTH, segments_BT, cache: KDACache | None,
    cached_segment_B, *, head_dim: int, cut: bool,
):  # fmt: skip
    """Convolutions, norms and the recurrence over the heads and tokens of one device -> ``[B, T, H, V]``, cache.

    cut: the sequence goes on from the device before along "cp"; then without a cache.
    """
    before_B, history = cached_segment_B, (None, None, None)
    if cache is not None:
        history = (cache.conv_q, cache.conv_k, cache.conv_v)
    if cut:
        segments_BT = jnp.ones(g_BTHK.shape[:2], jnp.int32) if segments_BT is None else segments_BT
        before_B = _from_before(segments_BT[:, -1])
        history = tuple(_last_inputs(x, segments_BT, w.shape[1] - 1) for x, w in zip(inputs, taps, strict=True))
    conv = partial(linear_attention.short_conv, segments=segments_BT, history_segment=before_B)
    found = [conv(x, w, history=past) for x, w, past in zip(inputs, taps, history, strict=True)]
    q, k, v = (y.reshape(*y.shape[:2], -1, head_dim) for y, _ in found)
    q, k = linear_attention.l2norm(q), linear_attention.l2norm(k)
    q = q * jnp.asarray(head_dim**-0.5, q.dtype)
    where: dict[str, Any] = {
        "segments": segments_BT, "state_segment": before_B, "impl": implementation("kda", q.dtype)
    }  # fmt: skip
    state = None if cache is None else cache.state
    if cut:
        state = _entering(linear_attention.kda_range(k, v, g_BTHK, beta_BTH, **where))
    out_BTHV, state = linear_attention.kda(q, k, v, g_BTHK, beta_BTH, state=state, **where)
    if cache is not None:
        cache = KDACache(found[0][1], found[1][1], found[2][1], state)
    return out_BTHV, cache


def _last_inputs(x_BTC: jax.Array, segments_BT: jax.Array, count: int) -> jax.Array:
    """The inputs right before this device's tokens, zeros where they are not of the last one's document."""
    at = segments_BT.shape[1] - count
    same_BW1 = (segments_BT[:, at:] == segments_BT[:, -1:])[..., None]
    return _from_before(jnp.where(same_BW1, x_BTC[:, at:], 0))


def _from_before(x: jax.Array) -> jax.Array:
    """What the device before along "cp" has; zeros on the first."""
    return lax.ppermute(x, "cp", [(i, i + 1) for i in range(lax.axis_size("cp") - 1)])


def _entering(mine: tuple[jax.Array, jax.Array]) -> jax.Array:
    """The state before this device's tokens, from what the tokens of each device do to a state."""
    m_PBHKK, c_PBHKV = (lax.all_gather(a, "cp") for a in mine)
    earlier_P = jnp.arange(m_PBHKK.shape[0]) < lax.axis_index("cp")

    def through(state, device):
        m, c, earlier = device
        after = jnp.einsum("bhij,bhjv->bhiv", m, state, precision=lax.Precision.HIGHEST) + c
        return jnp.where(earlier, after, state), None

    return lax.scan(through, jnp.zeros_like(c_PBHKV[0]), (m_PBHKK, c_PBHKV, earlier_P))[0]
