"""Every feature on every mesh beside one device: what the tests have a part of, whole, for docs/proof/meshes.json.

python -m tests.prove_meshes [--mesh "pp2 ep2" ...] [--feature NAME ...] [--json docs/proof/meshes.json]

In float64 on eight virtual CPU devices. Every combination is of two batches whose gradients are added up as the trainer
does. Exit code 1 if any differs by more than the bars, is refused without being listed in `REFUSED`, or is listed there
and is not refused; all others are still tried.
"""

import argparse
import dataclasses
import gc
import math
import os
import re
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from tests import mesh_tools
from tests.mesh_tools import GRADIENT_BAR, LOSS_BAR, WITHIN

from trillion_moe.sharding import AXES, Layout, LayoutError
from trillion_moe.stamp import OutputError, Stamp, check_output, write_report

FEATURES = (
    "all weights", "stacked", "nothing recomputed", "balanced", "adapters", "some experts", "pictures", "kimi linear",
)  # fmt: skip
FORMAT, KEY = 1, "meshes beside one device"

RAGGED, FIXED = {"transport": "ragged"}, {"transport": "all_to_all"}
TIERS = {"transport": "hierarchical", "node": 2}
MESHES: list[tuple[Mapping[str, int], Mapping[str, Any]]] = [
    # each axis alone
    ({"pp": 4}, {}),
    ({"pp": 2}, {"virtual": 2}),
    ({"dp": 2}, {}),
    ({"fsdp": 4}, {"chunks": 2}),
    ({"ep": 8}, RAGGED),
    ({"ep": 8}, {"transport": "hierarchical", "node": 4, "chunks": 2}),
    ({"cp": 8}, {}),
    ({"tp": 4}, {}),
    # two
    ({"pp": 2, "dp": 2}, {"virtual": 2}),
    ({"pp": 2, "fsdp": 2}, {"schedule": "gpipe"}),
    ({"pp": 2, "ep": 2}, RAGGED),
    ({"pp": 2, "ep": 4}, TIERS),
    ({"pp": 2, "cp": 2}, {}),
    ({"pp": 4, "cp": 2}, {"microbatches": 8}),
    ({"pp": 2, "tp": 2}, {"microbatches": 4}),
    ({"dp": 2, "fsdp": 2}, {}),
    ({"dp": 2, "ep": 2}, {"chunks": 2} | FIXED),
    ({"dp": 2, "cp": 4}, {}),
    ({"dp": 2, "tp": 4}, {}),
    ({"fsdp": 2, "ep": 4}, FIXED),
    ({"fsdp": 2, "cp": 2}, {}),
    ({"fsdp": 4, "tp": 2}, WITHIN),
    ({"ep": 2, "cp": 4}, {"chunks": 2}),
    ({"ep": 4, "cp": 2}, RAGGED),
    ({"ep": 2, "tp": 2}, RAGGED),
    ({"ep": 4, "tp": 2}, {"chunks": 2} | TIERS | WITHIN),
    ({"ep": 4, "tp": 2}, FIXED | WITHIN),
    ({"ep": 2, "tp": 4}, {"chunks": 2} | WITHIN),
    ({"cp": 2, "tp": 4}, {}),
    # three
    ({"pp": 2, "dp": 2, "fsdp": 2}, {}),
    ({"pp": 2, "dp": 2, "ep": 2}, FIXED),
    ({"pp": 2, "dp": 2, "cp": 2}, {}),
    ({"pp": 2, "dp": 2, "tp": 2}, WITHIN),
    ({"pp": 2, "fsdp": 2, "ep": 2}, {"virtual": 2} | RAGGED),
    ({"pp": 2, "fsdp": 2, "cp": 2}, {}),
    ({"pp": 2, "fsdp": 2, "tp": 2}, {}),
    ({"pp": 2, "ep": 2, "cp": 2}, RAGGED),
    ({"pp": 2, "ep": 2, "tp": 2}, FIXED | WITHIN),
    ({"pp": 2, "cp": 2, "tp": 2}, {"schedule": "gpipe"}),
    ({"dp": 2, "fsdp": 2, "ep": 2}, {"chunks": 4} | RAGGED),
    ({"dp": 2, "fsdp": 2, "cp": 2}, {}),
    ({"dp": 2, "fsdp": 2, "tp": 2}, {}),
    ({"dp": 2, "ep": 2, "cp": 2}, FIXED),
    ({"dp": 2, "ep": 2, "tp": 2}, RAGGED | WITHIN),
    ({"dp": 2, "cp": 2, "tp": 2}, {}),
    ({"fsdp": 2, "ep": 2, "cp": 2}, RAGGED),
    ({"fsdp": 2, "ep": 2, "tp": 2}, {"chunks": 3} | RAGGED),
    ({"fsdp": 2, "cp": 2, "tp": 2}, WITHIN),
    ({"ep": 2, "cp": 2, "tp": 2}, {"chunks": 2} | FIXED | WITHIN),
]
"""Sizes of mesh axes and options of the layout: every choice of up to three axes, and all that the tests have."""

