"""`trillion-moe train`: a configuration and data to an adapter, or to a checkpoint where every weight is trained."""

import argparse
import dataclasses
import json
import os
import sys
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from trillion_moe.checkpoint import export_adapter, files_beside
from trillion_moe.checkpoint import save as save_folder
from trillion_moe.checkpoint.errors import CheckpointError
from trillion_moe.checkpoint.shared_disk import blind
from trillion_moe.config import ModelConfig
from trillion_moe.data.build import build_examples
from trillion_moe.data.examples import Examples
from trillion_moe.data.processor import Processor, load_processor
from trillion_moe.data.report import decode_marked, statistics
from trillion_moe.data.rows import DataError, read_rows
from trillion_moe.distributed import Processes, add_place_flags, current
from trillion_moe.layers.segments import stages_of
from trillion_moe.meshes.machine import layout_of, mesh_of
from trillion_moe.model import Model
from trillion_moe.programs import check_processes, checked, rows_of_a_pass
from trillion_moe.run_config import RunConfig, RunConfigError, load_run_config, to_json
from trillion_moe.sharding import Layout, bytes_on_a_device
from trillion_moe.train.report import picture
from trillion_moe.train.trainer import Trainer, check_rows, count_updates, flat
from trillion_moe.transforms import add_lora, count_by_group, partition
from trillion_moe.transforms.targets import places

SHOWN = 2  # examples that a dry run prints
ADAPTER, MODEL = "adapter", "model"
SIGNALLED = 128  # and the signal's number: what a shell reports of a program that it has ended


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", required=True, metavar="NAME | FILE.py | FILE.json", help="of the run")
    parser.add_argument("--data", metavar="FILE.jsonl", help="the same as --set data=FILE.jsonl")
    parser.add_argument("--model", metavar="FOLDER", help="the same as --set model=FOLDER")
    parser.add_argument("--output", metavar="FOLDER", help="the same as --set output=FOLDER")
    parser.add_argument(
        "--mesh", metavar="NAME | FILE.py | AXIS=SIZE,...", help="as --set mesh: a machine, or sizes of mesh axes"
    )
    parser.add_argument("--set", action="append", default=[], metavar="FIELD.FIELD=VALUE", help="may be repeated")
    parser.add_argument("--dry-run", action="store_true", help="check all of it, print what would be done, and end")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    add_place_flags(parser)


def configuration(args: argparse.Namespace) -> RunConfig:
    given = {name: getattr(args, name) for name in ("data", "model", "output")}
    flags = given | {"mesh": None if args.mesh is None else mesh_of(args.mesh)}
    settings = [f"{name}={json.dumps(value)}" for name, value in flags.items() if value is not None]
    config = load_run_config(args.config, [*settings, *args.set])
    if missing := [name for name in given if not getattr(config, name)]:
        raise RunConfigError(f"{args.config} does not say {' and '.join(missing)}: give --{' --'.join(missing)}")
    return config


def run(args: argparse.Namespace, load: Callable[..., Model]) -> int:
    """-> 0; 143 or 130 after SIGTERM or SIGINT, with a checkpoint to go on from. load: `api.load`. Of several processes
    (`distributed.current`) all call this with one configuration, every field of it, paths as each host spells them too;
    the first one writes what is no array, and prints."""
    config, processes = configuration(args), current()
    processes.same("configuration", flat(config) | {"--dry-run": args.dry_run})
    output = Path(config.output)
    done = output / (MODEL if config.lora is None else ADAPTER)
    if done.exists():
        raise CheckpointError(output, [f"{done.name} is there: this run has ended; choose another output"])
    _check_writable(output)
    cfg = ModelConfig.from_file(config.model)  # rows are checked before the weights, which take longer, are read
    layout = None if config.mesh is None else layout_of(config.mesh)
    checked(cfg, config, jax.default_backend(), layout)
    check_processes(layout)
    processes.same("model", told_apart_by(Path(config.model)))
    processor = load_processor(config.model, cfg)
    train, held_out = _examples(config, cfg, processor)
    processes.same("data", {"data": train.digest, "held out": held_out.digest if held_out else None})
    if processes.first:
        print(statistics(train), file=sys.stderr)
    check_rows(config, cfg, layout, (train, held_out))
    model = _adapted(load(config.model, dtype=config.dtype, mesh=layout), config)
    if processes.first and (stages := stages_of(model.plan, layout, rows_of_a_pass(config, layout))):
        print(stages, file=sys.stderr)
    if args.dry_run:
        if processes.first:
            _describe(model, config, train, processor)
        return 0
    output.mkdir(parents=True, exist_ok=True)
    _check_shared(output, processes)
    trainer = Trainer(model, config, train, held_out)
    if processes.first:
        (output / "config.json").write_text(to_json(config), encoding="utf-8")
    if trainer.step and processes.first:
        print(f"goes on behind update {trainer.step} of {trainer.total}", file=sys.stderr)
    result = trainer.run(quiet=args.quiet)
    if result.signal is not None:
        return SIGNALLED + result.signal
    if config.lora is None:
        save_folder(done, result.model, beside=files_beside(config.model))
    else:
        export_adapter(done, result.model)
    if processes.first:
        picture(output)
        print(done)
    return 0


