"""Low-rank adapters (Hu et al., arXiv 2106.09685) as part of the weights: put on, counted, taken off.

The forward pass does not change: `ops.dot` finds ``LoRA(base, a, b)`` where an array was. Shape suffixes: K
contraction, N out, r rank, E experts, S experts with an adapter.
"""

import dataclasses
import math
from typing import Any, Literal, get_args

import jax
import numpy as np

from trillion_moe.blueprint import Initializer, Spec, constant, init, is_spec, uniform
from trillion_moe.sharding import as_placed
from trillion_moe.transforms.segments import Rows, split_segments
from trillion_moe.transforms.targets import COUNTED, GROUPS, Place, axes, choose, dims, moe_layers, places
from trillion_moe.weights import ARRANGED, LoRA, is_arranged

Routed = Literal["independent", "shared_a", "shared"]
Experts = tuple[int, ...] | tuple[tuple[int, tuple[int, ...]], ...]

_DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclasses.dataclass(frozen=True)
class LoRAConfig:
    """Which matrices get an adapter, and of what kind. Plain data.

    targets: groups (`targets.GROUPS`) and exact paths; duplicates and overlaps are harmless. No group holds the router.
    rslora: scale by alpha / sqrt(rank) instead of alpha / rank.
    routed: adapters of a bank of experts, "independent" a [E, K, r], b [E, r, N]; "shared_a" a [K, r], b [E, r, N];
        "shared" a [K, r], b [r, N].
    experts: which routed experts of a layer get one. None = all, ids = the same in every targeted layer, pairs (layer,
        ids) = per layer, and none on targeted layers that are not named; as many ids in each. See `experts_from_load`.
    dtype: of a and b.
    """

    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = ("attention", "shared_experts", "dense_mlp")
    rslora: bool = False
    routed: Routed = "shared_a"
    experts: Experts | None = None
    dtype: str = "float32"

    def __post_init__(self):
        if self.rank < 1:
            raise ValueError(f"rank = {self.rank}: legal is an integer >= 1")
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise ValueError(f"alpha = {self.alpha}: legal is a finite number > 0")
        if self.routed not in get_args(Routed):
            raise ValueError(f"routed = {self.routed!r}: legal is {', '.join(get_args(Routed))}")
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype = {self.dtype!r}: legal is {', '.join(_DTYPES)}")
        if not self.targets:
            raise ValueError(f"targets is empty; legal: {_LEGAL_TARGETS}")
        for target in self.targets:
            if target not in GROUPS and "." not in target and target not in ("head", "embed"):
                raise ValueError(f"target {target!r} is no group; legal: {_LEGAL_TARGETS}")
        if self.experts is not None:
            self._check_experts()

    def _check_experts(self) -> None:
        if self.routed == "shared":
            raise ValueError(
                "experts is given, but routed = 'shared' adapts all with one pair: legal is experts = None"
            )
        pairs: Any = ((None, self.experts),) if self.experts_by_layer is None else self.experts
        layers = [layer for layer, _ in pairs]
        if len({*layers}) < len(layers):
            raise ValueError(f"experts names a layer twice: {layers}")
        for layer, ids in pairs:
            if not ids or min(ids) < 0 or len({*ids}) < len(ids):
                at = "" if layer is None else f" of layer {layer}"
                raise ValueError(f"experts{at} = {ids}: legal is at least one id, all different and >= 0")

    @property
    def experts_by_layer(self) -> dict[int, tuple[int, ...]] | None:
        """`experts` where it is given per layer, else None."""
        pairs: Any = self.experts or ()
        return dict(pairs) if pairs and all(isinstance(pair, tuple) for pair in pairs) else None

    def experts_of(self, layer: int) -> tuple[int, ...]:
        """The experts of a layer that get an adapter, where they are chosen at all."""
        chosen: Any = self.experts
        return chosen if self.experts_by_layer is None else self.experts_by_layer.get(layer, ())

    @property
    def scaling(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


_LEGAL_TARGETS = f"{', '.join(GROUPS)}, or an exact path such as 'layers.0.attention.q' or 'head'"


def experts_from_load(model: Any, counts: Any, top_n: int) -> Experts:
    """`LoRAConfig.experts`: in every layer the `top_n` experts that were given most tokens, the lower id on a tie.

    counts: int [MoE layers, E], as in ``metrics["expert_counts"]`` of this model (summed over batches).
    """
    counts, layers = np.asarray(counts), moe_layers(model)
    if counts.ndim != 2 or not np.issubdtype(counts.dtype, np.integer):
        raise ValueError(f"counts is {counts.dtype}{list(counts.shape)}: legal is integers [layers, E]")
    if len(layers) != len(counts):
        raise ValueError(f"counts has {len(counts)} rows, the model {len(layers)} layers with routed experts")
    if not 1 <= top_n <= counts.shape[1]:
        raise ValueError(f"top_n = {top_n}: legal is 1 to the number of experts, {counts.shape[1]}")
    best = np.sort(np.argsort(-counts, axis=1, kind="stable")[:, :top_n], axis=1)
    return tuple((int(layer), tuple(ids)) for layer, ids in zip(layers, best.tolist(), strict=True))


# --- put on ----------------------------------------------------------------------------------------------------------


def add_lora(model: Any, cfg: LoRAConfig, key: jax.Array | None = None) -> Any:
    """The model with ``LoRA(base, a, b)`` in the place of every targeted matrix; it computes what it did.

    On a blueprint (no key) a and b are Specs, on arrays they are drawn with `key`: one structure either way. a is
    U(-1/sqrt(K), 1/sqrt(K)), PEFT's ``kaiming_uniform_(a=sqrt(5))``; b is zero. Where only some repeats of a segment
    are targeted, the segment is split (`split_segments`).

    ValueError for a target that matches nothing or has an adapter already, for experts that do not fit, and for a key
    with a blueprint or none with arrays.
    """
    if is_arranged(model):
        raise ValueError(f"this model takes no adapter: {ARRANGED}")
    blueprint = any(map(is_spec, jax.tree.leaves(model)))
    if blueprint and key is not None:
        raise ValueError("a blueprint takes no key: blueprint.init draws its adapters with the rest")
    if not blueprint and key is None:
        raise ValueError("a model with arrays needs a key, to draw its adapters")
    found, _ = places(model)
    wanted = _with_chosen_experts(found, choose(found, cfg.targets), cfg)
    if adapted := [p.names[0] for p in found if isinstance(p.leaf, LoRA) and not wanted.isdisjoint(p.names)]:
        raise ValueError(
            f"{len(adapted)} targets have an adapter already, the first {adapted[0]!r}: merge or remove it"
        )
    found, treedef = places(split_segments(model, _cuts(found, wanted)))
    adapters = [_adapted(p, cfg) if p.names[0] in wanted else p.leaf for p in found]
    model = treedef.unflatten(adapters)
    return model if key is None else as_placed(init(model, key))


def _cuts(found: list[Place], wanted: set[str]) -> set[int]:
    """First layers of the repeats in which another set of matrices is targeted than in the repeat before."""
    return {
        start
        for place in found
        for before, name, start in zip(place.names, place.names[1:], place.starts[1:], strict=False)
        if (before in wanted) != (name in wanted)
    }


def _with_chosen_experts(found: list[Place], wanted: set[str], cfg: LoRAConfig) -> set[str]:
    """`wanted` less the routed experts of layers where none is chosen."""
    if cfg.experts is None:
        return wanted
    routed = [p for p in found if p.group == "routed_experts"]
    layer_of = {n: i for p in routed for n, i in zip(p.names, p.layers, strict=True) if n in wanted}
    if not layer_of:
        raise ValueError(f"experts is given, but no target is a matrix of routed experts: {', '.join(cfg.targets)}")
    chosen = {layer: cfg.experts_of(layer) for layer in layer_of.values()}
    named = cfg.experts_by_layer or {}
    if stray := sorted(named.keys() - chosen.keys()):
        raise ValueError(
            f"experts names layers {stray}, whose routed experts are no target; targeted: {sorted(chosen)}"
        )
    num_experts = dims(routed[0].leaf)[0][-1]
    for layer, ids in chosen.items():
        if max(ids, default=0) >= num_experts:
            raise ValueError(f"experts of layer {layer} = {ids}: this model has experts 0 to {num_experts - 1}")
    without = {name for name, layer in layer_of.items() if not chosen[layer]}
    if stray := sorted(without & {*cfg.targets}):
        raise ValueError(f"target {stray[0]!r}: experts names no expert of its layer; it names layers {sorted(named)}")
    return wanted - without


def _adapted(place: Place, cfg: LoRAConfig) -> LoRA:
    """The leaf with a and b (and slots) as Specs."""
    batch, k, n = dims(place.leaf)
    *batch, k, n = zip((*batch, k, n), axes(place.leaf), strict=True)
    a_batch, b_batch = batch, batch
    slots: Any = None
    if place.group == "routed_experts":
        *stack, expert = batch
        if cfg.experts is not None:
            values = _slots(place, expert[0], cfg)
            slots = _spec([*stack, expert], "int32", Rows(values.reshape([size for size, _ in [*stack, expert]])))
            expert = (int(values.max()) + 1, "expert_slot")
        a_batch = [*stack, expert] if cfg.routed == "independent" else stack
        b_batch = stack if cfg.routed == "shared" else [*stack, expert]
    rank, bound = (cfg.rank, "lora_rank"), k[0] ** -0.5
    a = _spec([*a_batch, k, rank], cfg.dtype, uniform(-bound, bound))
    b = _spec([*b_batch, rank, n], cfg.dtype, constant(0.0))
    return LoRA(place.leaf, a, b, slots, cfg.scaling)


def _spec(dims: list[tuple[int, str]], dtype: str, init: Initializer) -> Any:
    return Spec(tuple(size for size, _ in dims), dtype, tuple(axis for _, axis in dims), init)


def _slots(place: Place, num_experts: int, cfg: LoRAConfig) -> np.ndarray:
    """int32 [layers of the leaf, E]: which of its layer's adapters serves an expert, -1 for none."""
    chosen = {layer: cfg.experts_of(layer) for layer in place.layers}
    if len({len(ids) for ids in chosen.values()}) > 1:
        counts = ", ".join(f"layer {layer}: {len(ids)}" for layer, ids in chosen.items())
        raise ValueError(
            f"experts must name as many in every layer of a segment that repeats; {place.names[0]}: {counts}"
        )
    slots = np.full((1 if place.rows is None else dims(place.leaf)[0][0], num_experts), -1, np.int32)
    for row, ids in zip(place.rows or (0,), chosen.values(), strict=True):
        slots[row, list(ids)] = np.arange(len(ids))
    return slots


# --- look at, take off -----------------------------------------------------------------------------------------------


def remove_lora(model: Any) -> Any:
    """The model with the frozen base of every adapted matrix in its place: the same arrays, bit for bit."""
    found, treedef = adapted_places(model)
    return treedef.unflatten([p.leaf.base if isinstance(p.leaf, LoRA) else p.leaf for p in found])


def adapted_places(model: Any) -> tuple[list[Place], Any]:
    """`places`, of a model that has an adapter; ValueError without one."""
    found, treedef = places(model)
    if not any(isinstance(p.leaf, LoRA) for p in found):
        raise ValueError("this model has no adapter: nothing to merge or remove")
    return found, treedef


def count_by_group(model: Any) -> dict[str, tuple[int, int]]:
    """For each group of which the model has matrices: adapted matrices, and trainable parameters in their a and b.

    An expert's matrix counts as one. A blueprint is counted like arrays.
    """
    counts: dict[str, tuple[int, int]] = dict.fromkeys(COUNTED, (0, 0))
    found, _ = places(model)
    present = {place.group for place in found if place.group}
    for place in found:
        if place.group and isinstance(place.leaf, LoRA):
            matrices, parameters = counts[place.group]
            size = math.prod(place.leaf.a.shape) + math.prod(place.leaf.b.shape)
            own = round(place.share * _matrices(place.leaf)), round(place.share * size)
            counts[place.group] = (matrices + own[0], parameters + own[1])
    return {group: counts[group] for group in COUNTED if group in present}


def _matrices(w: LoRA) -> int:
    batch, _, _ = dims(w)
    if w.slots is None:
        return math.prod(batch)
    return math.prod(batch[:-1]) * w.b.shape[-3]


def describe(model: Any) -> str:
    """A table: adapted matrices and trainable parameters by group, and their sums."""
    counts = count_by_group(model)
    rows = [("group", "matrices", "parameters")] + [(g, f"{m:,}", f"{p:,}") for g, (m, p) in counts.items()]
    total = [sum(column) for column in zip(*counts.values(), strict=True)] or [0, 0]
    rows.append(("total", f"{total[0]:,}", f"{total[1]:,}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(f"{g:<{widths[0]}}  {m:>{widths[1]}}  {p:>{widths[2]}}" for g, m, p in rows)