REFUSED: dict[tuple[str, str], str] = {
    ("adapters", "ep2 tp4"): r"experts\..*\.scale has 2 along 'expert_mlp', not a multiple of 4 \(tp\); legal are 1, 2",
}
"""Feature and mesh that do not go together, and what says so (a regular expression): packed experts of 64 are two
groups of 32 that share a scale, which are not cut."""


def label(sizes: Mapping[str, int]) -> str:
    """As `--mesh` takes it: "pp2 ep2 tp2"."""
    return " ".join(f"{axis}{sizes[axis]}" for axis in AXES if axis in sizes)


def features_of(sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Over stages layers are recomputed whatever is said."""
    return tuple(f for f in FEATURES if not ("pp" in sizes and f == "nothing recomputed"))


def tried(sizes: Mapping[str, int], options: Mapping[str, Any], feature: str) -> dict[str, Any]:
    """What one combination came to: its differences, "refused" with the sentence, or "error"."""
    name, expected = f"{feature}, deep" if "pp" in sizes else feature, REFUSED.get((feature, label(sizes)))
    one = mesh_tools.one_device(name, passes=2)
    try:
        layout = Layout.make(sizes, **options)
        found = mesh_tools.differences(mesh_tools.gradients(name, layout, passes=2), one, layout)
    except LayoutError as error:
        meant = expected is not None and re.search(expected, str(error))
        return {"refused" if meant else "error": str(error)}
    except Exception as error:  # the others are still tried
        return {"error": f"{type(error).__name__}: {error}"}
    numbers = {"loss": _json(found.loss), "gradient": _json(found.gradient), "parameter": found.parameter}
    if expected is not None:
        return numbers | {"error": f"was to be refused: {expected}"}
    return numbers if found.small else numbers | {"error": "differs from one device"}


def _json(x: float) -> float | str:
    return x if math.isfinite(x) else str(x)


def prove(meshes: Sequence[str], features: Sequence[str]) -> list[dict[str, Any]]:
    """A row for every combination, printed as it is found."""
    rows = []
    for sizes, options in MESHES:
        if label(sizes) not in meshes:
            continue
        for feature in features_of(sizes):
            if feature in features:
                began = time.perf_counter()
                row = {"mesh": label(sizes), "options": dict(options), "feature": feature}
                row |= tried(sizes, options, feature) | {"seconds": round(time.perf_counter() - began, 1)}
                print(_line(row), flush=True)
                rows.append(row)
                if not ("pp" in sizes and feature == "all weights"):  # the next, stacked, is the same program there
                    _forget()
    return rows


def _forget() -> None:
    """What was compiled: kept, the programs of a few meshes exhaust the process's mappings."""
    jax.clear_caches()
    gc.collect()


def _line(row: Mapping[str, Any]) -> str:
    head = f"{row['mesh']:12} {_told(row['options']):36} {row['feature']:18} {row['seconds']:5.1f} s  "
    if "error" in row:
        head += f"FAILED: {row['error']}  "
    if "refused" in row:
        head += f"refused: {row['refused']}"
    if "gradient" in row:
        head += f"loss {float(row['loss']):.0e}, {float(row['gradient']):.0e} of {row['parameter']}"
    return head


def _told(options: Mapping[str, Any]) -> str:
    return " ".join("within" if key == "rules" else str(value) for key, value in options.items())


def main(given: Sequence[str] | None = None) -> int:
    labels = list(dict.fromkeys(label(sizes) for sizes, _ in MESHES))
    parser = argparse.ArgumentParser(prog="tests.prove_meshes", description=__doc__.splitlines()[0])
    parser.add_argument("--mesh", choices=labels, action="append", help="may be repeated; all by default")
    parser.add_argument("--feature", choices=FEATURES, action="append", help="may be repeated; all by default")
    parser.add_argument("--json", type=Path, help="write the rows, with versions, to this file")
    args = parser.parse_args(given)
    if args.json and (args.mesh or args.feature):
        parser.error("--json is of all combinations: without --mesh and --feature")
    try:
        if args.json:
            check_output(args.json, KEY)
    except OutputError as error:
        parser.error(str(error))
    began = time.perf_counter()
    rows = prove(args.mesh or labels, args.feature or FEATURES)
    seconds, failed = round(time.perf_counter() - began), sum("error" in row for row in rows)
    refused = sum("refused" in row for row in rows)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(f"{len(rows)} combinations: {failed} failed, {refused} refused as meant; {seconds} s, at most {peak} MB")
    if args.json:
        head = {
            KEY: FORMAT,
            "stamp": dataclasses.asdict(Stamp.here()),
            "bars": {"loss": LOSS_BAR, "gradient": GRADIENT_BAR},
        }
        write_report(args.json, head | {"failed": failed, "seconds": seconds, "peak_mb": peak, "rows": rows})
    return int(failed > 0 or not rows)


if __name__ == "__main__":
    # As in conftest: programs are run once or twice. Emitters of fusions would take two thirds of the compiler's time.
    os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_enable_compilation_cache", False)
    sys.exit(main())
