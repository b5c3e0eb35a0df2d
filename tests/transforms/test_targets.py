"""Which matrices a target means, and what is refused."""

import dataclasses
import re

import pytest

from trillion_moe.layers.segments import depth_plan
from trillion_moe.model import Model
from trillion_moe.transforms import GROUPS, LoRAConfig, add_lora, moe_layers
from trillion_moe.transforms.targets import places
from trillion_moe.weights import LoRA


def adapted(model) -> set[str]:
    return {n for p in places(model)[0] if isinstance(p.leaf, LoRA) for n in p.names}


def targeted(model, *targets: str) -> set[str]:
    return adapted(add_lora(model, LoRAConfig(targets=targets)))


def in_layers(layers, names: str) -> set[str]:
    return {f"layers.{i}.{name}" for i in layers for name in names.split()}


EVEN, ODD, MOE = (0, 2, 4, 6), (1, 3, 5, 7), (1, 2, 3, 4, 5, 6, 7)
KDA = in_layers(EVEN, " ".join(f"attention.{m}" for m in ("q", "k", "v", "o", "gate", "decay_a", "decay_b", "beta")))
MLA = in_layers(ODD, " ".join(f"attention.{m}" for m in ("q_a", "q_b", "kv_a", "kv_b", "gate", "o")))
MEMBERS = {
    "kda": KDA,
    "mla": MLA,
    "attention": KDA | MLA,
    "shared_experts": in_layers(MOE, "ffn.shared.gate ffn.shared.up ffn.shared.down"),
    "latent": in_layers(MOE, "ffn.latent_down ffn.latent_up"),
    "routed_experts": in_layers(MOE, "ffn.experts.gate ffn.experts.up ffn.experts.down"),
    "dense_mlp": in_layers((0,), "ffn.gate ffn.up ffn.down"),
    "lm_head": {"head"},
    "vision": {f"vision.{m}" for m in ("patch_embed", "blocks.qkv", "blocks.o", "blocks.up", "blocks.down")}
    | {"projector.proj_0", "projector.proj_2"},
}


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_is_these_matrices(scanned: Model, unrolled: Model, group: str) -> None:
    assert targeted(scanned, group) == targeted(unrolled, group) == MEMBERS[group]


def test_names_do_not_depend_on_the_plan(scanned: Model, unrolled: Model) -> None:
    names = [sorted(n for p in places(m)[0] for n in p.names) for m in (scanned, unrolled)]
    assert names[0] == names[1]
    assert len({*names[0]}) == len(names[0])
    assert moe_layers(scanned) == moe_layers(unrolled) == MOE


def test_low_rank_gates_of_kimi_linear(linear_config) -> None:
    names = targeted(Model(linear_config), "kda")
    first = linear_config.attention.index("kda")
    assert in_layers([first], "attention.gate_a attention.gate_b") <= names
    assert f"layers.{first}.attention.gate" not in names


def test_default_targets_leave_routers_and_routed_experts_alone(scanned: Model) -> None:
    names = adapted(add_lora(scanned, LoRAConfig()))
    assert names == MEMBERS["attention"] | MEMBERS["shared_experts"] | MEMBERS["dense_mlp"]
    everything = targeted(scanned, *GROUPS)
    assert not [n for n in everything if "router" in n or "norm" in n or "conv" in n or "res" in n.split(".")[-2:]]


def test_every_matrix_is_in_one_group_or_is_named_here(scanned: Model) -> None:
    """A new matrix of a layer must be given a group, or a place in this list of what ops.dot does not multiply."""
    others = {re.sub(r"^layers\.\d+\.", "", p.names[0]) for p in places(scanned)[0] if p.group is None}
    assert others == {
        *("embed", "norm", "out_res.norm", "out_res.query", "attn_norm", "ffn_norm", "attn_res.norm", "attn_res.query"),
        *("ffn_res.norm", "ffn_res.query", "ffn.router.weight", "ffn.router.bias", "ffn.latent_norm"),
        *("attention.q_conv", "attention.k_conv", "attention.v_conv", "attention.a_log", "attention.dt_bias"),
        *("attention.o_norm", "attention.q_norm", "attention.kv_norm", "projector.norm"),
        *("vision.pos_emb", "vision.blocks.attn_norm", "vision.blocks.mlp_norm", "vision.final_norm"),
    }


