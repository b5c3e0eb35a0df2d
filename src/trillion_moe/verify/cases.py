"""What an operator is tried on: arrays of a model's own widths, everyday and hostile, scaled down to fit memory."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from trillion_moe.config import ModelConfig

Arrays = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """One problem of an operator.

    floats: what gradients are taken of; measured after they were rounded to the working dtype, those in `wide` (float32
    by definition) to float32. constants: codes, ids, masks. prepare: the constants as an implementation reads them, on
    the host. run: implementation, floats, constants -> named arrays. known: of the rounded floats, in float64, what the
    reference is given beside them. reference: the named arrays, in float64.
    parts: rows of an array, by its name, that are measured by themselves (an output, or the gradient of an
    input). dead: first row of outputs whose cotangent is NaN. positive: no cotangent is below 0, so that sums do not
    cancel. gradients: whether they are compared at all.
    """

    name: str
    floats: Mapping[str, np.ndarray]
    run: Callable[[str, Arrays, Arrays], Arrays]
    reference: Callable[[Arrays, Arrays], Arrays]
    constants: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    prepare: Callable[[str, Arrays], Arrays] = lambda implementation, constants: constants
    known: Callable[[dict[str, np.ndarray]], Arrays] = lambda floats: {}
    wide: frozenset[str] = frozenset()
    parts: Mapping[str, Sequence[slice]] = dataclasses.field(default_factory=dict)
    dead: int | None = None
    positive: bool = False
    gradients: bool = True

    @property
    def realistic(self) -> bool:
        """Whether its time counts."""
        return self.name.startswith("realistic")


@dataclasses.dataclass(frozen=True)
class Scale:
    """How many of a model's tokens, experts, heads, words of the vocabulary and rows of a bank a case takes."""

    tokens: int
    experts: int = 0
    heads: int = 0
    vocab: int = 0


LARGEST = Scale(tokens=64, experts=8, heads=4, vocab=4096)
LEAST = Scale(tokens=16, experts=3, heads=1, vocab=256)  # three experts: an empty one, one of a row, one of the rest


@dataclasses.dataclass(frozen=True)
class Operator:
    """implementations: those to try. cases: makers of the problems, one at a time, as each may fill the memory.
    numbers: floats of a case of that scale, inputs and outputs. scaled: fields of Scale that may be cut, in that order.
    whole: the model's own sizes of those. factor, because: what its tolerance is multiplied by, by dtype, and why."""

    name: str
    implementations: tuple[str, ...]
    cases: Callable[[ModelConfig, Scale], Iterator[Case]]
    numbers: Callable[[ModelConfig, Scale], int]
    whole: Mapping[str, int]
    scaled: tuple[str, ...] = ("tokens",)
    factor: Mapping[str, float] = dataclasses.field(default_factory=dict)
    because: str = ""


def fitted(operator: Operator, cfg: ModelConfig, tokens: int, memory: int) -> Scale | None:
    """The largest scale whose float64 inputs and gradients stay below `memory` bytes, None if there is none."""
    sizes = {"tokens": tokens}
    for name in operator.scaled[1:]:
        sizes[name] = min(operator.whole[name], getattr(LARGEST, name))
    while 16 * operator.numbers(cfg, Scale(**sizes)) > memory:
        floors = {name: min(getattr(LEAST, name), sizes[name]) for name in operator.scaled}
        name = max(operator.scaled, key=lambda name: (sizes[name] / floors[name], name != "tokens"))
        if sizes[name] == floors[name]:
            return None
        sizes[name] = max(sizes[name] // 2, floors[name])
    return Scale(**sizes)


def normal(rng: np.random.Generator, *shape: int, std: float = 1.0) -> np.ndarray:
    return rng.standard_normal(shape, np.float32) * np.float32(std)


def matrix(rng: np.random.Generator, *shape: int, gain: float = 1.0) -> np.ndarray:
    """``[..., K, N]`` whose products keep the size of what it multiplies, times `gain`."""
    return normal(rng, *shape, std=gain * shape[-2] ** -0.5)


def uniform(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """In 1/2 to 3/2: sums of it do not cancel."""
    return rng.random(shape, np.float32) + np.float32(0.5)
