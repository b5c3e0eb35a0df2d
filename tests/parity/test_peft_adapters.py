"""Adapters exchanged with PEFT, on a model that transformers runs: both compute the same logits. Extra `parity`."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.checkpoint.adapter_tools import adapted, load_adapter

import trillion_moe as tm
from trillion_moe.checkpoint.adapter_export import export_adapter
from trillion_moe.transforms import LoRAConfig

peft = pytest.importorskip("peft")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.slow
BAR = 1e-4

# Every case that PEFT's format tells apart: experts adapted in one parameter or both, gate and up through one A or two,
# ranks and scalings that differ by layer, experts without an adapter, all layers of a kind or some.
MIXED = (
    LoRAConfig(rank=2, alpha=3.0, targets=("shared_experts", "dense_mlp", "lm_head", "layers.0.attention.decay_a")),
    LoRAConfig(rank=2, alpha=3.0, targets=("layers.1.ffn.experts.gate", "layers.2.ffn.experts.down"), routed="shared"),
    LoRAConfig(rank=3, alpha=4.0, targets=("layers.3.ffn.experts.gate", "layers.3.ffn.experts.down")),
    LoRAConfig(rank=2, alpha=2.0, targets=("layers.3.ffn.experts.up",), routed="independent"),
    LoRAConfig(rank=4, alpha=2.0, rslora=True, targets=("layers.0.attention.q", "layers.2.attention.q")),
    LoRAConfig(rank=5, alpha=2.0, targets=tuple(f"layers.4.ffn.experts.{m}" for m in ("gate", "up", "down")),
               routed="independent", experts=(5, 1)),
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(goldens: Path) -> Path:
    return goldens / "kimi_linear" / "a"


@pytest.fixture(scope="module")
def base(folder: Path) -> Any:
    return tm.load(folder)


@pytest.fixture(scope="module")
def ids(folder: Path) -> np.ndarray:
    return load_file(folder / "inputs.safetensors")["input_ids"]


def torch_model(folder: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", experts_implementation="eager"
    )
    return model.eval()


def torch_logits(model: Any, ids: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(input_ids=torch.tensor(ids)).logits.numpy()


def loaded_by_peft(folder: Path, adapter: Path) -> Any:
    """PEFT only warns of tensors that it misses or does not use, and of keys that it does not know."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = peft.PeftModel.from_pretrained(torch_model(folder), adapter)
    told = [str(warning.message) for warning in caught]
    assert not [text for text in told if "adapter keys" in text or "nexpected" in text]
    return model


def furthest(found: Any, expected: Any) -> float:
    return float(np.abs(np.asarray(found) - np.asarray(expected)).max())


def test_peft_computes_our_logits_with_an_exported_adapter(folder, base, ids, tmp_path) -> None:
    model = adapted(base, *MIXED)
    export_adapter(tmp_path / "adapter", model)
    logits, _ = tm.forward(model, ids)
    assert furthest(logits, load_file(folder / "outputs.safetensors")["logits"]) > 0.1
    theirs = loaded_by_peft(folder, tmp_path / "adapter")
    assert furthest(torch_logits(theirs, ids), logits) < BAR
    assert furthest(torch_logits(theirs.merge_and_unload(), ids), logits) < BAR


def test_we_compute_peft_s_logits_with_an_adapter_that_it_wrote(folder, base, ids, tmp_path) -> None:
    """One fused parameter alone, rank-stabilised, with patterns, in some layers."""
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=3,
        lora_alpha=5,
        use_rslora=True,
        init_lora_weights=False,
        target_modules=r".*\.(q_proj|o_proj|shared_experts\.up_proj)",
        target_parameters=["layers.1.mlp.experts.down_proj", "layers.3.mlp.experts.gate_up_proj"],
        rank_pattern={r"layers\.[02]\..*q_proj": 2, "experts.gate_up_proj": 4},
        alpha_pattern={"o_proj": 7, "experts.down_proj": 2},
        exclude_modules=["model.layers.0.self_attn.o_proj"],
    )
    theirs = peft.get_peft_model(torch_model(folder), config)
    theirs.save_pretrained(tmp_path / "adapter")
    expected = torch_logits(theirs.eval(), ids)
    assert furthest(expected, load_file(folder / "outputs.safetensors")["logits"]) > 0.1
    model = load_adapter(base, tmp_path / "adapter")
    assert furthest(tm.forward(model, ids)[0], expected) < BAR
    export_adapter(tmp_path / "again", model)
    again, before = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("again", "adapter"))
    assert again.keys() == before.keys()
    assert all(np.array_equal(again[name], before[name]) for name in before)
