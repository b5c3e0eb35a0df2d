"""`trillion-moe verify`: the table as it is measured, and the file that `train` and `generate` hold to."""

import argparse
import sys
from pathlib import Path

from trillion_moe.stamp import check_output
from trillion_moe.verify import DTYPES, MEMORY, verify
from trillion_moe.verify.cases import LARGEST
from trillion_moe.verify.report import HEAD, KEY, VERDICTS, Row, line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config", type=Path, metavar="FOLDER | config.json", help="of a checkpoint; no weights are read"
    )
    parser.add_argument("--dtype", action="append", choices=DTYPES, help="may be repeated; both by default")
    parser.add_argument("--operator", action="append", metavar="NAME", help="only this one; may be repeated")
    parser.add_argument("--tokens", type=int, default=LARGEST.tokens, help=f"of a case; {LARGEST.tokens} by default")
    parser.add_argument(
        "--memory",
        type=int,
        default=MEMORY,
        metavar="BYTES",
        help="of a case's inputs and gradients in float64: widths are the model's, but a case has no more than "
        f"{LARGEST.experts} experts, {LARGEST.heads} heads and {LARGEST.vocab:,} words, and fewer, and fewer tokens, "
        f"where they do not fit; {MEMORY:,} by default, the peak is about three times that",
    )
    parser.epilog = (
        "error: relative RMS against float64 of the worst array, output or gradient, of the worst case; time: the best "
        "of three runs of the realistic cases, values and gradients. A model's widths decide how long it takes: "
        "seconds an operator for a tiny model, minutes for all of a large one. Exit code 1: an operator has no "
        "implementation that passed."
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found, for --operators")


def run(args: argparse.Namespace) -> int:
    """-> 1 if an operator has no passing implementation in a dtype that was asked for, else 0."""
    if args.json is not None:
        check_output(args.json, KEY)
    print(HEAD)
    report = verify(
        args.config,
        dtypes=args.dtype or DTYPES,
        tokens=args.tokens,
        operators=args.operator,
        memory=args.memory,
        on_row=_show,
    )
    stamp = report.stamp
    print(f"on {stamp.count} x {stamp.device} ({stamp.platform}), jax {stamp.versions['jax']}")
    if args.json is not None:
        report.write(args.json)
    counts = [(verdict, sum(row.verdict == verdict for row in report.operators)) for verdict in VERDICTS]
    print(", ".join(f"{count} {verdict}" for verdict, count in counts))
    for name in report.failed:
        print(f"trillion-moe verify: no implementation of {name} passed", file=sys.stderr)
    return 1 if report.failed else 0


def _show(row: Row) -> None:
    print(line(row), flush=True)
