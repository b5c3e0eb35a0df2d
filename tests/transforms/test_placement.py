"""Experts on devices by how often they are chosen: plans, and models that compute what they did."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tiny import LINEAR, MLA, MOE, filled, tiny_k3

import trillion_moe as tm
from trillion_moe.checkpoint.errors import CheckpointError
from trillion_moe.model import Model, depth_plan, embed, trunk
from trillion_moe.sharding import Layout, place, shardings
from trillion_moe.transforms import arrange_experts, imbalance, moe_layers, partition, plan_experts, restore_experts


def in_order(layers: int, experts: int) -> np.ndarray:
    return np.tile(np.arange(experts), (layers, 1))


# --- plans ------------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_expert_is_there_and_on_no_device_twice(data) -> None:
    """Whatever the loads, also where room is left only beside the same expert."""
    experts, devices = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 6))
    spare = data.draw(st.integers(0, experts - -(-experts // devices)))
    loads = np.array([data.draw(st.lists(st.integers(0, 1000), min_size=experts, max_size=experts)) for _ in range(2)])
    plan = plan_experts(loads, devices, spare=spare)
    assert plan.shape == (2, devices * (-(-experts // devices) + spare))
    for row, load in zip(plan, loads, strict=True):
        held = row.reshape(devices, -1)
        assert all(len({*mine}) == len(mine) for mine in held.tolist())
        count = np.bincount(row, minlength=experts)
        assert count.min() >= 1
        fewer = load[count > 1] / (count[count > 1] - 1)  # no copy would be of more use to another expert
        assert (load / count)[count < devices].max(initial=0) <= fewer.min(initial=np.inf)


def test_loads_of_a_skewed_router() -> None:
    """Zipf over 64 experts on 8 devices, neighbours alike: 4 times the mean on the busiest; spread and copied, all
    nearly alike."""
    loads = (100000 / np.arange(1, 65)).astype(int)[None]
    before = imbalance(loads, in_order(1, 64), 8)
    spread = imbalance(loads, plan_experts(loads, 8), 8)
    copied = imbalance(loads, plan_experts(loads, 8, spare=2), 8)
    assert before > 4
    assert spread < 1.9  # the busiest device has hardly more than the first expert, which a fifth of all tokens want
    assert copied < 1.02
    assert imbalance(np.ones((3, 8), int), in_order(3, 8), 4).tolist() == [1, 1, 1]


def test_plans_that_cannot_be() -> None:
    with pytest.raises(ValueError, match=re.escape("loads is float64[2, 4]: legal is counts")):
        plan_experts(np.ones((2, 4)), 2)
    with pytest.raises(ValueError, match="legal is counts, integers from 0"):
        plan_experts(np.array([[1, -1]]), 2)
    with pytest.raises(ValueError, match=r"devices = 2, spare = 3: 5 slots for 4 experts; .* spare of 0 to 2"):
        plan_experts(np.ones((2, 4), int), 2, spare=3)
    with pytest.raises(ValueError, match="devices = 0"):
        plan_experts(np.ones((2, 4), int), 0)


# --- models -----------------------------------------------------------------------------------------------------------

PAIR = {"num_layers": 2, "attention": ("mla",) * 2, "mlp": ("moe",) * 2, "kda": None}
PAIR |= {"mla": dataclasses.replace(MLA, num_heads=4), "attn_res_block": 1}
LORA = {"targets": ("routed_experts", "attention"), "rank": 2}


def problem(name: str) -> Model:
    match name:
        case "packed, adapters of all, stacked":
            cfg = tiny_k3(**PAIR)
            model = tm.quantize_experts(filled(cfg, plan=depth_plan(cfg, scan=True)))
            lora = tm.LoRAConfig(routed="independent", **LORA)
        case "packed, adapters of some":
            model = tm.quantize_experts(filled(tiny_k3(**PAIR | {"mlp": ("dense", "moe")})))
            lora = tm.LoRAConfig(routed="shared_a", experts=(1, 6), **LORA)
        case "groups":
            moe = dataclasses.replace(LINEAR["moe"], num_experts=12, num_groups=4, topk_groups=2)
            cfg = tiny_k3(**LINEAR | {"moe": moe, "num_layers": 2, "attention": ("mla",) * 2, "mlp": ("dense", "moe")})
            return filled(cfg)
        case _:
            raise ValueError(name)
    stirred = np.random.default_rng(1)
    model = tm.add_lora(model, lora, jax.random.key(0))
    return jax.tree.map(
        lambda x: x + 0.1 * stirred.normal(size=x.shape).astype(x.dtype) if 2 in x.shape[-2:] else x, model
    )


TOKENS = jnp.asarray(np.random.default_rng(0).integers(4, 300, (8, 16)), jnp.int32)
REAL = np.arange(16) < np.array([[16], [7], [3], [16], [0], [1], [16], [9]])
SEGMENTS = jnp.asarray(REAL, jnp.int32)


@jax.jit
def run(model: Model):
    """-> hidden states, what routers chose."""
    hidden, _, aux, _ = trunk(model, embed(model, TOKENS, None, SEGMENTS), SEGMENTS)
    return hidden, jnp.stack([layer["expert_counts"] for layer in aux if "expert_counts" in layer])


def loads_of(model: Model) -> np.ndarray:
    random = np.random.default_rng(3)
    return random.zipf(1.3, size=(len(moe_layers(model)), model.config.moe.num_experts)).clip(max=10**6)


@pytest.mark.parametrize(
    ("name", "sizes", "spare"),
    [
        pytest.param("packed, adapters of all, stacked", {"ep": 4}, 1, marks=pytest.mark.slow),
        pytest.param("packed, adapters of some", {"ep": 2, "tp": 2}, 2, marks=pytest.mark.slow),
        pytest.param("groups", {"ep": 8}, 0, marks=pytest.mark.slow),  # 12 experts in 16 slots
    ],
)
def test_an_arranged_model_computes_what_it_did(name: str, sizes: dict[str, int], spare: int) -> None:
    """On one device and over a mesh, there and back; what routers report stays in the experts' order."""
    model = problem(name)
    expected, counts = run(model)
    plan = plan_experts(loads_of(model), sizes["ep"], spare=spare)
    arranged = arrange_experts(model, plan)
    assert not any(np.array_equal(row, np.arange(row.size)) for row in plan)
    for layout in (None, Layout.make(sizes, transport="ragged")):
        found, chosen = map(np.asarray, run(arranged if layout is None else place(arranged, layout)))
        np.testing.assert_allclose(found[REAL], np.asarray(expected)[REAL], rtol=2e-5, atol=2e-5)
        np.testing.assert_array_equal(chosen, counts)
    back = restore_experts(arranged)
    assert jax.tree.structure(back) == jax.tree.structure(model)
    jax.tree.map(np.testing.assert_array_equal, back, model)


