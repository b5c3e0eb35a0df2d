"""A model over a mesh equals the model on one device: loss, counts and every gradient, whatever the mesh.

In float64, so that what is left is summation order: an error of one part in 1e9 fails.
"""

import dataclasses
import functools
import os
import re
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from tests.mesh_tools import HEADS, TWO, VISION, WITHIN, assert_as_on_one_device, by_layer, problem
from tests.tiny import LINEAR, MOE, filled, tiny_k3

import trillion_moe as tm
from trillion_moe.blueprint import init
from trillion_moe.model import Model, forward, init_caches
from trillion_moe.plan.collectives import collectives
from trillion_moe.sharding import AXES, BATCH, RULES, Layout, LayoutError, model_axes, place, shardings
from trillion_moe.steps import grad_step
from trillion_moe.transforms.quantize import cast
from trillion_moe.transforms.targets import places

QUICK = [
    ("all weights", {"fsdp": 2, "ep": 2, "tp": 2}, {"transport": "ragged", "chunks": 3}),
]
SLOW = [
    ("stacked", {"ep": 4, "tp": 2}, {"transport": "hierarchical", "node": 2, "chunks": 2} | WITHIN),
    ("pictures", {"dp": 2, "cp": 2, "tp": 2}, {}),
    ("all weights", {"dp": 2}, {}),
    ("stacked", {"fsdp": 4}, {"chunks": 2}),
    ("adapters", {"ep": 8}, {"transport": "ragged"}),
    ("all weights", {"cp": 8}, {}),
    ("kimi linear", {"tp": 4}, {}),
    ("kimi linear", {"dp": 2, "fsdp": 2}, {}),
    ("some experts", {"dp": 2, "ep": 2}, {"transport": "all_to_all", "chunks": 2}),
    ("pictures", {"dp": 2, "tp": 4}, {}),
    ("stacked", {"fsdp": 2, "ep": 4}, {"transport": "all_to_all"}),
    ("pictures", {"fsdp": 2, "cp": 2}, {}),
    ("adapters", {"fsdp": 4, "tp": 2}, WITHIN),
    ("some experts", {"ep": 2, "cp": 4}, {"chunks": 2}),
    ("kimi linear", {"ep": 2, "tp": 2}, {"transport": "ragged"}),
    ("all weights", {"cp": 2, "tp": 4}, {}),
    ("all weights", {"ep": 2, "tp": 4}, {"chunks": 2} | WITHIN),
    ("some experts", {"fsdp": 2, "ep": 2, "cp": 2}, {"transport": "ragged"}),
    ("stacked", {"ep": 2, "cp": 2, "tp": 2}, {"transport": "all_to_all", "chunks": 2} | WITHIN),
    ("adapters", {"dp": 2, "fsdp": 2, "ep": 2}, {"transport": "ragged", "chunks": 4}),
    ("pictures", {"ep": 4, "cp": 2}, {"transport": "ragged"}),
    ("adapters", {"ep": 8}, {"transport": "hierarchical", "node": 4, "chunks": 2}),
]


