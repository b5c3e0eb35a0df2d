"""Where the time of traced programs goes: what a profiler's trace says of their instructions, device by device.

A trace names the instructions that ran; what each is, and which part of the model it comes from, says the text of the
compiled program. An instruction that contains others (a loop, a call) counts by what runs within it.
"""

import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from trillion_moe import hlo
from trillion_moe.hlo import KINDS
from trillion_moe.layers.moe import EXCHANGE

_CONTAINERS = ("while", "call", "conditional")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_MODULE = re.compile(r"^HloModule ([\w.-]+)")
_CPU, _DEVICE = "/host:CPU", re.compile(r"^/device:(?:GPU|TPU):(\d+)")
_LINES = ("XLA Ops", "Async XLA Ops")  # of a TPU, whose events are instructions and say no more

Span = tuple[float, float]
Named = Mapping[str, hlo.Instruction]


@dataclass(frozen=True)
class Instruction:
    """kind: of `KINDS`, "" for what computes, None for what contains others. exchange: of tokens with experts."""

    kind: str | None
    exchange: bool


@dataclass(frozen=True)
class Shares:
    """Of the time from the first instruction to the last, mean over devices; times at once count once.

    busy: any instruction runs. collectives: one is underway, which counts the wait for the slowest device; exposed: and
    nothing is computed meanwhile. by_kind: of the collectives, by XLA's name. exchange: of tokens with their experts.
    seconds: of all that was traced. devices: of this process. events: how many there were.
    """

    seconds: float
    devices: int
    events: int
    busy: float
    collectives: float
    exposed: float
    exchange: float
    by_kind: dict[str, float]


def traced(run: Callable[[], Any]) -> Any:
    """The trace of everything that runs within a call, which must wait for its results."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            run()
        (file,) = Path(folder).rglob("*.xplane.pb")
        return jax.profiler.ProfileData.from_serialized_xspace(file.read_bytes())


def instructions(texts: Iterable[str]) -> dict[str, dict[str, Instruction]]:
    """Of compiled programs, by module and name, from their HLO."""
    found: dict[str, dict[str, Instruction]] = {}
    for text in texts:
        module = _MODULE.match(text)
        assert module is not None, text[:100]
        lines = hlo.computations(text)
        named = {one.name: one for name in lines for one in hlo.instructions(lines[name])}
        found[module[1]] = {name: _instruction(one, named, lines) for name, one in named.items()}
    return found


def _instruction(
    one: hlo.Instruction, named: Mapping[str, hlo.Instruction], lines: dict[str, list[str]]
) -> Instruction:
    said = _OP_NAME.search(one.line)
    bare = [opcode.removesuffix("-start").removesuffix("-done") for opcode in _opcodes(one, named, lines)]
    kind = next((opcode for opcode in bare if opcode in KINDS), None if one.opcode in _CONTAINERS else "")
    return Instruction(kind, bool(kind) and said is not None and EXCHANGE in said[1])


def _opcodes(one: hlo.Instruction, named: Named, lines: dict[str, list[str]]) -> list[str]:
    """Its own, or if it runs apart those of the computation that it begins, or that the one it names began."""
    if not one.opcode.startswith("async-"):
        return [one.opcode]
    if called := hlo.callees(one.line, lines):
        return [inner.opcode for name in called for inner in hlo.instructions(lines[name])]
    return [opcode for name in one.operands[:1] if name in named for opcode in _opcodes(named[name], named, lines)]


def shares(data: Any, programs: Mapping[str, Mapping[str, Instruction]]) -> Shares | None:
    """What a trace says of these programs; None if it has no event of any of their instructions."""
    spans: dict[int, dict[Instruction, list[Span]]] = defaultdict(lambda: defaultdict(list))
    events = 0
    for device, instruction, span in _events(data, programs):
        if instruction.kind is not None:
            spans[device][instruction].append(span)
            events += 1
    if not spans:
        return None
    ends = [edge for kinds in spans.values() for found in kinds.values() for span in found for edge in span]
    wall = (max(ends) - min(ends)) * len(spans)

    def share(wanted: Callable[[Instruction], bool]) -> float:
        return sum(_length(_of(kinds, wanted)) for kinds in spans.values()) / wall

    busy, computed = share(lambda i: True), share(lambda i: not i.kind)
    kinds = sorted({i.kind for found in spans.values() for i in found if i.kind})
    return Shares(
        seconds=(max(ends) - min(ends)) / 1e9,
        devices=len(spans),
        events=events,
        busy=busy,
        collectives=share(lambda i: bool(i.kind)),
        exposed=busy - computed,
        exchange=share(lambda i: i.exchange),
        by_kind={kind: share(lambda i, kind=kind: i.kind == kind) for kind in kinds},
    )


def _events(data: Any, programs: Mapping[str, Mapping[str, Instruction]]) -> Iterator[tuple[int, Instruction, Span]]:
    """Device, instruction, span in nanoseconds. Devices of a CPU share threads: their events say whose they are."""
    for plane in data.planes:
        device = _DEVICE.match(plane.name)
        if device is None and plane.name != _CPU:
            continue
        for line in plane.lines:
            for event in line.events:
                stats = dict(event.stats)
                name = stats.get("hlo_op") or (event.name if line.name in _LINES else None)
                instruction = None if name is None else _found(name, stats.get("hlo_module"), programs)
                if instruction is not None:
                    on = int(device[1]) if device else int(stats["device_ordinal"])
                    yield on, instruction, (event.start_ns, event.start_ns + event.duration_ns)


def _found(name: Any, module: Any, programs: Mapping[str, Mapping[str, Instruction]]) -> Instruction | None:
    name = str(name).split(" = ")[0].lstrip("%")
    if module is not None:
        return programs.get(str(module), {}).get(name)
    return next((program[name] for program in programs.values() if name in program), None)


def _of(kinds: Mapping[Instruction, list[Span]], wanted: Callable[[Instruction], bool]) -> list[Span]:
    return [span for instruction, spans in kinds.items() if wanted(instruction) for span in spans]


def _length(spans: list[Span]) -> float:
    """Of the union."""
    total, end = 0.0, float("-inf")
    for low, high in sorted(spans):
        total += max(0.0, high - max(low, end))
        end = max(end, high)
    return total