@pytest.mark.parametrize("sizes", [{"ep": 4}, pytest.param({"ep": 2, "tp": 2}, marks=pytest.mark.slow)])
def test_an_arranged_layer(sizes: dict[str, int]) -> None:
    """The quick form: one layer, packed, some experts adapted."""
    model = problem("packed, adapters of some")
    arranged = arrange_experts(model, plan_experts(loads_of(model), sizes["ep"], spare=1))
    layout, cfg = Layout.make(sizes, transport="ragged"), model.config
    hidden = jnp.asarray(np.random.default_rng(0).normal(size=(8, 16, 64)), jnp.float32)
    layer = jax.jit(lambda moe, layout: moe(hidden, jnp.asarray(REAL), cfg, layout), static_argnums=1)
    expected, counts = layer(model.segments[1][0].ffn, None)
    for moe, where in (
        (arranged.segments[1][0].ffn, None),
        (place(arranged, layout).segments[1][0].ffn, layout),
    ):
        found, chosen = layer(moe, where)
        np.testing.assert_allclose(np.asarray(found)[REAL], np.asarray(expected)[REAL], rtol=2e-5, atol=2e-5)
        np.testing.assert_array_equal(chosen["expert_counts"], counts["expert_counts"])


def test_copies_share_the_tokens() -> None:
    """Copies of an expert differ here, so that it shows: half of its tokens are given to either, in turn."""
    model = problem("groups")
    plan = np.concatenate([np.arange(12), np.arange(12)])[None]
    arranged = arrange_experts(model, plan)
    experts = arranged.segments[0][1].ffn.experts
    experts.down = experts.down.at[12:].set(0)
    other = arrange_experts(model, plan)
    other.segments[0][1].ffn.experts.down = other.segments[0][1].ffn.experts.down.at[:12].set(0)
    hidden = np.random.default_rng(0).normal(size=(1, 9, 64)).astype(np.float32)

    @jax.jit
    def one(moe, hidden):
        return moe(hidden, jnp.ones((1, 9), bool), model.config)[0][0]

    def routed(model):
        model.segments[0][1].ffn.shared = None
        return np.asarray(one(model.segments[0][1].ffn, hidden))

    first, second, both = routed(arranged), routed(other), routed(model)
    assert (np.abs(first[::2]).sum(1) > 0).all()
    assert (first[1::2] == 0).all()
    assert (second[::2] == 0).all()
    np.testing.assert_allclose(first + second, both, rtol=1e-5, atol=1e-6)


