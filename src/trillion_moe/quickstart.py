"""Real digits through every part of a tiny Kimi K3: train, pack to 4 bits, save, load, generate, adapt.

    python -m trillion_moe.quickstart [--output runs/quickstart] [--seed 0]

scikit-learn's 1,797 handwritten digits (8 x 8 pixels) become patches for the vision tower; the model answers "which
digit?" in letters. It is saved in Kimi K3's Hugging Face layout with MXFP4 experts, and that folder is loaded again;
two adapters then learn, over the packed experts, to answer in German. Prints a table, writes quickstart.png beside
the checkpoint, and exits with 1 if an accuracy falls short.
"""

import argparse
import shutil
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import trillion_moe as tm
from trillion_moe.blueprint import init
from trillion_moe.configs.quickstart import ASK, BOS, EOS, LETTERS, MEDIA, PAD, config
from trillion_moe.model import depth_plan
from trillion_moe.steps import train_step

ENGLISH = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
GERMAN = ["null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun"]
BATCH, NEEDED_BASE, NEEDED_ADAPTER = 64, 0.90, 0.85


@dataclass(frozen=True)
class Digits:
    """pixels [N, 8, 8] in 0..16, labels [N]."""

    pixels: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows) -> "Digits":
        return Digits(self.pixels[rows], self.labels[rows])

    def images(self) -> tm.ImageBatch:
        """Each pixel 3 x 3 times in a margin of 2: 28 x 28 gray in -1..1, in 2 x 2 patches of three equal channels."""
        big = np.kron(self.pixels / 8 - 1, np.ones((3, 3)))
        big = np.pad(big, ((0, 0), (2, 2), (2, 2)), constant_values=-1).astype(np.float32)
        patches = big.reshape(-1, 2, 14, 2, 14).swapaxes(2, 3).reshape(-1, 1, 14, 14)
        return tm.ImageBatch(np.repeat(patches, 3, axis=1), ((1, 2, 2),) * len(self))

    def batch(self, words: list[str]) -> dict:
        """Prompts with their answers, only the answers supervised."""
        rows = [[*PROMPT, *spell(words[label])] for label in self.labels]
        width = max(map(len, GERMAN + ENGLISH)) + 1 + len(PROMPT)
        tokens = np.array([row + [PAD] * (width - len(row)) for row in rows], np.int32)
        segments = np.array([[1] * len(row) + [0] * (width - len(row)) for row in rows], np.int32)
        mask = np.broadcast_to(np.arange(width) >= len(PROMPT), tokens.shape)
        return {"tokens": tokens, "segments": segments, "loss_mask": mask, "images": self.images()}


PROMPT = [BOS, MEDIA, ASK]  # one token an image: 2 x 2 patches, merged


def spell(word: str) -> list[int]:
    return [*(5 + LETTERS.index(letter) for letter in word), EOS]


def unspell(ids: tuple[int, ...]) -> str:
    return "".join(LETTERS[i - 5] if 5 <= i < 5 + len(LETTERS) else "?" for i in ids if i != EOS)


def digits() -> tuple[Digits, Digits]:
    """1,437 to train on and 360 held out, in a fixed order."""
    from sklearn.datasets import load_digits

    data: Any = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    everything = Digits(data.images[order], data.target[order])
    return everything[:1437], everything[1437:]


