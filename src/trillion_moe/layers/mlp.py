"""Gated activations and the dense gated MLP."""

from typing import Any

import jax
from flax import nnx

from trillion_moe.blueprint import Spec, normal
from trillion_moe.config import ModelConfig
from trillion_moe.ops import Activation, Silu, Situ, activate, dot


def activation_of(cfg: ModelConfig) -> Activation:
    """SiTU-GLU or SwiGLU; b1 absent acts as 1, b2 absent leaves u linear."""
    if cfg.activation == "silu":
        return Silu()
    return Situ(1.0 if cfg.situ_beta is None else cfg.situ_beta, cfg.situ_linear_beta)


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
        return dot(activate(activation_of(cfg), dot(x_BTD, self.gate), dot(x_BTD, self.up)), self.down)