@pytest.mark.parametrize(
    ("name", "sizes", "options"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_over_a_mesh_as_on_one_device(name: str, sizes: dict[str, int], options: dict) -> None:
    assert_as_on_one_device(name, Layout.make(sizes, **options))


def test_logits_and_caches_over_a_mesh() -> None:
    """Prompts of unequal lengths, then a token more from the caches; a mesh that cuts sequences has none."""
    model, random = filled(tiny_k3(**TWO, **HEADS)), np.random.default_rng(0)
    tokens = random.integers(4, 300, (4, 12)).astype(np.int32)
    segments = (np.arange(12) < np.array([[12], [7], [3], [12]])).astype(np.int32)
    expected, caches = tm.forward(model, tokens, segments=segments)
    after, _ = tm.forward(model, tokens[:, :1], caches=caches)
    for sizes in ({"ep": 2, "tp": 2}, {"fsdp": 4}, {"cp": 4}):
        cut = place(model, Layout.make(sizes))
        found, caches = tm.forward(cut, tokens, segments=segments)
        np.testing.assert_allclose(found[segments > 0], expected[segments > 0], rtol=1e-4, atol=1e-4)
        if "cp" in sizes:
            assert caches is None
            with pytest.raises(LayoutError, match="a mesh with cp = 4 cuts sequences, and caches cannot be cut"):
                tm.forward(cut, tokens, caches=init_caches(cut, 4, 16))
        else:
            np.testing.assert_allclose(tm.forward(cut, tokens[:, :1], caches=caches)[0], after, rtol=1e-4, atol=1e-4)


def test_few_tokens_travel_in_one_chunk() -> None:
    """One each: what is there goes once and comes back once, however many chunks a layout has for the many."""
    layout = Layout.make({"ep": 4}, transport="all_to_all", chunks=8)
    model = place(filled(tiny_k3(**TWO, **HEADS)), layout)
    program = jax.jit(forward).lower(model, np.full((4, 1), 5, np.int32)).compile()
    count = {row.kind: row.count for row in collectives([program.as_text() or ""], layout.mesh)}
    assert count["all-to-all"] == 3  # to experts, back, and the columns of the embedding


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes", "options", "most"),
    [
        ("adapters", {"ep": 2, "cp": 2, "tp": 2}, {"transport": "ragged"} | WITHIN, 0.1),
        ("adapters, five", {"pp": 2, "ep": 2, "tp": 2}, {"transport": "ragged"} | WITHIN, 0.4),  # one device: 0.27
    ],
)
def test_in_bfloat16(name: str, sizes: dict[str, int], options: dict, most: float) -> None:
    """Half precision rounds elsewhere on a mesh, and no more: as far from float32 as one device is.

    A token has all experts: in half precision near ties choose others, whatever the mesh.
    """

    def grads(layout: Layout | None, dtype: str) -> dict[str, np.ndarray]:
        model, batch, of_loss = problem(name)
        moe = dataclasses.replace(model.config.moe, top_k=MOE.num_experts)
        model.config = dataclasses.replace(model.config, moe=moe)
        model = cast(model, dtype)
        trained, frozen = tm.partition(model if layout is None else tm.place(model, layout))
        found, _ = jax.jit(functools.partial(grad_step, **of_loss))(trained, frozen, batch)
        return {name: array.astype(np.float64) for name, array in by_layer(found).items()}

    exact, one = grads(None, "float32"), grads(None, "bfloat16")
    mesh = grads(Layout.make(sizes, **options), "bfloat16")

    def off(found: dict[str, np.ndarray]) -> float:
        """Relative RMS over all gradients together: single ones are small differences of large sums."""
        square = sum(np.sum((found[n] - exact[n]) ** 2) for n in exact)
        return float(np.sqrt(square / sum(np.sum(exact[n] ** 2) for n in exact)))

    assert 0.01 < off(one) < most
    assert off(mesh) <= 1.2 * off(one)
    for n, array in exact.items():  # 1.4 found; what is lost is 2.6 times as far off and more, where it is not noise
        assert np.linalg.norm(mesh[n] - array) <= 2 * np.linalg.norm(one[n] - array), n


# --- rules ------------------------------------------------------------------------------------------------------------


def blueprints() -> dict[str, Model]:
    k3 = tiny_k3(**TWO, vision=VISION)
    lora = tm.LoRAConfig(rank=2, targets=("attention", "shared_experts", "latent", "routed_experts", "vision"))
    return {
        "kimi_k3": Model(k3),
        "kimi_k3_packed_with_adapters": tm.add_lora(tm.quantize_experts(Model(k3)), lora),
        "kimi_linear": Model(tiny_k3(**LINEAR | TWO)),
    }


@pytest.mark.parametrize("name", ["kimi_k3", "kimi_k3_packed_with_adapters", "kimi_linear"])
def test_where_every_array_lies(name: str, goldens) -> None:
    """The golden file has, for every parameter, its shape and the mesh axes of each dimension."""
    model, layout = blueprints()[name], Layout.make({})
    found = [
        f"{place.names[0]} {list(place.leaf.shape)} {[layout.over(axis) for axis in dims.axes]}"
        for place, dims in zip(places(model, inside=True)[0], jax.tree.leaves(model_axes(model)), strict=True)
    ]
    text = "".join(line.replace("'", "").replace(",)", ")") + "\n" for line in found)
    assert text == (goldens / "shardings" / f"{name}.txt").read_text()


def test_blueprint_and_arrays_lie_alike() -> None:
    layout = Layout.make({"ep": 2, "tp": 2})
    blueprint = tm.quantize_experts(Model(tiny_k3(**TWO, **HEADS)))
    blueprint = tm.add_lora(blueprint, tm.LoRAConfig(rank=2, targets=("attention", "routed_experts")))
    filled_in = init(blueprint, jax.random.key(0))
    assert jax.tree.leaves(shardings(blueprint, layout)) == jax.tree.leaves(shardings(filled_in, layout))
    arrays = jax.tree.leaves(place(filled_in, layout))
    assert [a.sharding for a in arrays] == jax.tree.leaves(shardings(blueprint, layout))


def test_axes_of_adapters_are_those_of_their_specs() -> None:
    for model in blueprints().values():
        for spec, dims in zip(jax.tree.leaves(model), jax.tree.leaves(model_axes(model)), strict=True):
            assert spec.axes == dims.axes


def test_errors() -> None:
    with pytest.raises(LayoutError, match="no mesh axis 'x': legal are pp, dp, fsdp, ep, cp, tp"):
        Layout.make({"x": 2})
    with pytest.raises(LayoutError, match="dp 4 x tp 4 = 16 devices, but there are 8"):
        Layout.make({"dp": 4, "tp": 4})
    with pytest.raises(LayoutError, match="mesh axis tp=0: legal are whole numbers from 1"):
        Layout.make({"tp": 0})
    with pytest.raises(LayoutError, match="mesh axis ep=True: legal are whole numbers from 1"):
        Layout.make({"ep": True})
    with pytest.raises(LayoutError, match="a rule for 'heds', which is no logical axis"):
        Layout.make({}, rules={"heds": ("tp",)})
    with pytest.raises(LayoutError, match="the rule of 'heads' names mesh axis 'model'"):
        Layout.make({}, rules={"heads": ("model",)})
    with pytest.raises(LayoutError, match="the rule of 'embed' names 'tp': legal are dp, fsdp, ep"):
        Layout.make({}, rules={"embed": ("tp",)})
    with pytest.raises(LayoutError, match=r"attention.beta.*'embed', 'heads'.* lie over mesh axis 'ep' more than once"):
        shardings(Model(tiny_k3()), Layout.make({}, rules={"heads": ("ep",)}))
    with pytest.raises(LayoutError, match="has 3 along 'heads', not a multiple of 2"):
        shardings(Model(tiny_k3()), Layout.make({"tp": 2}))
    with pytest.raises(LayoutError, match="has 300 along 'vocab', not a multiple of 8"):
        shardings(Model(tiny_k3(**HEADS)), Layout.make({"tp": 8}))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"transport": "pigeon"}, "no transport 'pigeon': legal are replicated, all_to_all, ragged, hierarchical"),
        ({"capacity": 0.5}, "capacity = 0.5: legal is above 0 up to 1, with 'all_to_all' alone"),
        ({"transport": "all_to_all", "capacity": 1.5}, "capacity = 1.5: legal is above 0 up to 1"),
        ({"transport": "all_to_all", "capacity": 0.0}, "capacity = 0.0: legal is above 0 up to 1"),
        ({"transport": "all_to_all", "capacity": 0.3, "capacities": (0.25, 0.5)}, "capacity = 0.3: legal are rising"),
        ({"transport": "all_to_all", "capacity": 0.5, "capacities": (0.5, 0.25)}, "capacity = 0.5: legal are rising"),
        ({"transport": "all_to_all", "capacity": 0.5, "capacities": (0.5, 0.5)}, "capacity = 0.5: legal are rising"),
        ({"transport": "all_to_all", "capacity": 0.5}, "capacity = 0.5 over ep = 1, where nothing is exchanged"),
        ({"chunks": 0}, "chunks = 0: legal are whole numbers from 1"),
        ({"microbatches": True}, "microbatches = True: legal are whole numbers from 1"),
        ({"rules": {"mlp": "tp"}}, "the rule of 'mlp' is 'tp': legal is a tuple of mesh axes, () for none"),
        ({"rules": {"mlp": None}}, "the rule of 'mlp' is None: legal is a tuple of mesh axes, () for none"),
        ({"transport": "hierarchical"}, "transport 'hierarchical' with node = None: 'hierarchical' alone has nodes"),
        ({"node": 2}, "transport 'replicated' with node = 2: 'hierarchical' alone has nodes"),
        ({"transport": "hierarchical", "node": 2}, "node = 2 of ep = 1 devices: legal are none"),
        ({"wire": "float8_e4m3fn"}, "wire = 'float8_e4m3fn' over ep = 1: legal is float8_e4m3fn, where ep is above 1"),
        ({"rules": {"expert_mlp": ("cp",)}}, "the rule of 'expert_mlp' is ('cp',): legal is () or ('tp',)"),
        ({"rules": {"time": ()}}, "the rule of 'time' is (): legal is ('cp',)"),
        ({"rules": {"batch": ("dp",)}}, "the rule of 'batch' is ('dp',): legal is ('pp', 'dp', 'fsdp', 'ep')"),
        ({"rules": {"vocab": ()}}, "the rule of 'vocab' is (): legal is ('tp',)"),
        ({"rules": {"expert": ()}}, "the rule of 'expert' is (): legal is ('ep',)"),
        ({"rules": {"expert_embed": ("tp",)}}, "the rule of 'expert_embed' is ('tp',): legal is ()"),
    ],
)
def test_options_that_are_not_legal(options: dict, says: str) -> None:
    with pytest.raises(LayoutError, match=re.escape(says)):
        Layout.make({}, **options)


