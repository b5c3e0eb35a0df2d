"""Block attention residuals (Kimi K3 report): a learned softmax over block sums replaces the residual stream."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from trillion_moe.blueprint import Spec, constant, normal
from trillion_moe.config import ModelConfig
from trillion_moe.layers.norm import rms_scale
from trillion_moe.ops import accumulator


class AttnRes(nnx.Module):
    """One mix: a norm weight and a pseudo-query, both ``[D]``."""

    norm: Any = nnx.data()
    query: Any = nnx.data()

    def __init__(self, cfg: ModelConfig, *, dtype: str):
        d = cfg.hidden_size
        self.norm = Spec((d,), dtype, ("norm",), constant(1.0))
        self.query = Spec((d,), dtype, ("norm",), normal(cfg.initializer_range))

    def __call__(
        self,
        bank_NBTD: jax.Array,
        last: int | jax.Array,
        prefix_BTD: jax.Array | None,
        eps: float,
        *,
        without: bool | jax.Array = False,
    ) -> jax.Array:
        """Softmax-weighted sum of rows 0..last of the bank and of the running prefix (None: not a source) -> [B, T, D].

        ``score_i = sum_d v_i,d / rms(v_i) * norm_d * query_d``, no 1/sqrt(d); the mixed values are not normalised. Rows
        after `last` may hold anything finite: their weight is exactly 0, and so is the prefix's under `without`. All in
        float32; cast to the bank's dtype.
        """
        if isinstance(last, int):
            bank_NBTD, live = bank_NBTD[: last + 1], None
        else:
            live = jnp.arange(bank_NBTD.shape[0]) <= last
        acc = accumulator(bank_NBTD.dtype)
        q_D = self.norm.astype(acc) * self.query.astype(acc)
        scores_NBT = _score(bank_NBTD, q_D, eps)
        if live is not None:
            scores_NBT = jnp.where(live[:, None, None], scores_NBT, -jnp.inf)
        if prefix_BTD is not None:
            score_BT = _score(prefix_BTD, q_D, eps)
            score_BT = score_BT if without is False else jnp.where(without, -jnp.inf, score_BT)
            scores_NBT = jnp.concatenate([scores_NBT, score_BT[None]])
        weights_NBT = jax.nn.softmax(scores_NBT, axis=0)
        rows = bank_NBTD.shape[0]
        mixed_BTD = jnp.sum(weights_NBT[:rows, ..., None] * bank_NBTD.astype(acc), axis=0)
        if prefix_BTD is not None:
            mixed_BTD = mixed_BTD + weights_NBT[rows, ..., None] * prefix_BTD.astype(acc)
        return mixed_BTD.astype(bank_NBTD.dtype)


def _score(v: jax.Array, q_D: jax.Array, eps: float) -> jax.Array:
    return rms_scale(v, eps)[..., 0] * jnp.sum(v.astype(q_D.dtype) * q_D, axis=-1)
