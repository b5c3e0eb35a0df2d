"""The arrays of a leaf from the tensors of a folder: of each only what devices of this process have is read.

A box is a part of an array, (start, stop) along every dim. A tensor is read by whole rows of its file, each once, into
all boxes that have some of it; a box that has some of their columns gets these. So a process holds the boxes of one
array at a time and one tensor's rows.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from trillion_moe.blueprint import Spec
from trillion_moe.checkpoint.audit import Located
from trillion_moe.checkpoint.errors import CheckpointError
from trillion_moe.checkpoint.names import Slot, flipped
from trillion_moe.checkpoint.safetensors_io import NAMES, NUMPY, Reader
from trillion_moe.kernels import mxfp4
from trillion_moe.weights import MXFP4

decode = jax.jit(mxfp4.decode, static_argnames=("dtype",))
Box = tuple[tuple[int, int], ...]
Homes = list[tuple[Slot, np.ndarray]]
"""Slots of one leaf, each with the places of its tensors."""


def boxes(shape: tuple[int, ...], sharding: Sharding | None) -> list[Box]:
    """The parts of an array that devices of this process have, each once; without a sharding all of it."""
    if sharding is None:
        return [tuple((0, size) for size in shape)]
    found = sharding.addressable_devices_indices_map(shape).values()
    return list(dict.fromkeys(_box(index, shape) for index in found))


def _box(index: Any, shape: tuple[int, ...]) -> Box:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def held(slot: Slot, parts: Iterable[Box]) -> np.ndarray:
    """bool [slot.count]: whether any of these boxes of its leaf has some of the tensor."""
    found = np.zeros(slot.count, bool)
    for box in parts:
        found[slice(*_experts(slot, box))] = True
    return found


def _experts(slot: Slot, box: Box) -> tuple[int, int]:
    """Which of the slot's tensors a box has some of: (start, stop)."""
    if slot.repeat is not None and not box[0][0] <= slot.repeat < box[0][1]:
        return 0, 0
    return (0, 1) if slot.experts is None else box[slot.repeat is not None]


class _Window(NamedTuple):
    """Where tensors `start` to `stop` of a slot go: bank [stop - start, rows, ...], which has these columns of them."""

    start: int
    stop: int
    bank: np.ndarray
    columns: tuple[slice, ...]


def _windows(slot: Slot, parts: Mapping[Box, np.ndarray], flip: bool) -> dict[tuple[int, int], list[_Window]]:
    """Of all boxes with some of a slot, by the rows (start, stop) that they have of its tensors."""
    found = defaultdict(list)
    for box, part in parts.items():
        start, stop = _experts(slot, box)
        if start == stop:
            continue
        bank = part if slot.repeat is None else part[slot.repeat - box[0][0]]
        bank = bank[None] if slot.experts is None else bank
        rows, *columns = box[len(slot.index(0)) :][:: -1 if flip else 1]
        bank = bank.swapaxes(1, 2) if flip else bank
        found[rows].append(_Window(start, stop, bank, tuple(slice(*column) for column in columns)))
    return found


