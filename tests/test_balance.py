"""Balanced experts: the definitions, what routers report for them, and the gradient of the sequence loss."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.tiny import LINEAR, MLA, MOE, filled, tiny_k3

import trillion_moe as tm
from trillion_moe.balance import (
    BalanceConfig,
    exact_quantile,
    histogram,
    next_by_quantile,
    next_by_sign,
    shortfalls,
    span,
)
from trillion_moe.layers.router import Router
from trillion_moe.layers.vocabulary import cross_entropy
from trillion_moe.model import Compaction, Model, depth_plan, embed, loss_sum, next_token_targets, trunk
from trillion_moe.sharding import Layout, place
from trillion_moe.steps import balance_step, grad_step
from trillion_moe.transforms.targets import is_bias, places

# --- quantiles --------------------------------------------------------------------------------------------------------


def drawn(n: int, e: int, seed: int = 0):
    """Scores in 0..1, some experts liked by all, and biases."""
    random = np.random.default_rng(seed)
    logits = random.normal(size=(n, e)) + random.normal(size=e)
    return jnp.asarray(1 / (1 + np.exp(-logits)), jnp.float32), jnp.asarray(random.normal(size=e) * 0.2, jnp.float32)


@functools.partial(jax.jit, static_argnums=2)
def counted(scores, bias, k: int, real):
    return histogram(shortfalls(scores, bias, k), bias, real)


quantile = jax.jit(next_by_quantile, static_argnums=(2, 3))


def sorted_shortfalls(scores, bias, k: int) -> np.ndarray:
    """In plain numpy: the cutoff is the (k + 1)-th of the biased scores, the k chosen before it."""
    scores, bias = np.asarray(scores), np.asarray(bias)
    cutoffs = np.sort(scores + bias, axis=1)[:, -k - 1]
    return np.sort(cutoffs[:, None] - scores, axis=0)


@pytest.mark.parametrize(("n", "e", "k"), [(1000, 16, 2), (37, 5, 3), (301, 8, 7), (3, 8, 1)])
def test_histogram_gives_the_quantile_within_a_bin(n: int, e: int, k: int) -> None:
    """Between the values of order q and q + 1, the definition's, but for one bin; q may be no whole number."""
    scores, bias = drawn(n, e)
    r = sorted_shortfalls(scores, bias, k)
    expected = r[n * k // e]
    np.testing.assert_allclose(exact_quantile(scores, bias, k), expected - expected.mean(), atol=1e-6)
    counts = counted(scores, bias, k, np.ones(n, bool))
    low, width = map(float, map(np.squeeze, span(bias)))
    edges = low + width * np.arange(1001)
    for found, column in zip(np.asarray(counts), r.T, strict=True):
        assert np.abs(np.cumsum(found) - np.searchsorted(column, edges[1:])).max() <= 1  # one on an edge
        assert found.sum() == n
    found = np.asarray(quantile(counts, bias, k))
    below = r[-(-n * k // e) - 1]  # first order statistic that reaches q
    offsets = found - below
    assert abs(found.mean()) < 1e-6
    assert offsets.max() - offsets.min() <= 2 * width + (expected - below).max()
    assert np.abs(found - (below - below.mean())).max() <= 2 * width
    half = quantile(counts, bias, k, 0.5)
    np.testing.assert_allclose(half, 0.5 * bias + 0.5 * found, atol=1e-6)


def test_what_is_padding_is_in_no_bin() -> None:
    """fault 35, of histograms; and without any token the bias stays."""
    scores, bias = drawn(600, 8)
    real = np.random.default_rng(1).random(600) < 0.5
    without = counted(scores[real], bias, 2, np.ones(real.sum(), bool))
    np.testing.assert_array_equal(counted(scores, bias, 2, real), without)
    none = counted(scores, bias, 2, np.zeros(600, bool))
    assert (np.asarray(none) == 0).all()
    np.testing.assert_array_equal(quantile(none, bias, 2), bias)


def test_many_tokens_do_not_overflow() -> None:
    """Two thousand million of them, the most that int32 counts, in two bins."""
    counts = np.zeros((4, 1000), np.int32)
    counts[:, 100], counts[:, 900] = 2**31 - 2**20, 2**20 - 1
    counts[0] = counts[0, ::-1]
    bias = quantile(jnp.asarray(counts), jnp.zeros(4), 2)
    assert bias[0] > 0.5
    np.testing.assert_allclose(bias[1:], bias[1], atol=1e-6)


# --- signs ------------------------------------------------------------------------------------------------------------


def test_the_mean_load_is_exact() -> None:
    """fault 31: 64 counts of 608 to 676, summing to 40,840: in half precision their sum depends on the order."""
    counts = np.random.default_rng(0).integers(612, 665, 64)
    missing = 40840 - counts.sum()
    counts += missing // 64
    counts[: missing % 64] += 1
    assert counts.sum() == 40840
    halves = {float(jnp.sum(jnp.asarray(c, jnp.bfloat16))) for c in (counts, np.sort(counts), counts[::-1])}
    assert halves != {40840.0}
    bias = next_by_sign(jnp.asarray(counts, jnp.int32), jnp.zeros(64), 0.5)
    np.testing.assert_array_equal(bias, 0.5 * np.sign(40840 - 64 * counts))
    shuffled = np.random.default_rng(1).permutation(64)
    again = next_by_sign(jnp.asarray(counts[shuffled], jnp.int32), jnp.zeros(64), 0.5)
    np.testing.assert_array_equal(again, bias[shuffled])


def test_signs_at_the_mean_and_far_above_it() -> None:
    def sign(*counts: int) -> list[float]:
        return next_by_sign(jnp.asarray(counts, jnp.int32), jnp.zeros(len(counts)), 1.0).tolist()

    assert sign(5, 5, 5) == [0, 0, 0]
    assert sign(5, 6, 4) == [0, -1, 1]
    assert sign(5, 5, 6) == [1, 1, -1]  # the mean is 5 1/3
    assert sign(2**31 - 1, 2**31 - 1, 2**31 - 2) == [-1, -1, 1]
    assert sign(0, 0) == [0, 0]


# --- convergence ------------------------------------------------------------------------------------------------------


def skewed_loads(update, steps: int) -> list[float]:
    """Greatest load in equal shares, step by step, of a router that likes its first experts best; always new tokens."""
    cfg = tiny_k3(moe=dataclasses.replace(MOE, num_experts=16, top_k=2))
    router, random = filled_router(cfg), np.random.default_rng(0)
    found = []
    choose = jax.jit(lambda router, x: router(x, cfg))
    for _ in range(steps):
        x = jnp.asarray(random.normal(size=(2048, 64)) + 1, jnp.float32)
        ids, _, logits = choose(router, x)
        counts = np.bincount(np.asarray(ids).reshape(-1), minlength=16).astype(np.int32)
        found.append(counts.max() / counts.mean())
        router.bias = update(jax.nn.sigmoid(logits), jnp.asarray(counts), router.bias)
    return found


def filled_router(cfg):
    router, random = Router(cfg, dtype="float32"), np.random.default_rng(1)
    slopes = np.linspace(0.04, -0.04, 16)
    router.weight = jnp.asarray(random.normal(size=(64, 16)) * 0.1 + slopes, jnp.float32)
    router.bias = jnp.zeros(16)
    return router


def test_a_skewed_router_is_balanced() -> None:
    """In two updates by quantiles, in many by signs: the busiest expert of 16 had 4 times its share or more."""

    def by_quantile(scores, counts, bias):
        return quantile(counted(scores, bias, 2, np.ones(len(scores), bool)), bias, 2)

    loads = skewed_loads(by_quantile, 4)
    assert loads[0] > 4
    assert max(loads[3:]) < 1.3
    loads = skewed_loads(lambda scores, counts, bias: next_by_sign(counts, bias, 0.02), 40)
    assert loads[3] > 2
    assert np.mean(loads[-5:]) < 1.5


# --- in a model -------------------------------------------------------------------------------------------------------

FOUR_HEADS = dataclasses.replace(MLA, num_heads=4)
PAIR = {"num_layers": 2, "attention": ("mla",) * 2, "mlp": ("moe",) * 2, "kda": None, "mla": FOUR_HEADS}
FOUR = PAIR | {"num_layers": 4, "attention": ("mla",) * 4, "mlp": ("moe",) * 4}
ONE = {"num_layers": 1, "attention": ("mla",), "mlp": ("moe",), "kda": None}
ASKED = BalanceConfig(method="quantile", sequence_loss=0.3)
B, T = 4, 32
DOCUMENTS = [1] * 9 + [2] * 14 + [4] * 5 + [0] * 4


def problem(name: str):
    random = np.random.default_rng(0)
    segments = np.array([np.roll(DOCUMENTS, 4 * row) if row % 2 else DOCUMENTS for row in range(B)], np.int32)
    segments[3] = 1
    batch = {
        "tokens": random.integers(4, 300, (B, T)).astype(np.int32),
        "segments": segments,
        "loss_mask": random.random((B, T)) < 0.7,
    }
    if name == "kimi linear":
        return filled(tiny_k3(**LINEAR | ONE)), batch
    cfg = tiny_k3(**PAIR, attn_res_block=1) if name == "stacked" else tiny_k3(**FOUR)
    return _stirred(filled(cfg, plan=depth_plan(cfg, scan=True))), batch


def _stirred(model):
    """Biases that are not 0."""
    found, treedef = places(model)
    random = np.random.default_rng(3)
    moved = [random.normal(size=p.leaf.shape).astype("float32") * 0.1 if is_bias(p.names[0]) else p.leaf for p in found]
    return treedef.unflatten(map(jnp.asarray, moved))


def named(grads) -> dict[str, np.ndarray]:
    return {p.names[0]: np.asarray(p.leaf) for p in places(grads, inside=True)[0]}


@functools.cache
def compiled(name: str, layout: Layout | None, remat: bool = True):
    """-> function of a batch: gradients by name, sums; in float64, so that only summation order is left."""
    with jax.enable_x64(True):
        model, _ = problem(name)
        model = jax.tree.map(lambda x: x.astype("float64"), model)
        model.dtype = "float64"
        model = model if layout is None else place(model, layout)
        trained, frozen = tm.partition(model, trainable="all")
        step = jax.jit(functools.partial(grad_step, remat=remat, balance=ASKED))

    def run(batch):
        with jax.enable_x64(True):
            grads, sums = step(trained, frozen, batch)
            return named(grads), jax.device_get(sums)

    return run


def by_definition(name: str):
    """Cross-entropy and the sequence loss of every document, from the routers' logits, as the paper has it."""
    with jax.enable_x64(True):
        model, batch = problem(name)
        model = jax.tree.map(lambda x: x.astype("float64"), model)
        model.dtype = "float64"
        batch = {key: jnp.asarray(a) for key, a in batch.items()}
        rows = Compaction.of(batch["segments"])
        batch = {key: rows.forth(a) for key, a in batch.items()}
        targets, counted = next_token_targets(model, batch)
        segments = np.asarray(batch["segments"])
        documents = sorted({(row, d) for row in range(B) for d in segments[row] if d})
        mine_MN = np.array([((np.arange(B)[:, None] == row) & (segments == d)).reshape(-1) for row, d in documents])
        mine_MN = mine_MN.astype(np.float64)
        counted_M = mine_MN @ np.asarray(counted).reshape(-1)

        def of_layer(logits_NE):
            s, k = jax.nn.sigmoid(logits_NE), model.config.moe.top_k
            chosen = jax.lax.stop_gradient(s >= jnp.sort(s, axis=1)[:, -k, None])
            lengths = mine_MN.sum(1, keepdims=True)
            f = s.shape[1] / (k * lengths) * (mine_MN @ chosen.astype(s.dtype))
            p = mine_MN @ (s / jnp.sum(s, axis=1, keepdims=True)) / lengths
            return ASKED.sequence_loss * jnp.sum(counted_M * jnp.sum(f * p, axis=1))

        def objective(trained):
            model = tm.combine(trained, frozen)
            x = embed(model, batch["tokens"], None, batch["segments"])
            hidden, _, aux, _ = trunk(model, x, batch["segments"], tracing=True)
            extra = sum(of_layer(layer["router_logits"]) for layer in aux if "router_logits" in layer)
            return cross_entropy(model.head, hidden, targets, counted, None)[0] + extra, (extra, jnp.sum(counted))

        trained, frozen = tm.partition(model, trainable="all")
        (total, (extra, tokens)), grads = jax.jit(jax.value_and_grad(objective, has_aux=True))(trained)
        return named(grads), {"loss": float(total), "sequence_loss": float(extra), "tokens": int(tokens)}


def close(found, expected, within=1e-9) -> None:
    assert found[0].keys() == expected[0].keys()
    for metric, value in expected[1].items():
        if np.issubdtype(np.asarray(value).dtype, np.integer):
            np.testing.assert_array_equal(found[1][metric], value, err_msg=metric)
        else:
            np.testing.assert_allclose(found[1][metric], value, rtol=within, err_msg=metric)
    for name, grad in expected[0].items():
        assert np.linalg.norm(found[0][name] - grad) <= within * np.linalg.norm(grad) + 1e-12, name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stacked", "blocks of two", "kimi linear"])
def test_sequence_loss_of_documents(name: str) -> None:
    """Value and gradients, recomputed layer by layer, of attention residuals and of a residual stream."""
    found, expected = compiled(name, None)(problem(name)[1]), by_definition(name)
    close(found, expected)
    assert expected[1]["sequence_loss"] > 0.1 * expected[1]["tokens"]


@pytest.mark.slow
def test_recomputed_or_not() -> None:
    """fault 34, of histograms and counts: what is computed twice is counted once."""
    _, batch = problem("stacked")
    with jax.enable_x64(True):
        model, _ = problem("stacked")
        model = jax.tree.map(lambda x: x.astype("float64"), model)
        model.dtype = "float64"
        _, once = jax.jit(functools.partial(loss_sum, remat=False, balance=ASKED))(model, batch)
    _, sums = compiled("stacked", None)(batch)
    for name in ("expert_counts", "shortfall_histogram"):
        np.testing.assert_array_equal(sums[name], once[name])


@pytest.mark.parametrize(
    "sizes",
    [
        {"ep": 2, "cp": 2},
        {"dp": 2, "tp": 2},
        {"cp": 8},
    ],
)
@pytest.mark.slow
def test_over_a_mesh(sizes) -> None:
    """Counts to the last token, documents that straddle devices, and a router's gradient under expert parallelism
    (fault 37): it is that of one device, and not 0 without the sequence loss either (`test_sharding`)."""
    _, batch = problem("stacked")
    expected = compiled("stacked", None)(batch)
    close(compiled("stacked", Layout.make(sizes))(batch), expected)
    routers = [grad for name, grad in expected[0].items() if name.endswith("router.weight")]
    assert min(map(np.linalg.norm, routers)) > 0


def test_passes_add_up_and_packing_changes_nothing() -> None:
    """Two passes of two rows give the sums of one of four; documents in rows of their own those of packed ones."""
    step, (_, batch) = compiled("stacked", None), problem("stacked")
    whole = step(batch)
    assert whole[1]["shortfall_histogram"].shape == (2, 8, 1000)
    real = int((batch["segments"] > 0).sum())
    assert (whole[1]["shortfall_histogram"].sum(-1) == real).all()
    half = np.arange(B)[:, None] < 2
    parts = [step(batch | {"segments": np.where(rows, batch["segments"], 0)}) for rows in (half, ~half)]
    close(jax.tree.map(np.add, *parts), whole)
    packed = batch | {"segments": np.where(np.arange(B)[:, None] < 1, batch["segments"], 0)}
    alone = {key: np.zeros_like(a) for key, a in batch.items()}
    for row, document in enumerate((1, 2, 4)):
        mine = batch["segments"][0] == document
        for key in ("tokens", "loss_mask"):
            alone[key][row, : mine.sum()] = batch[key][0, mine]
        alone["segments"][row, : mine.sum()] = row + 1
    close(step(alone), step(packed))


def test_only_what_is_asked_for_is_reported() -> None:
    """Nothing by default: runs that train adapters do not pay. Counts are there always."""
    model, batch = problem("stacked")

    def reported(balance):
        return jax.eval_shape(functools.partial(loss_sum, balance=balance), model, batch)[1].keys()

    plain = reported(None)
    assert reported(BalanceConfig(method="sign", rate=0.1)) == plain
    assert reported(BalanceConfig(method="quantile")) - plain == {"shortfall_histogram"}
    assert reported(BalanceConfig(sequence_loss=0.1)) - plain == {"sequence_loss"}


@functools.cache
def unfilled(scan: bool) -> Model:
    """A model of zeros."""
    cfg = tiny_k3(**FOUR)
    return jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), Model(cfg, plan=depth_plan(cfg, scan=scan)))


@pytest.mark.parametrize("balance", [BalanceConfig(method="quantile"), BalanceConfig(method="sign", rate=0.5)])
def test_every_layer_has_its_own_bias(balance) -> None:
    """Stacked or not, over a mesh or not; nothing else of the model changes."""
    random = np.random.default_rng(0)
    sums = {
        "expert_counts": random.integers(0, 100, (4, 8)).astype(np.int32),
        "shortfall_histogram": random.integers(0, 100, (4, 1, 1000)).astype(np.int32) * np.ones((1, 8, 1), np.int32),
    }
    sums["shortfall_histogram"][:, 3] = sums["shortfall_histogram"][:, 3, ::-1]
    found = {}
    for scan, layout in ((True, None), (False, None), (True, Layout.make({"ep": 2, "tp": 2}))):
        one = unfilled(scan)
        one = one if layout is None else place(one, layout)
        new = jax.jit(functools.partial(balance_step, balance))(one, sums)
        biases = {}
        for before, after in zip(places(one)[0], places(new)[0], strict=True):
            if is_bias(before.names[0]):
                rows = after.leaf if scan else [after.leaf]
                biases |= dict(zip(before.names, map(np.asarray, rows), strict=True))
                assert after.leaf.dtype == np.float32
            else:
                np.testing.assert_array_equal(before.leaf, after.leaf)
            assert layout is None or after.leaf.sharding.is_equivalent_to(before.leaf.sharding, after.leaf.ndim)
        found[scan, layout] = biases
    first = found[True, None]
    assert sorted(first) == [f"layers.{i}.ffn.router.bias" for i in range(4)]
    for i, bias in enumerate(first[name] for name in sorted(first)):
        if balance.method == "sign":
            counts = sums["expert_counts"][i]
            np.testing.assert_array_equal(bias, 0.5 * np.sign(counts.sum() - 8 * counts.astype(int)))
        else:
            assert np.ptp(np.delete(bias, 3)) == 0 != bias[3]
    for other in found.values():
        assert all(np.array_equal(other[name], bias) for name, bias in first.items())
