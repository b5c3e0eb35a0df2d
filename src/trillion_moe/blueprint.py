"""A model before it has arrays: every parameter as a `Spec` of shape, dtype, logical axes and initialiser.

`Model(cfg)` builds a tree of Specs. Initialisation, loading, sharding, adapters, quantisation and memory planning are
functions of that one tree, so what is planned is what is run.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.tree_util import DictKey, GetAttrKey, SequenceKey

Initializer = Callable[[jax.Array, tuple[int, ...], Any], jax.Array]


@dataclasses.dataclass(frozen=True)
class Spec:
    """One parameter array to come. Not a pytree: it is a leaf of the blueprint.

    shape: with a leading axis "repeats" once stacked by `stack`.
    axes: the logical name of every dimension, what sharding rules match on.
    """

    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str, ...]
    init: Initializer

    def __post_init__(self):
        if len(self.shape) != len(self.axes):
            raise ValueError(
                f"shape {self.shape} has {len(self.shape)} dimensions, axes {self.axes} name {len(self.axes)}"
            )

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


def _draw(sample: Callable[..., jax.Array], key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """`sample(key, shape)`, small arrays cut out of a power of two: random generators compile slowly, once a size."""
    size = math.prod(shape)
    if size > 1 << 20:
        return sample(key, shape)
    return sample(key, (1 << max(size - 1, 0).bit_length(),))[:size].reshape(shape)


def normal(std: float) -> Initializer:
    """N(0, std^2), drawn in float32."""
    return lambda key, shape, dtype: (std * _draw(jax.random.normal, key, shape)).astype(dtype)


def constant(value: float) -> Initializer:
    return lambda key, shape, dtype: jnp.full(shape, value, dtype)


def uniform(low: float, high: float) -> Initializer:
    return lambda key, shape, dtype: (low + (high - low) * _draw(jax.random.uniform, key, shape)).astype(dtype)


def log_uniform(low: float, high: float) -> Initializer:
    """log of U(low, high): the release's initialisation of A_log."""
    flat = uniform(low, high)
    return lambda key, shape, dtype: jnp.log(flat(key, shape, jnp.float32)).astype(dtype)


def random_bytes(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Uniform bytes: every e2m1 nibble equally likely."""
    return jax.random.bits(key, shape, jnp.uint8).astype(dtype)


def is_spec(leaf: Any) -> bool:
    return isinstance(leaf, Spec)


def init(blueprint: Any, key: jax.Array) -> Any:
    """Replace every Spec by an array drawn from its initialiser; leaves that are arrays already are kept."""
    leaves, treedef = jax.tree.flatten(blueprint)
    keys = jax.random.split(key, max(len(leaves), 1))
    return treedef.unflatten(
        [s.init(k, s.shape, jnp.dtype(s.dtype)) if is_spec(s) else s for s, k in zip(leaves, keys, strict=True)]
    )


def abstract(blueprint: Any) -> Any:
    """The same tree with `jax.ShapeDtypeStruct` leaves, for tracing and ahead-of-time compilation."""
    return jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, jnp.dtype(s.dtype)) if is_spec(s) else jax.typeof(s), blueprint
    )


def stack(blueprint: Any, repeats: int, axis: str = "repeats") -> Any:
    """The blueprint of `repeats` copies of a module, each leaf with a leading axis of this name. 1 leaves it
    unchanged."""
    if repeats == 1:
        return blueprint
    return jax.tree.map(
        lambda s: dataclasses.replace(s, shape=(repeats, *s.shape), axes=(axis, *s.axes)),
        blueprint,
    )


# --- depth as data ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """What kind of layer: two layers of one LayerSpec have parameters of the same shapes."""

    attention: Literal["kda", "mla"]
    ffn: Literal["dense", "moe"]


Numbers = tuple[tuple[int | None, ...], ...]


@dataclasses.dataclass(frozen=True)
class Segment:
    """`layers` run one after the other, the whole `repeats` times (then with stacked parameters, under a scan).

    stages: of a pipeline (`layers.segments.staged_plan`) over which the repeats lie, `virtual` runs of them on each.
    numbers: by repeat the numbers of its layers in the model, None where a slot is empty; given for stages, whose order
    is another.
    """

    layers: tuple[LayerSpec, ...]
    repeats: int
    stages: int = 1
    virtual: int = 1
    numbers: Numbers | None = None

    def __post_init__(self):
        sizes = f"repeats {self.repeats}, stages {self.stages}, virtual {self.virtual}"
        if min(self.repeats, self.stages, self.virtual) < 1:
            raise ValueError(f"{sizes}: legal are numbers from 1")
        if self.numbers is None:
            return
        if [len(repeat) for repeat in self.numbers] != [len(self.layers)] * self.repeats:
            raise ValueError(f"numbers {self.numbers}: legal are {self.repeats} rows of {len(self.layers)}")
        if self.repeats % (self.stages * self.virtual):
            raise ValueError(f"{sizes}: legal are repeats that all stages and their runs share alike")

    @property
    def count(self) -> int:
        """Layers in it."""
        if self.numbers is None:
            return len(self.layers) * self.repeats
        return sum(number is not None for repeat in self.numbers for number in repeat)


def layer_numbers(plan: Sequence[Segment]) -> list[Numbers]:
    """Depth plan -> for each segment and each of its repeats, the numbers in the whole model of its layers.

    None: a slot of a pipeline's stage that no layer fills.
    """
    numbers, layer = [], 0
    for segment in plan:
        size = len(segment.layers)
        inner = segment.numbers or tuple(
            tuple(range(layer + r * size, layer + (r + 1) * size)) for r in range(segment.repeats)
        )
        numbers.append(inner)
        layer += segment.count
    return numbers


def numbered(plan: Sequence[Segment]) -> list[tuple[int, LayerSpec]]:
    """Number and kind of every layer, by number."""
    slots = [
        (number, kind)
        for segment, repeats in zip(plan, layer_numbers(plan), strict=True)
        for numbers in repeats
        for number, kind in zip(numbers, segment.layers, strict=True)
        if number is not None
    ]
    return sorted(slots, key=lambda slot: slot[0])


def path_parts(path: Sequence[Any]) -> list[str | int]:
    """Of a leaf of a model: attributes and places in tuples."""
    return [_part(key) for key in path]


def _part(key: Any) -> str | int:
    match key:
        case GetAttrKey(name=part) | SequenceKey(idx=part) | DictKey(key=part):
            return part
    raise TypeError(f"a model's leaves are reached by attributes and tuples, not by {key!r}")


def leaf_names(numbers: Sequence[Any], parts: Sequence[Any]) -> tuple[str, ...]:
    """``layers.{i}.{attributes}`` for each repeat of a leaf's segment, or the attributes alone outside the layers.

    numbers: `layer_numbers` of the model's plan.
    """
    if parts[0] != "segments":
        return (".".join(map(str, parts)),)
    _, s, j, *rest = parts
    layers = (repeat[j] for repeat in numbers[s] if repeat[j] is not None)
    return tuple(f"layers.{i}.{'.'.join(map(str, rest))}" for i in layers)
