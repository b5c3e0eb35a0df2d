"""Real digits through every part of a tiny Kimi K3: train, pack to 4 bits, save, load, ask, adapt.

    python -m trillion_moe.quickstart [--output runs/quickstart] [--seed 0]

scikit-learn's 1,797 handwritten digits (8 x 8 pixels) become pictures in a chat: "Which digit?", and the model answers
with a word. It is saved in Kimi K3's Hugging Face layout with MXFP4 experts and a tokenizer of its own, and that folder
is loaded again; two adapters then learn, over the packed experts, to answer in German. The first is exported as PEFT
reads it, loaded again, and merged into the weights: all three answer alike. Prints a table, writes quickstart.png, one
digit.png to ask about and chat.jsonl to tune on beside the checkpoint, and exits with 1 if an accuracy falls short.
"""

import argparse
import base64
import io
import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import PIL.Image

import trillion_moe as tm
from trillion_moe.blueprint import init
from trillion_moe.configs.quickstart import CONTROL, ENGLISH, GERMAN, QUESTION, TOKENS, config
from trillion_moe.data.chat import encode_each
from trillion_moe.data.images import preprocess_all
from trillion_moe.data.processor import Processor
from trillion_moe.data.tiktoken_model import write_tiktoken
from trillion_moe.layers.segments import depth_plan
from trillion_moe.steps import train_step

BATCH, NEEDED_BASE, NEEDED_ADAPTER = 64, 0.90, 0.85
LONGEST = 48  # tokens of a question with its answer
AT_ONCE = tm.ChatOptions(thinking=False)


@dataclass(frozen=True)
class Digits:
    """pixels [N, 8, 8] in 0..16, labels [N]."""

    pixels: np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows) -> "Digits":
        return Digits(self.pixels[rows], self.labels[rows])

    @cached_property
    def pictures(self) -> list[PIL.Image.Image]:
        """28 x 28 gray: every pixel 3 x 3 times, in a margin of 2."""
        big = np.kron(self.pixels * (255 / 16), np.ones((3, 3)))
        return [PIL.Image.fromarray(one) for one in np.pad(big, ((0, 0), (2, 2), (2, 2))).astype(np.uint8)]

    def conversations(self) -> list[list[dict[str, Any]]]:
        return [
            [{"role": "user", "content": [{"type": "image", "image": one}, {"type": "text", "text": QUESTION}]}]
            for one in self.pictures
        ]


@dataclass(frozen=True)
class Lessons:
    """Conversations with answers. tokens, segments, mask [10, T]: by digit, the mask true where the model speaks;
    patches [N, 4, 3, 14, 14], labels [N]: by picture."""

    tokens: np.ndarray
    segments: np.ndarray
    mask: np.ndarray
    patches: np.ndarray
    labels: np.ndarray

    @classmethod
    def of(cls, data: Digits, words: Sequence[str], processor: Processor) -> "Lessons":
        asked = data[:1].conversations()[0]
        options = tm.ChatOptions(thinking=False, add_generation_prompt=False)
        tokens, segments, mask = np.zeros((3, len(words), LONGEST), np.int32)
        for row, word in enumerate(words):
            answered = [*asked, {"role": "assistant", "content": word}]
            parts = processor.format.render(answered, options, [data.pictures[0].size])
            ids = encode_each(parts, processor.tokenizer)
            length = sum(map(len, ids))
            tokens[row, :length], segments[row, :length] = np.concatenate(ids), 1
            mask[row, :length] = np.repeat([part.generated for part in parts], list(map(len, ids)))
        patches = preprocess_all(data.pictures).patches
        return cls(tokens, segments, mask, patches.reshape(len(data), -1, *patches.shape[1:]), data.labels)

    def batch(self, rows: np.ndarray) -> dict[str, Any]:
        patches = self.patches[rows]
        images = tm.ImageBatch(patches.reshape(-1, *patches.shape[2:]), ((1, 2, 2),) * len(rows))
        labels = self.labels[rows]
        by_digit = {"tokens": self.tokens, "segments": self.segments, "loss_mask": self.mask}
        return {name: rows[labels] for name, rows in by_digit.items()} | {"images": images}


def digits() -> tuple[Digits, Digits]:
    """1,437 to train on and 360 held out, in a fixed order."""
    from sklearn.datasets import load_digits

    data: Any = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    everything = Digits(data.images[order], data.target[order])
    return everything[:1437], everything[1437:]


def train(model, trainable, lessons: Lessons, *, steps: int, rate: float, seed: int):
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
        batch = lessons.batch(random.choice(len(lessons.labels), BATCH, replace=False))
        trained, state, metrics = step(trained, frozen, state, batch)
        losses.append(metrics["loss"])
    return tm.combine(trained, frozen), np.array(losses)


