"""`trillion-moe plan`: whether a run fits a machine, by XLA's own figures for the real step."""

import argparse
import dataclasses
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from trillion_moe.meshes.chips import Gpu, Tpu
from trillion_moe.meshes.machine import compiled_for, machine
from trillion_moe.plan.step import SHARE, Compiled, compile_step
from trillion_moe.run_config import RunConfigError, load_run_config
from trillion_moe.stamp import check_output, write_report

FORMAT, KEY = 1, "trillion_moe plan"
COMPILERS = {Gpu: "jax-cuda13-plugin", Tpu: "libtpu"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", required=True, metavar="NAME | FILE.py | FILE.json", help="the run, as for train")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD.FIELD=VALUE")
    parser.add_argument("--mesh", required=True, metavar="NAME | FILE.py", help="the machine: trillion_moe.meshes")
    parser.add_argument(
        "--compile", action="store_true", required=True, help="compile the step ahead of time; needs the extra aot"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")


def run(args: argparse.Namespace) -> int:
    """1 if the step does not fit."""
    if args.json is not None:
        check_output(args.json, KEY)
    config, mesh = load_run_config(args.config, args.set), machine(args.mesh)
    if config.mesh not in (None, args.mesh):
        raise RunConfigError(f"mesh = {config.mesh!r}, but what is planned for is --mesh {args.mesh}: legal is null")
    compiler = COMPILERS[type(compiled_for(mesh))]
    if not jax.config.values["jax_platforms"]:
        jax.config.update("jax_platforms", "cpu")  # nothing runs, so no accelerator is taken
    print(f"compiling {args.config} for {mesh.name}: minutes, for a model of many layers", file=sys.stderr, flush=True)
    began = time.perf_counter()
    compiled = compile_step(config, mesh)
    seconds = time.perf_counter() - began
    facts = mesh.facts
    assert facts is not None  # what is compiled for is known
    plan: dict[str, Any] = {
        KEY: FORMAT,
        "config": args.config,
        "set": args.set,
        "mesh": mesh.name,
        "axes": dict(mesh.axes),
        "hbm_bytes": facts.hbm_bytes,
        "fits": compiled.peak_bytes <= SHARE * facts.hbm_bytes,
        "compiled": dataclasses.asdict(compiled),
        "seconds": round(seconds, 1),
        "versions": {name: version(name) for name in ("trillion-moe", "jax", "jaxlib", compiler)},
    }
    print(_said(plan, compiled))
    if args.json is not None:
        write_report(args.json, plan)
        print(args.json, file=sys.stderr)
    return 0 if plan["fits"] else 1


def _said(plan: dict[str, Any], compiled: Compiled) -> str:
    share = compiled.peak_bytes / plan["hbm_bytes"]
    axes = " x ".join(f"{axis} {size}" for axis, size in plan["axes"].items())
    lines = [
        f"{plan['config']} on {plan['mesh']} ({axes}): {compiled.rows} rows of {compiled.tokens:,} tokens a pass",
        f"  peak {compiled.peak_bytes / 1e9:.1f} of {plan['hbm_bytes'] / 1e9:.1f} GB a device, {share:.0%}: "
        f"{'fits' if plan['fits'] else f'does not fit, {SHARE:.0%} is legal'}",
        f"  arguments {compiled.argument_bytes / 1e9:.1f} GB, temporaries {compiled.temp_bytes / 1e9:.1f} GB, "
        f"in host memory {compiled.host_bytes / 1e9:.1f} GB; compiled in {plan['seconds']:.0f} s",
    ]
    if compiled.pipeline is not None:
        lines.append(f"  {compiled.pipeline}")
    for row in compiled.collectives:
        where = row.axes or "(not along mesh axes)"
        lines.append(
            f"  {row.kind:19} over {where:10} {row.count:8,} times, {row.bytes / 1e9:10.2f} GB, "
            f"{row.hidden_bytes / max(row.bytes, 1):4.0%} of it hidden"
        )
    return "\n".join(lines)
