"""`trillion-moe`: one verb per job. Errors go to standard error in one message, the exit code is then 1
(2: usage, 130: interrupted, 141: nobody reads the output any more)."""

import argparse
import contextlib
import dataclasses
import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn, get_args

import jax

from trillion_moe import __version__, api
from trillion_moe.aot import AotError
from trillion_moe.checkpoint import compare_experts, files_beside, is_orbax
from trillion_moe.checkpoint.adapter_export import Naming
from trillion_moe.data import command as data_command
from trillion_moe.data.chat import ChatError
from trillion_moe.data.image_files import ImageError
from trillion_moe.data.rows import DataError
from trillion_moe.data.tokenizer import TokenizerError
from trillion_moe.distributed import ProcessesError, add_place_flags, join, place_flags, report
from trillion_moe.generate import command
from trillion_moe.meshes.machine import layout_of, mesh_of
from trillion_moe.ops import using
from trillion_moe.plan import command as plan_command
from trillion_moe.profile import ProfileError
from trillion_moe.profile import command as profile_command
from trillion_moe.run_config import RunConfigError, load_run_config
from trillion_moe.sharding import check_caches
from trillion_moe.stamp import OutputError
from trillion_moe.train import command as train_command
from trillion_moe.transforms import merge_report
from trillion_moe.transforms.targets import places
from trillion_moe.verify import command as verify_command
from trillion_moe.verify import doctor
from trillion_moe.verify.report import load as load_operators
from trillion_moe.verify.report import read as read_operators
from trillion_moe.weights import parameters

ERRORS = (
    *(api.ConfigError, api.CheckpointError, api.InputError, ChatError, DataError, ImageError),
    *(RunConfigError, TokenizerError, api.VerifyError, api.LayoutError, AotError, ProfileError, OutputError),
    ProcessesError,
    *(OSError, EOFError, UnicodeError, FloatingPointError),
)
INTERRUPTED, PIPE_CLOSED = 130, 141  # what a shell reports of a program that SIGINT or SIGPIPE has ended


def main(argv: Sequence[str] | None = None) -> int:
    args = _parsed(argv)
    try:
        code = _run(args)
        sys.stdout.flush()  # here, where a closed pipe can still be caught
        return code
    except BrokenPipeError:  # whoever reads has had enough, as `head` does
        _give_up_output()
        return PIPE_CLOSED


