"""A model over a mesh equals the model on one device: loss, counts and every gradient, whatever the mesh.

In float64, so that what is left is summation order: an error of one part in 1e9 fails.
"""

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from tests.tiny import KDA, LINEAR, MLA, MOE, filled, tiny_k3

import trillion_moe as tm
from trillion_moe.blueprint import init
from trillion_moe.config import VisionConfig
from trillion_moe.model import Model, depth_plan, init_caches
from trillion_moe.sharding import AXES, BATCH, RULES, Layout, LayoutError, model_axes, place, shardings
from trillion_moe.steps import grad_step
from trillion_moe.transforms.quantize import cast
from trillion_moe.transforms.targets import places

HEADS = {"kda": dataclasses.replace(KDA, num_heads=4, a_log_shape=None), "mla": dataclasses.replace(MLA, num_heads=4)}
VISION = VisionConfig(
    hidden_size=32, num_layers=1, num_heads=2, qkv_size=32, mlp_size=64, patch_size=14, text_hidden_size=64,
    pos_emb_height=4, pos_emb_width=4, pos_emb_time=4,
)  # fmt: skip
TWO = {"num_layers": 2, "attention": ("kda", "mla"), "mlp": ("dense", "moe")}
FOUR = {"num_layers": 4, "attention": ("kda", "mla") * 2, "mlp": ("moe",) * 4}  # one residual block of two, repeated
B, T = 8, 32
DOCUMENTS = [1] * 9 + [2] * 14 + [3] * 5 + [0] * 4  # over 2 or 4 devices some straddle, over 8 one has only padding


def problem(name: str):
    """Model, batch and options of the loss: what is trained and how differs, so that meshes meet every feature."""
    random = np.random.default_rng(0)
    tokens = random.integers(4, 300, (B, T)).astype(np.int32)
    segments = np.array([np.roll(DOCUMENTS, 4 * row) if row % 2 else DOCUMENTS for row in range(B)], np.int32)
    segments[3] = 1
    packed = {"tokens": tokens, "segments": segments}
    match name:
        case "all weights":
            return filled(tiny_k3(**TWO, **HEADS)), packed, {}
        case "stacked":
            return filled(tiny_k3(**FOUR, **HEADS), plan=depth_plan(tiny_k3(**FOUR, **HEADS), scan=True)), packed, {}
        case "adapters":
            targets = ("attention", "shared_experts", "latent", "routed_experts")
            lora = tm.LoRAConfig(rank=4, targets=targets, routed="independent")
            wide = tiny_k3(**TWO, **HEADS, moe=dataclasses.replace(MOE, hidden_size=64))  # 32 a device when cut in two
            model = tm.add_lora(tm.quantize_experts(filled(wide)), lora, jax.random.key(1))
            return _stirred(model), packed | {"loss_mask": random.integers(0, 2, (B, T)).astype(bool)}, {}
        case "some experts":
            lora = tm.LoRAConfig(rank=4, targets=("routed_experts",), experts=(1, 6), routed="shared_a")
            model = tm.add_lora(filled(tiny_k3(**TWO, **HEADS)), lora, jax.random.key(1))
            return _stirred(model), {"tokens": tokens}, {"remat": False}
        case "kimi linear":
            changes = LINEAR | TWO | {"kda": dataclasses.replace(LINEAR["kda"], num_heads=4)}
            changes["mla"] = dataclasses.replace(LINEAR["mla"], num_heads=4)
            return filled(tiny_k3(**changes)), {"tokens": tokens}, {"remat": False}
        case "pictures":
            tokens[0, 3:7] = tokens[5, 20:24] = 3
            images = tm.ImageBatch(random.normal(size=(32, 3, 14, 14)), ((1, 4, 4), (1, 4, 4)))
            return filled(tiny_k3(**TWO, **HEADS, vision=VISION)), packed | {"images": images}, {}
    raise ValueError(name)


def _stirred(model):
    """Adapters whose b is not 0, so that every a has a gradient."""
    key = jax.random.key(2)
    return jax.tree.map(lambda x: x + 0.05 * jax.random.normal(key, x.shape, x.dtype) if _adapter(x) else x, model)


