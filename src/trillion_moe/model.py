"""Kimi K3 and Kimi Linear: the decoder, its vision tower, and the pure functions over them.

A `Model` is a blueprint when built and a value once filled (`blueprint.init`, `checkpoint.load`): `jax.jit`,
`jax.grad`, `lax.scan` and Optax take it as it is, and nothing here changes it.
"""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from trillion_moe.balance import BalanceConfig
from trillion_moe.blueprint import Spec, constant, normal, stack
from trillion_moe.config import ModelConfig
from trillion_moe.layers import pipeline, pipeline_loss, stages
from trillion_moe.layers.balance import LOSS, Balancing, asked_axes
from trillion_moe.layers.block import Block, Context
from trillion_moe.layers.depth import Run, attention_residuals, residual_stream
from trillion_moe.layers.mla import MLACache
from trillion_moe.layers.norm import rms_norm
from trillion_moe.layers.residual import AttnRes
from trillion_moe.layers.segments import Plan, check_plan, depth_plan, layer_places, staged
from trillion_moe.layers.vision import Features, ImageBatch, Projector, VisionTower, splice
from trillion_moe.layers.vocabulary import cross_entropy, look_up
from trillion_moe.ops import accumulator, dot
from trillion_moe.sharding import Layout, LayoutError, check_batch, check_caches, pin
from trillion_moe.weights import Weight


class Model(nnx.Module):
    """embed ``[V, D]``, the layers by segment, final mix and norm, head ``[D, V]`` (None when tied), vision.

    config, plan, dtype and layout are static. `dtype` is that of the parameters that are not float32 by definition, and
    of the activations; `layout` says over which mesh all arrays lie (`sharding.place`), None = one device.
    """

    embed: Any = nnx.data()
    segments: Any = nnx.data()
    out_res: Any = nnx.data()
    norm: Any = nnx.data()
    head: Any = nnx.data()
    vision: Any = nnx.data()
    projector: Any = nnx.data()

    def __init__(self, cfg: ModelConfig, *, dtype: str | None = None, plan: Plan | None = None):
        dtype = dtype or cfg.dtype
        self.config, self.dtype, self.layout = cfg, dtype, None
        self.plan = depth_plan(cfg) if plan is None else plan
        check_plan(cfg, self.plan)
        d, v, std = cfg.hidden_size, cfg.vocab_size, normal(cfg.initializer_range)
        self.embed = Spec((v, d), dtype, ("vocab", "embed"), std)
        self.segments = tuple(
            tuple(
                stack(Block(cfg, kind, dtype=dtype), segment.repeats, "stages" if segment.numbers else "repeats")
                for kind in segment.layers
            )
            for segment in self.plan
        )
        self.out_res = AttnRes(cfg, dtype=dtype) if cfg.attn_res_block is not None else None
        self.norm = Spec((d,), dtype, ("norm",), constant(1.0))
        self.head = None if cfg.tie_embeddings else Spec((d, v), dtype, ("embed", "vocab"), std)
        self.vision = VisionTower(cfg, dtype=dtype) if cfg.vision is not None else None
        self.projector = Projector(cfg, dtype=dtype) if cfg.vision is not None else None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Caches:
    """All that a later call needs of the tokens so far.

    layers: per segment and layer a KDACache or MLACache, stacked where the segment repeats.
    segments: int32 [B, S], document of each cached position (0 = free); S is the capacity.
    length: int32 [B], positions in use. segment: int32 [B], document that a row is in.
    """

    layers: Any
    segments: jax.Array
    length: jax.Array
    segment: jax.Array

    @property
    def capacity(self) -> int:
        return self.segments.shape[1]


