"""Names of adapters against the real list of tensors, and against what our own transforms can adapt."""

import re
from pathlib import Path

import pytest
from tests.tiny import LINEAR, tiny_k3

from trillion_moe.checkpoint.adapter_names import Home, Names
from trillion_moe.config import ModelConfig
from trillion_moe.layers.segments import depth_plan
from trillion_moe.model import Model
from trillion_moe.transforms.targets import places


@pytest.fixture(scope="module")
def real(goldens: Path) -> Model:
    cfg = ModelConfig.from_file(goldens / "config" / "kimi_k3_config.json")
    return Model(cfg, plan=depth_plan(cfg))


@pytest.fixture(scope="module")
def listed(goldens: Path) -> dict[str, tuple[int, ...]]:
    """Tensor -> shape, of the real checkpoint; the first and last expert of each layer."""
    found = {}
    for line in (goldens / "kimi_k3" / "tensors.tsv").read_text().splitlines()[1:]:
        pattern, shape, _, layers, experts, *_ = line.split("\t")
        for layer in numbers(layers):
            for expert in {*numbers(experts)[:1], *numbers(experts)[-1:]}:
                name = pattern.replace("{L}", str(layer)).replace("{E}", str(expert))
                found[name] = tuple(map(int, shape.split("x")))
    return found


def numbers(text: str) -> list[int]:
    """ "0-2,5" -> 0, 1, 2, 5; of nothing, one number."""
    spans = [span.split("-") for span in text.split(",")] if text else [["0"]]
    return [i for span in spans for i in range(int(span[0]), int(span[-1]) + 1)]


def test_every_matrix_of_the_real_list_has_a_home(real, listed) -> None:
    """fault 71, fault 51: the keys that PEFT writes for Kimi K3, each found, in the list's own shapes."""
    names, resolved = Names(real), set()
    for tensor, shape in listed.items():
        module = re.sub(r"\.weight(_packed)?$", "", tensor)
        if len(shape) < 2 or tensor == module or tensor.endswith("_scale"):
            continue
        hit = names.resolve(f"base_model.model.{module}.lora_A.weight")
        if isinstance(hit, str):
            assert hit.startswith("cannot be adapted"), tensor
            assert re.search(r"embed_tokens|conv1d|_res_proj|block_sparse_moe\.gate|pos_emb", tensor), tensor
            continue
        factor, home = hit
        assert factor == "A"
        assert home.matrix is not None
        k, n = home.matrix.shape
        packed = tensor.endswith("weight_packed")
        assert (n, k) == (shape[0], 2 * shape[1]) if packed else n * k == shape[0] * len_of(shape[1:])
        resolved.add(home.matrix)
    assert resolved == set(names.matrices)


def len_of(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def test_experts_of_the_real_model_are_latent_wide(real) -> None:
    """fault 81: 3584, not 7168."""
    bank = Names(real).banks[0]
    assert bank.experts == 896
    assert bank.gate.shape == bank.up.shape == bank.down.shape[::-1] == (3584, 3072)


@pytest.mark.parametrize("changes", [{}, LINEAR], ids=["kimi_k3", "kimi_linear"])
def test_what_files_may_adapt_is_what_add_lora_may(changes) -> None:
    model = Model(tiny_k3(**changes))
    legal = {name for place in places(model)[0] if place.group for name in place.names}
    assert {matrix.name for matrix in Names(model).matrices} == legal


def home(names: Names, module: str) -> Home | str:
    hit = names.resolve(f"{module}.lora_B.weight")
    return hit if isinstance(hit, str) else hit[1]


def test_names_are_compared_as_a_whole() -> None:
    """A suffix, a substring, an expert too many, a prefix twice: none of them is a matrix of the model."""
    names = Names(Model(tiny_k3()))
    text = "language_model.model."
    assert isinstance(home(names, f"{text}layers.1.block_sparse_moe.experts.7.w1"), Home)
    for module in (
        "q_proj",
        f"{text}layers.1.self_attn.q",
        f"{text}layers.01.self_attn.q_proj",
        f"{text}layers.1.self_attn.q_proj.q_proj",
        f"{text}layers.5.self_attn.q_proj",
        f"{text}layers.0.block_sparse_moe.experts.0.w1",
        f"{text}layers.1.block_sparse_moe.experts.*.w1",
        f"{text}layers.1.block_sparse_moe.experts.w1",
        f"{text}layers.1.block_sparse_moe.experts.00.w1",
        f"language_model.base_model.model.{text}layers.1.self_attn.q_proj",
        f"language_model.{text}layers.1.self_attn.q_proj",
    ):
        assert str(home(names, module)).startswith("unexpected"), module
    assert "experts 0 to 7" in str(home(names, f"{text}layers.1.block_sparse_moe.experts.8.w1"))


def test_other_prefixes_are_the_same_matrix() -> None:
    k3, linear = (Names(Model(tiny_k3(**changes))) for changes in ({}, LINEAR))
    for names in (k3, linear):
        for prefix, head in (("language_model.model.", "language_model.lm_head"), ("model.", "lm_head")):
            for wrapped in ("", "base_model.model."):
                hit = home(names, f"{wrapped}{prefix}layers.2.self_attn.q_proj")
                assert isinstance(hit, Home)
                assert hit.matrix is not None
                assert (hit.matrix.name, hit.prefix) == ("layers.2.attention.q", prefix)
                hit = home(names, f"{wrapped}{head}")
                assert isinstance(hit, Home)
                assert hit.matrix is not None
                assert hit.matrix.name == "head"
