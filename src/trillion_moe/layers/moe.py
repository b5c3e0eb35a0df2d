"""Mixture of experts: routing, the permutation of rows to experts and back, latent width, shared experts."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from trillion_moe.blueprint import Spec, constant, normal
from trillion_moe.config import ModelConfig
from trillion_moe.layers import Tap, tap_into
from trillion_moe.layers.mlp import GatedMLP, activation_of
from trillion_moe.layers.norm import rms_norm
from trillion_moe.layers.router import Router
from trillion_moe.ops import accumulator, dot, grouped_dot, grouped_glu


class Experts(nnx.Module):
    """E gated MLPs of one width: gate, up ``[E, L, F]`` and down ``[E, F, L]``."""

    gate: Any = nnx.data()
    up: Any = nnx.data()
    down: Any = nnx.data()

    def __init__(self, cfg: ModelConfig, *, dtype: str):
        moe, std = cfg.moe, normal(cfg.initializer_range)
        width, e, f = moe.latent_size or cfg.hidden_size, moe.num_experts, moe.hidden_size
        self.gate = Spec((e, width, f), dtype, ("expert", "expert_embed", "expert_mlp"), std)
        self.up = Spec((e, width, f), dtype, ("expert", "expert_embed", "expert_mlp"), std)
        self.down = Spec((e, f, width), dtype, ("expert", "expert_mlp", "expert_embed"), std)

    def __call__(self, x_RL: jax.Array, group_sizes_E: jax.Array, cfg: ModelConfig) -> jax.Array:
        hidden_RF = grouped_glu(x_RL, self.gate, self.up, group_sizes_E, activation_of(cfg))
        return grouped_dot(hidden_RF, self.down, group_sizes_E)


class MoE(nnx.Module):
    """Routed plus shared experts.

    With a latent width (Kimi K3's Stable LatentMoE): tokens are projected once to L, the experts live in L, their
    weighted sum is normalised and projected back. Router and shared experts see the full width. Without one, experts
    work on the full width (Kimi Linear, DeepSeek-V3).
    """

    router: Any = nnx.data()
    experts: Any = nnx.data()
    shared: Any = nnx.data()
    latent_down: Any = nnx.data()
    latent_norm: Any = nnx.data()
    latent_up: Any = nnx.data()

    def __init__(self, cfg: ModelConfig, *, dtype: str):
        moe, d, std = cfg.moe, cfg.hidden_size, normal(cfg.initializer_range)
        latent = moe.latent_size
        self.router = Router(cfg, dtype=dtype)
        self.experts = Experts(cfg, dtype=dtype)
        self.shared = GatedMLP(cfg, moe.num_shared * moe.hidden_size, dtype=dtype) if moe.num_shared else None
        self.latent_down = Spec((d, latent), dtype, ("embed", "latent"), std) if latent else None
        self.latent_norm = Spec((latent,), dtype, ("latent",), constant(1.0)) if latent and moe.latent_norm else None
        self.latent_up = Spec((latent, d), dtype, ("latent", "embed"), std) if latent else None

    def __call__(
        self, x_BTD: jax.Array, real_BT: jax.Array, cfg: ModelConfig, tap: Tap = None
    ) -> tuple[jax.Array, jax.Array]:
        """-> output ``[B, T, D]`` and int32 ``[E]``, the number of real tokens each expert was given.

        Padding is never routed: it is in no group, no count, and its routed output is 0.
        """
        x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
        ids_NK, weights_NK, logits_NE = self.router(x_ND, cfg)
        z_NL = x_ND if self.latent_down is None else dot(x_ND, self.latent_down)
        routed_NL, counts_E = self._routed(z_NL, ids_NK, weights_NK, real_BT.reshape(-1), cfg)
        tap_into(
            tap,
            router_logits=logits_NE,
            router_ids=ids_NK,
            router_weights=weights_NK,
            latent_in=z_NL,
            latent_sum=routed_NL,
        )
        if self.latent_norm is not None:
            routed_NL = rms_norm(routed_NL, self.latent_norm, cfg.rms_norm_eps)
        y_ND = routed_NL if self.latent_up is None else dot(routed_NL, self.latent_up)
        y_BTD = y_ND.reshape(x_BTD.shape)
        if self.shared is not None:
            shared_BTD = self.shared(x_BTD, cfg)
            tap_into(tap, shared_out=shared_BTD)
            y_BTD = y_BTD + shared_BTD
        return y_BTD, counts_E

    def _routed(self, z_NL, ids_NK, weights_NK, real_N, cfg: ModelConfig) -> tuple[jax.Array, jax.Array]:
        e, (n, k) = cfg.moe.num_experts, ids_NK.shape
        ids_R = jnp.where(real_N[:, None], ids_NK, e).reshape(-1)
        order_R = jnp.argsort(ids_R, stable=True)
        place_R = jnp.argsort(order_R)
        counts_E = jnp.sum(ids_R[:, None] == jnp.arange(e)[None, :], axis=0, dtype=jnp.int32)
        rows_RL = _dispatch(z_NL, order_R, place_R, k)
        y_RL = self.experts(rows_RL, counts_E, cfg)
        y_NKL = _permute(y_RL, place_R, order_R).reshape(n, k, -1)
        acc = accumulator(z_NL.dtype)
        sum_NL = jnp.einsum("nkl,nk->nl", y_NKL.astype(acc), weights_NK, precision=lax.Precision.HIGHEST)
        return sum_NL.astype(z_NL.dtype), counts_E


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _dispatch(z_NL: jax.Array, order_R: jax.Array, place_R: jax.Array, k: int) -> jax.Array:
    """Each token's row k times, in the order of the experts. Backward is a gather and a sum, never a scatter."""
    return z_NL[order_R // k]


def _dispatch_fwd(z_NL, order_R, place_R, k):
    return _dispatch(z_NL, order_R, place_R, k), place_R


def _dispatch_bwd(k, place_R, g_RL):
    g_NKL = g_RL[place_R].reshape(-1, k, g_RL.shape[-1])
    return jnp.sum(g_NKL.astype(accumulator(g_RL.dtype)), axis=1).astype(g_RL.dtype), None, None


_dispatch.defvjp(_dispatch_fwd, _dispatch_bwd)


@jax.custom_vjp
def _permute(x_RL: jax.Array, index_R: jax.Array, inverse_R: jax.Array) -> jax.Array:
    """``x[index]`` for a permutation whose inverse is known; backward gathers by the inverse."""
    return x_RL[index_R]


_permute.defvjp(lambda x, index, inverse: (x[index], inverse), lambda inverse, g: (g[inverse], None, None))
