"""`python -m trillion_moe.bench [--only train|decode|grouped ...] [--output FILE]`: measure, print, and write JSON."""

import argparse
import json
import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

PARTS = ("grouped", "model")


def main() -> int:
    parser = argparse.ArgumentParser(prog="trillion_moe.bench", description=__doc__)
    parser.add_argument("--only", choices=PARTS, action="append", help="a part; may be repeated; all by default")
    parser.add_argument("--rounds", type=int, default=5, help="timed calls of each rival")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    args = parser.parse_args()
    results: dict[str, Any] = {"machine": _machine()}
    for part in args.only or PARTS:
        results[part] = _PARTS[part](args.rounds)
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(results, indent=1) + "\n")
        print(f"written to {args.output}")
    return 0


def _machine() -> dict[str, Any]:
    packages = ("trillion-moe", "jax", "jaxlib", "flax", "numpy", "torch", "transformers")
    return {
        "cores": os.cpu_count(),
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in packages},
    }


def _grouped(rounds: int) -> list[dict[str, Any]]:
    from trillion_moe.bench import grouped

    rows = grouped.measure(rounds)
    print("grouped matmul, R=4096, K=N=512, float32; time over one dense matmul of the same FLOPs")
    for row in rows:
        ragged = f"  ragged_dot / ours {row['ragged_dot_over_ours']:5.1f}" if "ragged_dot_over_ours" in row else ""
        print(
            f"  E={row['experts']:<3} {row['sizes']:9} {row['what']:16} {row['time_over_dense']:5.2f}{ragged}",
            flush=True,
        )
    return rows


def _model(rounds: int) -> dict[str, Any]:
    from trillion_moe.bench import model

    results = model.measure(rounds)
    for part in results.values():
        faster = part["faster"]
        print(part["what"])
        print(
            f"  transformers {part['transformers']['median_ms']:8.1f} ms   ours {part['ours']['median_ms']:8.1f} ms (medians)"
        )
        print(
            f"  faster by {faster['of_medians']:.2f} (medians), {faster['of_minima']:.2f} (minima); compile {part['compile_s']:.1f} s"
        )
    train, decode = results["train"], results["decode"]
    print(
        f"  training uses {train['share_of_gemm_rate']:.0%} of the {train['gemm_gflops']:.0f} GFLOP/s a matmul reaches here;",
        end=" ",
    )
    print(f"losses {train['loss']['ours']:.5f} / {train['loss']['transformers']:.5f}")
    print(
        f"  decoding {decode['tokens_per_s']['ours']:.0f} tokens/s; equal tokens in {decode['rows_with_equal_tokens']} rows"
    )
    return results


_PARTS = {"grouped": _grouped, "model": _model}

if __name__ == "__main__":
    sys.exit(main())