def _adapter(x) -> bool:
    return np.issubdtype(x.dtype, np.floating) and 4 in x.shape[-2:]


def gradients(name: str, layout: Layout | None):
    """-> loss, metrics, gradients by name, where the arrays of a trained model would lie."""
    with jax.enable_x64(True):
        model, batch, options = problem(name)
        model = jax.tree.map(lambda x: x.astype("float64") if np.issubdtype(x.dtype, np.floating) else x, model)
        model.dtype = "float64"
        model = model if layout is None else place(model, layout)
        trained, frozen = tm.partition(model, trainable="lora" if name in ADAPTERS else "all")
        grads, sums = jax.jit(functools.partial(grad_step, **options))(trained, frozen, batch)
        for grad, array in zip(*map(jax.tree.leaves, (grads, trained)), strict=True):
            assert grad.sharding.is_equivalent_to(array.sharding, grad.ndim)
        sums = jax.device_get(sums)
        return sums.pop("loss"), sums, {p.names[0]: np.asarray(p.leaf) for p in places(grads, inside=True)[0]}


ADAPTERS = ("adapters", "some experts")
one_device = functools.cache(lambda name: gradients(name, None))

WITHIN = {"rules": {"expert_mlp": ("tp",)}}  # experts cut inside, too
QUICK = [
    ("all weights", {"fsdp": 2, "ep": 2, "tp": 2}, {"transport": "ragged", "chunks": 3}),
    ("stacked", {"cp": 4, "ep": 2}, {"transport": "ragged"}),
]
SLOW = [
    ("adapters", {"ep": 4, "tp": 2}, {"transport": "all_to_all"} | WITHIN),
    ("pictures", {"dp": 2, "cp": 2, "tp": 2}, {}),
    ("all weights", {"dp": 2}, {}),
    ("stacked", {"fsdp": 4}, {"chunks": 2}),
    ("adapters", {"ep": 8}, {"transport": "ragged"}),
    ("all weights", {"cp": 8}, {}),
    ("kimi linear", {"tp": 4}, {}),
    ("kimi linear", {"dp": 2, "fsdp": 2}, {}),
    ("some experts", {"dp": 2, "ep": 2}, {"transport": "all_to_all", "chunks": 2}),
    ("adapters", {"dp": 4, "cp": 2}, {}),
    ("pictures", {"dp": 2, "tp": 4}, {}),
    ("stacked", {"fsdp": 2, "ep": 4}, {"transport": "all_to_all"}),
    ("pictures", {"fsdp": 2, "cp": 2}, {}),
    ("adapters", {"fsdp": 4, "tp": 2}, WITHIN),
    ("some experts", {"ep": 2, "cp": 4}, {"chunks": 2}),
    ("kimi linear", {"ep": 2, "tp": 2}, {"transport": "ragged"}),
    ("all weights", {"cp": 2, "tp": 4}, {}),
    ("kimi linear", {"cp": 4}, {}),
    ("all weights", {"ep": 2, "tp": 4}, {"chunks": 2} | WITHIN),
    ("some experts", {"fsdp": 2, "ep": 2, "cp": 2}, {"transport": "ragged"}),
    ("stacked", {"ep": 2, "cp": 2, "tp": 2}, {"transport": "all_to_all", "chunks": 2} | WITHIN),
    ("adapters", {"dp": 2, "fsdp": 2, "ep": 2}, {"transport": "ragged", "chunks": 4}),
    ("pictures", {"ep": 4, "cp": 2}, {"transport": "ragged"}),
]


