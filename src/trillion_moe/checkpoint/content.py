"""What headers cannot tell: padding that is not zero, scales that were never written, experts off by a factor.

A_log and the scales are read before anything is put on a device (scales are 1/17 of a packed model's bytes), by each
process those of the experts that it has.
"""

from collections.abc import Callable, Iterator

import numpy as np

from trillion_moe.checkpoint.audit import Located
from trillion_moe.checkpoint.names import Form, Slot
from trillion_moe.checkpoint.safetensors_io import NAMES, Reader
from trillion_moe.kernels import mxfp4

ORDINARY = (2, 252)  # scale codes that are sound whatever they scale; the others are looked at with their nibbles


def read(reader: Reader, slot: Slot, place: np.ndarray, expert: int) -> np.ndarray:
    """One stored tensor, as bytes say it."""
    at = place[expert]
    return reader.read(int(at["file"]), int(at["start"]), slot.shape, NAMES[at["dtype"]])


Here = Callable[[Slot], np.ndarray]


def content_findings(located: Located, here: Here) -> Iterator[str]:
    """Findings about A_log and about MXFP4 pairs, of tensors that are sound otherwise.

    here: bool [slot.count], which pairs to look at.
    """
    with Reader(located.shards.files) as reader:
        for pairs in located.by_leaf().values():
            for slot, place in pairs:
                if slot.form is Form.A_LOG and place[0]["sound"]:
                    yield from _a_log_findings(read(reader, slot, place, 0), slot, located.label(slot, place, 0))
            parts = {(slot.repeat, slot.part): (slot, place) for slot, place in pairs}
            for (repeat, part), scales in parts.items():
                if part == "scale":
                    yield from _scale_findings(located, reader, parts[repeat, "packed"], scales, here)


def _a_log_findings(stored: np.ndarray, slot: Slot, label: str) -> Iterator[str]:
    """Entries past the heads must be +0 bit for bit, since that is what is written back; heads must be finite."""
    (heads,) = slot.held
    flat = stored.reshape(-1)
    for i in np.flatnonzero(flat[heads:].view(np.uint32))[:1]:
        yield f"{label}: entry {heads + i} is {flat[heads + i]}, but past the {heads} heads may only be zeros"
    for i in np.flatnonzero(~np.isfinite(flat[:heads]))[:1]:
        yield f"{label}: entry {i} is {flat[i]}"


def _scale_findings(located: Located, reader: Reader, packed, scales, here: Here) -> Iterator[str]:
    (slot, place), (packed_slot, packed_place) = scales, packed
    for e in map(int, np.flatnonzero(place["sound"] & packed_place["sound"] & here(slot))):
        scale = read(reader, slot, place, e)
        if scale.size and not ORDINARY[0] <= scale.min() <= scale.max() <= ORDINARY[1]:
            label = located.label(slot, place, e)
            yield from mxfp4.check(read(reader, packed_slot, packed_place, e), scale, name=label)
