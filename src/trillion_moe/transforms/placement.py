"""Inference over devices that are equally busy: which device holds which experts, and copies of those asked for most.

From how often every expert was chosen (``metrics["expert_counts"]``, summed over what is typical), as DeepSeek's EPLB
does (arXiv 2412.19437, section 3.4): what is hot gets more copies, copies are packed onto devices by load. A token's
expert is one of its copies, by the number of the token on its device, so that outputs do not change.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trillion_moe.blueprint import is_spec
from trillion_moe.sharding import as_placed, model_axes
from trillion_moe.transforms.targets import moe_layers, places
from trillion_moe.weights import ARRANGED, Copies, is_arranged, is_copies

# --- which device holds what ------------------------------------------------------------------------------------------


def plan_experts(loads: Any, devices: int, *, spare: int = 0) -> np.ndarray:
    """-> int32 [layers, devices * slots]: the expert in every slot; a device's slots are neighbours.

    loads: int [layers, E], how often each was chosen. spare: slots of a device beyond its share of the experts, rounded
    up; what is over is filled with copies. No device has an expert twice. ValueError for loads that are none,
    and for more slots than there are experts.
    """
    loads = np.asarray(loads)
    if loads.ndim != 2 or not np.issubdtype(loads.dtype, np.integer) or loads.min(initial=0) < 0:
        raise ValueError(f"loads is {loads.dtype}{list(loads.shape)}: legal is counts, integers from 0 [layers, E]")
    experts = loads.shape[1]
    slots = -(-experts // max(devices, 1)) + spare
    if devices < 1 or spare < 0 or slots > experts:
        raise ValueError(
            f"devices = {devices}, spare = {spare}: {slots} slots for {experts} experts; legal is at least 1 device "
            f"and a spare of 0 to {experts - -(-experts // max(devices, 1))}"
        )
    return np.stack([_pack(load, _copies(load, devices, devices * slots), devices, slots) for load in loads])


def imbalance(loads: Any, plan: np.ndarray, devices: int) -> np.ndarray:
    """float [layers]: tokens of the busiest device in equal shares, when the copies of an expert share its tokens.

    1 = all alike. ``np.arange(E)`` for every layer is the plan of a model in its own order.
    """
    loads, plan = np.asarray(loads), np.asarray(plan)
    count = np.stack([np.bincount(row, minlength=loads.shape[1]) for row in plan])
    share = np.take_along_axis(loads / np.maximum(count, 1), plan, axis=1).reshape(len(plan), devices, -1).sum(axis=2)
    return share.max(axis=1) / share.mean(axis=1)


def _copies(load: np.ndarray, devices: int, total: int) -> np.ndarray:
    """int [E]: one of each, then again and again one of that whose copies have most to do, at most one a device."""
    count = np.ones(len(load), int)
    for _ in range(total - len(load)):
        count[np.argmax(np.where(count < devices, load / count, -1))] += 1
    return count


def _pack(load: np.ndarray, count: np.ndarray, devices: int, slots: int) -> np.ndarray:
    """int32 [devices * slots]: copies, the busiest first, each to the device with least to do that has room and not the
    expert. Where room is only where the expert is already, one that is not there moves into it."""
    held: list[list[int]] = [[] for _ in range(devices)]
    each = load / count
    busy = np.zeros(devices)

    def least(fits: list[int]) -> int:
        return min(fits, key=lambda d: (busy[d], d))

    for expert in np.repeat(np.argsort(-each, kind="stable"), count[np.argsort(-each, kind="stable")]).tolist():
        room = [d for d in range(devices) if len(held[d]) < slots]
        if fits := [d for d in room if expert not in held[d]]:
            at = least(fits)
        else:
            into, at = least(room), least([d for d in range(devices) if expert not in held[d]])
            moved = min(set(held[at]) - set(held[into]), key=lambda other: (each[other], other))
            held[at].remove(moved)
            held[into].append(moved)
            busy[[at, into]] += [-each[moved], each[moved]]
        held[at].append(expert)
        busy[at] += each[expert]
    return np.concatenate([sorted(mine) for mine in held]).astype(np.int32)


# --- a model with its experts there ----------------------------------------------------------------------------------


def arrange_experts(model: Any, plan: Any) -> Any:
    """The model with the experts of every layer where `plan_experts` wants them, computing what it did.

    Whatever the experts' weights are: packed, adapted. A model over a mesh stays there. It is for inference: it cannot
    be trained, saved or exported before `restore_experts`. ValueError for a plan that is none of this model.
    """
    if is_arranged(model):
        raise ValueError(f"this model cannot be arranged again: {ARRANGED}")
    if any(map(is_spec, jax.tree.leaves(model))):
        raise ValueError("the model is a blueprint without arrays: load or init it first")
    if any(segment.numbers for segment in model.plan):
        raise ValueError("the model lies on pipeline stages, which do not generate: legal is a mesh with pp = 1")
    plan, layers, experts = np.asarray(plan), moe_layers(model), model.config.moe.num_experts
    if plan.ndim != 2 or len(plan) != len(layers) or not np.issubdtype(plan.dtype, np.integer):
        raise ValueError(
            f"plan is {plan.dtype}{list(plan.shape)}: legal is integers, a row for each of the {len(layers)} MoE layers"
        )
    for layer, row in zip(layers, plan, strict=True):
        if {*row.tolist()} != {*range(experts)}:
            raise ValueError(f"the plan of layer {layer} does not hold every expert of 0 to {experts - 1}, or others")
    arranged = _taken(model, dict(zip(layers, plan, strict=True)))
    slots, count = _inverse(plan, experts)
    order = {layer: row for row, layer in enumerate(layers)}
    for segment, blocks, start in _segments(arranged):
        for j, block in enumerate(blocks):
            if segment.layers[j].ffn == "moe":
                rows = [order[start + r * len(blocks) + j] for r in range(segment.repeats)]
                rows = rows if segment.repeats > 1 else rows[0]
                block.ffn.router.copies = Copies(jnp.asarray(slots[rows]), jnp.asarray(count[rows]), plan.shape[1])
    return as_placed(arranged)


def restore_experts(model: Any) -> Any:
    """What `arrange_experts` was given, bit for bit. ValueError for a model that is in its own order."""
    if not is_arranged(model):
        raise ValueError("the experts of this model are in their own order already")
    first, bare = {}, jax.tree.map(lambda leaf: None if is_copies(leaf) else leaf, model, is_leaf=is_copies)
    for segment, blocks, start in _segments(model):
        for j, block in enumerate(blocks):
            if segment.layers[j].ffn == "moe":
                rows = np.asarray(block.ffn.router.copies.slots)[..., 0].reshape(segment.repeats, -1)
                first |= {start + r * len(blocks) + j: row for r, row in enumerate(rows)}
    return as_placed(_taken(bare, first))


def _segments(model: Any):
    """Of every segment its plan, its blocks, and the number of its first layer."""
    start = 0
    for segment, blocks in zip(model.plan, model.segments, strict=True):
        yield segment, blocks, start
        start += segment.repeats * len(blocks)


def _taken(model: Any, rows: dict[int, np.ndarray]) -> Any:
    """The model with ``bank[rows[layer]]`` for everything that has one of each expert."""
    found, treedef = places(model, inside=True)

    def one(place: Any, axes: tuple[str | None, ...]) -> Any:
        if "expert" not in axes:
            return place.leaf
        index = np.stack([rows[layer] for layer in place.layers])
        if axes[0] == "repeats":
            return jax.vmap(lambda bank, row: bank[row])(place.leaf, index)
        return place.leaf[index[0]]

    dims = jax.tree.leaves(model_axes(model))
    return treedef.unflatten([one(p, d.axes) for p, d in zip(found, dims, strict=True)])


def _inverse(plan: np.ndarray, experts: int) -> tuple[np.ndarray, np.ndarray]:
    """-> slots int32 [layers, E, C], count int32 [layers, E]; see `Copies`."""
    count = np.stack([np.bincount(row, minlength=experts) for row in plan]).astype(np.int32)
    most = int(count.max())
    slots = np.zeros((len(plan), experts, most), np.int32)
    for layer, row in enumerate(plan):
        for expert in range(experts):
            slots[layer, expert] = np.resize(np.flatnonzero(row == expert), most)
    return slots, count
