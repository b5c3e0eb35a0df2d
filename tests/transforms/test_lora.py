"""Putting adapters on: one structure from blueprint and arrays, no change at first, counts, split segments."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trillion_moe.blueprint import Spec, init
from trillion_moe.layers.segments import depth_plan
from trillion_moe.layers.vision import ImageBatch
from trillion_moe.model import Model
from trillion_moe.ops import dense
from trillion_moe.transforms import (
    GROUPS,
    LoRAConfig,
    add_lora,
    count_by_group,
    describe,
    experts_from_load,
    quantize_experts,
    remove_lora,
    split_segments,
)
from trillion_moe.transforms.targets import dims, places
from trillion_moe.weights import MXFP4, LoRA

EVERYTHING = tuple(GROUPS)
KEY = jax.random.key(0)


def leaf(model: Any, name: str) -> Any:
    return next(p.leaf for p in places(model)[0] if name in p.names)


def shapes(tree) -> tuple:
    return jax.tree.structure(tree), [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]


CONFIGS = [
    LoRAConfig(targets=EVERYTHING),
    LoRAConfig(rank=3, rslora=True, targets=("routed_experts",), routed="independent", dtype="bfloat16"),
    LoRAConfig(targets=("routed_experts",), routed="shared"),
    LoRAConfig(targets=("routed_experts",), experts=(4, 0)),
    LoRAConfig(targets=("routed_experts",), routed="independent", experts=((3, (1,)), (5, (2,)))),
    LoRAConfig(targets=("layers.4.attention.q", "layers.1.ffn.experts.up", "head")),
]


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("cfg", CONFIGS, ids=range(len(CONFIGS)))
def test_blueprint_and_arrays_get_one_structure(config, cfg: LoRAConfig, packed: bool, scan: bool) -> None:
    blueprint = Model(config, plan=depth_plan(config, scan=scan))
    blueprint = quantize_experts(blueprint) if packed else blueprint
    drawn_last = jax.eval_shape(lambda key: init(add_lora(blueprint, cfg), key), KEY)
    drawn_first = jax.eval_shape(lambda key: add_lora(init(blueprint, key), cfg, key), KEY)
    assert shapes(drawn_last) == shapes(drawn_first)
    assert all(isinstance(x, Spec) and len(x.shape) == len(x.axes) for x in jax.tree.leaves(add_lora(blueprint, cfg)))


def test_key_goes_with_arrays(scanned: Model, model: Model) -> None:
    with pytest.raises(ValueError, match="a blueprint takes no key"):
        add_lora(scanned, LoRAConfig(), KEY)
    with pytest.raises(ValueError, match="needs a key"):
        add_lora(model, LoRAConfig())


@pytest.mark.parametrize(
    ("routed", "experts", "a", "b"),
    [
        ("independent", None, (3, 5, 32, 2), (3, 5, 2, 64)),
        ("shared_a", None, (3, 32, 2), (3, 5, 2, 64)),
        ("shared", None, (3, 32, 2), (3, 2, 64)),
        ("independent", (4, 1, 2), (3, 3, 32, 2), (3, 3, 2, 64)),
        ("shared_a", (4, 1, 2), (3, 32, 2), (3, 3, 2, 64)),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_shapes_of_routed_adapters(scanned: Model, routed, experts, a, b, packed: bool) -> None:
    """The experts' K is the latent width, 32, not the model's 64; on packed experts it is read from the bytes."""
    blueprint = quantize_experts(scanned) if packed else scanned
    cfg = LoRAConfig(rank=2, alpha=6.0, targets=("routed_experts",), routed=routed, experts=experts)
    w = leaf(add_lora(blueprint, cfg), "layers.2.ffn.experts.gate")
    assert isinstance(w.base, MXFP4) == packed
    assert (w.a.shape, w.b.shape, w.scaling) == (a, b, 3.0)
    assert w.a.axes[-2:] == ("expert_embed", "lora_rank")
    assert w.b.axes[-2:] == ("lora_rank", "expert_mlp")
    assert (w.slots is None) == (experts is None)
    if experts is not None:
        slots = w.slots.init(KEY, w.slots.shape, w.slots.dtype)
        np.testing.assert_array_equal(slots, [[-1, 1, 2, -1, 0]] * 3)
        assert w.b.axes[1] == "expert_slot"


def test_a_is_drawn_as_peft_does_and_b_is_zero(model: Model) -> None:
    adapted = add_lora(model, LoRAConfig(rank=64, alpha=4.0, rslora=True, targets=("dense_mlp",)), jax.random.key(3))
    w = leaf(adapted, "layers.0.ffn.down")
    assert w.scaling == 4.0 / 64**0.5
    assert w.a.shape == (96, 64)
    bound = 96**-0.5
    assert 0.95 * bound < float(jnp.abs(w.a).max()) <= bound
    assert float(jnp.std(w.a)) == pytest.approx(bound / 3**0.5, rel=0.05)
    assert not w.b.any()


def test_a_fresh_adapter_changes_no_bit_and_a_moved_one_does(small: Model, adapted, moved, logits) -> None:
    base, fresh = logits(small), adapted(small, LoRAConfig(rank=3, targets=EVERYTHING))
    np.testing.assert_array_equal(logits(fresh), base)
    assert float(jnp.abs(logits(moved(fresh)) - base).max()) > 1e-3


def test_an_adapter_on_packed_experts_changes_no_bit_at_first(model: Model, quick, adapted, moved) -> None:
    """Experts only, chosen ones: routed adapters are wired, and stand on the packed bank."""
    run = quick(lambda ffn, x: ffn(x, jnp.ones(x.shape[:2], bool), model.config)[0])
    packed = quantize_experts(model)
    fresh = adapted(packed, LoRAConfig(targets=("routed_experts",), routed="independent", experts=(0, 2, 3)))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 6, 64)), jnp.float32)
    base, same, other = (run(m.segments[0][1].ffn, x) for m in (packed, fresh, moved(fresh)))
    np.testing.assert_array_equal(same, base)
    assert float(jnp.abs(other - base).max()) > 1e-3


def test_vision_adapters(model: Model, quick, adapted, moved) -> None:
    images = ImageBatch(jnp.asarray(np.random.default_rng(0).normal(size=(8, 3, 14, 14)), jnp.float32), [[1, 2, 4]])
    run = quick(lambda model: model.projector(model.vision(images, model.config), model.config))
    fresh = adapted(model, LoRAConfig(targets=("vision",)))
    np.testing.assert_array_equal(run(fresh), run(model))
    assert float(jnp.abs(run(moved(fresh)) - run(model)).max()) > 1e-3


@pytest.mark.parametrize("cfg", CONFIGS[:4], ids=range(4))
def test_remove_gives_back_the_same_leaves(scanned: Model, cfg: LoRAConfig) -> None:
    removed = remove_lora(add_lora(scanned, cfg))
    assert jax.tree.structure(removed) == jax.tree.structure(scanned)
    assert all(a is b for a, b in zip(jax.tree.leaves(removed), jax.tree.leaves(scanned), strict=True))


def test_remove_gives_back_the_same_arrays(model: Model) -> None:
    removed = remove_lora(add_lora(model, LoRAConfig(targets=("dense_mlp",)), KEY))
    assert all(a is b for a, b in zip(jax.tree.leaves(removed), jax.tree.leaves(model), strict=True))
    with pytest.raises(ValueError, match="no adapter"):
        remove_lora(model)


# --- counts ----------------------------------------------------------------------------------------------------------


def test_counts_are_the_closed_formulas(config, scanned: Model, unrolled: Model) -> None:
    r, d, latent, f, e, moe = 3, 64, 32, 64, 5, 7
    c, m = config.kda.num_heads * config.kda.head_dim, config.mla
    n_q, n_v, n_kv = (
        m.num_heads * m.qk_head_dim,
        m.num_heads * m.v_head_dim,
        m.num_heads * (m.qk_nope_head_dim + m.v_head_dim),
    )
    kda = [(d, c)] * 4 + [(c, d), (d, config.kda.head_dim), (config.kda.head_dim, c), (d, config.kda.num_heads)]
    mla = [(d, m.q_lora_rank), (m.q_lora_rank, n_q), (d, m.kv_lora_rank + m.qk_rope_head_dim), (m.kv_lora_rank, n_kv)]
    mla += [(d, n_v), (n_v, d)]

    def both(sizes):
        return r * sum(k + n for k, n in sizes)

    v = config.vision
    tower = [(v.hidden_size, 3 * v.qkv_size), (v.qkv_size, v.hidden_size), (v.hidden_size, v.mlp_size)]
    tower += [(v.mlp_size, v.hidden_size)]
    once = [(3 * 14 * 14, v.hidden_size), (v.projector_size, v.projector_size), (v.projector_size, d)]
    want = {
        "kda": (4 * len(kda), 4 * both(kda)),
        "mla": (4 * len(mla), 4 * both(mla)),
        "shared_experts": (moe * 3, moe * both([(d, 2 * f)] * 2 + [(2 * f, d)])),
        "latent": (moe * 2, moe * both([(d, latent), (latent, d)])),
        "routed_experts": (moe * 3 * e, moe * r * (2 * (latent + e * f) + (f + e * latent))),  # a shared by the experts
        "dense_mlp": (3, both([(d, 96)] * 2 + [(96, d)])),
        "lm_head": (1, both([(d, 512)])),
        "vision": (2 * 4 + 3, 2 * both(tower) + both(once)),
    }
    for blueprint in (scanned, unrolled):
        assert count_by_group(add_lora(blueprint, LoRAConfig(rank=r, targets=EVERYTHING))) == want


@pytest.mark.parametrize(
    ("routed", "experts", "matrices", "parameters"),
    [
        ("independent", None, 5, 3 * 5 * 8 * (32 + 64)),
        ("shared", None, 5, 3 * 8 * (32 + 64)),
        ("independent", (1, 3), 2, 3 * 2 * 8 * (32 + 64)),
        ("shared_a", (1, 3), 2, 8 * (2 * (32 + 2 * 64) + (64 + 2 * 32))),
    ],
)
def test_counts_of_routed_adapters(scanned: Model, routed, experts, matrices: int, parameters: int) -> None:
    """Two experts chosen are two matrices; none of the three matrices of an expert is left out."""
    cfg = LoRAConfig(targets=("routed_experts",), routed=routed, experts=experts)
    counts = count_by_group(add_lora(scanned, cfg))
    assert counts["routed_experts"] == (7 * 3 * matrices, 7 * parameters)
    assert counts["shared_experts"] == counts["kda"] == (0, 0)


def test_describe_is_a_table_by_group(scanned: Model) -> None:
    lines = describe(add_lora(scanned, LoRAConfig(targets=("dense_mlp",)))).splitlines()
    assert [line.split() for line in lines if "mlp" in line or "total" in line] == [
        ["dense_mlp", "3", "3,840"],
        ["total", "3", "3,840"],
    ]
    assert "shared_experts" in lines[3]
    assert len({len(line) for line in lines}) == 1


# --- some repeats only -----------------------------------------------------------------------------------------------


def test_a_path_into_a_scanned_segment_splits_it(scanned: Model) -> None:
    for layer, repeats in ((2, [1, 1, 2]), (4, [1, 1, 1, 1]), (6, [1, 2, 1])):
        split = add_lora(scanned, LoRAConfig(targets=(f"layers.{layer}.attention.q",)))
        assert [s.repeats for s in split.plan] == repeats
        found = {n: p for p in places(split)[0] for n in p.names}
        assert [n for n, p in found.items() if isinstance(p.leaf, LoRA)] == [f"layers.{layer}.attention.q"]
        assert dims(found[f"layers.{layer}.attention.q"].leaf)[0] == ()
        assert {n: dims(p.leaf)[1:] for n, p in found.items() if p.group} == {
            n: dims(p.leaf)[1:] for p in places(scanned)[0] if p.group for n in p.names
        }
    whole = add_lora(scanned, LoRAConfig(targets=tuple(f"layers.{i}.attention.q" for i in (2, 4, 6))))
    assert whole.plan == scanned.plan
    assert scanned.plan[1].repeats == 3  # the argument is as it was


def test_a_split_model_computes_what_the_scanned_one_does(small: Model, adapted, moved, logits) -> None:
    """Adapters on layer 2 alone, so that nothing is scanned any more, against the sum in the stacked weights."""
    targets = ("layers.2.attention.q", "layers.2.ffn.experts.down")
    split = moved(adapted(small, LoRAConfig(targets=targets)))
    assert [[s.repeats for s in m.plan] for m in (small, split)] == [[1, 2, 1], [1, 1, 1, 1]]
    added = {name: dense(leaf(split, name), jnp.float64) for name in targets}
    found, treedef = places(small)
    summed = treedef.unflatten([p.leaf.at[1].set(added[p.names[1]]) if p.names[-1] in added else p.leaf for p in found])
    want, base = logits(summed), logits(small)
    np.testing.assert_allclose(logits(split), want, atol=1e-10, rtol=0)
    assert float(jnp.abs(want - base).max()) > 1e-3


def test_split_slices_adapters_and_their_slots(model: Model, scanned: Model, adapted) -> None:
    cfg = LoRAConfig(targets=("routed_experts",), experts=((2, (0,)), (4, (3,)), (6, (1,))))
    whole, specs = adapted(model, cfg), add_lora(scanned, cfg)
    assert [s.repeats for s in whole.plan] == [s.repeats for s in specs.plan] == [1, 3]
    part, part_specs = split_segments(whole, [4]), split_segments(specs, [4])
    slots = [[-1, -1, -1, 0, -1], [-1, 0, -1, -1, -1]]
    w, of = (leaf(m, "layers.6.ffn.experts.up") for m in (part, whole))
    np.testing.assert_array_equal(w.slots, slots)
    np.testing.assert_array_equal(w.base, of.base[1:])
    np.testing.assert_array_equal(leaf(part, "layers.2.ffn.experts.up").a, of.a[0])
    rest, one = (leaf(part_specs, f"layers.{i}.ffn.experts.up") for i in (6, 2))
    np.testing.assert_array_equal(rest.slots.init(KEY, rest.slots.shape, "int32"), slots)
    np.testing.assert_array_equal(one.slots.init(KEY, one.slots.shape, "int32"), [0, -1, -1, -1, -1])
    assert jax.eval_shape(lambda key: one.a.init(key, one.a.shape, "float32"), KEY).shape == (32, 8)
    assert one.a.axes == ("expert_embed", "lora_rank")


@pytest.mark.parametrize("cut", [3, 8, -1])
def test_cuts_are_at_the_first_layer_of_a_repeat(scanned: Model, cut: int) -> None:
    with pytest.raises(
        ValueError, match=re.escape(f"cannot cut before layers [{cut}]: legal are the first layers of repeats")
    ):
        split_segments(scanned, [4, cut])
    assert split_segments(scanned, [0, 2]).plan == scanned.plan


# --- experts chosen by load ------------------------------------------------------------------------------------------


def test_experts_from_load_takes_the_busiest(scanned: Model) -> None:
    """The rows are the layers with routed experts, 1 to 7 here: dense layer 0 has none."""
    counts = np.zeros((7, 5), int)
    counts[:2] = [[3, 9, 9, 0, 1], [0, 0, 0, 0, 7]]
    assert experts_from_load(scanned, counts, 2)[:2] == ((1, (1, 2)), (2, (0, 4)))
    for top_n in (0, 6):
        with pytest.raises(ValueError, match=f"top_n = {top_n}: legal is 1 to the number of experts, 5"):
            experts_from_load(scanned, counts, top_n)
    with pytest.raises(ValueError, match="counts has 1 rows, the model 7 layers with routed experts"):
        experts_from_load(scanned, counts[:1], 1)
    with pytest.raises(ValueError, match="legal is integers"):
        experts_from_load(scanned, counts / 2, 1)


def test_chosen_experts_go_where_they_were_chosen(scanned: Model) -> None:
    counts = np.random.default_rng(0).integers(0, 100, (7, 5))
    experts = experts_from_load(scanned, counts, 2)
    cfg = LoRAConfig(targets=("routed_experts",), experts=experts)
    adapted, chosen = add_lora(scanned, cfg), cfg.experts_by_layer
    assert chosen is not None
    assert adapted.plan == scanned.plan
    for place in places(adapted)[0]:
        if isinstance(place.leaf, LoRA):
            spec: Any = place.leaf.slots
            slots = spec.init(KEY, spec.shape, "int32").reshape(-1, 5)
            for row, layer in zip(slots, place.layers, strict=True):
                assert tuple(np.flatnonzero(row >= 0)) == chosen[layer]


def test_layers_without_chosen_experts_are_left_alone(scanned: Model) -> None:
    cfg = LoRAConfig(targets=("routed_experts", "kda"), experts=((2, (0, 1)), (3, (2, 4))))
    adapted = add_lora(scanned, cfg)
    assert [s.repeats for s in adapted.plan] == [1, 1, 2]
    assert count_by_group(adapted)["routed_experts"][0] == 2 * 3 * 2
    assert count_by_group(adapted)["kda"][0] == 4 * 8


@pytest.mark.parametrize(
    ("targets", "experts", "why"),
    [
        (("routed_experts",), ((2, (0, 1)), (4, (0,)), (6, (2, 3))), "layer 2: 2, layer 4: 1, layer 6: 2"),
        (("routed_experts",), (0, 5), "this model has experts 0 to 4"),
        (("routed_experts",), ((0, (1,)),), "experts names layers [0], whose routed experts are no target"),
        (("attention",), (0, 1), "no target is a matrix of routed experts: attention"),
        (("layers.1.ffn.experts.up",), ((3, (1,)),), "experts names layers [3]"),
        (("layers.1.ffn.experts.up", "layers.3.ffn.experts.up"), ((3, (1,)),), "target 'layers.1.ffn.experts.up'"),
    ],
)
def test_experts_that_do_not_fit_are_refused(scanned: Model, targets, experts, why: str) -> None:
    with pytest.raises(ValueError, match=re.escape(why)):
        add_lora(scanned, LoRAConfig(targets=targets, experts=experts))


def test_a_tied_head_is_no_target(scanned: Model) -> None:
    tied = jax.tree.map(lambda x: x, scanned)
    tied.head = None
    with pytest.raises(ValueError, match="target 'lm_head' is a group of which this model has no matrix"):
        add_lora(tied, LoRAConfig(targets=("lm_head",)))
    assert "lm_head" not in count_by_group(tied)
    assert dataclasses.asdict(LoRAConfig())["routed"] == "shared_a"
