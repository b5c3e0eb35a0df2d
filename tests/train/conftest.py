"""A tiny model to train, rows for it, and runs of one shape, so that they share what is compiled."""

import dataclasses
import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from tests.tiny import IDS, RANKS, filled, tiny_k3

import trillion_moe as tm
from trillion_moe.data.build import build_examples
from trillion_moe.data.examples import DataConfig
from trillion_moe.data.rows import read_rows
from trillion_moe.data.tiktoken_model import write_tiktoken
from trillion_moe.run_config import OptimizerConfig, RunConfig, TrainConfig
from trillion_moe.train import Trainer

# Few matrices, nothing recomputed: this compiles in half the time.
LORA = tm.LoRAConfig(rank=2, targets=("layers.0.attention.o", "layers.0.ffn.experts.down"))
TRAIN = TrainConfig(batch_size=2, accumulate=2, dropout=0.25, remat=False, save_every=1)


def _rows(count: int, first: int = 0) -> list[dict[str, str]]:
    texts = [chr(ord("a") + i % 20) * 2 + "=" for i in range(first, first + count)]
    return [{"prompt": text, "completion": text[: 1 + i % 3] + "." * (i % 2)} for i, text in enumerate(texts)]


@pytest.fixture(scope="session")
def rows():
    """Rows, each of another text, with two to five supervised tokens: a letter is a token, and the end."""
    return _rows


@pytest.fixture(scope="session")
def write_rows():
    """Writes rows to a file -> its path."""

    def write_rows(path: Path, given) -> Path:
        path.write_text("".join(json.dumps(row) + "\n" for row in given))
        return path

    return write_rows


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A checkpoint of one layer, MLA and MoE, with its tokenizer: nothing here depends on the model."""
    folder = tmp_path_factory.mktemp("train") / "tiny"
    cfg = tiny_k3(
        num_layers=1, attention=("mla",), mlp=("moe",), kda=None, vocab_size=len(RANKS) + 256, initializer_range=0.3,
        bos_id=IDS["[BOS]"][0], eos_ids=(IDS["<|end_of_msg|>"][0],), pad_id=IDS["[PAD]"][0],
        media_id=IDS["<|media_pad|>"][0],
    )  # fmt: skip
    tm.save(folder, filled(cfg))
    write_tiktoken(folder, RANKS, IDS, bos="[BOS]", eos="[EOS]", pad="[PAD]", unk="[UNK]")
    return folder


@pytest.fixture(scope="session")
def adapted(folder):
    """Committed to its device, as restored arrays are: jit compiles anew for those that are not."""
    return jax.device_put(tm.add_lora(tm.load(folder), LORA, jax.random.key(0)), jax.devices()[0])


@pytest.fixture(scope="session")
def settings(folder):
    """The configuration of a run in a folder; train and optimizer are changes to TRAIN and to the defaults."""

    def settings(here: Path, *, train=None, optimizer=None, **changes) -> RunConfig:
        given = {
            "model": str(folder),
            "data": str(here / "rows.jsonl"),
            "output": str(here / "out"),
            "lora": LORA,
            "examples": DataConfig(raw=True),
            "train": dataclasses.replace(TRAIN, **train or {}),
            "optimizer": OptimizerConfig(**optimizer or {}),
        }
        return RunConfig(**given | changes)

    return settings


@pytest.fixture
def config(settings, tmp_path):
    return partial(settings, tmp_path)


@pytest.fixture(scope="session")
def trainer(folder, adapted, write_rows):
    """Makes the Trainer of a configuration, its rows (ten) written first. It gives up what it trains: copies."""
    processor = tm.load_processor(folder, adapted.config)

    def trainer(config: RunConfig, given=None, held_out=None, *, model=None) -> Trainer:
        def build(path, given):
            return build_examples(read_rows(write_rows(path, given)), processor, adapted.config, config.examples)

        path = Path(config.data)
        train = build(path, _rows(10) if given is None else given)
        other = None if held_out is None else build(path.with_name("eval.jsonl"), held_out)
        return Trainer(jax.tree.map(jnp.copy, model or adapted), config, train, other)

    return trainer