def train(model, trainable, data: Digits, words: list[str], *, steps: int, rate: float, seed: int):
    """AdamW with warm-up and cosine decay over shuffled batches -> model, losses."""
    trained, frozen = tm.partition(model, trainable=trainable)
    optimizer = optax.adamw(
        optax.warmup_cosine_decay_schedule(0, rate, steps // 10, steps, rate / 20), weight_decay=0.01
    )
    optimizer = optax.flatten(optax.chain(optax.clip_by_global_norm(1.0), optimizer))  # one kernel, not one a leaf
    state, losses = optimizer.init(trained), []
    step = jax.jit(partial(train_step, optimizer, remat=False), donate_argnums=(0, 2))
    random = np.random.default_rng(seed)
    for _ in range(steps):
        batch = data[random.choice(len(data), BATCH, replace=False)].batch(words)
        trained, state, metrics = step(trained, frozen, state, batch)
        losses.append(metrics["loss"])
    return tm.combine(trained, frozen), np.array(losses)


def answers(model, data: Digits) -> list[str]:
    return [unspell(c.ids) for c in tm.generate(model, [PROMPT] * len(data), images=data.images(), max_new_tokens=8)]


def accuracy(given: list[str], data: Digits, words: list[str]) -> float:
    return float(np.mean([answer == words[label] for answer, label in zip(given, data.labels, strict=True)]))


def expert_bytes(model) -> int:
    return sum(
        leaf.nbytes
        for leaf in jax.tree.leaves([b.ffn.experts for s in model.segments for b in s if b.kind.ffn == "moe"])
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    began = time.perf_counter()
    folder = args.output / "quickstart-checkpoint"
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier run; saving never overwrites
    seen, held_out = digits()
    rows, curves = [], {}

    def report(name: str, given: list[str], words: list[str], needed: float, seconds: float) -> None:
        rows.append((name, accuracy(given, held_out, words), needed, seconds))
        print(
            f"{name:40} {rows[-1][1]:7.1%} of {len(held_out)} held-out digits (needed {needed:.0%})  {seconds:5.1f} s",
            flush=True,
        )

    start = time.perf_counter()
    model = init(tm.Model(config(), plan=depth_plan(config(), scan=True)), jax.random.key(args.seed))
    model, curves["base"] = train(model, "all", seen, ENGLISH, steps=200, rate=4e-3, seed=args.seed)
    tm.save(folder, tm.quantize_experts(model))
    packed = tm.load(folder, scan=True)
    given = answers(packed, held_out)
    report("base, saved and loaded with MXFP4 experts", given, ENGLISH, NEEDED_BASE, time.perf_counter() - start)
    print(f"  routed experts: {expert_bytes(model):,} bytes in float32, {expert_bytes(packed):,} packed")

    experts = tm.LoRAConfig(targets=("routed_experts",), routed="independent", rank=16, alpha=32.0)
    for what, lora, steps in (("default targets", tm.LoRAConfig(), 100), ("routed experts only", experts, 200)):
        name = f"LoRA to German, {what}"
        start = time.perf_counter()
        adapted = tm.add_lora(packed, lora, jax.random.key(args.seed + 1))
        adapted, curves[name] = train(adapted, "lora", seen, GERMAN, steps=steps, rate=1e-2, seed=args.seed + 1)
        german = answers(adapted, held_out)
        report(name, german, GERMAN, NEEDED_ADAPTER, time.perf_counter() - start)
        if answers(tm.remove_lora(adapted), held_out) != given:
            raise RuntimeError("without its adapter the model no longer answers as its base")

    picture(args.output / "quickstart.png", rows, curves, held_out, given, german)
    print(f"checkpoint and picture in {args.output}, {time.perf_counter() - began:.0f} s in all")
    short = [name for name, reached, needed, _ in rows if reached < needed]
    if short:
        print(f"accuracy too low: {', '.join(short)}", file=sys.stderr)
    return 1 if short else 0


def picture(path: Path, rows, curves, data: Digits, english: list[str], german: list[str]) -> None:
    """Loss curves, accuracies, and sample digits with the answers of the base and of the last adapter."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(12, 7), layout="constrained")
    parts: Any = figure.subfigures(2, 1, height_ratios=(3, 2))
    top, bottom = parts
    curves_at, bars_at = top.subplots(1, 2)
    for name, losses in curves.items():
        curves_at.plot(losses, label=name)
    curves_at.set(xlabel="step", ylabel="loss (nats per letter)", yscale="log")
    curves_at.legend(fontsize=8)
    bars_at.barh([row[0] for row in rows], [row[1] for row in rows], color="tab:green")
    for at, row in enumerate(rows):
        bars_at.plot([row[2]] * 2, [at - 0.4, at + 0.4], color="black")
        bars_at.text(0.02, at, f"{row[1]:.1%}", va="center", color="white")
    bars_at.set(xlim=(0, 1), xlabel="held-out accuracy (line: needed)")
    bars_at.invert_yaxis()
    for at, axes in enumerate(bottom.subplots(2, 8).flat):
        axes.imshow(data.pixels[at], cmap="gray_r")
        axes.set_title(f"{english[at]} / {german[at]}", fontsize=8)
        axes.axis("off")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main())