def init_caches(model: Model, batch: int, capacity: int) -> Caches:
    """Empty caches for `batch` rows of at most `capacity` tokens, in the model's dtype, states in float32."""
    cfg, dtype = model.config, activation_dtype(model)

    def one(block: Block, repeats: int):
        empty = block.empty_cache(cfg, batch, capacity, dtype)
        return empty if repeats == 1 else jax.tree.map(lambda a: jnp.zeros((repeats, *a.shape), a.dtype), empty)

    layers = tuple(
        tuple(one(block, segment.repeats) for block in blocks)
        for blocks, segment in zip(model.segments, model.plan, strict=True)
    )
    zeros = partial(jnp.zeros, dtype=jnp.int32)
    return Caches(layers, zeros((batch, capacity)), zeros(batch), zeros(batch))


def bucket(length: int) -> int:
    """The power of two, at least 64, that holds `length` tokens: lengths are padded to it, so that few are compiled."""
    return max(64, 1 << (length - 1).bit_length())


def grow(caches: Caches, capacity: int) -> Caches:
    """The same caches with room for `capacity` positions."""
    more = capacity - caches.capacity
    if more <= 0:
        return caches

    def pad(cache):
        if not isinstance(cache, MLACache):
            return cache
        return jax.tree.map(lambda a: jnp.pad(a, [(0, 0)] * (a.ndim - 2) + [(0, more), (0, 0)]), cache)

    layers = jax.tree.map(pad, caches.layers, is_leaf=lambda c: isinstance(c, MLACache))
    return dataclasses.replace(caches, layers=layers, segments=jnp.pad(caches.segments, ((0, 0), (0, more))))


def activation_dtype(model: Model) -> jnp.dtype:
    return jnp.dtype(model.dtype)


# ----------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Compaction:
    """Padding moved to the end of every row (order kept), and back. None without segments: nothing moves."""

    order_BT: jax.Array | None

    @classmethod
    def of(cls, segments_BT: jax.Array | None) -> "Compaction":
        return cls(None if segments_BT is None else jnp.argsort(segments_BT == 0, axis=1, stable=True))

    def forth(self, x_BT: jax.Array) -> jax.Array:
        return x_BT if self.order_BT is None else _take(x_BT, self.order_BT)

    def back(self, x_BT: jax.Array) -> jax.Array:
        return x_BT if self.order_BT is None else _take(x_BT, jnp.argsort(self.order_BT, axis=1))


def _take(x_BT: jax.Array, index_BT: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x_BT, index_BT.reshape(*index_BT.shape, *(1,) * (x_BT.ndim - 2)), axis=1)


def least_tokens(cfg: ModelConfig) -> int:
    """Tokens that a device needs of a sequence which is cut: what its convolutions look back at."""
    return 1 if cfg.kda is None else max(1, cfg.kda.conv_width - 1)


def image_features(model: Model, images: ImageBatch | None, tap: dict | None = None) -> Features | None:
    """The tower's and the projector's output: one row ``[D]`` for every image token of every picture, in order."""
    if images is None:
        return None
    rows_MD = model.projector(model.vision(images, model.config, tap), model.config, tap)
    return Features(rows_MD, len(rows_MD))


def embed(model: Model, tokens_BT, features: Features | None = None, segments_BT=None) -> jax.Array:
    """Token embeddings with image features at the placeholders, in order -> ``[B, T, D]``.

    What stands in padding is no placeholder.
    """
    check_batch(model.layout, *tokens_BT.shape, least=least_tokens(model.config))
    x_BTD = look_up(model.embed, tokens_BT, model.layout).astype(activation_dtype(model))
    if features is None:
        return x_BTD
    holds_BT = tokens_BT == model.config.media_id
    if segments_BT is not None:
        holds_BT &= segments_BT > 0
    return pin(model.layout, splice(x_BTD, holds_BT, features), "batch", "time", None)


