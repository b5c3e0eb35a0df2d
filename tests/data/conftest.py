"""What a tiny Kimi K3 that reads text and pictures has beside its weights, and files of rows for it."""

import json

import numpy as np
import PIL.Image
import pytest
from tests.tiny import IDS, RANKS, tiny_k3

from trillion_moe.config import ModelConfig, VisionConfig
from trillion_moe.data.build import build_examples
from trillion_moe.data.examples import DataConfig
from trillion_moe.data.processor import load_processor
from trillion_moe.data.rows import read_rows
from trillion_moe.data.tiktoken_model import write_tiktoken

VISION = VisionConfig(
    hidden_size=32, num_layers=1, num_heads=2, qkv_size=32, mlp_size=64, patch_size=14, text_hidden_size=64,
    pos_emb_height=4, pos_emb_width=4, pos_emb_time=4,
)  # fmt: skip


@pytest.fixture(scope="session")
def front_folder(tmp_path_factory):
    """config.json and tokenizer."""
    folder = tmp_path_factory.mktemp("front") / "tiny"
    cfg = tiny_k3(
        vocab_size=len(RANKS) + 256, vision=VISION, bos_id=IDS["[BOS]"][0], eos_ids=(IDS["<|end_of_msg|>"][0],),
        pad_id=IDS["[PAD]"][0], media_id=IDS["<|media_pad|>"][0],
    )  # fmt: skip
    write_tiktoken(folder, RANKS, IDS, bos="[BOS]", eos="[EOS]", pad="[PAD]", unk="[UNK]")
    (folder / "config.json").write_text(json.dumps(cfg.to_json()))
    return folder


@pytest.fixture(scope="session")
def front_model(front_folder):
    return ModelConfig.from_file(front_folder)


@pytest.fixture(scope="session")
def processor(front_folder, front_model):
    return load_processor(front_folder, front_model)


@pytest.fixture
def write(tmp_path):
    """Writes rows to rows.jsonl, texts as they are -> its path. Pictures a.png, b.png, c.png lie beside it: one, two
    and six tokens."""
    for name, size in (("a", (20, 28)), ("b", (30, 20)), ("c", (84, 56))):
        pixels = np.random.default_rng(ord(name)).integers(0, 256, (size[1], size[0], 3), np.uint8)
        PIL.Image.fromarray(pixels).save(tmp_path / f"{name}.png")

    def write(*rows):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return path

    return write


@pytest.fixture
def build(write, processor, front_model):
    """Rows -> Examples, without a word about effort; `model` and `chat` take the place of the checkpoint's."""

    def build(*rows, model=front_model, processor=processor, **settings):
        return build_examples(read_rows(write(*rows)), processor, model, DataConfig(**{"effort": None} | settings))

    return build
