"""Gated activations of two branches, and their gradients: what the experts apply between two grouped matmuls.

Plain functions of float32 arrays, so that kernels and layers compute one formula. Frozen dataclasses: they are static
arguments.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

Activation = Callable[[jax.Array, jax.Array], jax.Array]
"""Of gate and up, hashable."""


@dataclass(frozen=True)
class Silu:
    """SwiGLU (Shazeer, arXiv 2002.05202): ``g sigmoid(g) u``."""

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        return gate * jax.nn.sigmoid(gate) * up


@dataclass(frozen=True)
class Situ:
    """SiTU-GLU (Kimi K3 report): ``[b1 tanh(g / b1) sigmoid(g)] [b2 tanh(u / b2)]``; the sigmoid takes the uncapped g.

    beta: b1. linear_beta: b2; None leaves u linear.
    """

    beta: float = 1.0
    linear_beta: float | None = None

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        gated = self.beta * jnp.tanh(gate / self.beta) * jax.nn.sigmoid(gate)
        linear = self.linear_beta
        return gated * (up if linear is None else linear * jnp.tanh(up / linear))


def gradient(activation: Activation, gate: jax.Array, up: jax.Array, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(d gate, d up) of ``sum(dy * activation(gate, up))``, nothing kept from a forward pass."""
    return jax.vjp(activation, gate, up)[1](dy)


def activate(activation: Activation, gate: jax.Array, up: jax.Array, added: tuple[jax.Array, ...] = ()) -> jax.Array:
    """activation(gate + added[0], up + added[1]): sums and result in gate's dtype, the activation in fp32 (or float64).

    The backward pass keeps gate and up as they came, not what fp32 makes of them on the way.
    """
    if added:
        gate, up = gate + added[0].astype(gate.dtype), up + added[1].astype(up.dtype)
    return _activate(activation, gate, up)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _activate(activation: Activation, gate: jax.Array, up: jax.Array) -> jax.Array:
    return activation(*_wide(gate, up)).astype(gate.dtype)


def _activate_bwd(activation, branches, dy):
    grads = gradient(activation, *_wide(*branches), *_wide(dy))
    return tuple(g.astype(branch.dtype) for g, branch in zip(grads, branches, strict=True))


_activate.defvjp(lambda activation, gate, up: (_activate(activation, gate, up), (gate, up)), _activate_bwd)


def _wide(*arrays: jax.Array) -> list[jax.Array]:
    return [a.astype(jnp.promote_types(a.dtype, jnp.float32)) for a in arrays]
