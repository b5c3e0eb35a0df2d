"""The collectives of a compiled program: which, over which mesh axes, how many bytes in one run of it.

Read from the text of XLA's HLO. What stands in the body of a loop counts as often as the loop turns, which XLA notes.
"""

import dataclasses
import itertools
import math
import re
from collections import Counter

import numpy as np
from jax.sharding import Mesh

KINDS = (
    "all-gather", "all-reduce", "all-to-all", "collective-broadcast", "collective-permute", "ragged-all-to-all",
    "reduce-scatter",
)  # fmt: skip
_BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "bf16": 2, "c64": 8, "token": 0} | {
    f"{kind}{bits}": bits // 8 for kind in "suf" for bits in (8, 16, 32, 64)
}
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.-]+ = (.*?) ([a-z][\w-]*)\(")
_ARRAY = re.compile(r"\b(\w+)\[([\d,]*)\]")


@dataclasses.dataclass(frozen=True)
class Collective:
    """count: how often it runs in one step. bytes: what all its runs give to one device, largest: the greatest single
    run. axes: "" if not a mesh's."""

    kind: str
    axes: str
    count: int
    bytes: int
    largest: int


def collectives(text: str, mesh: Mesh) -> list[Collective]:
    """Sums by kind and mesh axes, the most bytes first. ValueError for what is not known here."""
    computations = _computations(text)
    turns = _turns(computations)
    counts: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    largest: Counter[tuple[str, str]] = Counter()
    for name, lines in computations.items():
        for line in lines:
            found = _INSTRUCTION.match(line)
            kind = found[2].removesuffix("-start") if found else ""
            if found is None or kind not in KINDS:
                continue
            if not turns[name]:
                raise ValueError(f"nothing seems to call {name}, which has {line.strip()[:200]}")
            key, size = (kind, _axes(line, mesh)), _result_bytes(found[1], found[2])
            counts[key] += turns[name]
            sizes[key] += turns[name] * size
            largest[key] = max(largest[key], size)
    rows = [Collective(*key, counts[key], sizes[key], largest[key]) for key in counts]
    return sorted(rows, key=lambda row: -row.bytes)


def _computations(text: str) -> dict[str, list[str]]:
    """Name to lines; the entry's name is "ENTRY"."""
    found: dict[str, list[str]] = {}
    name = None
    for line in text.splitlines():
        if line.rstrip().endswith("{") and not line.startswith(" ") and " = " not in line.split("(")[0]:
            name = "ENTRY" if line.startswith("ENTRY") else line.split()[0].lstrip("%")
            found[name] = []
        elif line.startswith("}"):
            name = None
        elif name is not None:
            found[name].append(line)
    return found


_CALLS = re.compile(
    r"(?:body|calls|to_apply|called_computations|(?:branch|true|false)_computations?)"
    r"=\{?(%?[\w.-]+(?:, ?%?[\w.-]+)*)\}?"
)
_TRIPS = re.compile(r'known_trip_count":?\{"n":"(\d+)"')


def _turns(computations: dict[str, list[str]]) -> Counter[str]:
    """How often each computation runs. A branch counts as taken, a loop of unknown length as one turn."""
    calls: dict[str, Counter[str]] = {name: Counter() for name in computations}
    for name, lines in computations.items():
        for line in lines:
            trips = _TRIPS.search(line)
            for group in _CALLS.findall(line):
                for callee in group.replace("%", "").replace(" ", "").split(","):
                    if callee in computations:
                        calls[name][callee] += int(trips[1]) if trips else 1
    order: list[str] = []
    seen: set[str] = set()

    def visit(name: str) -> None:
        if name not in seen:
            seen.add(name)
            for callee in calls[name]:
                visit(callee)
            order.append(name)

    visit("ENTRY")
    turns: Counter[str] = Counter({"ENTRY": 1})
    for name in reversed(order):
        for callee, times in calls[name].items():
            turns[callee] += turns[name] * times
    return turns


def _result_bytes(shape: str, opcode: str) -> int:
    """Of what one run gives to a device; of a ragged exchange the room for it.

    An asynchronous start has its operands in front of its results, a permutation numbers of its own behind them.
    """
    arrays = [_bytes_of(kind) * math.prod(map(int, filter(None, d.split(",")))) for kind, d in _ARRAY.findall(shape)]
    match opcode:
        case "collective-permute-start":
            arrays = arrays[1:2]
        case "ragged-all-to-all-start":
            arrays = arrays[-1:]
        case "all-gather-start" | "all-to-all-start" | "reduce-scatter-start" | "collective-broadcast-start":
            arrays = arrays[len(arrays) // 2 :]
    return int(sum(arrays))


def _bytes_of(dtype: str) -> int | float:
    if dtype.startswith("f8"):
        return 1
    if dtype not in _BYTES:
        raise ValueError(f"the size of XLA's {dtype} is not known here")
    return _BYTES[dtype]


def _axes(line: str, mesh: Mesh) -> str:
    """The mesh axes over which a collective's groups lie, as "ep" or "ep tp"."""
    groups = _groups(line, mesh.devices.size)
    names = [axis for axis, size in mesh.shape.items() if size > 1]
    places = np.arange(mesh.devices.size).reshape(mesh.devices.shape)
    for count in range(1, len(names) + 1):
        for chosen in itertools.combinations(names, count):
            inner = [mesh.axis_names.index(axis) for axis in chosen]
            outer = [i for i in range(places.ndim) if i not in inner]
            expected = places.transpose(*outer, *inner).reshape(-1, math.prod(mesh.shape[axis] for axis in chosen))
            if groups == {frozenset(group) for group in expected.tolist()}:
                return " ".join(chosen)
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