@dataclasses.dataclass(frozen=True)
class Fill:
    """Reads one leaf after the other. keep_dtypes: as of `load_into`."""

    located: Located
    reader: Reader
    keep_dtypes: bool

    def leaf(self, leaf: Spec | MXFP4, homes: Homes, where: Any) -> Any:
        """The leaf with arrays for its Specs, over devices as `where` says: like the leaf, of shardings; None = where
        JAX puts them."""
        parts = {part: [(s, p) for s, p in homes if s.part == part] for part in ("weight", "packed", "scale")}
        if isinstance(leaf, MXFP4):
            flip, byte = leaf.layout == "kn", np.dtype(np.uint8)
            packed = self._array(leaf.packed.shape, byte, where and where.packed, parts["packed"], flip)
            scale = self._array(leaf.scale.shape, byte, where and where.scale, parts["scale"], flip)
            return dataclasses.replace(leaf, packed=packed, scale=scale)
        dtype = jnp.dtype(leaf.dtype)
        if parts["packed"] and parts["packed"][0][1][0]["file"] >= 0:
            return self._array(leaf.shape, dtype, where, parts["packed"], True, parts["scale"])
        slot, place = parts["weight"][0]
        stored = np.dtype(np.float32) if slot.float32 else NUMPY[NAMES[place[0]["dtype"]]]
        keep = self.keep_dtypes or slot.float32
        return self._array(leaf.shape, stored if keep else dtype, where, parts["weight"], flipped(slot))

    def _array(
        self,
        shape: tuple[int, ...],
        dtype: np.dtype,
        where: Sharding | None,
        homes: Homes,
        flip: bool,
        scales: Homes | None = None,
    ) -> jax.Array:
        """flip: the tensors are stored transposed. scales: of tensors that are to be decoded."""
        if (kept := jax.dtypes.canonicalize_dtype(dtype)) != dtype:
            raise ValueError(f"JAX holds {dtype} as {kept}: set jax_enable_x64, or choose another dtype")
        # A slot without a layer stays zero.
        parts = {box: np.zeros([stop - start for start, stop in box], dtype) for box in boxes(shape, where)}
        for i, (slot, place) in enumerate(homes):
            windows = _windows(slot, parts, flip)
            for e in map(int, np.flatnonzero(held(slot, parts))):
                for rows, some in windows.items():
                    targets = [(w.bank[e - w.start], w.columns) for w in some if w.start <= e < w.stop]
                    if targets:
                        self._tensor(targets, rows, slot, place, e, None if scales is None else scales[i])
        return assemble(shape, dtype, where, parts)

    def _tensor(
        self,
        targets: list[tuple[np.ndarray, tuple[slice, ...]]],
        rows: tuple[int, int],
        slot: Slot,
        place: np.ndarray,
        e: int,
        scale: tuple[Slot, np.ndarray] | None,
    ) -> None:
        """Rows of one tensor into each target, which has these columns of them."""
        target, _ = targets[0]
        if len(targets) == 1 and scale is None and _as_stored(target, slot, place[e]):
            self._read(slot, place, e, rows, target)
            return
        source = self._read(slot, place, e, rows)
        if scale is not None:
            exact = jnp.bfloat16 if target.dtype == jnp.bfloat16 else jnp.float32
            source = np.asarray(decode(source, self._read(scale[0], scale[1], e, rows), dtype=exact))
        for target, columns in targets:
            target[...] = self._cast(source[(slice(None), *columns)], target.dtype, slot, place, e)

    def _read(
        self, slot: Slot, place: np.ndarray, e: int, rows: tuple[int, int], out: np.ndarray | None = None
    ) -> np.ndarray:
        """Rows of a stored tensor, as bytes say it; what pads it is left out."""
        at, (start, stop) = place[e], rows
        if out is None:
            out = np.empty((stop - start, *_columns(slot)), NUMPY[NAMES[at["dtype"]]])
        return self.reader.into(int(at["file"]), int(at["start"]) + start * (out.nbytes // (stop - start)), out)

    def _cast(self, array: np.ndarray, dtype: np.dtype, slot: Slot, place: np.ndarray, e: int) -> np.ndarray:
        if array.dtype == dtype:
            return array
        with np.errstate(over="ignore"):
            cast = array.astype(dtype)
        if np.any(np.isinf(cast) & np.isfinite(array)):
            label = self.located.label(slot, place, e)
            raise CheckpointError(self.located.shards.folder, [f"{label}: holds values too large for {dtype}"])
        return cast


def _as_stored(target: np.ndarray, slot: Slot, place: Any) -> bool:
    """Whether the file has the very bytes of whole rows."""
    stored = NUMPY[NAMES[place["dtype"]]], _columns(slot)
    return target.flags.c_contiguous and (target.dtype, target.shape[1:]) == stored


def _columns(slot: Slot) -> tuple[int, ...]:
    """Shape of one row of a stored tensor, a row being what one index along its first dim names."""
    return (slot.held[::-1] if flipped(slot) else slot.held)[1:]


def assemble(
    shape: tuple[int, ...], dtype: np.dtype, where: Sharding | None, parts: Mapping[Box, np.ndarray]
) -> jax.Array:
    """The array of which this process has these boxes."""
    if where is None:
        (whole,) = parts.values()
        return jnp.asarray(whole)
    return jax.make_array_from_callback(shape, where, lambda index: parts[_box(index, shape)], dtype=dtype)
