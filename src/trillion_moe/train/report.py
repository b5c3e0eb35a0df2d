"""What a run shows: a progress bar, metrics as JSON lines and for TensorBoard, and pictures when it ends."""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from trillion_moe.checkpoint.errors import CheckpointError

METRICS, EVENTS = "metrics.jsonl", "tensorboard"
SHOWN = ("loss", "lr", "grad_norm", "tokens_per_s", "expert_load")  # by the bar, which adds memory and time left
Line = Mapping[str, Any]


class Report:
    """Metrics of a run in its output folder, on from update `start`: lines of later updates, which a killed run left
    behind, are taken away first. dropped: rows that the run does without."""

    def __init__(self, output: Path, *, start: int, total: int, dropped: int = 0, quiet: bool = False):
        from tensorboardX import SummaryWriter
        from tqdm import tqdm

        output.mkdir(parents=True, exist_ok=True)
        self.path = output / METRICS
        kept = [line for line in read(self.path) if line["step"] <= start]
        new = self.path.with_suffix(".new")  # a kill leaves the old file or the new one
        new.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        os.replace(new, self.path)
        self._dropped = dropped
        self._file = self.path.open("a", encoding="utf-8")
        self._board = SummaryWriter(str(output / EVENTS), purge_step=start + 1)
        self._bar = tqdm(total=total, initial=start, unit="update", disable=quiet, file=sys.stderr)

    def line(self, kind: str, step: int, values: Mapping[str, Any], expert_counts: Any = None) -> None:
        """kind: "train" or "eval"; values: numbers. expert_counts: [MoE layers, E], tokens that experts were given;
        `expert_load` is added to the values."""
        values = {name: float(value) for name, value in values.items()}
        row = {"kind": kind, "step": step} | values
        if expert_counts is not None:
            values["expert_load"] = row["expert_load"] = expert_load(expert_counts)
            row["expert_counts"] = np.asarray(expert_counts).tolist()
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        for name, value in values.items():
            self._board.add_scalar(f"{kind}/{name}", value, step)
        if kind == "train":
            shown = {name: f"{values[name]:.4g}" for name in SHOWN if name in values}
            shown |= {"memory": f"{memory() / 1e9:.1f}GB"} | ({"dropped_rows": self._dropped} if self._dropped else {})
            self._bar.set_postfix(shown, refresh=False)
            self._bar.update(step - self._bar.n)
        else:
            self.say(f"update {step}: evaluation loss {values['loss']:.4f}")

    def say(self, text: str) -> None:
        self._bar.write(text, file=sys.stderr)

    def close(self) -> None:
        self._bar.close()
        self._board.close()
        self._file.close()


class NoReport:
    """Of a process that leaves reporting to the first one."""

    def line(self, kind: str, step: int, values: Mapping[str, Any], expert_counts: Any = None) -> None: ...

    def say(self, text: str) -> None: ...

    def close(self) -> None: ...


def expert_load(counts: Any) -> float:
    """What the busiest expert of any layer is given, in equal shares: 1 = all alike, E = one is given everything."""
    counts = np.asarray(counts)
    return float((counts.max(axis=1) / counts.mean(axis=1)).max())


def memory() -> int:
    """Peak bytes in use: on the device where it says so, else of this process."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return int(stats["peak_bytes_in_use"])
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def read(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a metrics file; a last one that was cut off is left out. CheckpointError with the numbers
    of others that are none."""
    if not path.is_file():
        return []
    *complete, _ = path.read_bytes().split(b"\n")
    lines = [_line(text) for text in complete]
    if bad := [number for number, line in enumerate(lines, 1) if line is None]:
        raise CheckpointError(path, [f"line {number} is no line of metrics: take it out" for number in bad])
    return [line for line in lines if line is not None]


def _line(text: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) and "kind" in line and isinstance(line.get("step"), int) else None


def picture(output: Path) -> Path:
    """loss.png: training and evaluation loss; experts.png: tokens by layer and expert over the whole run."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    lines = read(output / METRICS)
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for kind in ("train", "eval"):
        mine = [line for line in lines if line["kind"] == kind]
        axes.plot(
            [line["step"] for line in mine],
            [line["loss"] for line in mine],
            label=kind,
            marker="." if kind == "eval" else "",
        )
    axes.set(xlabel="update", ylabel="loss (nats per supervised token)")
    axes.legend()
    figure.savefig(output / "loss.png", dpi=110)
    plt.close(figure)
    counts = [np.asarray(line["expert_counts"]) for line in lines if "expert_counts" in line]
    if counts:
        _heat_map(output / "experts.png", np.sum(counts, axis=0))
    return output / "loss.png"


def _heat_map(path: Path, counts: np.ndarray) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 1.5 + 0.25 * len(counts)), layout="constrained")
    shares = counts / counts.sum(axis=1, keepdims=True) * counts.shape[1]
    drawn = axes.imshow(shares, aspect="auto", cmap="viridis", vmin=0)
    axes.set(xlabel="expert", ylabel="MoE layer")
    figure.colorbar(drawn, label="tokens, 1 = an equal share")
    figure.savefig(path, dpi=110)
    plt.close(figure)
