"""The sigmoid router with a selection bias (DeepSeek-V3, arXiv 2412.19437, eqs. 12-16)."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from trillion_moe.blueprint import Spec, constant, normal
from trillion_moe.config import ModelConfig
from trillion_moe.ops import accumulator


class Router(nnx.Module):
    """weight ``[D, E]``; bias float32 ``[E]`` moves the choice of experts and never enters their weights.

    copies: where experts are whose bank is arranged for devices (`transforms.arrange_experts`), None = in their order.
    """

    weight: Any = nnx.data()
    bias: Any = nnx.data()
    copies: Any = nnx.data()

    def __init__(self, cfg: ModelConfig, *, dtype: str):
        moe = cfg.moe
        self.weight = Spec(
            (cfg.hidden_size, moe.num_experts), dtype, ("embed", "router"), normal(cfg.initializer_range)
        )
        self.bias = Spec((moe.num_experts,), "float32", ("router",), constant(0.0))
        self.copies = None

    def __call__(self, x_ND: jax.Array, cfg: ModelConfig) -> tuple[jax.Array, jax.Array, jax.Array]:
        """-> expert ids int32 ``[N, K]``, mixture weights float32 ``[N, K]``, logits float32 ``[N, E]``.

        Gradients reach the logits through the weights, neither the bias nor the choice.
        """
        moe, acc = cfg.moe, accumulator(x_ND.dtype)
        logits_NE = jnp.matmul(x_ND.astype(acc), self.weight.astype(acc), precision=lax.Precision.HIGHEST)
        scores_NE = jax.nn.sigmoid(logits_NE)
        choice_NE = lax.stop_gradient(scores_NE + self.bias.astype(acc))
        if moe.num_groups > 1:
            choice_NE = _best_groups(choice_NE, moe.num_groups, moe.topk_groups)
        _, ids_NK = lax.top_k(choice_NE, moe.top_k)
        weights_NK = _pick(scores_NE, ids_NK)
        if moe.renormalize:
            weights_NK = weights_NK / (jnp.sum(weights_NK, -1, keepdims=True) + 1e-20)
        return ids_NK, weights_NK * moe.scaling_factor, logits_NE


def in_bank(router: Router, ids_NK: jax.Array, cfg: ModelConfig) -> tuple[jax.Array, ModelConfig]:
    """Experts as their bank numbers them, no expert as the number past its end, and the config of such a model.

    Tokens take the copies of an expert in turn.
    """
    copies = router.copies
    if copies is None:
        return ids_NK, cfg
    assert cfg.moe is not None
    moe = dataclasses.replace(cfg.moe, num_experts=copies.total, num_groups=1, topk_groups=1)
    known_NK = jnp.minimum(ids_NK, cfg.moe.num_experts - 1)
    turn_NK = jnp.arange(len(ids_NK), dtype=jnp.int32)[:, None] % copies.count[known_NK]
    slots_NK = jnp.where(ids_NK < cfg.moe.num_experts, copies.slots[known_NK, turn_NK], copies.total)
    return slots_NK, dataclasses.replace(cfg, moe=moe)


def _pick(scores_NE: jax.Array, ids_NK: jax.Array) -> jax.Array:
    """Scores of the chosen experts. A product with a one-hot: its gradient is a product too, not a scatter."""
    one_hot_NKE = jax.nn.one_hot(ids_NK, scores_NE.shape[-1], dtype=scores_NE.dtype)
    return jnp.sum(one_hot_NKE * scores_NE[:, None, :], axis=-1)


def _best_groups(choice_NE: jax.Array, num_groups: int, topk_groups: int) -> jax.Array:
    """-inf outside the `topk_groups` groups with the largest sum of their two best scores."""
    n, e = choice_NE.shape
    grouped = choice_NE.reshape(n, num_groups, e // num_groups)
    group_scores = jnp.sum(lax.top_k(grouped, 2)[0], axis=-1)
    _, best = lax.top_k(group_scores, topk_groups)
    kept = jnp.any(jax.nn.one_hot(best, num_groups, dtype=bool), axis=1)
    return jnp.where(kept[:, :, None], grouped, -jnp.inf).reshape(n, e)