def _run(args: argparse.Namespace) -> int:
    try:
        return args.run(args)
    except BrokenPipeError:
        raise
    except ERRORS as error:
        print(f"trillion-moe {args.verb}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED


def _give_up_output() -> None:
    """What nobody reads goes nowhere from here on, so that the interpreter has nothing to say at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _UsageError(self, message)


class _UsageError(Exception):
    """Flags that a parser does not take, which `main` says."""

    def __init__(self, parser: argparse.ArgumentParser, message: str):
        self.parser, self.message = parser, message


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """Of several processes, one that is given wrong flags tells the others, which would wait for it to join them."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        return _parser().parse_args(argv)
    except _UsageError as usage:
        if {*argv[:1]} & {"train", "profile"}:
            flags = argparse.ArgumentParser(add_help=False, exit_on_error=False)
            add_place_flags(flags)
            with contextlib.suppress(ProcessesError, argparse.ArgumentError):  # then there is nobody to tell
                report(place_flags(flags.parse_known_args(argv)[0]), usage.message)
        argparse.ArgumentParser.error(usage.parser, usage.message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="trillion-moe", description="Kimi K3 and its relatives in JAX.")
    parser.add_argument("--version", action="version", version=f"trillion-moe {__version__}, jax {jax.__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    inspect = verbs.add_parser("inspect", help="load a checkpoint, check all of it, print what it holds")
    inspect.add_argument("folder")
    inspect.add_argument(
        "--against", metavar="FOLDER", help="what it was quantised from: refuse experts of another norm"
    )
    inspect.add_argument("--json", action="store_true", help="print JSON")
    inspect.set_defaults(run=_inspect)
    generate = verbs.add_parser("generate", help="answer prompts of text, pictures or token ids")
    command.add_arguments(generate)
    generate.add_argument("--adapter", metavar="FOLDER", help="adapters to put on top, as `train` or PEFT wrote them")
    _add_operators(generate)
    generate.set_defaults(run=_generate)
    data = verbs.add_parser("data", help="what a file of conversations becomes: figures, supervised spans, bad rows")
    data_command.add_arguments(data)
    data.add_argument("--config", metavar="NAME | FILE.py | FILE.json", help="take it all from a run's configuration")
    data.add_argument("--set", action="append", default=[], metavar="FIELD.FIELD=VALUE", help="with --config")
    data.set_defaults(run=_data)
    train = verbs.add_parser("train", help="tune adapters, or every weight, on conversations; goes on where it stopped")
    train_command.add_arguments(train)
    _add_operators(train)
    train.set_defaults(run=_train)
    export = verbs.add_parser("export", help="merge an adapter into its base, or write it under other names")
    export.add_argument("folder", help="the base")
    export.add_argument("--adapter", required=True, metavar="FOLDER", help="as `train` or PEFT wrote it")
    export.add_argument("--output", required=True, metavar="FOLDER", help="a new folder")
    what = export.add_mutually_exclusive_group()
    what.add_argument("--names", choices=get_args(Naming), help="write no merged model, but the adapter by these names")
    what.add_argument("--decode", action="store_true", help="unpack 4-bit experts, so that merging does not round them")
    export.set_defaults(run=_export)
    plan = verbs.add_parser("plan", help="whether a run fits a machine: its step compiled ahead of time, without it")
    plan_command.add_arguments(plan)
    plan.set_defaults(run=plan_command.run)
    profile = verbs.add_parser("profile", help="time the collectives of a mesh, and a training step, on these devices")
    profile_command.add_arguments(profile)
    profile.set_defaults(run=_profile)
    verify = verbs.add_parser("verify", help="try every operator of a model on this machine, against float64")
    verify_command.add_arguments(verify)
    verify.set_defaults(run=verify_command.run)
    check = verbs.add_parser("doctor", help="versions, devices, plugins, and what is missing")
    doctor.add_arguments(check)
    check.set_defaults(run=doctor.run)
    return parser


def _add_operators(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--operators", metavar="FILE", help="of `verify --json`: run what passed, refuse what was not tried here"
    )


def _inspect(args: argparse.Namespace) -> int:
    """Parameters and bytes by group; loading has audited every tensor."""
    model = api.load(args.folder)
    if args.against is not None:
        if model.config.quantization is None or is_orbax(args.folder):
            raise api.InputError(f"--against is for a folder of packed experts; {args.folder} holds {model.dtype} ones")
        plain = api.Model(dataclasses.replace(model.config, quantization=None))
        if findings := compare_experts(plain, args.folder, args.against):
            raise api.CheckpointError(args.folder, findings)
    counts, nbytes = Counter(), Counter()
    for place in places(model)[0]:
        name = place.names[0]
        group = next((part for part in name.split(".") if part in ("vision", "projector")), None) or place_group(name)
        counts[group] += parameters(place.leaf)
        nbytes[group] += sum(array.nbytes for array in jax.tree.leaves(place.leaf))
    cfg = model.config
    about = {
        "model_type": cfg.model_type,
        "layers": cfg.num_layers,
        "kda_layers": cfg.attention.count("kda"),
        "mla_layers": cfg.attention.count("mla"),
        "dtype": model.dtype,
        "experts": "packed MXFP4" if cfg.quantization else model.dtype,
        "parameters": {**counts, "total": counts.total()},
        "bytes": {**nbytes, "total": nbytes.total()},
    }
    if args.json:
        print(json.dumps(about, indent=2))
        return 0
    for key in ("model_type", "layers", "kda_layers", "mla_layers", "dtype", "experts"):
        print(f"{key:20} {about[key]}")
    print(f"{'group':20} {'parameters':>16} {'bytes':>16}")
    for group in about["parameters"]:
        print(f"{group:20} {about['parameters'][group]:16,} {about['bytes'][group]:16,}")
    return 0


def place_group(name: str) -> str:
    """What part of the model a leaf belongs to, from its logical name."""
    if not name.startswith("layers."):
        return name.split(".")[0]
    module, *rest = name.split(".")[2:]
    if module != "ffn" or not rest:
        return module
    return f"ffn.{rest[0]}" if rest[0] in ("experts", "shared", "router") else "ffn"


def _generate(args: argparse.Namespace) -> int:
    command.check(args)
    if args.operators is not None:
        read_operators(args.operators)  # what is no such file is found before the weights are read
    layout = None if args.mesh is None else layout_of(mesh_of(args.mesh))
    check_caches(layout)
    model = api.load(args.folder, dtype=args.dtype, mesh=layout)
    with _verified(args, model.config, model.dtype):
        return command.run(args, model if args.adapter is None else api.load_adapter(model, args.adapter))


def _train(args: argparse.Namespace) -> int:
    with join(place_flags(args), known=ERRORS):
        return _trained(args)


def _profile(args: argparse.Namespace) -> int:
    with join(place_flags(args), known=ERRORS):
        return profile_command.run(args)


def _trained(args: argparse.Namespace) -> int:
    if args.operators is None:
        return train_command.run(args, api.load)
    run = train_command.configuration(args)
    cfg = api.ModelConfig.from_file(run.model)
    with _verified(args, cfg, run.dtype or cfg.dtype):  # before the data and the weights are read
        return train_command.run(args, api.load)


def _verified(args: argparse.Namespace, cfg: api.ModelConfig, dtype: str) -> contextlib.AbstractContextManager[None]:
    """The implementations of --operators, or the platform's own."""
    if args.operators is None:
        return contextlib.nullcontext()
    return using(load_operators(args.operators, cfg, dtype))


def _export(args: argparse.Namespace) -> int:
    """A merged checkpoint with tokenizer and settings beside it, or an adapter; says what merging rounds."""
    if Path(args.output).exists():  # found before the weights are read
        raise api.CheckpointError(args.output, ["exists already; nothing is overwritten, choose another name"])
    base = api.load(args.folder, quantization="decode" if args.decode else "keep")
    model = api.load_adapter(base, args.adapter)
    if args.names is not None:
        api.export_adapter(args.output, model, names=args.names)
    else:
        worst, error = max(merge_report(model).items(), key=lambda item: item[1])
        api.save(args.output, api.merge_lora(model), beside=args.folder if files_beside(args.folder) else None)
        print(f"rounding of merged weights at most {error:.1e} of their RMS ({worst})", file=sys.stderr)
    print(args.output)
    return 0


def _data(args: argparse.Namespace) -> int:
    if args.config is None:
        if args.set:
            raise api.InputError("--set is legal with --config")
        return data_command.run(args)
    data_command.check_plain(args)
    given = {"data": args.file, "model": args.model}
    config = load_run_config(args.config, [*(f"{k}={v}" for k, v in given.items() if v is not None), *args.set])
    args.file, args.model = Path(config.data), Path(config.model)
    return data_command.run(args, config.examples)


if __name__ == "__main__":
    sys.exit(main())
