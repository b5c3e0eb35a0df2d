"""The logical name of every leaf of a model, and which matrices an adapter may be put on.

A name is ``layers.{i}.{attributes}`` with i the number of the layer in the whole model (a stacked leaf has one name per
repeat), or the attributes alone outside the layers: ``head``, ``vision.blocks.qkv`` (all blocks of the tower, one
stack), ``projector.proj_0``. A target is one of `GROUPS` or such a name, compared as a whole, never as a substring.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax

from trillion_moe.blueprint import layer_numbers, leaf_names, path_parts
from trillion_moe.weights import MXFP4, LoRA, is_weight, matrix_shape

GROUPS = {
    "attention": ("kda", "mla"),
    "kda": ("kda",),
    "mla": ("mla",),
    "shared_experts": ("shared_experts",),
    "latent": ("latent",),
    "routed_experts": ("routed_experts",),
    "dense_mlp": ("dense_mlp",),
    "lm_head": ("lm_head",),
    "vision": ("vision",),
}
"""What may be targeted together; "attention" is every kind of it. The others are also what adapters are counted by."""

COUNTED = tuple(dict.fromkeys(part for parts in GROUPS.values() for part in parts))

# Only matrices that layers multiply through ops.dot or ops.grouped_dot: elsewhere an adapter would have no effect.
_MLP = ("gate", "up", "down")
_ATTENTION = {
    "kda": ("q", "k", "v", "o", "gate", "gate_a", "gate_b", "decay_a", "decay_b", "beta"),
    "mla": ("q", "q_a", "q_b", "kv_a", "kv_b", "gate", "o"),
}
_FFN = (
    {f"ffn.{m}": "dense_mlp" for m in _MLP}
    | {f"ffn.shared.{m}": "shared_experts" for m in _MLP}
    | {f"ffn.experts.{m}": "routed_experts" for m in _MLP}
    | {"ffn.latent_down": "latent", "ffn.latent_up": "latent"}
)
_OUTSIDE = {
    "head": "lm_head",
    "vision.patch_embed": "vision",
    "projector.proj_0": "vision",
    "projector.proj_2": "vision",
}
_OUTSIDE |= {f"vision.blocks.{m}": "vision" for m in ("qkv", "o", "up", "down")}


@dataclasses.dataclass(frozen=True)
class Place:
    """A leaf of the tree and where it is.

    names: one per repeat where its segment repeats, else one.
    layers: the layer number of each name, starts: the first layer of its repeat; both empty outside the layers.
    rows: of each name its row of a leaf that has a leading axis for repeats; None of one that has none.
    group: one of `COUNTED`, None for what cannot be adapted.
    """

    names: tuple[str, ...]
    layers: tuple[int, ...]
    starts: tuple[int, ...]
    group: str | None
    leaf: Any
    rows: tuple[int, ...] | None = None

    @property
    def share(self) -> float:
        """Of the leaf that is of layers: below 1 where slots of pipeline stages are empty."""
        return 1.0 if self.rows is None else len(self.rows) / jax.tree.leaves(self.leaf)[0].shape[0]


def places(model: Any, *, inside: bool = False) -> tuple[list[Place], Any]:
    """Every leaf of a model in tree order, and the treedef that takes their replacements.

    A packed or adapted matrix is one leaf; with `inside` its arrays are (``layers.3.attention.q.base.packed``).
    """
    flat, treedef = jax.tree_util.tree_flatten_with_path(model, is_leaf=None if inside else is_weight)
    numbers = layer_numbers(model.plan)
    return [_place(model.plan, numbers, path_parts(path), leaf) for path, leaf in flat], treedef


def _place(plan, numbers: list, path: list, leaf: Any) -> Place:
    names = leaf_names(numbers, path)
    if path[0] != "segments":
        return Place(names, (), (), _OUTSIDE.get(names[0]), leaf)
    _, s, j, *rest = path
    segment, tail = plan[s], ".".join(map(str, rest))
    rows = tuple(r for r, repeat in enumerate(numbers[s]) if repeat[j] is not None)
    layers = tuple(numbers[s][r][j] for r in rows)
    starts = tuple(min(i for i in numbers[s][r] if i is not None) for r in rows)
    kind = segment.layers[j].attention
    attention = {f"attention.{m}": kind for m in _ATTENTION.get(kind, ())}
    group = attention.get(tail) or _FFN.get(tail)
    return Place(names, layers, starts, group, leaf, rows if segment.repeats > 1 else None)


def is_bias(name: str) -> bool:
    """Of an array's name, whether it is a router's bias, which no gradient trains."""
    return name.endswith("ffn.router.bias")


def moe_layers(model: Any) -> tuple[int, ...]:
    """The layers with routed experts, in order: the rows of ``metrics["expert_counts"]``."""
    return tuple(sorted({i for p in places(model)[0] if p.group == "routed_experts" for i in p.layers}))


def choose(found: Iterable[Place], targets: Iterable[str]) -> set[str]:
    """The names of all matrices that `targets` mean. ValueError for a target that means none, with what is legal."""
    found, wanted = list(found), set()
    known = {name: place for place in found for name in place.names}
    for target in targets:
        if target in GROUPS:
            hit = {n for p in found if p.group in GROUPS[target] for n in p.names}
        else:
            hit = {target} if target in known and known[target].group else set()
        if not hit:
            raise ValueError(f"target {target!r} {_why_not(target, known)}; legal here: {_legal(found)}")
        wanted |= hit
    return wanted


def _why_not(target: str, known: dict[str, Place]) -> str:
    if target in GROUPS:
        return "is a group of which this model has no matrix"
    if target.endswith("router.weight") and target in known:
        return "is multiplied in float32 by the router itself, outside ops.dot: an adapter would never be applied"
    if target == "embed":
        return "is a table that is looked up, not a matrix that is multiplied"
    if target in known:
        return "is no matrix that ops.dot multiplies"
    if target.startswith("vision.blocks."):
        return "matches nothing: the tower's blocks are one stack, named without a number, as in 'vision.blocks.qkv'"
    return "matches nothing"


def _legal(found: list[Place]) -> str:
    first = {}
    for place in found:
        if place.group:
            first.setdefault(place.group, place.names[0])
    groups = [name for name, parts in GROUPS.items() if not first.keys().isdisjoint(parts)]
    examples = [repr(first[group]) for group in COUNTED if group in first]
    return f"the groups {', '.join(groups)}, or an exact path such as {', '.join(examples)}"


# --- what a weight is, however it is stored --------------------------------------------------------------------------


def dims(weight: Any) -> tuple[tuple[int, ...], int, int]:
    """(b, K, N) of a weight ``[*b, K, N]``: array, Spec, packed or adapted."""
    *batch, k, n = matrix_shape(weight)
    return tuple(batch), k, n


def axes(weight: Any) -> tuple[str, ...]:
    """Logical axes of ``[*b, K, N]``; of a weight that holds arrays, which have none, as many empty names."""
    match weight:
        case LoRA(base=base):
            return axes(base)
        case MXFP4(packed=packed, layout=layout):
            *batch, last, final = axes(packed)
            return (*batch, final, last) if layout == "nk" else (*batch, last, final)
        case _:
            return getattr(weight, "axes", ("",) * len(weight.shape))
