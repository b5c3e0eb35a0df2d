"""Adapters that were read from a file, put on a model."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import jax.numpy as jnp
import numpy as np

from trillion_moe.sharding import as_placed
from trillion_moe.transforms.segments import split_segments
from trillion_moe.transforms.targets import Place, places
from trillion_moe.weights import LoRA, matrix_shape


def with_lora(model: Any, adapters: Mapping[str, LoRA]) -> Any:
    """The model with every adapter on the matrix that it is named for; bases stay as they are, packed ones packed.

    adapters: by logical name (`targets`), each ``LoRA(None, a, b, slots, scaling)`` of one layer. Layers of one
    stacked leaf whose adapters differ in shape, dtype or scaling, or of which only some have one, are cut apart
    (`split_segments`). ValueError for a name that is no matrix of the model or has an adapter already, and unless
    exactly the named matrices have one afterwards.
    """
    found, _ = places(model)
    known = {name: place for place in found for name in place.names}
    if not adapters:
        raise ValueError("no adapters are given: there is nothing to put on the model")
    for name in adapters:
        if name not in known or known[name].group is None:
            raise ValueError(f"{name!r} is no matrix of this model that can be adapted")
        if isinstance(known[name].leaf, LoRA):
            raise ValueError(f"{name!r} has an adapter already: merge or remove it")
    found, treedef = places(split_segments(model, _cuts(found, adapters)))
    leaves = [_adapted(place, adapters) for place in found]
    done = {n for place, leaf in zip(found, leaves, strict=True) if isinstance(leaf, LoRA) for n in place.names}
    if done != set(adapters):
        raise ValueError(
            f"{len(done)} matrices would be adapted, {len(adapters)} are named: {sorted(done ^ set(adapters))}"
        )
    return as_placed(treedef.unflatten(leaves))


def _cuts(found: list[Place], adapters: Mapping[str, LoRA]) -> set[int]:
    """First layers of the repeats whose adapter cannot be stacked with that of the repeat before."""
    return {
        start
        for place in found
        for (before, name), start in zip(pairwise(place.names), place.starts[1:], strict=False)
        if _kind(adapters.get(before)) != _kind(adapters.get(name))
    }


def _kind(lora: LoRA | None) -> Any:
    """What is the same of all adapters that can be stacked."""
    if lora is None:
        return None
    return lora.scaling, lora.slots is None, *((m.shape, str(m.dtype)) for m in (lora.a, lora.b))


def _adapted(place: Place, adapters: Mapping[str, LoRA]) -> Any:
    loras = [adapters[name] for name in place.names if name in adapters]
    if not loras:
        return place.leaf

    def held(arrays: list[Any]) -> Any:
        if arrays[0] is None:
            return None
        if place.rows is None:
            return jnp.asarray(arrays[0])
        stacked = np.zeros((matrix_shape(place.leaf)[0], *arrays[0].shape), arrays[0].dtype)
        stacked[list(place.rows)] = arrays
        return jnp.asarray(stacked)

    a, b, slots = (held([getattr(lora, field) for lora in loras]) for field in ("a", "b", "slots"))
    return LoRA(place.leaf, a, b, slots, loras[0].scaling)