def write_conversations(path: Path, data: Digits) -> None:
    """Pictures with their German names as `trillion-moe train` reads them."""
    rows = []
    for one, label in zip(data.pictures, data.labels, strict=True):
        file = io.BytesIO()
        one.save(file, "PNG")
        uri = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
        asked = [{"type": "image_url", "image_url": {"url": uri}}, {"type": "text", "text": QUESTION}]
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": GERMAN[label]}]
        rows.append(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
    path.write_text("".join(rows), encoding="utf-8")


def answers(model, processor: Processor, data: Digits) -> list[str]:
    done = tm.generate(model, data.conversations(), tokenizer=processor, chat=AT_ONCE, max_new_tokens=16)
    return [completion.text or "" for completion in done]


def accuracy(given: list[str], data: Digits, words: Sequence[str]) -> float:
    return float(np.mean([answer == words[label] for answer, label in zip(given, data.labels, strict=True)]))


def exchange(folder: Path, packed, adapted, given: list[str], answers_of: Callable[[Any], list[str]]) -> None:
    """Export the adapter, load it onto the packed base, merge it, save and load the merged model: the answers stay."""
    adapter, merged = folder / "quickstart-adapter", folder / "quickstart-merged"
    for old in (adapter, merged):
        shutil.rmtree(old, ignore_errors=True)  # of an earlier run; saving never overwrites
    tm.export_adapter(adapter, adapted)
    if answers_of(tm.load_adapter(packed, adapter)) != given:
        raise RuntimeError(f"{adapter}: exported and loaded again, the adapter answers otherwise")
    tm.save(merged, tm.merge_lora(adapted), beside=folder / "quickstart-checkpoint")
    if answers_of(tm.load(merged, scan=True)) != given:
        raise RuntimeError(f"{merged}: merged into the weights, the adapter answers otherwise")
    print(f"  exported, loaded again, merged and saved: the same {len(given)} answers each time")


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

    def report(name: str, given: list[str], words: Sequence[str], needed: float, seconds: float) -> None:
        rows.append((name, accuracy(given, held_out, words), needed, seconds))
        print(
            f"{name:40} {rows[-1][1]:7.1%} of {len(held_out)} held-out digits (needed {needed:.0%})  {seconds:5.1f} s",
            flush=True,
        )

    start = time.perf_counter()
    model = init(tm.Model(config(), plan=depth_plan(config(), scan=True)), jax.random.key(args.seed))
    write_tiktoken(args.output / "tokenizer", TOKENS, CONTROL, bos="[BOS]", eos="[EOS]", pad="[PAD]", unk="[UNK]")
    processor = tm.load_processor(args.output / "tokenizer", config())
    model, curves["base"] = train(
        model, "all", Lessons.of(seen, ENGLISH, processor), steps=180, rate=4e-3, seed=args.seed
    )
    tm.save(folder, tm.quantize_experts(model))
    shutil.copytree(args.output / "tokenizer", folder, dirs_exist_ok=True)
    packed, processor = tm.load(folder, scan=True), tm.load_processor(folder, config())
    given = answers(packed, processor, held_out)
    report("base, saved and loaded with MXFP4 experts", given, ENGLISH, NEEDED_BASE, time.perf_counter() - start)
    print(f"  routed experts: {expert_bytes(model):,} bytes in float32, {expert_bytes(packed):,} packed")

    german = Lessons.of(seen, GERMAN, processor)
    experts = tm.LoRAConfig(targets=("routed_experts",), routed="independent", rank=16, alpha=32.0)
    for what, lora, steps in (("default targets", tm.LoRAConfig(), 80), ("routed experts only", experts, 170)):
        name = f"LoRA to German, {what}"
        start = time.perf_counter()
        adapted = tm.add_lora(packed, lora, jax.random.key(args.seed + 1))
        adapted, curves[name] = train(adapted, "lora", german, steps=steps, rate=1e-2, seed=args.seed + 1)
        in_german = answers(adapted, processor, held_out)
        report(name, in_german, GERMAN, NEEDED_ADAPTER, time.perf_counter() - start)
        if answers(tm.remove_lora(adapted), processor, held_out) != given:
            raise RuntimeError("without its adapter the model no longer answers as its base")
        if lora is not experts:  # merging into packed experts would round them
            exchange(args.output, packed, adapted, in_german, lambda model: answers(model, processor, held_out))

    held_out.pictures[0].save(args.output / "digit.png")
    write_conversations(args.output / "chat.jsonl", seen[:200])
    picture(args.output / "quickstart.png", rows, curves, held_out, given, in_german)
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
    curves_at.set(xlabel="step", ylabel="loss (nats per supervised token)", yscale="log")
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
