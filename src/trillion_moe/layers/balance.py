"""What a MoE layer is asked for beside its output, so that its experts are given alike; see `trillion_moe.balance`.

Runs on every device by itself, over its own tokens. Nothing is computed that is not asked for.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from trillion_moe.balance import BalanceConfig, histogram, shortfalls
from trillion_moe.config import ModelConfig
from trillion_moe.layers.router import Router
from trillion_moe.ops import accumulator
from trillion_moe.sharding import Layout, dims
from trillion_moe.weights import Dims

LOSS, HISTOGRAM = "sequence_loss", "shortfall_histogram"
"""What layers report: float32 scalar and int32 [E, bins], of the tokens of all devices."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Balancing:
    """What is asked for.

    segments_BT: int32, documents as in `Context`; counted_BT: bool, which positions have a target. Rows are whole: a
    document's loss needs all of it. Both None without `config.sequence_loss`.
    """

    segments_BT: Any
    counted_BT: Any
    config: BalanceConfig = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, config: BalanceConfig | None, segments_BT: jax.Array | None, counted_BT: jax.Array):
        if config is None or not config.sequence_loss:
            return None if config is None else cls(None, None, config)
        return cls(jnp.ones_like(counted_BT, jnp.int32) if segments_BT is None else segments_BT, counted_BT, config)


def asked_axes(asked: Balancing | None) -> dict[str, Dims]:
    """The logical axes of what `answers` gives."""
    if asked is None:
        return {}
    found = {HISTOGRAM: dims("expert", None)} if asked.config.method == "quantile" else {}
    return found | ({LOSS: dims()} if asked.config.sequence_loss else {})


def answers(asked: Balancing | None, router: Router, logits_NE, real_N, cfg: ModelConfig, layout: Layout | None):
    """-> what was asked for, by name, summed over all devices with other tokens."""
    if asked is None:
        return {}
    found, k, scores_NE = {}, cfg.moe.top_k, jax.nn.sigmoid(logits_NE)
    if asked.config.method == "quantile":
        bias_E, fixed_NE = router.bias.astype(scores_NE.dtype), lax.stop_gradient(scores_NE)
        counts_EB = histogram(shortfalls(fixed_NE, bias_E, k), bias_E, real_N)
        found[HISTOGRAM] = counts_EB if layout is None else _summed_by_expert(counts_EB, layout)
    if asked.config.sequence_loss:
        loss = asked.config.sequence_loss * sequence_loss(scores_NE, asked, k, layout)
        found[LOSS] = loss if layout is None else lax.psum(loss, layout.tokens)
    return found


def _summed_by_expert(counts_EB: jax.Array, layout: Layout) -> jax.Array:
    """Summed over all tokens; each device along "ep" keeps the rows of its own experts (all: 330 MB for Kimi K3)."""
    mine = lax.psum_scatter(counts_EB, "ep", scatter_dimension=0, tiled=True)
    return lax.psum(mine, tuple(axis for axis in layout.tokens if axis != "ep"))


def sequence_loss(scores_NE: jax.Array, asked: Balancing, k: int, layout: Layout | None) -> jax.Array:
    """DeepSeek-V3, eqs. 17-20 without the coefficient, of this device's tokens; summed over supervised tokens.

    Of a document of T tokens it is ``sum_i f_i P_i``, ``f_i = E / (k T) *`` tokens with i among their k best scores
    (unbiased, as there), ``P_i`` the mean of the scores normalised over experts. It counts as often as the document has
    targets. The gradient goes through P alone.
    """
    e, acc = scores_NE.shape[-1], accumulator(scores_NE.dtype)
    real_BT, number_BT = asked.segments_BT > 0, _numbers(asked.segments_BT)
    size_BT, targets_BT = (_by_document(number_BT, a) for a in (real_BT, asked.counted_BT & real_BT))
    scale_BT = jnp.where(real_BT, targets_BT.astype(acc) * e / (k * jnp.maximum(size_BT, 1).astype(acc) ** 2), 0)
    length = len(scores_NE) // len(number_BT)
    start = 0 if layout is None else lax.axis_index("cp") * length
    mine = [lax.dynamic_slice_in_dim(a, start, length, axis=1) for a in (real_BT, scale_BT)]
    chosen_NE = jnp.sum(jax.nn.one_hot(lax.top_k(scores_NE, k)[1], e, dtype=jnp.int32), axis=1)
    chosen_BTE = chosen_NE.reshape(-1, length, e) * mine[0][..., None]
    factor_BTE = lax.stop_gradient(mine[1][..., None] * _of_document(chosen_BTE, number_BT, layout))
    share_NE = scores_NE / jnp.sum(scores_NE, axis=-1, keepdims=True)
    return jnp.sum(factor_BTE * share_NE.reshape(factor_BTE.shape))


def _numbers(segments_BT: jax.Array) -> jax.Array:
    """0, 1, ... along every row, one more where another document or padding begins."""
    begins_BT = segments_BT != jnp.pad(segments_BT, ((0, 0), (1, 0)), mode="edge")[:, :-1]
    return jnp.cumsum(begins_BT, axis=1, dtype=jnp.int32)


def _by_document(number_BT: jax.Array, a_BT: jax.Array) -> jax.Array:
    """For every token the sum over its document: ``[B, T]`` or ``[B, T, E]`` of integers."""

    def one(number_T, a_T):
        return jnp.zeros(a_T.shape, jnp.int32).at[number_T].add(a_T.astype(jnp.int32))[number_T]

    return jax.vmap(one)(number_BT, a_BT)


def _of_document(chosen_BTE: jax.Array, number_BT: jax.Array, layout: Layout | None) -> jax.Array:
    """`_by_document` of this device's tokens where others have parts of their documents: int32 ``[B, T, E]``.

    number_BT: of whole rows. Of another device only the first and the last document can go on here.
    """
    length, parts = chosen_BTE.shape[1], 1 if layout is None else layout.size("cp")
    start = 0 if layout is None else lax.axis_index("cp") * length
    mine_BT = lax.dynamic_slice_in_dim(number_BT, start, length, axis=1)
    here_BTE = _by_document(mine_BT - mine_BT[:, :1], chosen_BTE)
    if parts == 1:
        return here_BTE
    ends_PB2 = lax.all_gather(mine_BT[:, jnp.array([0, -1])], "cp")
    counts_PB2E = lax.all_gather(here_BTE[:, jnp.array([0, -1])], "cp")
    another_P = jnp.arange(parts) != lax.axis_index("cp")
    once_PB2 = ~jnp.pad(ends_PB2[..., :1] == ends_PB2[..., 1:], ((0, 0), (0, 0), (1, 0)))  # the last may be the first
    same_PB2T = ends_PB2[..., None] == mine_BT[None, :, None, :]
    same_PB2T &= (another_P[:, None, None] & once_PB2)[..., None]
    return here_BTE + jnp.einsum("pbst,pbse->bte", same_PB2T.astype(jnp.int32), counts_PB2E)
