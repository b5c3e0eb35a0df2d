"""Cutting a segment that repeats into several, so that some of its repeats can differ from the others."""

import dataclasses
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trillion_moe.blueprint import is_spec, layer_numbers


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """An initialiser that gives the same values whatever the key."""

    values: np.ndarray

    def __call__(self, key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return jnp.asarray(self.values, dtype).reshape(shape)


def split_segments(model: Any, cuts: Iterable[int]) -> Any:
    """The same model with a segment boundary before every layer in `cuts`, computing the same.

    cuts: layer numbers, each the first of a repeat (a repeat of Kimi K3 is a block of attention residuals, which stays
    whole; layers on pipeline stages cannot be parted). Stacked leaves are sliced; a segment left with one repeat has no
    leading axis. `model.plan` follows.
    ValueError for a layer inside a repeat or outside the model, with the legal ones.
    """
    cuts = set(cuts)
    _check(model.plan, cuts)
    plan, segments = [], []
    for segment, blocks, repeats in zip(model.plan, model.segments, layer_numbers(model.plan), strict=True):
        inner = [r for r, numbers in enumerate(repeats) if r and numbers[0] in cuts and segment.numbers is None]
        for low, high in pairwise([0, *inner, segment.repeats]):
            plan.append(dataclasses.replace(segment, repeats=high - low))
            segments.append(blocks if not inner else jax.tree.map(lambda x, at=(low, high): _part(x, *at), blocks))
    model = jax.tree.map(lambda leaf: leaf, model)  # a new object with the same leaves
    model.plan, model.segments = tuple(plan), tuple(segments)
    return model


def _check(plan, cuts: set[int]) -> None:
    numbers = list(zip(plan, layer_numbers(plan), strict=True))
    if fixed := sorted(cuts & {i for segment, repeats in numbers if segment.numbers for r in repeats for i in r}):
        raise ValueError(
            f"layer {fixed[0]} lies on a pipeline's stages, where layers of a slot must be alike: "
            "legal is to adapt all or none of a kind, alike"
        )
    legal = [repeat[0] for segment, repeats in numbers for repeat in repeats if segment.numbers is None]
    if wrong := sorted(cuts - set(legal)):
        raise ValueError(f"cannot cut before layers {wrong}: legal are the first layers of repeats, {legal}")


def _part(leaf: Any, low: int, high: int) -> Any:
    """Rows low..high of a stacked leaf, without the leading axis when that is one row."""
    if is_spec(leaf):
        return _part_of_spec(leaf, low, high)
    return leaf[low] if high - low == 1 else leaf[low:high]


def _part_of_spec(spec: Any, low: int, high: int) -> Any:
    init, rest = spec.init, spec.shape[1:]
    if isinstance(init, Rows):
        init = Rows(init.values[low:high])
    if high - low > 1:
        return dataclasses.replace(spec, shape=(high - low, *rest), init=init)
    one = init if isinstance(init, Rows) else lambda key, shape, dtype: init(key, (1, *shape), dtype)[0]
    return dataclasses.replace(spec, shape=rest, axes=spec.axes[1:], init=one)


def restack(model: Any, plan: Any) -> Any:
    """The same model, of arrays, under another depth plan, computing the same. Slots that no layer fills are zeros.

    Takes apart and stacks what the layers hold: it needs room for both. The layout is that of before, if any: place it.
    """
    by_layer: dict[int | None, Any] = {}
    for blocks, repeats in zip(model.segments, layer_numbers(model.plan), strict=True):
        for r, numbers in enumerate(repeats):
            for block, number in zip(blocks, numbers, strict=True):
                if number is not None:
                    by_layer[number] = jax.tree.map(lambda x, r=r: x[r], block) if len(repeats) > 1 else block
    model = jax.tree.map(lambda leaf: leaf, model)
    model.segments = tuple(
        tuple(_stacked([by_layer.get(numbers[j]) for numbers in repeats]) for j in range(len(segment.layers)))
        for segment, repeats in zip(plan, layer_numbers(plan), strict=True)
    )
    model.plan = plan
    return model


def _stacked(blocks: list[Any]) -> Any:
    if len(blocks) == 1:
        return blocks[0]
    one = next(block for block in blocks if block is not None)
    if len({jax.tree.structure(block) for block in blocks if block is not None}) > 1:
        raise ValueError(
            "layers that would be stacked are not alike, as some have adapters: legal is all or none of a kind"
        )
    empty = jax.tree.map(jnp.zeros_like, one)
    return jax.tree.map(lambda *xs: jnp.stack(xs), *(empty if block is None else block for block in blocks))
