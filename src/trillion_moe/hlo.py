"""The text of a compiled program, taken apart: computations, their instructions, how often each of them runs."""

import math
import re
from collections import Counter
from typing import NamedTuple

KINDS = (
    "all-gather", "all-reduce", "all-to-all", "collective-broadcast", "collective-permute", "ragged-all-to-all",
    "reduce-scatter",
)  # fmt: skip
"""Opcodes of collectives."""

_BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "bf16": 2, "c64": 8, "token": 0} | {
    f"{kind}{bits}": bits // 8 for kind in "suf" for bits in (8, 16, 32, 64)
}
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (.*?) ([a-z][\w-]*)\((.*)")
_OPERAND = re.compile(r"%([\w.-]+)")
_ARRAY = re.compile(r"\b(\w+)\[([\d,]*)\]")


class Instruction(NamedTuple):
    """operands: names, in order. line: all that XLA says of it."""

    name: str
    shape: str
    opcode: str
    operands: list[str]
    line: str


def instructions(lines: list[str]) -> list[Instruction]:
    """In the order in which they are scheduled."""
    found = (_INSTRUCTION.match(line) for line in lines)
    return [Instruction(m[1], m[2], m[3], _OPERAND.findall(m[4].split(")")[0]), m[0]) for m in found if m]


def computations(text: str) -> dict[str, list[str]]:
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


_CONDITION = re.compile(r" while\(.* condition=%?([\w.-]+)")
_BOUND = re.compile(r" = s32\[\][^ ]* constant\((\d+)\)")
_BELOW = re.compile(r"^\s+ROOT .* compare\(.*direction=LT")


def callees(line: str, computations: dict[str, list[str]]) -> Counter[str]:
    """The computations that an instruction runs, and how often: a branch as if taken, a loop of unknown length never.

    Where the compiler does not note how often a loop turns, it is known if all that its condition has is a comparison
    with a number (loops count from 0).
    """
    times = 1
    if found := _TRIPS.search(line):
        times = int(found[1])
    elif (found := _CONDITION.search(line)) and found[1] in computations:
        condition = computations[found[1]]
        bounds = [bound[1] for bound in map(_BOUND.search, condition) if bound]
        times = int(bounds[0]) if len(bounds) == 1 and any(map(_BELOW.match, condition)) else 0
    names = [name for group in _CALLS.findall(line) for name in group.replace("%", "").replace(" ", "").split(",")]
    return Counter({name: names.count(name) * times for name in names if name in computations})


def turns(computations: dict[str, list[str]]) -> Counter[str]:
    """How often each computation runs in one run of the program."""
    calls: dict[str, Counter[str]] = {name: Counter() for name in computations}
    for name, lines in computations.items():
        for line in lines:
            calls[name] += callees(line, computations)
    order: list[str] = []
    seen: set[str] = set()

    def visit(name: str) -> None:
        if name not in seen:
            seen.add(name)
            for callee in calls[name]:
                visit(callee)
            order.append(name)

    visit("ENTRY")
    times: Counter[str] = Counter({"ENTRY": 1})
    for name in reversed(order):
        for callee, count in calls[name].items():
            times[callee] += times[name] * count
    return times


def arrays(shape: str) -> list[tuple[str, list[int]]]:
    """dtype and sizes of each array in a shape, which may be a tuple."""
    return [(kind, [int(size) for size in sizes.split(",") if size]) for kind, sizes in _ARRAY.findall(shape)]


def array_bytes(shape: str) -> list[int]:
    """Of each array in a shape. ValueError for a dtype whose size is not known here."""
    return [math.ceil(_bytes_of(kind) * math.prod(sizes)) for kind, sizes in arrays(shape)]


def _bytes_of(dtype: str) -> int | float:
    if dtype.startswith("f8"):
        return 1
    if dtype not in _BYTES:
        raise ValueError(f"the size of XLA's {dtype} is not known here")
    return _BYTES[dtype]
