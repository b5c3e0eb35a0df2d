"""`python -m trillion_moe.bench [--only PART] [--output FILE]`: measure, print, and write JSON."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from trillion_moe.bench.machine import machine

PARTS = ("grouped", "model", "lora")
APART = ("kda",)  # has an environment of its own: make bench-kda


def main() -> int:
    parser = argparse.ArgumentParser(prog="trillion_moe.bench", description=__doc__)
    legal, default = (*PARTS, *APART), ", ".join(PARTS)
    parser.add_argument("--only", choices=legal, action="append", help=f"may be repeated; by default {default}")
    parser.add_argument("--rounds", type=int, default=5, help="timed calls of each rival")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    args = parser.parse_args()
    results: dict[str, Any] = {"machine": machine()}
    for part in args.only or PARTS:
        results[part] = _PARTS[part](args.rounds)
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(results, indent=1) + "\n")
        print(f"written to {args.output}")
    return 0


def _print_faster(part: dict[str, Any]) -> None:
    faster = part["faster"]
    print(f"  faster {faster['of_medians']:.2f}x by medians, {faster['of_minima']:.2f}x by minima", end="; ")
    print(f"compiled in {part['compile_s']:.1f} s")


def _grouped(rounds: int) -> list[dict[str, Any]]:
    from trillion_moe.bench import grouped

    rows = grouped.measure(rounds)
    print("grouped matmul, R=4096, K=N=512, float32; time over one dense matmul of the same FLOPs")
    for row in rows:
        ragged = f"  ragged_dot / ours {row['ragged_dot_over_ours']:5.1f}" if "ragged_dot_over_ours" in row else ""
        print(
            f"  E={row['experts']:<3} {row['sizes']:9} {row['what']:16} {row['time_over_dense']:5.2f} "
            f"peak {row['peak_mb']['ours']:4.0f} MB, dense {row['peak_mb']['dense']:4.0f}{ragged}",
            flush=True,
        )
    return rows


def _model(rounds: int) -> dict[str, Any]:
    from trillion_moe.bench import model

    results = model.measure(rounds)
    for part in results.values():
        theirs, ours = part["transformers"], part["ours"]
        print(f"{part['what']}: medians {theirs['median_ms']:.0f} ms transformers, {ours['median_ms']:.0f} ms ours")
        _print_faster(part)
    train, decode = results["train"], results["decode"]
    print(f"training at {train['share_of_gemm_rate']:.0%} of the {train['gemm_gflops']:.0f} GFLOP/s of one matmul")
    print(f"  losses {train['loss']['ours']:.5f} ours, {train['loss']['transformers']:.5f} transformers")
    speed = decode["tokens_per_s"]
    print(f"decoding {speed['ours']:.0f} tokens/s ours, {speed['transformers']:.0f} transformers")
    print(f"  equal tokens in {decode['rows_with_equal_tokens']} rows")
    return results


def _lora(rounds: int) -> dict[str, Any]:
    from trillion_moe.bench import lora

    results = lora.measure(rounds)
    for part in results.values():
        speed, losses = part["tokens_per_s"], part["losses"]
        print(f"{part['what']}: {speed['ours']:.0f} tokens/s ours, {speed['PEFT']:.0f} transformers + PEFT")
        _print_faster(part)
        first, last = ([losses[name][at] for name in ("ours", "PEFT")] for at in (0, -1))
        print(f"  losses of the first update {first[0]:.5f} ours, {first[1]:.5f} theirs; of the last ", end="")
        print(f"{last[0]:.5f} and {last[1]:.5f}", flush=True)
    return results


def _kda(rounds: int) -> dict[str, Any]:
    from trillion_moe.bench import kda

    results = kda.measure(rounds)
    print(f"KDA, 8 heads x 2,048 x 128, float32, jax {results['jax']}; over tokamax {results['tokamax']} xla_chunked")
    for what in ("forward", "forward and gradients"):
        part = results[what]
        over, peak = part["time_over_tokamax"], part["peak_mb"]
        print(f"  {what}: {over['of_medians']:.2f} of its time by medians, {over['of_minima']:.2f} by minima; ", end="")
        print(f"peak {peak['ours']:.0f} MB, {peak['tokamax']:.0f} theirs", flush=True)
    print(f"  outputs differ by {results['difference']:.1e} of the largest", end="")
    print(f", gradients by {results['gradients_difference']:.1e}")
    return results


_PARTS = {"grouped": _grouped, "model": _model, "lora": _lora, "kda": _kda}

if __name__ == "__main__":
    sys.exit(main())