def _on_stages(
    model: Model, x_RTD, segments_RT, balance: BalanceConfig | None = None
) -> tuple[pipeline.Pipe, tuple[Any, ...], stages.Grid, Any]:
    """How this batch goes over the stages: their layers, what the layers are, and the microbatches ``[M, n, B, T, D]``
    as they come to the first."""
    segment = staged(model.plan)
    if model.layout is None or segment is None or segment.stages != model.layout.size("pp"):
        raise LayoutError("this model is cut into pipeline stages: it runs over their mesh alone, see load(mesh=)")
    check_batch(model.layout, *x_RTD.shape[:2], least=least_tokens(model.config))
    pipe = pipeline.Pipe.make(model.config, model.plan, model.layout, len(x_RTD), balance)
    *lead, blocks = model.segments
    rows = pipe.lead(lead[0] if lead else (), x_RTD, segments_RT)
    return pipe, blocks, stages.grid(model.plan, model.config), pipe.parted(rows, 1, apart=True)


def _over_stages(model: Model, x_RTD, segments_RT, caches, tracing: bool):
    """`trunk`, forwards over the stages of a pipeline."""
    if tracing:
        raise LayoutError("over pipeline stages there are no traces: legal is a mesh with pp = 1")
    if caches is not None:
        check_caches(model.layout)
    segments_RT = _documents(x_RTD, segments_RT)
    pipe, blocks, grid, first = _on_stages(model, x_RTD, segments_RT)
    mixed_MBTD, aux = pipeline.run(pipe, blocks, grid, model.out_res, first, stages.Tokens(pipe.parted(segments_RT)))
    x_RTD = pin(model.layout, pipe.whole(mixed_MBTD), "batch", "time", None)
    hidden_RTD = rms_norm(x_RTD, model.norm, model.config.rms_norm_eps)
    return hidden_RTD, None, _by_layer(model, aux), (x_RTD, None)


def _documents(x_RTD, segments_RT) -> jax.Array:
    return jnp.ones(x_RTD.shape[:2], jnp.int32) if segments_RT is None else segments_RT


def _by_layer(model: Model, aux: tuple[Any, ...]) -> list[Any]:
    """Aux of the slots on stages, by layer; of those before there is none."""
    places = [(j, r) for s, j, r in layer_places(model.plan) if s == len(model.plan) - 1]
    return [at_repeat(aux[j], r) for j, r in places]


def trunk(
    model: Model, x_BTD, segments_BT=None, caches: Caches | None = None, *, remat: bool = False, tracing: bool = False,
    asked: Balancing | None = None,
) -> tuple[jax.Array, Any, list[Any], tuple[jax.Array, Any]]:  # fmt: skip
    """Embeddings to final hidden states, for rows whose padding stands at the end.

    -> hidden ``[B, T, D]`` after the final norm, caches (None if none given), aux per layer, final mix ``[B, T, D]``.
    A row whose tokens do not fit the caches comes out as NaN.
    """
    cfg = model.config
    if staged(model.plan):
        return _over_stages(model, x_BTD, segments_BT, caches, tracing)
    if remat and caches is not None:
        raise ValueError("remat recomputes for gradients; with caches there are none to take")
    run = Run(cfg, tuple(s.repeats for s in model.plan), tracing=tracing, remat=remat)
    ctx, caches, fits_B = _context(x_BTD.shape[:2], segments_BT, caches, model.layout)
    ctx = dataclasses.replace(ctx, asked=asked)
    layers = None if caches is None else caches.layers
    if cfg.attn_res_block is None:
        x_BTD, layers, aux = residual_stream(model.segments, x_BTD, ctx, layers, run)
        bank = None
    else:
        bank, layers, aux = attention_residuals(model.segments, x_BTD, ctx, layers, run)
        mix = partial(model.out_res, last=bank.shape[0] - 1, prefix_BTD=None, eps=cfg.rms_norm_eps)
        x_BTD = (jax.checkpoint(mix) if run.remat else mix)(bank)
    if caches is not None:
        caches = dataclasses.replace(caches, layers=layers)
        x_BTD = jnp.where(fits_B[:, None, None], x_BTD, jnp.nan)
    aux = [at_repeat(aux[s][j], r) for s, j, r in layer_places(model.plan)]
    return rms_norm(x_BTD, model.norm, cfg.rms_norm_eps), caches, aux, (x_BTD, bank)


