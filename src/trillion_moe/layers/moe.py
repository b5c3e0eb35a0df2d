"""Mixture of experts: routing, the permutation of rows to experts and back, latent width, shared experts."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from trillion_moe.blueprint import Spec, constant, normal
from trillion_moe.config import ModelConfig
from trillion_moe.layers import Tap, tap_into
from trillion_moe.layers.balance import Balancing, answers, asked_axes
from trillion_moe.layers.exchange import MAKERS, Route, Transport, combine, demand, dispatch, traffic
from trillion_moe.layers.mlp import GatedMLP, activation_of
from trillion_moe.layers.norm import rms_norm
from trillion_moe.layers.router import Router, in_bank
from trillion_moe.layers.wire import row_bytes
from trillion_moe.ops import accumulator, dot, grouped_dot, grouped_glu
from trillion_moe.sharding import Layout, axes_like, dims, island

COUNTED = 128  # rows in which those of one expert are counted by comparing each with each
CHUNK = 32  # rows of a chunk at the least: each chunk reads the weights of the experts and begins messages of its own
EXCHANGE = "expert_exchange"  # what is between tokens and their experts, in the names of a program's operations


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

    def __call__(
        self, x_RL: jax.Array, group_sizes_E: jax.Array, cfg: ModelConfig, turns: tuple = ()
    ) -> tuple[jax.Array, tuple]:
        """-> rows ``[R, L]``, and `turns`: none, or the two arrays of `_in_turn`."""
        hidden_RF = grouped_glu(x_RL, self.gate, self.up, group_sizes_E, activation_of(cfg))
        if not turns:
            return grouped_dot(hidden_RF, self.down, group_sizes_E), turns
        return _in_turn(hidden_RF, self.down, group_sizes_E, turns)


@jax.custom_vjp
def _in_turn(hidden_RF: jax.Array, down: Any, group_sizes_E: jax.Array, turns: tuple) -> tuple[jax.Array, tuple]:
    """The second product of experts, and two float arrays as they came: the product waits for the first of them, the
    second waits for what the product takes. Backward, the first product's gradient waits for that of the second array.

    So two exchanges, of which a TPU has one underway at a time, each get a product of their own; without, its compiler
    lays all products over one of them. What is kept for the gradient is the product's alone.
    """
    hidden_RF, turns = lax.optimization_barrier((hidden_RF, turns))
    return grouped_dot(hidden_RF, down, group_sizes_E), turns


def _in_turn_back(kept: Any, g: Any):
    hidden_RF, down, group_sizes_E = kept
    g_RL, (g_came, g_goes) = g
    _, pulled = jax.vjp(lambda hidden_RF, down: grouped_dot(hidden_RF, down, group_sizes_E), hidden_RF, down)
    g_RF, g_down = pulled(g_RL)
    g_RF, g_goes = lax.optimization_barrier((g_RF, g_goes))
    return g_RF, g_down, None, (g_came, g_goes)


_in_turn.defvjp(
    lambda hidden_RF, down, sizes_E, turns: (_in_turn(hidden_RF, down, sizes_E, turns), (hidden_RF, down, sizes_E)),
    _in_turn_back,
)


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
        self.latent_norm = Spec((latent,), dtype, ("norm",), constant(1.0)) if latent and moe.latent_norm else None
        self.latent_up = Spec((latent, d), dtype, ("latent", "embed"), std) if latent else None

    def __call__(
        self, x_BTD: jax.Array, real_BT: jax.Array, cfg: ModelConfig, layout: Layout | None = None, tap: Tap = None,
        asked: Balancing | None = None,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:  # fmt: skip
        """-> output ``[B, T, D]``, ``expert_counts`` int32 [E] (real tokens given to each expert), ``dropped``, and
        what is asked for.

        dropped: int32, assignments of real tokens to experts that were over the capacity of their transport, which is
        the one cause there is. Where experts lie apart, ``exchange`` too, of all devices: ``asked`` (see
        `exchange.demand`) and ``traffic`` (see `exchange.traffic`). Padding is never routed: it is in no group, no
        count, and its routed output is 0.
        """
        z_BTL = x_BTD if self.latent_down is None else dot(x_BTD, self.latent_down)
        tokens, bank = dims("batch", "time", None), axes_like(self.experts, Experts(cfg, dtype="float32"))
        apart = layout is not None and layout.size("ep") > 1
        counted = {"expert_counts": dims(), "dropped": dims()} | ({"exchange": dims()} if apart else {})
        routed = island(
            layout,
            partial(_routed, cfg=cfg, layout=layout),
            (dims(), bank, tokens, tokens, dims("batch", "time"), dims("batch", None)),
            (
                tokens,
                counted | asked_axes(asked),
                {"router_ids": tokens, "router_weights": tokens, "router_logits": tokens},
            ),
        )
        routed_BTL, counts, taps = routed(self.router, self.experts, x_BTD, z_BTL, real_BT, asked)
        tap_into(tap, **{name: a.reshape(-1, a.shape[-1]) for name, a in taps.items()})
        tap_into(tap, latent_in=_flat(z_BTL), latent_sum=_flat(routed_BTL))
        if self.latent_norm is not None:
            routed_BTL = rms_norm(routed_BTL, self.latent_norm, cfg.rms_norm_eps)
        y_BTD = routed_BTL if self.latent_up is None else dot(routed_BTL, self.latent_up)
        if self.shared is not None:
            shared_BTD = self.shared(x_BTD, cfg)
            tap_into(tap, shared_out=shared_BTD)
            y_BTD = y_BTD + shared_BTD
        return y_BTD, counts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """Tokens and what they ask for: x ``[N, L]``, ids int32 and weights float32 ``[N, K]`` of their experts."""

    x: jax.Array
    ids: jax.Array
    weights: jax.Array


def _flat(x_BTN: jax.Array) -> jax.Array:
    return x_BTN.reshape(-1, x_BTN.shape[-1])


def _routed(
    router: Router, experts: Experts, x_BTD, z_BTL, real_BT, asked: Balancing | None, *, cfg: ModelConfig,
    layout: Layout | None,
):  # fmt: skip
    """Tokens of one device through experts wherever they are -> sums ``[B, T, L]``, counts, what the router said."""
    e, shape = cfg.moe.num_experts, z_BTL.shape
    x_ND, z_NL, real_N = _flat(x_BTD), _flat(z_BTL), real_BT.reshape(-1)
    ids_NK, weights_NK, logits_NE = router(x_ND, cfg)
    wanted_NK = jnp.where(real_N[:, None], ids_NK, e)
    counts_E = jnp.sum(wanted_NK.reshape(-1, 1) == jnp.arange(e), axis=0, dtype=jnp.int32)
    reports = answers(asked, router, logits_NE, real_N, cfg, layout)
    wanted_NK, cfg = in_bank(router, wanted_NK, cfg)
    if layout is None:
        y_NL, _ = apply_experts(experts, Rows(z_NL, wanted_NK, weights_NK), cfg.moe.num_experts, cfg)
        counts = {"dropped": jnp.zeros((), jnp.int32)}
    else:
        y_NL, counts = _over_devices(experts, z_NL, wanted_NK, weights_NK, cfg, layout)
        counts_E = lax.psum(counts_E, layout.tokens)
    taps = {"router_ids": ids_NK, "router_weights": weights_NK, "router_logits": logits_NE}
    taps = {name: a.reshape(*shape[:2], -1) for name, a in taps.items()}
    return y_NL.reshape(shape), counts | {"expert_counts": counts_E} | reports, taps


@jax.named_scope(EXCHANGE)
def _over_devices(experts: Experts, z_NL, ids_NK, weights_NK, cfg: ModelConfig, layout: Layout):
    """-> weighted sums ``[N, L]``, and of all devices together what was dropped and how it travelled.

    Devices along "tp" hold the same tokens: each takes its share of them, unless experts are cut along it too.
    """
    n, e, within = len(z_NL), cfg.moe.num_experts, "tp" in layout.over("expert_mlp")
    parts = 1 if within else layout.size("tp")
    chunks = max(1, min(layout.chunks, n // (parts * CHUNK)))
    each = -(-n // (parts * chunks))
    at = 0 if parts == 1 else lax.axis_index("tp")

    def mine(a_N: jax.Array, fill: int = 0) -> jax.Array:
        padded = jnp.pad(a_N, ((0, parts * chunks * each - n), (0, 0)), constant_values=fill)
        share = lax.dynamic_slice_in_dim(padded, at * chunks * each, chunks * each)
        return share.reshape(chunks, each, -1)

    y_CNL, counts = _in_chunks(experts, Rows(mine(z_NL), mine(ids_NK, e), mine(weights_NK)), cfg, layout)
    y_NL = y_CNL.reshape(-1, y_CNL.shape[-1])
    y_NL = lax.psum(y_NL, "tp") if within else lax.all_gather(y_NL, "tp", axis=0, tiled=True)
    everywhere = lax.psum(counts, (*layout.tokens, "tp"))
    if within:  # each token is on all of them
        everywhere["dropped"] = everywhere["dropped"] // layout.size("tp")
    return y_NL[:n], everywhere


def _in_chunks(experts: Experts, x: Rows, cfg: ModelConfig, layout: Layout) -> tuple[jax.Array, dict[str, Any]]:
    """Rows ``[C, N, ...]`` through the exchange -> ``[C, N, L]``, and what was dropped and how it travelled from here.

    While the experts work on one chunk, the next is underway here and what became of the one before is underway back.
    """
    if layout.size("ep") == 1:
        e = cfg.moe.num_experts
        through = jax.checkpoint(lambda x: apply_experts(experts, x, e, cfg)[0])
        return lax.map(through, x), {"dropped": jnp.zeros((), jnp.int32)}
    local = cfg.moe.num_experts // layout.size("ep")

    def worked(arrived: Rows, turns: tuple = ()) -> tuple[jax.Array, tuple]:
        return apply_experts(experts, arrived, local, cfg, turns)

    nothing = Rows(
        jnp.zeros_like(x.x[:1]), jnp.full_like(x.ids[:1], cfg.moe.num_experts), jnp.zeros_like(x.weights[:1])
    )
    alone = len(x.x) == 1
    more = x if alone else jax.tree.map(lambda a, none: jnp.concatenate([a, none]), x, nothing)
    # Of all chunks at once: within the loop, asking how much comes would take the place of sending it.
    made, counts = _transports(more, local, cfg, layout)

    def of(chunk: int, tree: Any) -> Any:
        return jax.tree.map(lambda a: a[chunk], tree)

    here = _arrivals(of(0, made), of(0, x), local, layout)
    if alone:
        return combine(of(0, made), jax.checkpoint(worked)(here)[0], layout.wire)[None], counts

    @jax.checkpoint
    def step(carry: Any, after: tuple[Rows, Transport]):
        (arrived, now), (y_ML, before) = carry
        rows, soon = after
        coming = _arrivals(soon, rows, local, layout)
        if layout.platform == "tpu":
            z_ML, (come_ML, y_ML) = worked(arrived, (coming.x, y_ML))
            coming = dataclasses.replace(coming, x=come_ML)
        else:
            z_ML, _ = worked(arrived)
        y_NL = combine(before, y_ML, layout.wire)
        return ((coming, soon), (z_ML, now)), y_NL

    start = (here, of(0, made)), (jnp.zeros_like(here.x), of(-1, made))
    (_, (y_ML, last)), y_CNL = lax.scan(step, start, jax.tree.map(lambda a: a[1:], (more, made)))
    return jnp.concatenate([y_CNL[1:], combine(last, y_ML, layout.wire)[None]]), counts


def _transports(x: Rows, local: int, cfg: ModelConfig, layout: Layout) -> tuple[Transport, dict[str, Any]]:
    """Of chunks of rows ``[C, N, ...]``, and of all of them what is dropped and how it travels from here."""
    most = min(layout.size("ep"), cfg.moe.top_k)
    route = Route("ep", most, layout.capacity, layout.node, twin=layout.platform == "cpu")

    def make(x: Rows) -> tuple[Transport, dict[str, Any]]:
        wanted_NP = _wanted(x, local, layout)
        made = MAKERS[layout.transport](wanted_NP, route)
        widths = row_bytes(x.x, (x.ids, x.weights), layout.wire), row_bytes(x.x)
        figures = {"asked": demand(wanted_NP), "traffic": traffic(made, "ep", wanted_NP, *widths)}
        return made, {"dropped": _dropped(made.sent_NP, x.ids, local), "exchange": figures}

    # To tell nodes what is for whom takes a ragged exchange, of which JAX makes no batch.
    made, counts = lax.map(make, x)
    return made, jax.tree.map(lambda a_C: jnp.sum(a_C, axis=0, dtype=a_C.dtype), counts)


def _wanted(x: Rows, local: int, layout: Layout) -> jax.Array:
    """Which tokens have experts on which devices, `local` on each: bool ``[N, P]``."""
    return jnp.any((x.ids // local)[:, :, None] == jnp.arange(layout.size("ep")), axis=1)  # P for no expert


def _arrivals(made: Transport, x: Rows, local: int, layout: Layout) -> Rows:
    """The rows that come to this device, experts counted from its first; what is another's has no expert here."""
    # Zeros arrive in empty slots: expert i travels as i + 1.
    x_ML, (ids_MK, weights_MK) = dispatch(made, x.x, (x.ids + 1, x.weights), layout.wire)
    ids_MK = ids_MK - 1 - lax.axis_index("ep") * local
    return Rows(x_ML, jnp.where((ids_MK >= 0) & (ids_MK < local), ids_MK, local), weights_MK)


