"""The collectives of a compiled program: which, over which mesh axes, how many bytes in one run of it.

Read from the text of XLA's HLO. What stands in the body of a loop counts as often as the loop turns, which XLA notes.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Sequence

import numpy as np
from jax.sharding import Mesh

from trillion_moe.hlo import KINDS, Instruction, array_bytes, computations, turns
from trillion_moe.plan.overlap import Program, Work


@dataclasses.dataclass(frozen=True)
class Collective:
    """count: how often it runs in one step, every branch taken: of a pipeline's ticks all count, though forwards and
    backwards each skip some (of 6 ticks 1, with two stages and four microbatches). bytes: what all its runs give to one
    device, largest: the greatest array of a run, which may give several. axes: "part of" them for groups within, "" if
    not a mesh's.

    asynchronous: runs that are begun in one place and awaited in another. overlapped: those of them between whose
    beginning and end the device multiplies matrices or runs kernels; hidden_bytes: what these give. hidden_flops: of
    the products of matrices between, without those within kernels; see `plan.overlap`.
    """

    kind: str
    axes: str
    count: int
    bytes: int
    largest: int
    asynchronous: int = 0
    overlapped: int = 0
    hidden_bytes: int = 0
    hidden_flops: int = 0


def collectives(texts: Sequence[str], mesh: Mesh) -> list[Collective]:
    """Sums over programs, by kind and mesh axes, the most bytes first. ValueError for what is not known here."""
    found: dict[tuple[str, str], Collective] = {}
    for text in texts:
        lines = computations(text)
        times, program = turns(lines), Program(lines)
        for name in lines:
            for one in program.instructions(name):
                kind = one.opcode.removesuffix("-start")
                if kind not in KINDS or "source_target_pairs={}" in one.line:  # a permutation between nobody
                    continue
                if not times[name]:
                    raise ValueError(f"how often {name} is called is not known; it has {one.line.strip()[:200]}")
                key = kind, _axes(one.line, mesh)
                before = found.get(key, Collective(*key, 0, 0, 0))
                found[key] = _added(before, one, times[name], program.hidden(name, one))
    return sorted(found.values(), key=lambda row: -row.bytes)


def _added(row: Collective, one: Instruction, runs: int, hidden: Work | None) -> Collective:
    sizes = _result_bytes(one.shape, one.opcode)
    size = sum(sizes)
    hides = hidden is not None and hidden.hides(size)
    return dataclasses.replace(
        row,
        count=row.count + runs,
        bytes=row.bytes + runs * size,
        largest=max(row.largest, *sizes),
        asynchronous=row.asynchronous + runs * (hidden is not None),
        overlapped=row.overlapped + runs * hides,
        hidden_bytes=row.hidden_bytes + runs * size * hides,
        hidden_flops=row.hidden_flops + runs * (hidden.flops if hidden else 0),
    )


def _result_bytes(shape: str, opcode: str) -> list[int]:
    """Of each array that one run gives to a device; of a ragged exchange the room for it.

    An asynchronous start has its operands in front of its results, a permutation numbers of its own behind them.
    """
    sizes = array_bytes(shape)
    match opcode:
        case "collective-permute-start":
            sizes = sizes[1:2]
        case "ragged-all-to-all-start":
            sizes = sizes[-3:-2] if "u32[]" in shape else sizes[-1:]
        case "all-gather-start" | "all-to-all-start" | "reduce-scatter-start" | "collective-broadcast-start":
            sizes = sizes[len(sizes) // 2 :]
    return sizes


def _axes(line: str, mesh: Mesh) -> str:
    """The mesh axes over which a collective's groups lie, as "ep" or "ep tp"; "part of ep" if only within them."""
    groups = _groups(line, mesh.devices.size)
    names = [axis for axis, size in mesh.shape.items() if size > 1]
    places = np.arange(mesh.devices.size).reshape(mesh.devices.shape)
    for count in range(1, len(names) + 1):
        for chosen in itertools.combinations(names, count):
            inner = [mesh.axis_names.index(axis) for axis in chosen]
            outer = [i for i in range(places.ndim) if i not in inner]
            expected = places.transpose(*outer, *inner).reshape(-1, math.prod(mesh.shape[axis] for axis in chosen))
            whole = {frozenset(group) for group in expected.tolist()}
            if groups == whole:
                return " ".join(chosen)
            if all(any(group <= all_of_them for all_of_them in whole) for group in groups):
                return f"part of {' '.join(chosen)}"
    return ""


_IOTA = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"  # sizes, and in which order their dims are laid out
_LISTED = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}")
_COUNTED = re.compile(r"replica_groups=\[([\d,]+)\]<=" + _IOTA)
_NAMED = re.compile(r"replica_groups=mesh\[([^\]]+)\](?:, device_ids=\(" + _IOTA + r"\))? \{([^}]*)\}")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")


def _groups(line: str, devices: int) -> set[frozenset[int]]:
    """Which devices talk with each other, by their places in the mesh. ValueError for a form that is not known here."""
    if found := _COUNTED.search(line):
        return _rows(_iota(found[2], found[3]).reshape(_numbers(found[1])))
    if found := _NAMED.search(line):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", found[1])}
        ids = _iota(found[2], found[3]) if found[2] else np.arange(math.prod(sizes.values()))
        inner = [list(sizes).index(name) for name in re.findall(r"'(\w+)'", found[4])]
        outer = [i for i in range(len(sizes)) if i not in inner]
        ids = ids.reshape(list(sizes.values())).transpose(*outer, *inner)
        return _rows(ids.reshape(-1, math.prod(ids.shape[len(outer) :])))
    if found := _LISTED.search(line):
        listed = re.findall(r"\{([\d,]+)\}", found[1])
        return {frozenset(_numbers(group)) for group in listed} or {frozenset(range(devices))}
    if found := _PAIRS.search(line):
        return _chains([_numbers(pair) for pair in re.findall(r"\{(\d+,\d+)\}", found[1])])
    raise ValueError(f"XLA names the devices of a collective in a form that is not known here: {line.strip()[:200]}")


def _iota(sizes: str, order: str | None) -> np.ndarray:
    """Devices 0, 1, 2, ... in an array of these sizes, its dims then in this order; flat."""
    ids = np.arange(math.prod(_numbers(sizes))).reshape(_numbers(sizes))
    return (ids.transpose(_numbers(order)) if order else ids).reshape(-1)


def _rows(ids: np.ndarray) -> set[frozenset[int]]:
    return {frozenset(group) for group in ids.tolist()}


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _chains(pairs: list[list[int]]) -> set[frozenset[int]]:
    """The devices that are joined by pairs of sender and receiver."""
    groups: list[set[int]] = []
    for pair in pairs:
        touching = [group for group in groups if group & set(pair)]
        groups = [group for group in groups if group not in touching] + [set(pair).union(*touching)]
    return {frozenset(group) for group in groups}
