"""Gated activations and the dense gated MLP."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from trillion_moe.blueprint import Spec, normal
from trillion_moe.config import ModelConfig
from trillion_moe.ops import accumulator, dot


def gated_activation(gate: jax.Array, up: jax.Array, cfg: ModelConfig) -> jax.Array:
    """SiTU-GLU or SwiGLU of two branches, in float32, cast back to their dtype.

    SiTU (Kimi K3 report): ``[b1 tanh(g / b1) sigmoid(g)] * [b2 tanh(u / b2)]``; the sigmoid takes the uncapped g;
    b1 absent acts as 1, b2 absent leaves u linear. SwiGLU: ``g sigmoid(g) u``.
    """
    g, u = gate.astype(accumulator(gate.dtype)), up.astype(accumulator(up.dtype))
    if cfg.activation == "silu":
        return (jax.nn.silu(g) * u).astype(gate.dtype)
    cap = 1.0 if cfg.situ_beta is None else cfg.situ_beta
    linear = cfg.situ_linear_beta
    g = cap * jnp.tanh(g / cap) * jax.nn.sigmoid(g)
    u = u if linear is None else linear * jnp.tanh(u / linear)
    return (g * u).astype(gate.dtype)


class GatedMLP(nnx.Module):
    """``down(act(gate x, up x))``: dense layers (width `hidden`) and the fused shared experts."""

    gate: Any = nnx.data()
    up: Any = nnx.data()
    down: Any = nnx.data()

    def __init__(self, cfg: ModelConfig, hidden: int, *, dtype: str):
        d, std = cfg.hidden_size, normal(cfg.initializer_range)
        self.gate = Spec((d, hidden), dtype, ("embed", "mlp"), std)
        self.up = Spec((d, hidden), dtype, ("embed", "mlp"), std)
        self.down = Spec((hidden, d), dtype, ("mlp", "embed"), std)

    def __call__(self, x_BTD: jax.Array, cfg: ModelConfig) -> jax.Array:
        return dot(gated_activation(dot(x_BTD, self.gate), dot(x_BTD, self.up), cfg), self.down)