def at_repeat(tree: Any, repeat: int | None) -> Any:
    """One repeat of stacked leaves; None takes them as they are."""
    return tree if repeat is None else jax.tree.map(lambda a: a[repeat], tree)


def _context(shape, segments_BT, caches: Caches | None, layout: Layout | None):
    """Where the new tokens stand, the caches with them entered (layers not yet), and which rows had room."""
    if caches is None:
        return Context(segments_BT, layout=layout), None, None
    check_caches(layout)
    if segments_BT is None:
        segments_BT = jnp.broadcast_to(jnp.maximum(caches.segment, 1)[:, None], shape)
    segments_BT = segments_BT.astype(jnp.int32)
    real_BT = segments_BT > 0
    new_B = jnp.sum(real_BT, axis=1, dtype=jnp.int32)
    slots_BT = caches.length[:, None] + jnp.arange(shape[1], dtype=jnp.int32)
    put = jax.vmap(lambda into, at, new: into.at[at].set(new, mode="drop"))
    keys_BS = put(caches.segments, slots_BT, segments_BT)
    last_B = jnp.take_along_axis(segments_BT, jnp.maximum(new_B - 1, 0)[:, None], axis=1)[:, 0]
    started_B = jnp.where(caches.length > 0, caches.segment, segments_BT[:, 0])
    length_B = caches.length + new_B
    entered = Caches(caches.layers, keys_BS, length_B, jnp.where(new_B > 0, last_B, caches.segment))
    return Context(segments_BT, slots_BT, keys_BS, started_B, layout), entered, length_B <= caches.capacity


def _cached(model: Model) -> bool:
    return staged(model.plan) is None and (model.layout is None or model.layout.size("cp") == 1)


def unembed(model: Model, hidden: jax.Array) -> jax.Array:
    """``[..., D]`` hidden states to ``[..., V]`` logits in float32."""
    return dot(hidden, _head(model), dtype=accumulator(hidden.dtype))


def _head(model: Model) -> Weight:
    return model.embed.T if model.head is None else model.head


def forward(model: Model, tokens_BT, *, segments=None, images: ImageBatch | None = None, caches: Caches | None = None):
    """-> logits float32 ``[B, T, V]``, caches. Positions of padding hold no meaning.

    Without caches, new ones with room for exactly these tokens are made, so that a later call may go on (`grow` them);
    none where a mesh cuts the sequence, or layers into stages.
    """
    caches = init_caches(model, *tokens_BT.shape) if caches is None and _cached(model) else caches
    rows = Compaction.of(segments)
    segments_BT = None if segments is None else rows.forth(segments)
    x_BTD = embed(model, rows.forth(tokens_BT), image_features(model, images), segments_BT)
    hidden_BTD, caches, *_ = trunk(model, x_BTD, segments_BT, caches)
    return rows.back(unembed(model, hidden_BTD)), caches


# ----------------------------------------------------------------------------------------------------------------------


def next_token_targets(model: Model, batch: Mapping[str, Any]) -> tuple[jax.Array, jax.Array]:
    """-> targets int32 ``[B, T]`` and which of them count, bool ``[B, T]``.

    A position's target is the next token of its document. Image placeholders are never targets, padding neither;
    ``batch["loss_mask"]`` (bool [B, T], true where a *token* is supervised) narrows it further.
    """
    tokens_BT = batch["tokens"]

    def shift(a_BT):
        return jnp.concatenate([a_BT[:, 1:], jnp.zeros_like(a_BT[:, :1])], axis=1)

    segments_BT = batch.get("segments")
    segments_BT = jnp.ones_like(tokens_BT) if segments_BT is None else segments_BT
    targets_BT, next_segments_BT = shift(tokens_BT), shift(segments_BT)
    counted_BT = (segments_BT > 0) & (next_segments_BT == segments_BT)
    if model.config.media_id is not None:
        counted_BT &= targets_BT != model.config.media_id
    if batch.get("loss_mask") is not None:
        counted_BT &= shift(batch["loss_mask"].astype(bool))
    return targets_BT, counted_BT