def test_arranged_where_it_lies() -> None:
    """A model over a mesh stays there."""
    layout = Layout.make({"ep": 4})
    model = place(filled(tiny_k3(**PAIR)), layout)
    arranged = arrange_experts(model, plan_experts(loads_of(model), 4, spare=1))
    for array, where in zip(*map(jax.tree.leaves, (arranged, shardings(arranged, layout))), strict=True):
        assert array.sharding.is_equivalent_to(where, array.ndim)
    back = restore_experts(arranged)
    for array, was in zip(*map(jax.tree.leaves, (back, model)), strict=True):
        np.testing.assert_array_equal(array, was)
        assert array.sharding.is_equivalent_to(was.sharding, was.ndim)


def test_what_an_arranged_model_is_not_for(tmp_path) -> None:
    """Copies must not be trained apart, nor stored: each refusal says how to get back."""
    model = filled(tiny_k3(num_layers=1, attention=("mla",), mlp=("moe",), kda=None, moe=MOE))
    plan = plan_experts(loads_of(model), 2)
    arranged = arrange_experts(model, plan)
    for form in ("hf", "orbax"):
        with pytest.raises(CheckpointError, match="restore_experts first"):
            tm.save(tmp_path / form, arranged, format=form)
        assert not (tmp_path / form).exists()
    adapted = tm.add_lora(model, tm.LoRAConfig(**LORA), jax.random.key(0))
    with pytest.raises(CheckpointError, match="restore_experts first"):
        tm.export_adapter(tmp_path / "adapter", arrange_experts(adapted, plan))
    with pytest.raises(CheckpointError, match=r"takes no adapter: .*restore_experts first"):
        tm.load_adapter(arranged, tmp_path)
    with pytest.raises(ValueError, match=r"cannot be trained: .*restore_experts first"):
        partition(arranged, trainable="all")
    with pytest.raises(ValueError, match=r"takes no adapter: .*restore_experts first"):
        tm.add_lora(arranged, tm.LoRAConfig(rank=2), jax.random.key(0))
    with pytest.raises(ValueError, match=r"cannot be arranged again: .*restore_experts first"):
        arrange_experts(arranged, plan)
    with pytest.raises(ValueError, match="in their own order already"):
        restore_experts(model)
    with pytest.raises(
        ValueError, match=r"plan is int\d+\[2, 8\]: legal is integers, a row for each of the 1 MoE layers"
    ):
        arrange_experts(model, in_order(2, 8))
    with pytest.raises(ValueError, match=r"plan is float64\[1, 8\]: legal is integers"):
        arrange_experts(model, np.arange(8)[None] + 0.5)
    with pytest.raises(ValueError, match="the plan of layer 0 does not hold every expert of 0 to 7, or others"):
        arrange_experts(model, in_order(1, 9))
    with pytest.raises(ValueError, match="the model is a blueprint without arrays"):
        arrange_experts(Model(model.config), plan)