def test_paths_are_compared_whole(config, deepened) -> None:
    """`layers.1` is not the beginning of `layers.11`, and `q` is not the beginning of `q_a`."""
    deep = deepened(config, 14)
    model = Model(deep, plan=depth_plan(deep, scan=True))
    assert targeted(model, "layers.2.attention.q", "layers.1.ffn.latent_up", "head") == {
        "layers.2.attention.q",
        "layers.1.ffn.latent_up",
        "head",
    }


def test_overlapping_targets_give_one_adapter(scanned: Model) -> None:
    twice = targeted(scanned, "kda", "attention", "layers.0.attention.q", "kda")
    assert twice == MEMBERS["attention"]
    model = add_lora(scanned, LoRAConfig(targets=("kda", "attention")))
    assert all(not isinstance(p.leaf.base, LoRA) for p in places(model)[0] if isinstance(p.leaf, LoRA))


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("layers.1", "matches nothing"),
        ("layers.1.attention", "matches nothing"),
        ("attention.q", "matches nothing"),
        ("layers.0.attention.q.", "matches nothing"),
        ("layers.1.attention.q", "matches nothing"),  # low rank here: q_a and q_b
        ("layers.8.attention.q", "matches nothing"),
        ("layers.02.attention.q", "matches nothing"),
        ("layers.0.ffn.experts.gate", "matches nothing"),
        ("vision.blocks.1.qkv", "one stack"),
        ("layers.1.ffn.router.weight", "would never be applied"),
        ("layers.1.ffn.router.bias", "no matrix"),
        ("layers.0.attention.q_conv", "no matrix"),
        ("layers.0.attn_res.query", "no matrix"),
        ("vision.pos_emb", "no matrix"),
        ("embed", "looked up"),
    ],
)
def test_a_path_to_no_matrix_is_refused(scanned: Model, target: str, why: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(target))) as error:
        targeted(scanned, "kda", target)
    assert why in str(error.value)
    assert "attention, kda, mla, shared_experts, latent, routed_experts, dense_mlp, lm_head, vision" in str(error.value)
    assert "an exact path such as 'layers.0.attention." in str(error.value)


def test_a_group_that_the_model_lacks_is_refused(config) -> None:
    text = dataclasses.replace(config, vision=None, attention=("mla",) * 8)
    for group in ("vision", "kda"):
        with pytest.raises(ValueError, match=f"target '{group}' is a group of which this model has no matrix") as error:
            targeted(Model(text), "mla", group)
        assert "the groups attention, mla, shared_experts" in str(error.value)


def test_a_second_adapter_on_a_matrix_is_refused(scanned: Model) -> None:
    once = add_lora(scanned, LoRAConfig(targets=("kda",)))
    with pytest.raises(ValueError, match=r"already, the first 'layers\.0\.attention\.q'"):
        add_lora(once, LoRAConfig(targets=("layers.0.attention.q",)))
    assert adapted(add_lora(once, LoRAConfig(targets=("mla",)))) == MEMBERS["attention"]


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("rank", 0, "rank = 0: legal is an integer >= 1"),
        ("alpha", 0.0, "alpha = 0.0: legal is a finite number > 0"),
        ("alpha", float("nan"), "alpha = nan"),
        ("alpha", float("inf"), "alpha = inf"),
        ("targets", (), "targets is empty; legal: attention"),
        ("targets", ("attention", "q"), "target 'q' is no group; legal: attention, kda, mla"),
        ("targets", ("router",), "target 'router' is no group"),
        ("targets", ("q_proj",), "target 'q_proj' is no group"),
        ("dtype", "int8", "dtype = 'int8': legal is float32"),
        ("experts", (), "at least one id"),
        ("experts", (1, 1), "all different"),
        ("experts", (-1, 2), ">= 0"),
        ("experts", ((1, (0, 1)), (2, ())), "experts of layer 2"),
        ("experts", ((1, (0, 1)), (1, (2,))), "names a layer twice"),
    ],
)
def test_config_refuses(field: str, value, why: str) -> None:
    with pytest.raises(ValueError, match=re.escape(why)):
        dataclasses.replace(LoRAConfig(), **{field: value})


def test_config_refuses_chosen_experts_with_one_shared_pair() -> None:
    with pytest.raises(ValueError, match="routed = 'shared' adapts all with one pair"):
        LoRAConfig(targets=("routed_experts",), routed="shared", experts=(0, 1))
