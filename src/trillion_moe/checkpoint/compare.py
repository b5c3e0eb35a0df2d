"""A packed checkpoint against the plain one it was made from: a wrong scale bias is a model 2 or 4 times too big."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from trillion_moe.checkpoint.audit import Located, locate
from trillion_moe.checkpoint.content import read
from trillion_moe.checkpoint.errors import CheckpointError
from trillion_moe.checkpoint.fill import decode
from trillion_moe.checkpoint.load import read_config
from trillion_moe.checkpoint.names import Slot, slots
from trillion_moe.checkpoint.safetensors_io import Reader
from trillion_moe.checkpoint.shards import find_shards

TOLERANCE = 0.1  # of the root mean square; rounding to 4 bits moves it by a few thousandths


def compare_experts(blueprint: Any, folder: str | Path, original: str | Path) -> list[str]:
    """Every expert matrix of `folder` whose root mean square is more than 10 % off that in `original`, one line each.

    blueprint: of the model, plain. Reads one matrix of each at a time. Raises CheckpointError if one of the two is not
    a sound checkpoint of that model.
    """
    ours, theirs = (_located(blueprint, path) for path in (folder, original))
    with Reader(ours.shards.files) as reader, Reader(theirs.shards.files) as other:
        pairs = zip(_norms(ours, reader), _norms(theirs, other), strict=True)
        return [
            f"{label}: root mean square {rms:.4g}, that of the original {wanted:.4g}"
            + (f": {rms / wanted:.3g} times as much" if wanted > 0 else "")
            for (label, rms), (_, wanted) in pairs
            if not abs(rms - wanted) <= TOLERANCE * wanted  # so that NaN is named too
        ]


def _located(blueprint: Any, folder: str | Path) -> Located:
    cfg = read_config(folder)
    located = locate(list(slots(blueprint, cfg)), find_shards(folder), cfg)
    if located.findings:
        raise CheckpointError(folder, located.findings)
    return located


def _norms(located: Located, reader: Reader) -> Iterator[tuple[str, float]]:
    """("file: tensor", root mean square) of every expert matrix."""
    for homes in located.by_leaf().values():
        parts = {(slot.repeat, slot.part): (slot, place) for slot, place in homes if slot.experts is not None}
        for repeat in dict.fromkeys(repeat for repeat, _ in parts):
            slot, place = parts[repeat, "packed"]
            plain = place[0]["file"] < 0
            slot, place = parts[repeat, "weight"] if plain else (slot, place)
            for e in range(slot.count):
                w = read(reader, slot, place, e) if plain else _decoded(reader, parts, repeat, e)
                yield located.label(slot, place, e), float(np.sqrt(np.mean(np.square(w.astype(np.float64)))))


def _decoded(reader: Reader, parts: dict[Any, tuple[Slot, np.ndarray]], repeat: int | None, expert: int) -> np.ndarray:
    pair = (read(reader, *parts[repeat, part], expert) for part in ("packed", "scale"))
    return np.asarray(decode(*pair, dtype=jnp.float32))
