"""What lies on the stages of a pipeline: tokens, layers in their slots, what follows the last stage."""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax import lax

from trillion_moe.blueprint import layer_numbers
from trillion_moe.config import ModelConfig
from trillion_moe.layers.segments import Plan


def nth(x: jax.Array, i: Any) -> jax.Array:
    return lax.dynamic_index_in_dim(x, i, 0, keepdims=False)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tail:
    """What follows the layers: the final mix (None without attention residuals), norm, and the head as a weight."""

    out_res: Any
    norm: Any
    head: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tokens:
    """Of the microbatches: documents, targets and which of these count, each ``[M, B, T]``; the latter for a loss."""

    segments: Any
    targets: Any = None
    counted: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Grid:
    """Of the groups of a stage ``[G]`` and their slots ``[G, P]``: the layer in a slot (-1 for none), its row, whether
    no later layer of the run adds to that row; and the row that a run begins with."""

    number: Any
    row: Any
    last: Any
    start: Any


def grid(plan: Plan, cfg: ModelConfig) -> Grid:
    """Of all groups, as the plan has them."""
    segment, numbers = next(
        (s, np.array([[-1 if n is None else n for n in group] for group in repeats], np.int32))
        for s, repeats in zip(plan, layer_numbers(plan), strict=True)
        if s.numbers
    )
    row = np.maximum(numbers, 0) // cfg.attn_res_block + 1 if cfg.attn_res_block else np.zeros_like(numbers)
    last, start = np.zeros(numbers.shape, bool), np.zeros(len(numbers), np.int32)
    each = len(numbers) // (segment.stages * segment.virtual)
    for run in range(0, len(numbers), each):
        at = slice(run, run + each)
        real = numbers[at] >= 0
        for r in {*row[at][real]}:
            ends = real & (row[at] == r)
            last[at][ends & (numbers[at] == numbers[at][ends].max())] = True
        start[at] = row[at][real][np.argmin(numbers[at][real])]
    return Grid(numbers, row.astype(np.int32), last, start)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slot:
    """A tree cut into arrays, lists of them, that are frozen and trained. structure: its treedef, and which of them."""

    frozen: Any
    train: Any
    structure: tuple[Any, tuple[bool, ...]] = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, tree: Any, trained: Any) -> "Slot":
        """trained: the same tree of bools."""
        leaves, treedef = jax.tree.flatten(tree)
        flags = tuple(jax.tree.leaves(trained))
        pairs = list(zip(leaves, flags, strict=True))
        return cls([x for x, t in pairs if not t], [x for x, t in pairs if t], (treedef, flags))

    def tree(self, train: list[jax.Array], frozen: list[jax.Array] | None = None) -> Any:
        """With other arrays in the place of those that are trained (and frozen)."""
        treedef, flags = self.structure
        a, b = iter(train), iter(self.frozen if frozen is None else frozen)
        return treedef.unflatten([next(a) if t else next(b) for t in flags])

    def block(self, train_g: list[jax.Array], g: Any) -> Any:
        """Of a stack its repeat g, of which the trained arrays are given."""
        return self.tree(train_g, [nth(leaf, g) for leaf in self.frozen])