def _dropped(sent_NP: jax.Array, ids_NK: jax.Array, local: int) -> jax.Array:
    """How many assignments are to a device to which their token does not go."""
    sent_or_none_NP = jnp.pad(sent_NP, ((0, 0), (0, 1)), constant_values=True)
    return jnp.sum(~jnp.take_along_axis(sent_or_none_NP, ids_NK // local, axis=1), dtype=jnp.int32)


def apply_experts(experts: Experts, x: Rows, e: int, cfg: ModelConfig, turns: tuple = ()) -> tuple[jax.Array, tuple]:
    """``sum_k weights[n, k] * expert[ids[n, k]](x[n])`` -> ``[N, L]``; an id of e is no expert. And `turns`, as of
    `Experts`."""
    n, k = x.ids.shape
    order_R, place_R, counts_E = _by_expert(x.ids.reshape(-1), e)
    y_RL, turns = experts(_dispatch(x.x, order_R, place_R, k), counts_E, cfg, turns)
    y_NKL = _permute(y_RL, place_R, order_R).reshape(n, k, -1)
    acc = accumulator(x.x.dtype)
    # Not a product of matrices: fused into one pass, rows are never widened in memory.
    y_NL = jnp.sum(y_NKL.astype(acc) * x.weights[:, :, None].astype(acc), axis=1)
    return y_NL.astype(x.x.dtype), turns


def _by_expert(ids_R: jax.Array, e: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rows in the order of their experts, what has none last, else as they come: the row at each place, the place of
    each row, and int32 [E] rows of each expert.

    By counting: rows of the same expert in blocks before, then in the own block. Accelerators sort slowly.
    """
    rows = ids_R.shape[0]
    ids_CB = jnp.pad(ids_R, (0, -rows % COUNTED), constant_values=e).reshape(-1, COUNTED)
    counts_CE = jnp.sum(ids_CB[:, :, None] == jnp.arange(e + 1), axis=1, dtype=jnp.int32)
    counts_E = jnp.sum(counts_CE, axis=0)
    before_CE = jnp.cumsum(counts_CE, axis=0) - counts_CE + jnp.cumsum(counts_E) - counts_E
    same_CBB = (ids_CB[:, :, None] == ids_CB[:, None, :]) & jnp.tri(COUNTED, k=-1, dtype=bool)
    place_CB = jnp.take_along_axis(before_CE, ids_CB, axis=1) + jnp.sum(same_CBB, axis=2, dtype=jnp.int32)
    place_R = place_CB.reshape(-1)[:rows]
    order_R = jnp.zeros(rows, jnp.int32).at[place_R].set(jnp.arange(rows, dtype=jnp.int32), unique_indices=True)
    return order_R, place_R, counts_E[:e]


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
