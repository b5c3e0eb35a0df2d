"""Dropout on the inputs of adapters, as a transform of the tree."""

from typing import Any

import jax
import jax.numpy as jnp

from trillion_moe.weights import LoRA, is_weight


def drop_inputs(model: Any, key: jax.Array, rate: float) -> Any:
    """The model with each input feature of each adapter left out with probability `rate`, the others scaled to keep the
    mean: rows of ``a`` times 0 or 1 / (1 - rate).

    One mask serves all tokens of a pass (Gal & Ghahramani, arXiv 1512.05287), where PEFT draws one for each token; it
    costs nothing of token size. The base never loses an input. rate 0 gives the model as it is.
    """
    if not rate:
        return model
    leaves, treedef = jax.tree.flatten(model, is_leaf=is_weight)
    return treedef.unflatten([_dropped(leaf, jax.random.fold_in(key, i), rate) for i, leaf in enumerate(leaves)])


def _dropped(leaf: Any, key: jax.Array, rate: float) -> Any:
    if not isinstance(leaf, LoRA):
        return leaf
    kept = jax.random.bernoulli(key, 1 - rate, (*leaf.a.shape[:-1], 1))
    a = jnp.where(kept, leaf.a / jnp.asarray(1 - rate, leaf.a.dtype), 0)
    return LoRA(leaf.base, a, leaf.b, leaf.slots, leaf.scaling)
