"""A model cut into what is trained and what is not, so that gradients and optimizer state exist only for the former."""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from trillion_moe.transforms.targets import Place, is_bias, is_weight, places
from trillion_moe.weights import ARRANGED, LoRA, is_arranged

Trainable = Literal["lora", "all"] | Callable[[str], bool]


def partition(model: Any, *, trainable: Trainable = "lora") -> tuple[Any, Any]:
    """-> (trained, frozen): the model twice, each with None where the other has the array. `combine` joins them.

    trainable: "lora", the a and b of every adapter (the cut goes through the leaf: base and slots are frozen); "all",
    every float array but the router's bias, which no gradient reaches and weight decay would spoil; or a function of an
    array's name (``layers.3.attention.q``, ``layers.3.attention.q.a``), which must say the same of all repeats of a
    stacked array. Integers, packed weights among them, are always frozen. ValueError if nothing is left to train.
    """
    if is_arranged(model):
        raise ValueError(f"this model cannot be trained: {ARRANGED}")
    leaves, treedef = jax.tree.flatten(model)
    trained = [_is_float(leaf) and wanted for leaf, wanted in zip(leaves, _wanted(model, trainable), strict=True)]
    if not any(trained):
        raise ValueError(f"nothing is trainable with trainable = {trainable!r}: no float array of this model is chosen")
    pairs = list(zip(leaves, trained, strict=True))
    return treedef.unflatten([x if t else None for x, t in pairs]), treedef.unflatten(
        [None if t else x for x, t in pairs]
    )


def combine(trained: Any, frozen: Any) -> Any:
    """The model of which `partition` made these two. ValueError where both hold an array."""

    def join(t, f):
        if t is not None and f is not None:
            raise ValueError("the two trees to combine both hold an array in one place: they are no partition")
        return f if t is None else t

    return jax.tree.map(join, trained, frozen, is_leaf=lambda x: x is None)


def _is_float(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def _wanted(model: Any, trainable: Trainable) -> list[bool]:
    """For every array of the model, in tree order, whether it is chosen."""
    if callable(trainable):
        return [_agreed(place, trainable) for place in places(model, inside=True)[0]]
    match trainable:
        case "all":
            return [not is_bias(p.names[0]) for p in places(model, inside=True)[0]]
        case "lora":
            return [flag for w in jax.tree.leaves(model, is_leaf=is_weight) for flag in _adapter_arrays(w)]
    raise ValueError(f"trainable = {trainable!r}: legal is 'lora', 'all' or a function of an array's name")


def _adapter_arrays(w: Any) -> list[bool]:
    return [isinstance(w, LoRA) and (x is w.a or x is w.b) for x in jax.tree.leaves(w)]


def _agreed(place: Place, chosen: Callable[[str], bool]) -> bool:
    answers = {name: bool(chosen(name)) for name in place.names}
    if len({*answers.values()}) > 1:
        yes, no = (next(n for n, a in answers.items() if a is want) for want in (True, False))
        raise ValueError(f"trainable chooses {yes} and not {no}, which are one stacked array: see split_segments")
    return all(answers.values())
