"""`trillion-moe data`: what a file of conversations becomes, in figures and as text; bad rows by line and field."""

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from trillion_moe.config import ModelConfig
from trillion_moe.data.build import build_examples
from trillion_moe.data.chat import EFFORTS
from trillion_moe.data.examples import ON_BAD, SUPERVISE, TOO_LONG, DataConfig, Example, Examples
from trillion_moe.data.processor import load_processor
from trillion_moe.data.report import decode_marked, statistics
from trillion_moe.data.rows import SHOWN, DataError, read_rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", nargs="?", type=Path, metavar="FILE.jsonl", help="messages, prompt and completion, or ShareGPT"
    )
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="its config.json and tokenizer")
    rows = parser.add_argument_group("how rows become examples")
    rows.add_argument("--supervise", choices=SUPERVISE, default="assistant", help="what the loss counts")
    rows.add_argument("--max-length", type=int, metavar="TOKENS", help="no limit by default")
    rows.add_argument("--too-long", choices=TOO_LONG, default="refuse", help="rows above --max-length")
    rows.add_argument("--on-bad", choices=ON_BAD, default="refuse", help="rows that cannot be trained on")
    rows.add_argument("--raw", action="store_true", help="prompt and completion as they are, without the chat format")
    rows.add_argument("--no-thinking", action="store_true", help="turns without a thinking channel")
    rows.add_argument("--effort", choices=EFFORTS, default="default", help="how much to think, as the prompt says it")
    rows.add_argument("--ignore", action="append", default=[], metavar="KEY", help="of rows; may be repeated")
    out = parser.add_argument_group("what is printed")
    out.add_argument("--rows", type=int, default=3, metavar="N", help="examples as text, the first ones; 3 by default")
    out.add_argument("--json", action="store_true", help="print one JSON object")


def check_plain(args: argparse.Namespace) -> None:
    """DataError if a flag says how rows become examples, where a configuration says it."""
    plain = argparse.ArgumentParser()
    add_arguments(plain)
    for name in ("supervise", "max_length", "too_long", "on_bad", "raw", "no_thinking", "effort"):
        if getattr(args, name) != plain.get_default(name):
            raise DataError(
                f"--{name.replace('_', '-')}", ["has no effect with --config: use --set examples.FIELD=VALUE"]
            )


def run(args: argparse.Namespace, config: DataConfig | None = None) -> int:
    """Statistics and decoded rows on standard output, dropped rows on standard error. DataError as `build_examples`.

    config: in place of the flags that say how rows become examples.
    """
    if args.file is None or args.model is None:
        raise DataError("FILE.jsonl and --model", ["are needed, or --config"])
    config = _config(args) if config is None else config
    rows = read_rows(args.file, ignore=args.ignore)
    model = ModelConfig.from_file(args.model)
    processor = load_processor(args.model, model)
    examples = build_examples(rows, processor, model, config)
    shown = [
        _described(example, decode_marked(example, processor.tokenizer)) for example in examples.items[: args.rows]
    ]
    if args.json:
        dropped = [{"line": line, "reason": bad.reason, "what": str(bad)} for line, bad in examples.dropped]
        figures = dataclasses.asdict(statistics(examples))
        print(json.dumps({"statistics": figures, "dropped": dropped, "examples": shown}, ensure_ascii=False, indent=2))
        return 0
    _print_dropped(examples)
    print(statistics(examples))
    for one in shown:
        print(f"\n--- line {one['line']}: {one['supervised']:,} of {one['tokens']:,} tokens supervised")
        print(one["text"])
    return 0


def _config(args: argparse.Namespace) -> DataConfig:
    if args.rows < 0:
        raise DataError("--rows", [f"{args.rows} is below 0"])
    if args.no_thinking and args.effort != "default":
        raise DataError("--effort", ["it has no effect with --no-thinking"])
    names = ("supervise", "max_length", "too_long", "on_bad", "raw", "effort")
    return DataConfig(thinking=not args.no_thinking, **{name: getattr(args, name) for name in names})


def _described(example: Example, text: str) -> dict[str, Any]:
    return {
        "line": example.line,
        "tokens": len(example.ids),
        "supervised": int(example.mask.sum()),
        "text": text,
    }


def _print_dropped(examples: Examples) -> None:
    for line, bad in examples.dropped[:SHOWN]:
        print(f"{examples.path}: dropped line {line}, {bad}", file=sys.stderr)
    if len(examples.dropped) > SHOWN:
        print(f"{examples.path}: ... and {len(examples.dropped) - SHOWN} more dropped", file=sys.stderr)