@pytest.mark.parametrize(
    ("name", "sizes", "options"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_over_a_mesh_as_on_one_device(name: str, sizes: dict[str, int], options: dict) -> None:
    loss, sums, grads = gradients(name, Layout.make(sizes, **options))
    one_loss, one_sums, one_grads = one_device(name)
    assert loss == pytest.approx(one_loss, rel=1e-11)
    assert sums.keys() == one_sums.keys()
    for metric, value in one_sums.items():
        np.testing.assert_array_equal(sums[metric], value, err_msg=metric)
    assert sums["dropped"] == 0
    assert grads.keys() == one_grads.keys()
    for parameter, grad in one_grads.items():
        difference = np.linalg.norm(grads[parameter] - grad)
        assert difference <= 1e-9 * np.linalg.norm(grad), parameter
        if parameter.endswith("router.weight"):  # fault 37: through the weights of experts that are elsewhere, too
            assert np.linalg.norm(grad) > 0


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


def test_in_bfloat16() -> None:
    """Half precision rounds elsewhere on a mesh, and no more: as far from float32 as one device is.

    A token has all experts: in half precision near ties choose others, whatever the mesh.
    """

    def grads(layout: Layout | None, dtype: str) -> dict[str, np.ndarray]:
        model, batch, options = problem("adapters")
        moe = dataclasses.replace(model.config.moe, top_k=MOE.num_experts)
        model.config = dataclasses.replace(model.config, moe=moe)
        model = cast(model, dtype)
        trained, frozen = tm.partition(model if layout is None else place(model, layout))
        found, _ = jax.jit(functools.partial(grad_step, **options))(trained, frozen, batch)
        return {p.names[0]: np.asarray(p.leaf, np.float64) for p in places(found, inside=True)[0]}

    exact, one = grads(None, "float32"), grads(None, "bfloat16")
    mesh = grads(Layout.make({"ep": 2, "cp": 2, "tp": 2}, transport="ragged", **WITHIN), "bfloat16")

    def off(found: dict[str, np.ndarray]) -> float:
        """Relative RMS over all gradients together: single ones are small differences of large sums."""
        square = sum(np.sum((found[n] - exact[n]) ** 2) for n in exact)
        return float(np.sqrt(square / sum(np.sum(exact[n] ** 2) for n in exact)))

    assert 0.01 < off(one) < 0.1
    assert off(mesh) <= 1.2 * off(one)


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
    with pytest.raises(LayoutError, match="mesh axis pp=2: legal is 1, pipeline stages are not built yet"):
        Layout.make({"pp": 2})
    with pytest.raises(LayoutError, match="mesh axis tp=0: legal are sizes from 1"):
        Layout.make({"tp": 0})
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
        ({"transport": "pigeon"}, "no transport 'pigeon': legal are replicated, all_to_all, ragged"),
        ({"capacity": 0.5}, "capacity = 0.5: legal is above 0 up to 1, with 'all_to_all' alone"),
        ({"transport": "all_to_all", "capacity": 1.5}, "capacity = 1.5: legal is above 0 up to 1"),
        ({"transport": "all_to_all", "capacity": 0.0}, "capacity = 0.0: legal is above 0 up to 1"),
        ({"chunks": 0}, "chunks = 0: legal is at least 1"),
        ({"rules": {"expert_mlp": ("cp",)}}, "the rule of 'expert_mlp' is ('cp',): legal is () or ('tp',)"),
        ({"rules": {"time": ()}}, "the rule of 'time' is (): legal is ('cp',)"),
        ({"rules": {"batch": ("dp",)}}, "the rule of 'batch' is ('dp',): legal is ('dp', 'fsdp', 'ep')"),
        ({"rules": {"vocab": ()}}, "the rule of 'vocab' is (): legal is ('tp',)"),
        ({"rules": {"expert": ()}}, "the rule of 'expert' is (): legal is ('ep',)"),
        ({"rules": {"expert_embed": ("tp",)}}, "the rule of 'expert_embed' is ('tp',): legal is ()"),
    ],
)
def test_options_that_are_not_legal(options: dict, says: str) -> None:
    with pytest.raises(LayoutError, match=re.escape(says)):
        Layout.make({}, **options)


def test_batches_that_cannot_be_cut() -> None:
    tokens = np.ones((4, 12), np.int32)
    model = filled(tiny_k3(**TWO, **HEADS))
    with pytest.raises(LayoutError, match=r"4 rows cannot be cut over dp 8 x fsdp 1 x ep 1: legal are multiples of 8"):
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
