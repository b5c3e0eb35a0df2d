"""Weights are algebraic leaves: a logical matrix ``[*b, K, N]`` as an array, as packed MXFP4, or with an adapter.

``Weight = jax.Array | MXFP4 | LoRA``. Only `ops`, `transforms` and `checkpoint` look inside a leaf; layers call
`ops.dot` and never learn how a weight is stored. A leaf holds arrays and static scalars, no shapes, so that
``lax.scan`` may slice the stacked leaves of a segment. Its fields are arrays, or Specs in a blueprint.
"""

import dataclasses
import math
from typing import Any, Literal

import jax

PackedLayout = Literal["nk", "kn"]
MXFP4_GROUP = 32  # consecutive values of K that share a scale


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MXFP4:
    """A 4-bit matrix in the OCP Microscaling format: e2m1 nibbles, one E8M0 scale per 32 consecutive values of K.

    packed: uint8 ``[*b, N, K/2]`` in layout "nk" (as checkpoints store it), ``[*b, K/2, N]`` in layout "kn"; the low
        nibble of a byte is the even column of K.
    scale: uint8 ``[*b, N, K/32]`` or ``[*b, K/32, N]``; code u stands for 2^(u - 127).
    """

    packed: Any
    scale: Any
    layout: PackedLayout = dataclasses.field(default="nk", metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LoRA:
    """``base + scaling * a @ b`` (Hu et al., arXiv 2106.09685), the sum never materialised by `ops.dot`.

    base: the frozen Weight ``[*b, K, N]``.
    a: ``[K, r]`` shared by every matrix of the bank, or ``[*b', K, r]``.
    b: ``[r, N]`` or ``[*b', r, N]``.
    slots: None when every expert has its own pair (b' = b), or int32 ``[E]``: the row of a and b that serves an
        expert, -1 for an expert without an adapter.
    scaling: alpha / r (alpha / sqrt(r) for rank-stabilised adapters).
    """

    base: Any
    a: Any
    b: Any
    slots: Any = None
    scaling: float = dataclasses.field(default=1.0, metadata={"static": True})


Weight = jax.Array | MXFP4 | LoRA


def is_weight(node: Any) -> bool:
    """For `is_leaf`: a packed or adapted matrix is one leaf, not its arrays."""
    return isinstance(node, MXFP4 | LoRA)


def matrix_shape(weight: Any) -> tuple[int, ...]:
    """``(*b, K, N)`` of what a weight stands for; its leaves may be Specs."""
    match weight:
        case LoRA(base=base):
            return matrix_shape(base)
        case MXFP4(packed=packed, layout=layout):
            *batch, row, column = packed.shape
            return (*batch, 2 * column, row) if layout == "nk" else (*batch, 2 * row, column)
        case _:
            return tuple(weight.shape)


def parameters(weight: Any) -> int:
    """How many numbers a weight stands for, those of its adapter included."""
    adapter = math.prod(weight.a.shape) + math.prod(weight.b.shape) if isinstance(weight, LoRA) else 0
    return math.prod(matrix_shape(weight)) + adapter


@dataclasses.dataclass(frozen=True)
class Dims:
    """The logical axes of an array, as a leaf of a tree (a tuple would be a branch). None is not cut."""

    axes: tuple[str | None, ...]


def weight_axes(weight: Any, axes: tuple[str, ...]) -> Any:
    """Logical axes of every array of a weight that stands for one ``[*b, K, N]`` with these: a weight of `Dims`."""
    *batch, k, n = axes if len(axes) > 1 else ("", *axes)
    match weight:
        case LoRA(base=base, a=a, b=b, slots=slots):
            found = {"base": weight_axes(base, axes), "slots": None if slots is None else Dims(tuple(batch))}
            for name, m, tail in (("a", a, (k, "lora_rank")), ("b", b, ("lora_rank", n))):
                found[name] = Dims((*_adapter_batch(batch, len(m.shape) - 2, slots is not None), *tail))
            return dataclasses.replace(weight, **found)
        case MXFP4(layout=layout):
            stored = Dims((*batch, n, k) if layout == "nk" else (*batch, k, n))
            return dataclasses.replace(weight, packed=stored, scale=stored)
        case _:
            return Dims(axes)


def _adapter_batch(batch: list[str], count: int, slotted: bool) -> list[str]:
    """The dims before a matrix of an adapter: all of its base's, or all but the experts, whom it serves together."""
    if count < len(batch):
        return batch[:count]
    return [*batch[:-1], "expert_slot"] if slotted else batch


# --- experts out of their order ---------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Copies:
    """Where the experts of a layer are whose bank holds them in another order, some more than once.

    slots: int32 ``[*r, E, C]``, the places of an expert in the bank; past its number of copies they repeat.
    count: int32 ``[*r, E]``, copies of each. total: places in the bank.
    """

    slots: Any
    count: Any
    total: int = dataclasses.field(metadata={"static": True})


def is_copies(node: Any) -> bool:
    return isinstance(node, Copies)


def is_arranged(model: Any) -> bool:
    """Whether the experts of a model are out of their order, so that nothing may be stored or trained by it."""
    return any(map(is_copies, jax.tree.leaves(model, is_leaf=is_copies)))


ARRANGED = (
    "its experts are arranged for devices, some more than once: transforms.restore_experts first, which gives the "
    "model back in its own order"
)
