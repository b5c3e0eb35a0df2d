"""A tiny Kimi K3 that reads text and pictures: two layers, all single bytes and a few words, K3's control tokens."""

import pytest
from tests.tiny import filled, tiny_k3

import trillion_moe as tm
from trillion_moe.config import VisionConfig
from trillion_moe.data.tiktoken_model import K3_ADDED, K3_RANKS, write_tiktoken

RANKS = [bytes([i]) for i in range(256)] + [b"message", b"assistant", b"response", b" role", b"user"]
IDS = {token.name: (len(RANKS) + i - K3_RANKS, token.special) for i, token in K3_ADDED.items()}
VISION = VisionConfig(
    hidden_size=32, num_layers=1, num_heads=2, qkv_size=32, mlp_size=64, patch_size=14, text_hidden_size=64,
    pos_emb_height=4, pos_emb_width=4, pos_emb_time=4,
)  # fmt: skip


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory):
    kinds = {"num_layers": 2, "attention": ("kda", "mla"), "mlp": ("dense", "moe")}
    cfg = tiny_k3(
        **kinds, vocab_size=len(RANKS) + 256, vision=VISION, initializer_range=0.3, bos_id=IDS["[BOS]"][0],
        eos_ids=(IDS["<|end_of_msg|>"][0],), pad_id=IDS["[PAD]"][0], media_id=IDS["<|media_pad|>"][0],
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("text") / "tiny"
    tm.save(folder, filled(cfg))
    write_tiktoken(folder, RANKS, IDS, bos="[BOS]", eos="[EOS]", pad="[PAD]", unk="[UNK]")
    return folder


@pytest.fixture(scope="session")
def speaker(text_folder):
    """The model and its processor."""
    model = tm.load(text_folder)
    return model, tm.load_processor(text_folder, model.config)
