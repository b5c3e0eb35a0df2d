"""The training step: what it trains, what it leaves alone, and what it reports."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file
from tests.numerics import rel_rms
from tests.tiny import LINEAR, by_name, filled, tiny_k3

import trillion_moe as tm
from trillion_moe.programs import add
from trillion_moe.steps import grad_step, train_step, update_step
from trillion_moe.transforms.targets import places
from trillion_moe.weights import MXFP4, LoRA

METRICS = {"loss", "grad_norm", "tokens", "accuracy", "expert_counts", "dropped"}


def size(tree) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def names(tree) -> set[str]:
    return {name for place in places(tree, inside=True)[0] for name in place.names}


def step_of(optimizer):
    """Compiled as in use: what is replaced is donated."""
    return jax.jit(partial(train_step, optimizer), donate_argnums=(0, 2))


# --- adapters over packed experts -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def golden(goldens):
    return goldens / "kimi_k3" / "a" / "mxfp4"


@pytest.fixture(scope="module")
def adapted(golden):
    lora = tm.LoRAConfig(rank=2, targets=("routed_experts", "attention"))
    return tm.add_lora(last_block(tm.load(golden)), lora, jax.random.key(0))


def last_block(model):
    """The model with its last two layers only (KDA and MLA, both MoE), which compiles sooner."""
    kinds = model.plan[-1].layers
    attention, mlp = zip(*((kind.attention, kind.ffn) for kind in kinds), strict=True)
    assert (attention, mlp) == (("kda", "mla"), ("moe", "moe"))
    model.config = dataclasses.replace(model.config, num_layers=2, attention=attention, mlp=mlp)
    model.plan, model.segments = model.plan[-1:], model.segments[-1:]
    return model


@pytest.fixture(scope="module")
def run(adapted, golden):
    """Four steps on one batch with padding -> frozen arrays before, frozen, trained, state, metrics of every step."""
    arrays = load_file(golden / "text.safetensors")
    batch = {"tokens": arrays["input_ids"], "segments": arrays["attention_mask"].astype(np.int32)}
    trainable, frozen = tm.partition(adapted)
    before = jax.tree.map(np.array, frozen)
    optimizer = optax.adam(2e-2)
    step, state, metrics = step_of(optimizer), optimizer.init(trainable), []
    trainable = jax.tree.map(lambda leaf: leaf.copy(), trainable)  # those of `adapted` are not to be donated
    for _ in range(4):
        trainable, state, measured = step(trainable, frozen, state, batch)
        metrics.append(jax.device_get(measured))
    return before, frozen, trainable, state, metrics, batch


def test_adapters_lower_the_loss(adapted, run) -> None:
    _, _, trainable, _, metrics, _ = run
    losses = [measured["loss"] for measured in metrics]
    assert np.isfinite(losses).all()
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.1
    start = by_name_inside(tm.partition(adapted)[0])
    for name, array in by_name_inside(trainable).items():
        assert not np.array_equal(array, start[name]), name


def by_name_inside(tree) -> dict[str, np.ndarray]:
    return {place.names[0]: np.asarray(place.leaf) for place in places(tree, inside=True)[0]}


def test_frozen_arrays_are_bit_identical(adapted, run) -> None:
    before, frozen, trainable, _, _, _ = run
    jax.tree.map(np.testing.assert_array_equal, frozen, before)
    model = tm.combine(trainable, frozen)
    assert jax.tree.structure(model) == jax.tree.structure(adapted)
    weights = [place.leaf for place in places(model)[0]]
    assert any(isinstance(w, LoRA) and isinstance(w.base, MXFP4) for w in weights)
    jax.tree.map(np.testing.assert_array_equal, tm.remove_lora(model), tm.remove_lora(tm.combine(trainable, before)))


def test_only_what_is_trained_has_optimizer_state(run) -> None:
    _, _, trainable, state, _, _ = run
    counters = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim == 0]
    assert size(state) - size(counters) == 2 * size(trainable)
    assert [int(count) for count in counters] == [4]


def test_metrics(adapted, run) -> None:
    """Counts over real tokens; the first loss is that of the model before the step."""
    *_, metrics, batch = run
    moe = adapted.config.moe
    real, documents = int((batch["segments"] > 0).sum()), len(batch["tokens"])
    for measured in metrics:
        assert measured.keys() == METRICS
        assert measured["loss"].dtype == measured["grad_norm"].dtype == measured["accuracy"].dtype == np.float32
        assert measured["tokens"] == real - documents
        assert measured["expert_counts"].shape == (adapted.config.mlp.count("moe"), moe.num_experts)
        assert (measured["expert_counts"].sum(axis=1) == real * moe.top_k).all()
        assert measured["grad_norm"] > 0
        assert 0 <= measured["accuracy"] <= 1


# --- all weights ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_weight_decay_leaves_the_routers_bias_alone() -> None:
    """No gradient reaches it, so it is no parameter of the optimizer: decay would undo the balance of experts."""
    model = filled(tiny_k3(**LINEAR | {"num_layers": 2, "attention": ("kda", "mla"), "mlp": ("dense", "moe")}))
    router = model.segments[0][1].ffn.router
    router.bias = jax.random.normal(jax.random.key(1), router.bias.shape)
    before = {name: array.copy() for name, array in by_name(model, model).items()}
    trainable, frozen = tm.partition(model, trainable="all")
    assert names(frozen) == {"layers.1.ffn.router.bias"}
    optimizer = optax.adamw(1e-2, weight_decay=0.5)
    batch = {"tokens": jax.random.randint(jax.random.key(2), (2, 12), 4, 300)}
    trainable, state, first = (step := step_of(optimizer))(trainable, frozen, optimizer.init(trainable), batch)
    trainable, _, second = step(trainable, frozen, state, batch)
    assert second["loss"] < first["loss"]
    for name, array in by_name(tm.combine(trainable, frozen), model).items():
        assert np.array_equal(array, before[name]) == name.endswith("router.bias"), name


# --- sums over batches ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small():
    kinds = {"num_layers": 2, "attention": ("kda", "mla"), "mlp": ("dense", "moe")}
    model = tm.add_lora(filled(tiny_k3(**LINEAR | kinds)), tm.LoRAConfig(rank=2), jax.random.key(0))
    trainable, frozen = tm.partition(model)
    trainable = jax.tree.map(lambda a: a + 0.1 * jax.random.normal(jax.random.key(a.size), a.shape), trainable)
    return trainable, frozen


def rows(*slices, tokens, mask):
    return [{"tokens": tokens[s], "loss_mask": mask[s]} for s in slices]


def test_gradients_of_parts_add_up(small) -> None:
    """fault 97: rows with 4 and 3 x 1 supervised tokens in two batches give the gradient of one batch, not of means."""
    trainable, frozen = small
    tokens = np.asarray(jax.random.randint(jax.random.key(1), (4, 8), 6, 300))
    mask = np.zeros((4, 8), bool)
    mask[0, 4:], mask[1:, 7] = True, True
    step = jax.jit(grad_step)
    (whole, sums), *parts = (step(trainable, frozen, batch) for batch in rows(
        np.s_[:], np.s_[:1], np.s_[1:], tokens=tokens, mask=mask))  # fmt: skip
    assert int(sums["tokens"]) == 7
    added, total = jax.tree.map(lambda *leaves: sum(leaves[1:], start=leaves[0]), *parts)
    for name in sums:
        np.testing.assert_allclose(total[name], sums[name], rtol=1e-5)
    for a, b in zip(jax.tree.leaves(added), jax.tree.leaves(whole), strict=True):
        assert rel_rms(a, b) < 1e-5
    optimizer = optax.sgd(1.0)
    _, _, metrics = update_step(optimizer, trainable, optimizer.init(trainable), added, total)
    assert abs(float(metrics["loss"]) - float(sums["loss"]) / 7) < 1e-5


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_nothing_is_updated_by_what_is_not_finite(small, where) -> None:
    trainable, _ = small
    optimizer = optax.adam(1.0)
    state = optimizer.init(trainable)
    grads = jax.tree.map(jax.numpy.ones_like, trainable)
    sums = {"loss": jax.numpy.float32(3), "tokens": jax.numpy.int32(2), "correct": jax.numpy.float32(1)}
    if where == "loss":
        sums["loss"] = jax.numpy.float32(jax.numpy.inf)
    else:
        first, treedef = jax.tree.flatten(grads)
        grads = treedef.unflatten([first[0].at[(0,) * first[0].ndim].set(jax.numpy.nan), *first[1:]])
    after, new_state, metrics = update_step(optimizer, trainable, state, grads, sums)
    assert not np.isfinite([metrics["loss"], metrics["grad_norm"]]).all()
    jax.tree.map(np.testing.assert_array_equal, (after, new_state), (trainable, state))


def test_passes_are_summed_in_float32_whatever_the_parameters_are() -> None:
    """256 and 1 are 256 in bfloat16; counts stay whole numbers."""
    new = jnp.ones((2,), jnp.bfloat16), {"tokens": jnp.int32(2**24 + 1)}
    total = jnp.full((2,), 256, jnp.bfloat16), {"tokens": jnp.int32(1)}
    grads, sums = add(*add(*total, new), new)
    assert grads.dtype == jnp.float32
    assert grads.tolist() == [258, 258]
    assert (sums["tokens"].dtype, int(sums["tokens"])) == (jnp.int32, 2**25 + 3)
