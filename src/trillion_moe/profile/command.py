"""`trillion-moe profile`: collectives over a mesh, and a run's training step, timed on the devices that are there."""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from trillion_moe.config import ModelConfig
from trillion_moe.distributed import add_place_flags, current
from trillion_moe.meshes.machine import Machine, Tier, layout_of, machine, mesh_of
from trillion_moe.profile import collectives, step
from trillion_moe.profile.collectives import Row, Unavailable
from trillion_moe.profile.errors import ProfileError
from trillion_moe.profile.step import Step
from trillion_moe.profile.timing import Seconds
from trillion_moe.programs import check_processes
from trillion_moe.run_config import RunConfig, load_run_config
from trillion_moe.sharding import Layout
from trillion_moe.stamp import Stamp, check_output, write_report

FORMAT, KEY = 1, "trillion_moe profile"
CALLS, UPDATES = 100, 10
HEAD = f"{'collective':18} {'axis':8} {'bytes':>13} {'p50':>11} {'p95':>11} {'p99':>11} {'max':>11}"
HEAD += f" {'algorithm':>12} {'bus':>12} {'of fact':>8}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--mesh", metavar="NAME | FILE.py | AXIS=SIZE,...", help="time every collective over each axis of this mesh"
    )
    parser.add_argument("--sizes", metavar="BYTES,...", help="of a message, with --mesh; by default 1 KiB to 16 MiB")
    parser.add_argument(
        "--config", metavar="NAME | FILE.py | FILE.json", help="time the training step of a run, over --mesh if given"
    )
    parser.add_argument("--set", action="append", default=[], metavar="FIELD.FIELD=VALUE", help="with --config")
    parser.add_argument(
        "--repeats", type=int, metavar="N", help=f"calls that are timed; {CALLS} of a collective, {UPDATES} of a step"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found")
    add_place_flags(parser)
    parser.epilog = (
        "JAX_NUM_CPU_DEVICES=8 makes eight devices of a CPU. Every result is checked before it is timed. Sizes and "
        "bandwidths are those of nccl-tests, of the median time. A step is that of `train`, over rows of "
        "examples.max_length; its weights are drawn: the folder of the model needs no more than its config.json."
    )


@dataclass(frozen=True)
class Task:
    """What is to be measured. sizes: of messages, None without --mesh; config, cfg: of the run and its model, None
    without --config."""

    mesh: Machine | None
    layout: Layout | None
    sizes: list[int] | None
    config: RunConfig | None
    cfg: ModelConfig | None

    @property
    def axes(self) -> dict[str, int]:
        """Those above 1."""
        return {} if self.layout is None else {a: self.layout.size(a) for a in collectives.axes_of(self.layout)}

    @property
    def facts(self) -> dict[str, Tier]:
        """What the machine's file says of each axis."""
        return {} if self.mesh is None else {axis: self.mesh.tier(axis) for axis in self.axes}

    @property
    def peak(self) -> float | None:
        """bf16 FLOP/s of a device, by the machine's file."""
        return None if self.mesh is None or self.mesh.facts is None else self.mesh.facts.bf16_flops


def run(args: argparse.Namespace) -> int:
    if args.json is not None:
        check_output(args.json, KEY)
    task = checked(args)
    _check_alike(args, task)
    _say(f"on {jax.device_count()} x {jax.devices()[0].device_kind} ({jax.devices()[0].platform})")
    found: dict[str, Any] = {
        "mesh": None if task.mesh is None else task.mesh.name,
        "axes": task.axes,
        "facts": {axis: dataclasses.asdict(tier) for axis, tier in task.facts.items()},
        "dispatch": None,
        "latencies": {},
        "collectives": [],
        "unavailable": [],
        "config": args.config,
        "set": args.set,
        "step": None,
    }
    try:
        if task.sizes is not None:
            found |= _collectives(task, task.sizes, args.repeats or CALLS)
        if task.config is not None:
            found["step"] = _step(task, args.repeats or UPDATES)
    except jax.errors.JaxRuntimeError as error:  # as of memory that is not there
        raise ProfileError(str(error)) from error
    if args.json is not None and current().first:
        write_report(args.json, {KEY: FORMAT, "stamp": dataclasses.asdict(Stamp.here())} | found)
        print(args.json, file=sys.stderr)
    return 0


def _check_alike(args: argparse.Namespace, task: Task) -> None:
    """Several processes must measure the same, or they wait for each other for ever: ProcessesError, LayoutError."""
    processes = current()
    processes.same("flags", {"--sizes": task.sizes, "--repeats": args.repeats})
    processes.same("configuration", {} if task.config is None else dataclasses.asdict(task.config))
    check_processes(task.layout)


def checked(args: argparse.Namespace) -> Task:
    """Raises ProfileError for flags that are not legal, and what else is wrong with a mesh or a configuration."""
    if args.mesh is None and args.config is None:
        raise ProfileError("nothing to measure: give --mesh, --config, or both")
    for flag, needs in (("sizes", "mesh"), ("set", "config")):
        if getattr(args, flag) and getattr(args, needs) is None:
            raise ProfileError(f"--{flag} is legal with --{needs}")
    if args.repeats is not None and args.repeats < 1:
        raise ProfileError(f"--repeats {args.repeats}: legal is at least 1")
    config = None if args.config is None else load_run_config(args.config, args.set)
    over = mesh_of(args.mesh) if args.mesh is not None else config.mesh if config is not None else None
    mesh = machine(over) if isinstance(over, str) else None
    layout = None if over is None else layout_of(over)
    sizes = None
    if args.mesh is not None and layout is not None:
        sizes = collectives.default_sizes(layout) if args.sizes is None else _sizes(args.sizes)
        collectives.check(layout, sizes)
    return Task(mesh, layout, sizes, config, None if config is None else step.check(config, layout))


def _sizes(text: str) -> list[int]:
    if not all(part.isdecimal() for part in text.split(",")):
        raise ProfileError(f"--sizes {text}: legal are whole numbers of bytes with commas between, as in 1024,1048576")
    return [int(part) for part in text.split(",")]


def _collectives(task: Task, sizes: list[int], calls: int) -> dict[str, Any]:
    """Measured and printed, row by row."""
    assert task.layout is not None
    idle = collectives.dispatch(task.layout, calls)
    _say(f"a call that sends nothing: {_times(idle)} (p50 p95 p99 max)\n{HEAD}")
    rows: list[Row] = []
    absent: list[Unavailable] = []
    bandwidths = {axis: tier.bandwidth for axis, tier in task.facts.items()}
    for row in collectives.measure(task.layout, sizes, calls, bandwidths):
        _say(line(row))
        absent.append(row) if isinstance(row, Unavailable) else rows.append(row)
    latencies = {axis: latency(rows, axis, tier) for axis, tier in task.facts.items()}
    for axis, tier in task.facts.items():
        _say(
            f"{axis} by {task.mesh.name}: {tier.name}, {tier.bandwidth / 1e9:,.0f} GB/s, {tier.latency * 1e6:.1f} us; "
            f"a message of {latencies[axis]['bytes']:,} bytes takes {latencies[axis]['of_fact']:,.0f} times that"
        )
    found = {"collectives": rows, "unavailable": absent}
    return {
        "dispatch": dataclasses.asdict(idle),
        "latencies": latencies,
        **{name: [dataclasses.asdict(row) for row in part] for name, part in found.items()},
    }


def latency(rows: Sequence[Row], axis: str, tier: Tier) -> dict[str, Any]:
    """Of the smallest message from a device to the next one: the median with all of its call, and over the tier's."""
    row = min((row for row in rows if (row.collective, row.axis) == ("ppermute", axis)), key=lambda row: row.bytes)
    return {"bytes": row.bytes, "seconds": row.seconds.p50, "of_fact": row.seconds.p50 / tier.latency}


def _step(task: Task, updates: int) -> dict[str, Any]:
    assert task.config is not None
    assert task.cfg is not None
    _say(f"the training step of {task.config.model}, weights drawn")
    found = step.measure(task.config, task.cfg, task.layout, updates, task.peak)
    _say(said(found))
    return dataclasses.asdict(found)


def _say(text: str) -> None:
    """One process of several speaks."""
    if current().first:
        print(text, flush=True)


def line(row: Row | Unavailable) -> str:
    if isinstance(row, Unavailable):
        return f"{row.collective:18} not here: {row.reason}"
    of_fact = "-" if row.of_fact is None else f"{row.of_fact:.1%}"
    return (
        f"{row.collective:18} {f'{row.axis} {row.devices}':8} {row.bytes:13,} {_times(row.seconds)} "
        f"{row.algorithm_bandwidth / 1e9:7.3f} GB/s {row.bus_bandwidth / 1e9:7.3f} GB/s {of_fact:>8}"
    )


def _times(seconds: Seconds) -> str:
    return " ".join(f"{x * 1e6:8,.0f} us" for x in (seconds.p50, seconds.p95, seconds.p99, seconds.max))


def said(found: Step) -> str:
    of_peak = "" if found.of_peak is None else f", {found.of_peak:.1%} of the devices' bf16 peak"
    lines = [
        f"  {found.passes} x {found.rows} rows of {found.tokens:,} tokens: {_times(found.seconds)} (p50 p95 p99 max), "
        f"{found.tokens_per_second:,.0f} tokens/s",
        f"  {found.flops_per_second / 1e12:.3f} TFLOP/s of the model's matrices{of_peak}",
    ]
    if found.shares is None:
        return "\n".join([*lines, f"  exchange and utilisation are not known: {found.untraced}"])
    s = found.shares
    lines += [
        f"  devices busy {s.busy:.1%}, in collectives {s.collectives:.1%}, and nothing computed in {s.exposed:.1%}",
        f"  exchange of tokens with experts {s.exchange:.1%}",
        *(f"    {kind:22} {share:.1%}" for kind, share in s.by_kind.items()),
    ]
    return "\n".join(lines)