OTHER_TYPES = """
from trillion_moe.meshes.machine import layout_of
from trillion_moe.sharding import Layout, LayoutError

def said(f, *args, **options):
    try:
        return f(*args, **options)
    except LayoutError as error:
        return str(error)

to_all = {"transport": "all_to_all", "capacity": 1.0}
for size in (2.0, "2", None):
    assert said(Layout.make, {"ep": size}) == f"mesh axis ep={size!r}: legal are whole numbers from 1"
for options in ({"chunks": 1.5}, {"chunks": None}, {"virtual": "1"}, {"microbatches": 2.0}):
    (name, value), = options.items()
    assert said(Layout.make, {}, **options) == f"{name} = {value!r}: legal are whole numbers from 1"
assert said(Layout.make, {}, **to_all | {"capacity": "1"}).startswith("capacity = '1': legal is above 0 up to 1")
assert said(Layout.make, {"ep": 2}, **to_all | {"capacity": True}).startswith("capacity = True: legal is above 0")
for some in (None, 0.5):
    assert said(Layout.make, {"ep": 2}, **to_all, capacities=some).startswith(f"capacities = {some}: legal are tuples")
for rules in (None, [("embed", ())]):
    assert said(Layout.make, {}, rules=rules).startswith(f"rules are {rules}: legal is a dict of logical axes")
assert said(layout_of, ["ep", 2]).startswith("mesh is list: legal are a machine's name, FILE.py, sizes")
one, two = (Layout.make({"ep": 2}, **to_all, capacities=some) for some in ([0.5, 1.0], (0.5, 1.0)))
assert (one, hash(one)) == (two, hash(two))
"""