def told_apart_by(model: Path) -> dict[str, int]:
    """Of copies of a model on several hosts: its configuration's checksum, how many bytes each file of weights has."""
    weights = {file.name: file.stat().st_size for file in sorted(model.glob("*.safetensors"))}
    return {"crc32 of config.json": zlib.crc32((model / "config.json").read_bytes())} | weights


def _check_shared(output: Path, processes: Processes) -> None:
    """CheckpointError where a process does not see what the first one writes into the output."""
    if processes.count == 1:
        return
    mark = output / f".seen-{processes.gather('mark of the output', os.getpid())[0]}"
    if processes.first:
        mark.touch()
    who = blind(mark)
    if processes.first:
        mark.unlink()
    if who:
        raise CheckpointError(output, [f"{one} does not see what process 0 writes here: share a disk" for one in who])


def _check_writable(output: Path) -> None:
    """CheckpointError where the output cannot be made: found before anything is read."""
    there = next(path for path in (output.absolute(), *output.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise CheckpointError(output, [f"cannot be written: {there} is no folder that this user may write"])


def _examples(config: RunConfig, model: ModelConfig, processor: Processor) -> tuple[Examples, Examples | None]:
    def build(rows: Any) -> Examples:
        return build_examples(rows, processor, model, config.examples)

    rows = read_rows(config.data)
    if config.eval_data is not None:
        return build(rows), build(read_rows(config.eval_data))
    if not config.eval_rows:
        return build(rows), None
    if config.eval_rows >= len(rows):
        raise DataError(config.data, [f"eval_rows = {config.eval_rows} of {len(rows)} rows leaves none to train on"])
    return build(rows[: -config.eval_rows]), build(rows[-config.eval_rows :])


def _adapted(model: Model, config: RunConfig) -> Model:
    if config.lora is not None:
        try:
            return add_lora(model, config.lora, jax.random.key(config.seed))
        except ValueError as error:
            raise RunConfigError(f"lora, on {config.model}: {error}") from None
    return model


def _describe(model: Model, config: RunConfig, train: Examples, processor: Processor) -> None:
    """What the run would do, on standard output: configuration, parameters and bytes, the first examples."""
    print(to_json(config), end="")
    if model.layout is not None:
        print(_over(model.layout))
    trainable, frozen = (jax.tree.leaves(part) for part in partition(model, trainable=_what(config)))
    held = {"trainable": trainable, "frozen": frozen, "optimizer (two moments)": [*trainable, *trainable]}
    for name, arrays in held.items():
        line = f"{name:24} {sum(a.size for a in arrays):16,} numbers {sum(a.nbytes for a in arrays):16,} bytes"
        print(line if model.layout is None else f"{line} {bytes_on_a_device(arrays):16,} on a device")
    if config.lora is None:
        for group, count in _sizes(model).items():
            print(f"of {group:21} {count:16,} numbers")
    else:
        for group, (matrices, parameters) in count_by_group(model).items():
            print(f"adapters on {group:16} {matrices:10,} matrices {parameters:12,} parameters")
    rows = rows_of_a_pass(config, model.layout)
    updates = count_updates(config, train, rows)
    print(f"{updates:,} updates of {rows * config.train.accumulate:,} rows, {len(train.items):,} examples")
    for example in train.items[:SHOWN]:
        print(f"\n--- line {example.line}: {int(example.mask.sum()):,} of {len(example.ids):,} tokens supervised")
        print(decode_marked(example, processor.tokenizer))


def _over(layout: Layout) -> str:
    """Axes, and what is set of the rest."""
    axes = " x ".join(f"{axis} {size}" for axis, size in layout.mesh.shape.items() if size > 1)
    rest = [field for field in dataclasses.fields(layout) if field.name not in ("mesh", "rules")]
    given = [f"{f.name} {getattr(layout, f.name)}" for f in rest if getattr(layout, f.name) != f.default]
    return ", ".join([f"over {axes or 'no axis'}: {layout.mesh.size:,} device(s)", *given])


def _sizes(model: Model) -> Counter[str]:
    """Numbers by group of matrices; what is in none of them together."""
    counts: Counter[str] = Counter()
    for place in places(model)[0]:
        counts[place.group or "all else"] += round(place.share * place.leaf.size)
    return counts


def _what(config: RunConfig) -> Any:
    return "all" if config.lora is None else "lora"