def loss(model: Model, batch: Mapping[str, Any], *, remat: bool = True) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Mean next-token cross-entropy over the counted targets, float32, and metrics; see `loss_sum`.

    metrics: as there, with ``accuracy`` in place of ``correct``.
    """
    total, metrics = loss_sum(model, batch, remat=remat)
    correct = metrics.pop("correct")
    return total / metrics["tokens"], metrics | {"accuracy": correct / metrics["tokens"]}


def loss_sum(
    model: Model, batch: Mapping[str, Any], *, remat: bool = True, balance: BalanceConfig | None = None
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Sum of the next-token cross-entropies of the counted targets, float32, and sums that add up over batches.

    batch: ``tokens`` int32 [B, T]; optional ``segments`` int32 [B, T], ``loss_mask`` bool [B, T], ``images`` ImageBatch
    (placeholders expanded). metrics: ``tokens`` (targets counted, int32), ``correct`` (those that were the argmax),
    ``expert_counts`` int32 [MoE layers, E], ``dropped`` int32 (assignments that no expert was given, for want of room
    on the wire), and where experts lie apart ``exchange`` (see `layers.moe`). remat: recompute layers in the backward
    pass instead of keeping their intermediates; on pipeline stages they always are. balance: what is done so that
    experts are given alike; with its sequence loss this is in the sum, and in the metrics as ``sequence_loss`` (of all
    layers); for its quantiles there is ``shortfall_histogram`` int32 [MoE layers, E, bins].
    """
    rows = Compaction.of(batch.get("segments"))
    by_token = {k: batch[k] for k in ("tokens", "segments", "loss_mask") if batch.get(k) is not None}
    batch = dict(batch) | {k: pin(model.layout, rows.forth(a), "batch", "time") for k, a in by_token.items()}
    targets_BT, counted_BT = next_token_targets(model, batch)
    features = image_features(model, batch.get("images"))
    x_BTD = embed(model, batch["tokens"], features, batch.get("segments"))
    asked = Balancing.of(balance, batch.get("segments"), counted_BT)
    if staged(model.plan):
        segments_BT = _documents(x_BTD, batch.get("segments"))
        pipe, blocks, grid, first = _on_stages(model, x_BTD, segments_BT, balance)
        tokens = stages.Tokens(*map(pipe.parted, (segments_BT, targets_BT, counted_BT)))
        tail = stages.Tail(model.out_res, model.norm, _head(model))
        total, correct, aux = pipeline_loss.loss(pipe, blocks, grid, tail, first, tokens)
        aux = _by_layer(model, aux)
    else:
        hidden_BTD, _, aux, _ = trunk(model, x_BTD, batch.get("segments"), remat=remat, asked=asked)
        total, correct = cross_entropy(_head(model), hidden_BTD, targets_BT, counted_BT, model.layout)
    moe = [layer for layer in aux if "expert_counts" in layer]
    counts = [layer["expert_counts"] for layer in moe]
    metrics = {"tokens": jnp.sum(counted_BT, dtype=jnp.int32), "correct": correct}
    if counts:
        metrics |= {
            "expert_counts": jnp.stack(counts),
            "dropped": jnp.sum(jnp.stack([layer["dropped"] for layer in moe])),
        }
        metrics |= {name: jnp.stack([layer[name] for layer in moe]) for name in asked_axes(asked)}
    if LOSS in metrics:
        metrics[LOSS] = jnp.sum(metrics[LOSS])
        total = total + metrics[LOSS]
    if travelled := [layer["exchange"] for layer in moe if "exchange" in layer]:
        metrics["exchange"] = jax.tree.map(lambda *layers: sum(layers), *travelled)
    return total, metrics