def test_values_of_other_types() -> None:
    """As a machine's file may have them; in a process whose hints are not checked, as they are for users."""
    two = os.environ | {"JAX_NUM_CPU_DEVICES": "2"}
    subprocess.run([sys.executable, "-c", OTHER_TYPES], env=two, check=True)


def test_nodes_and_wires_that_are_not_legal() -> None:
    with pytest.raises(LayoutError, match="node = 3 of ep = 8 devices: legal are 2, 4; one tier needs no nodes"):
        Layout.make({"ep": 8}, transport="hierarchical", node=3)
    with pytest.raises(LayoutError, match="node = 8 of ep = 8 devices: legal are 2, 4; one tier needs no nodes"):
        Layout.make({"ep": 8}, transport="hierarchical", node=8)
    with pytest.raises(LayoutError, match="wire = 'int8' over ep = 8: legal is float8_e4m3fn, where"):
        Layout.make({"ep": 8}, wire="int8")


def test_batches_that_cannot_be_cut() -> None:
    tokens = np.ones((4, 12), np.int32)
    model = filled(tiny_k3(**TWO, **HEADS))
    with pytest.raises(LayoutError, match=r"4 rows cannot be cut over dp 8: legal are multiples of 8"):
        tm.loss(place(model, Layout.make({"dp": 8})), {"tokens": tokens})
    with pytest.raises(LayoutError, match=r"12 tokens a row cannot be cut over cp 8: legal are multiples of 8"):
        tm.loss(place(model, Layout.make({"cp": 8})), {"tokens": tokens})
    with pytest.raises(LayoutError, match=r"12 tokens a row leave 2 on each device along cp: its .* at least 3"):
        tm.loss(place(model, Layout.make({"cp": 6})), {"tokens": tokens})


def test_what_a_capacity_drops_is_counted() -> None:
    """A quarter of a device's tokens may go to one other: of what its experts were given, some never arrive."""
    random = np.random.default_rng(0)
    batch = {"tokens": random.integers(4, 300, (4, 32)).astype(np.int32)}
    model = filled(tiny_k3(**TWO, **HEADS))
    _, all_there = tm.loss(place(model, Layout.make({"ep": 4}, transport="all_to_all")), batch)
    _, metrics = tm.loss(place(model, Layout.make({"ep": 4}, transport="all_to_all", capacity=0.25)), batch)
    assert all_there["dropped"] == 0
    assert 0 < metrics["dropped"] < 4 * 32 * MOE.top_k
    np.testing.assert_array_equal(metrics["expert_counts"], all_there["expert_counts"])  # what routers chose


def test_rules_name_mesh_axes() -> None:
    assert {axis for axes in RULES.values() for axis in axes} <= set(AXES)
    assert set(RULES["embed"]) <= set(BATCH)
    assert Layout.make({}).spec(("vocab", "embed")) == PartitionSpec("tp", ("fsdp", "ep"))
