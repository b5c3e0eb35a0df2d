"""Cutting a segment that repeats into several, so that some of its repeats can differ from the others."""

import dataclasses
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trillion_moe.blueprint import is_spec, repeat_starts


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """An initialiser that gives the same values whatever the key."""

    values: np.ndarray

    def __call__(self, key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        return jnp.asarray(self.values, dtype).reshape(shape)


def split_segments(model: Any, cuts: Iterable[int]) -> Any:
    """The same model with a segment boundary before every layer in `cuts`, computing the same.

    cuts: layer numbers, each the first of a repeat (a repeat of Kimi K3 is a block of attention residuals, which stays
    whole). Stacked leaves are sliced; a segment left with one repeat has no leading axis. `model.plan` follows.
    ValueError for a layer inside a repeat or outside the model, with the legal ones.
    """
    cuts = set(cuts)
    _check(model.plan, cuts)
    plan, segments = [], []
    for segment, blocks, starts in zip(model.plan, model.segments, repeat_starts(model.plan), strict=True):
        inner = [r for r, start in enumerate(starts) if r and start in cuts]
        for low, high in pairwise([0, *inner, segment.repeats]):
            plan.append(dataclasses.replace(segment, repeats=high - low))
            segments.append(blocks if not inner else jax.tree.map(lambda x, at=(low, high): _part(x, *at), blocks))
    model = jax.tree.map(lambda leaf: leaf, model)  # a new object with the same leaves
    model.plan, model.segments = tuple(plan), tuple(segments)
    return model


def _check(plan, cuts: set[int]) -> None:
    legal = [start for starts in repeat_starts(plan) for start in starts]
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
