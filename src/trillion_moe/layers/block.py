"""One decoder layer: attention and feed-forward, each behind a norm, without the residual that joins them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from trillion_moe.blueprint import LayerSpec, Spec, constant
from trillion_moe.config import ModelConfig
from trillion_moe.layers import Tap, real_tokens, tap_into
from trillion_moe.layers.balance import Balancing
from trillion_moe.layers.kda import KDA
from trillion_moe.layers.mla import MLA, Positions
from trillion_moe.layers.mlp import GatedMLP
from trillion_moe.layers.moe import MoE
from trillion_moe.layers.norm import rms_norm
from trillion_moe.layers.residual import AttnRes
from trillion_moe.sharding import Layout, gathered, pin

LayerCache = Any  # KDACache, MLACache or None, as the layer is
Aux = dict[str, jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Context:
    """Where the tokens of this call stand. None means: one document a row, no padding, nothing cached.

    segments_BT: document of each new token, 0 = padding at the end of the row.
    slots_BT: position of each new token in the cache.
    key_segments_BS: document of each cached position, the new tokens included.
    cached_segment_B: document to which the cached states belong.
    layout: the mesh over which all of this lies, None = one device.
    asked: what routers are asked for, so that experts can be balanced.
    """

    segments_BT: Any = None
    slots_BT: Any = None
    key_segments_BS: Any = None
    cached_segment_B: Any = None
    layout: Layout | None = dataclasses.field(default=None, metadata={"static": True})
    asked: Balancing | None = None

    def positions(self, shape: tuple[int, ...]) -> Positions:
        """Of tokens ``[B, T]``, among themselves or in the cache."""
        slots_BT = jnp.broadcast_to(jnp.arange(shape[1]), shape) if self.slots_BT is None else self.slots_BT
        segments_BT = jnp.ones(shape, jnp.int32) if self.segments_BT is None else self.segments_BT
        return Positions(slots_BT, segments_BT, segments_BT if self.key_segments_BS is None else self.key_segments_BS)


class Block(nnx.Module):
    """norm -> KDA or MLA, norm -> dense MLP or MoE, and the two attention-residual mixes where the model has them."""

    attn_norm: Any = nnx.data()
    attention: Any = nnx.data()
    ffn_norm: Any = nnx.data()
    ffn: Any = nnx.data()
    attn_res: Any = nnx.data()
    ffn_res: Any = nnx.data()

    def __init__(self, cfg: ModelConfig, kind: LayerSpec, *, dtype: str):
        d = cfg.hidden_size
        self.kind = kind
        self.attn_norm = Spec((d,), dtype, ("norm",), constant(1.0))
        self.attention = KDA(cfg, dtype=dtype) if kind.attention == "kda" else MLA(cfg, dtype=dtype)
        self.ffn_norm = Spec((d,), dtype, ("norm",), constant(1.0))
        self.ffn = MoE(cfg, dtype=dtype) if kind.ffn == "moe" else GatedMLP(cfg, cfg.dense_hidden_size, dtype=dtype)
        has_res = cfg.attn_res_block is not None
        self.attn_res = AttnRes(cfg, dtype=dtype) if has_res else None
        self.ffn_res = AttnRes(cfg, dtype=dtype) if has_res else None

    def empty_cache(self, cfg: ModelConfig, batch: int, capacity: int, dtype) -> LayerCache:
        if isinstance(self.attention, KDA):
            return self.attention.empty_cache(cfg, batch, dtype)
        return self.attention.empty_cache(cfg, batch, capacity, dtype)

    def collected(self, cfg: ModelConfig, layout: Layout | None) -> "Block":
        """The block as it is used: its weights whole along "embed"."""
        return gathered(layout, self, lambda: Block(cfg, self.kind, dtype="float32"))

    def attend(self, h_BTD, ctx: Context, cache: LayerCache, cfg: ModelConfig, tap: Tap = None):
        """-> attention output ``[B, T, D]``, updated cache."""
        x_BTD = rms_norm(h_BTD, self.attn_norm, cfg.rms_norm_eps)
        if isinstance(self.attention, KDA):
            out_BTD, cache = self.attention(x_BTD, ctx.segments_BT, cfg, cache, ctx.cached_segment_B, ctx.layout, tap)
        else:
            out_BTD, cache = self.attention(x_BTD, ctx.positions(x_BTD.shape[:2]), cfg, cache, ctx.layout)
        tap_into(tap, attn_in=h_BTD, attn_out=out_BTD)
        return pin(ctx.layout, out_BTD, "batch", "time", None), cache

    def feed(self, h_BTD, ctx: Context, cfg: ModelConfig, tap: Tap = None) -> tuple[jax.Array, Aux]:
        """-> feed-forward output ``[B, T, D]``, and for a MoE what it reports (`MoE`)."""
        x_BTD = rms_norm(h_BTD, self.ffn_norm, cfg.rms_norm_eps)
        if isinstance(self.ffn, MoE):
            out_BTD, aux = self.ffn(
                x_BTD, real_tokens(ctx.segments_BT, x_BTD.shape[:2]), cfg, ctx.layout, tap, ctx.asked
            )
        else:
            out_BTD, aux = self.ffn(x_BTD, cfg), {}
        tap_into(tap, ffn_in=h_BTD, ffn_out=out_BTD)
        return pin(ctx.layout, out_BTD, "batch", "time", None), aux
