"""Faults that other trainers of large mixtures had on meshes, each planted here: what they got wrong must be right."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.tiny import KDA, MLA, filled, tiny_k3

import trillion_moe as tm
from trillion_moe.blueprint import init
from trillion_moe.config import VisionConfig
from trillion_moe.layers import kda, mla
from trillion_moe.layers.moe import MoE
from trillion_moe.meshes.machine import MEMORY, Machine
from trillion_moe.optimizer import make_optimizer
from trillion_moe.programs import add, gradients, over_all, update
from trillion_moe.run_config import OptimizerConfig
from trillion_moe.sharding import TRANSPORTS, Layout, LayoutError, place, put
from trillion_moe.transforms.targets import places

FLAT = [transport for transport in TRANSPORTS if transport != "hierarchical"]  # which needs more than two devices
HEADS = {"kda": dataclasses.replace(KDA, num_heads=2, a_log_shape=None), "mla": dataclasses.replace(MLA, num_heads=2)}
CFG = tiny_k3(**HEADS)
ONE = {"num_layers": 1, "attention": ("mla",), "mlp": ("moe",), "kda": None, "mla": HEADS["mla"]}


def by_name(tree) -> dict[str, np.ndarray]:
    return {p.names[0]: np.asarray(p.leaf) for p in places(tree, inside=True)[0]}


def through(f, layout: Layout | None = None):
    """-> of module, x and mask, y = f(module, x, mask, layout) and the gradients of sum(y * r), compiled once. In
    float64, so that only the order of sums differs."""

    def objective(module, x, mask, r):
        y = f(module, x, mask, layout)
        return jnp.sum(y * r), y

    compiled = jax.jit(jax.value_and_grad(objective, (0, 1), has_aux=True))

    def run(module, x: np.ndarray, mask: np.ndarray) -> dict[str, np.ndarray]:
        (_, y), grads = compiled(module, x, mask, np.random.default_rng(9).normal(size=x.shape))
        flat, _ = jax.tree_util.tree_flatten_with_path(grads)
        return {"y": np.asarray(y)} | {jax.tree_util.keystr(path): np.asarray(grad) for path, grad in flat}

    return run


def alike(found, expected) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert np.linalg.norm(found[name] - array) <= 1e-9 * np.linalg.norm(array), name


# --- sequences that are cut -------------------------------------------------------------------------------------------

DOCUMENTS = np.repeat(np.array([1, 2, 3], np.int32), [37, 51, 40])[None]
"""Over two devices of 64 tokens the second straddles."""


def of_kda(layer, x, segments, layout):
    return layer(x, segments, CFG, None, None, layout)[0]


def of_mla(layer, x, segments, layout):
    slots = jnp.arange(x.shape[1], dtype=jnp.int32)[None]
    return layer(x, mla.Positions(slots, segments, segments), CFG, None, layout)[0]


@pytest.mark.parametrize(("kind", "run"), [pytest.param(kda.KDA, of_kda, marks=pytest.mark.slow), (mla.MLA, of_mla)])
def test_a_document_across_the_cut(kind, run) -> None:
    """fault 17: documents were forgotten when a sequence was cut over devices, and convolutions began anew at the cut.
    fault 9: the backward pass over a cut sequence took the first head's gate for every head, and began each part at the
    sequence's first position: the loss was right, gradients were off by a hundredth. Here gates of the two heads are
    far apart, and each has its gradient."""
    with jax.enable_x64(True):
        layer = init(kind(CFG, dtype="float64"), jax.random.key(0))
        layer = jax.tree.map(lambda a: a.astype("float64"), layer)
        if kind is kda.KDA:
            layer.a_log = jnp.array([-1.0, 1.5])
            layer.dt_bias = layer.dt_bias + jnp.repeat(jnp.array([0.0, 3.0]), KDA.head_dim)
        x = np.random.default_rng(0).normal(size=(1, 128, 64))
        one = through(run)
        expected = one(layer, x, DOCUMENTS)
        alike(through(run, Layout.make({"cp": 2}))(layer, x, DOCUMENTS), expected)
        one_document = one(layer, x, np.ones_like(DOCUMENTS))["y"]
    assert np.linalg.norm(one_document - expected["y"]) > 0.1 * np.linalg.norm(expected["y"])
    if kind is kda.KDA:
        for name, head in (("[0].a_log", 1), ("[0].dt_bias", KDA.head_dim), ("[0].decay_b", KDA.head_dim)):
            both = expected[name]
            assert np.abs(both[..., :head]).max() > 0, name
            assert np.abs(both[..., head:]).max() > 0, name


# --- experts ----------------------------------------------------------------------------------------------------------


def test_unequal_numbers_of_tokens_on_two_devices() -> None:
    """fault 38: devices that gathered equally many tokens from each other waited for ever where they had unequal
    numbers, or none. fault 37: a router whose scores were detached by the exchange learned from the auxiliary loss
    alone: here its gradient is that of one device, and not zero."""
    x = np.random.default_rng(1).normal(size=(2, 12, 64))

    def moe(layer, x, real, layout):
        return layer(x, real, CFG, layout)[0]

    with jax.enable_x64(True):
        layer = jax.tree.map(lambda a: a.astype("float64"), init(MoE(CFG, dtype="float64"), jax.random.key(0)))
        one = through(moe)
        over = [through(moe, Layout.make({"ep": 2}, transport=transport)) for transport in FLAT]
        for counts in ((5, 9), (9, 0), (0, 0)):
            real = np.arange(12) < np.array(counts)[:, None]
            expected = one(layer, x, real)
            assert (np.linalg.norm(expected["[0].router.weight"]) > 0) == any(counts)
            for two in over:
                alike(two(layer, x, real), expected)


def over(layout: Layout | None, array: np.ndarray):
    return jnp.asarray(array) if layout is None else put(array, layout.sharding("batch", "time"))


def of_text(layout: Layout | None, tokens: np.ndarray, images=None) -> dict:
    arrays = {"tokens": tokens, "segments": np.ones_like(tokens), "loss_mask": np.ones(tokens.shape, bool)}
    return {name: over(layout, array) for name, array in arrays.items()} | {"images": images}


def trained_for(model, layout: Layout | None, batches, trainable: str):
    """An update for each list of batches, by the programs of `train` -> what is trained, gradients of the last."""
    model = jax.tree.map(jnp.copy, model if layout is None else place(model, layout))  # updates take its memory
    trained, frozen = tm.partition(model, trainable=trainable)
    optimizer = make_optimizer(OptimizerConfig(lr=1e-2), 10)
    state = over_all(optimizer.init(trained), layout)
    grads = []
    for window in batches:
        grads = [
            gradients(trained, frozen, of_text(layout, *batch), jax.random.key(0), remat=False, dropout=0.0)
            for batch in window
        ]
        summed, sums = functools.reduce(lambda both, new: add(*jax.tree.map(jnp.copy, both), new), grads)
        trained, state, metrics = update(optimizer, trained, state, summed, sums)
        assert np.isfinite(metrics["grad_norm"])
    return trained, [by_name(g) for g, _ in grads]


@pytest.mark.slow
def test_an_adapter_s_shared_part_stays_one() -> None:
    """fault 79: the part of an adapter that all experts share was drawn by each device for itself and updated from its
    own experts' gradients alone: copies drifted apart. Here they are bit for bit one, first and after three updates,
    and what one device makes of it."""
    lora = tm.LoRAConfig(rank=2, targets=("routed_experts",), routed="shared_a")
    model = tm.add_lora(filled(tiny_k3(**ONE)), lora, jax.random.key(1))
    random, layout = np.random.default_rng(2), Layout.make({"ep": 2}, transport="ragged")
    windows = [[(random.integers(4, 300, (2, 12)).astype(np.int32),)] for _ in range(3)]

    def shared(tree) -> dict[str, jax.Array]:
        return {p.names[0]: p.leaf for p in places(tree, inside=True)[0] if p.names[0].endswith(".a")}

    def one_everywhere(tree) -> None:
        assert len(shared(tree)) == 3
        for name, array in shared(tree).items():
            first, second = (np.asarray(shard.data) for shard in array.addressable_shards)
            assert first.shape == array.shape
            np.testing.assert_array_equal(first, second, err_msg=name)

    cut = place(model, layout)
    one_everywhere(cut)
    trained, _ = trained_for(cut, layout, windows, "lora")
    one_everywhere(trained)
    expected, _ = trained_for(model, None, windows, "lora")
    for name, array in shared(expected).items():
        assert np.any(array != shared(model)[name])
        np.testing.assert_allclose(shared(trained)[name], array, rtol=1e-3, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_a_part_without_gradient_in_one_of_two_batches() -> None:
    """fault 132: over a cut sequence with accumulation, a part that one batch did not use had no gradient there, or one
    of another dtype, and the sum failed. The first batch has no picture, the second one has: the tower's gradients are
    zero, then not, and their sums and the update are those of one device."""
    vision = VisionConfig(
        hidden_size=32, num_layers=1, num_heads=2, qkv_size=32, mlp_size=64, patch_size=14, text_hidden_size=64,
        pos_emb_height=4, pos_emb_width=4, pos_emb_time=4,
    )  # fmt: skip
    model = filled(tiny_k3(**ONE | {"mlp": ("dense",)}, vision=vision))
    random = np.random.default_rng(3)
    tokens = random.integers(4, 300, (2, 1, 32)).astype(np.int32)
    tokens[1, 0, 14:18] = 3
    images = tm.ImageBatch(random.normal(size=(16, 3, 14, 14)).astype(np.float32), ((1, 4, 4),))
    windows = [[(tokens[0],), (tokens[1], images)]]
    trained, (without, with_picture) = trained_for(model, Layout.make({"cp": 2}), windows, "all")
    expected, of_one = trained_for(model, None, windows, "all")
    tower = [name for name in without if name.startswith(("vision", "projector"))]
    assert tower
    for name in tower:
        assert not without[name].any()
        assert without[name].dtype == with_picture[name].dtype == np.float32
    assert any(with_picture[name].any() for name in tower)
    for found, one in zip((without, with_picture), of_one, strict=True):
        for name, grad in one.items():
            np.testing.assert_allclose(found[name], grad, rtol=1e-3, atol=1e-3 * np.abs(grad).max(), err_msg=name)
    for name, array in by_name(expected).items():
        np.testing.assert_allclose(by_name(trained)[name], array, rtol=1e-3, atol=2e-3, err_msg=name)


def test_a_mesh_is_as_many_devices_as_its_axes_multiply_to() -> None:
    """fault 123: a legal number of devices was refused, as some axes were counted into their product and some not. All
    six are: what is more than there is, is refused with the product; what is less takes the first devices."""
    for sizes in ({"tp": 2, "dp": 2, "ep": 2}, {"tp": 2, "pp": 2, "ep": 2}, {"tp": 2, "cp": 2, "ep": 2}, {"fsdp": 8}):
        assert Layout.make(sizes).mesh.devices.size == 8
    few = Layout.make({"tp": 2, "ep": 3})
    assert list(few.mesh.devices.flat) == jax.devices()[:6]
    there = "devices, but there are 8; JAX_NUM_CPU_DEVICES makes more of a CPU"
    with pytest.raises(LayoutError, match=rf"^tp 2 x dp 2 x ep 4 = 16 {there}$"):
        Layout.make({"tp": 2, "dp": 2, "ep": 4})
    with pytest.raises(LayoutError, match=rf"^tp 2 x pp 2 x ep 4 = 16 {there}$"):
        Layout.make({"tp": 2, "pp": 2, "ep": 4})
    with pytest.raises(LayoutError, match=r"mine: tiers span \[8\], which must rise to the 16 devices of its axes"):
        Machine("mine", "cpu", {"tp": 2, "dp": 2, "ep": 4}, (MEMORY.switched(8),))
