"""What holds for every model: packing, padding, caches, precision, routing, the loss, bad inputs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.numerics import TOLERANCE, cosine, rel_rms
from tests.tiny import LINEAR, MOE, SHORT, filled, tiny_k3, value_and_grads

import trillion_moe as tm
from trillion_moe.blueprint import init
from trillion_moe.kernels.linear_attention import kda
from trillion_moe.layers import mla
from trillion_moe.layers.router import Router
from trillion_moe.layers.vision import VisionTower
from trillion_moe.model import Model, grow, init_caches
from trillion_moe.transforms import cast
from trillion_moe.transforms.targets import places

F32 = TOLERANCE["float32"]


@pytest.fixture(scope="module", params=["kimi_k3", "kimi_linear"])
def model(request):
    return filled(tiny_k3(**(SHORT if request.param == "kimi_k3" else LINEAR | SHORT)))


@pytest.fixture(scope="module")
def tokens():
    return jax.random.randint(jax.random.key(5), (2, 13), 4, 300)


def test_forward_leaves_the_module_as_it_is(model, tokens):
    before = jax.tree.map(np.array, model)
    structure = jax.tree.structure(model)
    tm.forward(model, tokens)
    assert jax.tree.structure(model) == structure
    jax.tree.map(np.testing.assert_array_equal, model, before)


@pytest.mark.parametrize("name", ["kimi_k3", "kimi_linear"])
def test_parameter_paths(name, goldens):
    """Shape, dtype and logical axes of every parameter. A change here changes checkpoints and sharding rules."""
    cfg = tiny_k3(**({} if name == "kimi_k3" else LINEAR))
    lines = [
        f"{path} {list(p.leaf.shape)} {p.leaf.dtype} {','.join(p.leaf.axes)}"
        for p in places(Model(dataclasses.replace(cfg, dtype="bfloat16")))[0]
        for path in p.names
    ]
    assert lines == (goldens / "parameters" / f"{name}.txt").read_text().splitlines()


def test_packed_rows_equal_rows_alone(model, tokens):
    """faults 15, 16, 20: a packed document knows nothing of the one before it, its first tokens included."""
    segments = jnp.asarray([[1] * 6 + [2] * 7] * 2)
    packed, _ = tm.forward(model, tokens, segments=segments)
    for a, b in ((0, 6), (6, 13)):
        alone, _ = tm.forward(model, tokens[:, a:b])
        assert rel_rms(packed[:, a:b], alone) < F32


def test_padding_anywhere(model, tokens):
    """faults 18, 35: wherever padding stands, real tokens come out the same, and it is counted nowhere."""
    alone, _ = tm.forward(model, tokens[:1, :8])
    for row in ([0] * 5 + [1] * 8, [1] * 8 + [0] * 5, [1, 1, 0, 0, 1, 1, 1, 0, 1, 0, 1, 0, 1]):
        real = np.asarray(row, bool)
        padded = np.full((1, 13), 7)
        padded[0, real] = np.asarray(tokens)[0, :8]
        segments = jnp.asarray([row])
        logits, _ = tm.forward(model, padded, segments=segments)
        assert rel_rms(logits[:, real], alone) < F32
        _, metrics = tm.loss(model, {"tokens": jnp.asarray(padded), "segments": segments})
        assert int(metrics["tokens"]) == 7
        assert metrics["expert_counts"].sum() == 8 * MOE.top_k * 2


@pytest.mark.slow
def test_padding_takes_no_gradient(tokens):
    """fault 8: 37 + 20 tokens padded to 64 give the gradients of 57, all finite."""
    model = filled(tiny_k3(**SHORT))
    ids = jax.random.randint(jax.random.key(1), (1, 64), 4, 300)
    segments = jnp.asarray([[1] * 37 + [2] * 20 + [0] * 7])
    _, padded = value_and_grads(model, {"tokens": ids, "segments": segments})
    _, exact = value_and_grads(model, {"tokens": ids[:, :57], "segments": segments[:, :57]})
    for a, b in zip(jax.tree.leaves(padded), jax.tree.leaves(exact), strict=True):
        assert np.isfinite(a).all()
        assert rel_rms(a, b) < 3e-4  # a_log: three sums that cancel, in another order


def test_padding_is_told_by_segments_not_by_id(tokens):
    """fault 19: with pad_id == eos_id, a final end token still counts in the loss and is routed."""
    model = filled(tiny_k3(**SHORT))
    assert model.config.pad_id == model.config.eos_ids[0]
    ids = tokens.at[:, -1].set(model.config.pad_id)
    _, metrics = tm.loss(model, {"tokens": ids})
    assert int(metrics["tokens"]) == 2 * 12
    assert (metrics["expert_counts"].sum(axis=1) == ids.size * MOE.top_k).all()


@pytest.mark.parametrize("cut", [1, 5, 12])
def test_prefill_cut_anywhere(model, tokens, cut):
    """fault 3: 13 tokens in one go, or in two pieces with the caches between them."""
    whole, _ = tm.forward(model, tokens)
    first, caches = tm.forward(model, tokens[:, :cut])
    second, caches = tm.forward(model, tokens[:, cut:], caches=caches)
    assert rel_rms(jnp.concatenate([first, second], axis=1), whole) < F32
    assert caches.length.tolist() == [13, 13]


@pytest.mark.slow
def test_prefill_cut_inside_a_packed_document(model, tokens):
    """The caches remember the document: a piece that starts another one starts from nothing."""
    segments = jnp.asarray([[1] * 6 + [2] * 7, [1] * 4 + [2] * 9])
    whole, _ = tm.forward(model, tokens, segments=segments)
    for cut in (3, 8):
        _, caches = tm.forward(model, tokens[:, :cut], segments=segments[:, :cut])
        second, _ = tm.forward(model, tokens[:, cut:], segments=segments[:, cut:], caches=caches)
        assert rel_rms(second, whole[:, cut:]) < F32


@pytest.mark.slow
def test_prefill_of_64_tokens_in_two(tokens):
    """fault 3, past a chunk's edge, with value heads of another width than key heads in MLA."""
    model = filled(tiny_k3(**SHORT))
    ids = jax.random.randint(jax.random.key(2), (1, 64), 4, 300)
    whole, _ = tm.forward(model, ids)
    _, caches = tm.forward(model, ids[:, :40])
    rest, _ = tm.forward(model, ids[:, 40:], caches=caches)
    assert rel_rms(rest, whole[:, 40:]) < F32


def test_full_caches_are_loud(tokens):
    """Under jit the caches cannot grow: a row that does not fit is NaN, never silently wrong."""
    model = filled(tiny_k3(**SHORT))
    caches = init_caches(model, 2, 15)
    step = jax.jit(lambda m, t, s, c: tm.forward(m, t, segments=s, caches=c))
    segments = jnp.asarray([[1] * 13, [1] * 9 + [0] * 4])
    logits, caches = step(model, tokens, segments, caches)
    assert np.isfinite(logits[0]).all()
    logits, _ = step(model, tokens[:, :4], jnp.ones((2, 4), jnp.int32), caches)
    assert np.isnan(logits[0]).all()
    assert np.isfinite(logits[1]).all()
    assert grow(caches, 40).capacity == 40


@pytest.mark.slow
def test_long_rows_are_attended_in_blocks():
    """More than one block of queries, the last one not full, equals one block."""
    cfg = tiny_k3(num_layers=2, attention=("mla", "mla"), mlp=("dense", "moe"))
    model = filled(cfg)
    ids = jax.random.randint(jax.random.key(2), (1, 37), 4, 300)
    batch = {"tokens": ids}
    value, grads = value_and_grads(model, batch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mla, "QUERY_BLOCK", (16, 16))
        blocked, blocked_grads = value_and_grads(model, batch)
    assert abs(value - blocked) < 1e-5
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(blocked_grads), strict=True):
        assert rel_rms(b, a) < 5 * F32


def test_float32_islands_survive_a_cast(model):
    """fault 28: the router's bias, A_log, dt_bias, convolutions and o_norm stay float32."""
    half = cast(model, "bfloat16")
    pinned = ("router.bias", "a_log", "dt_bias", "_conv", "o_norm")
    for place in places(half)[0]:
        kept = place.names[0].endswith(pinned)
        assert place.leaf.dtype == (jnp.float32 if kept else jnp.bfloat16), place.names


def test_a_small_bias_decides(tokens):
    """fault 28: 0.5 and 0.5 + 2^-12 are one number in bf16; here the second wins the tie, in a bf16 model too."""
    half = cast(filled(tiny_k3(**SHORT)), "bfloat16")
    router = half.segments[0][1].ffn.router
    x = jnp.zeros((1, 64), jnp.bfloat16)  # all scores equal
    for favoured in (2, 7):
        bias = jnp.full(8, 0.5).at[favoured].add(2.0**-12)
        router.bias = bias
        ids, _, _ = router(x, half.config)
        assert ids[0, 0] == favoured


def test_a_large_bias_forces_its_expert(tokens):
    """fault 32: expert 7 is chosen by every token, with a weight that knows nothing of the bias."""
    model = filled(tiny_k3(**SHORT))
    router = model.segments[0][1].ffn.router
    x = jax.random.normal(jax.random.key(0), (20, 64))
    router.bias = router.bias.at[7].set(100.0)
    ids, weights, logits = (np.asarray(a) for a in router(x, model.config))
    assert (ids == 7).any(axis=1).all()
    scores = np.take_along_axis(1 / (1 + np.exp(-logits.astype(np.float64))), ids, axis=1)
    scores *= model.config.moe.scaling_factor / scores.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(weights, scores, rtol=1e-5)


def test_groups_limit_the_choice():
    """Top-2 groups of 4 by the sum of their two best biased scores, then top-k inside them."""
    moe = dataclasses.replace(
        MOE, num_experts=12, num_groups=4, topk_groups=2, top_k=3, renormalize=False, scaling_factor=2.0
    )
    cfg = tiny_k3(moe=moe)
    router = init(Router(cfg, dtype="float32"), jax.random.key(0))
    router.bias = 0.3 * jax.random.normal(jax.random.key(1), (12,))
    x = jax.random.normal(jax.random.key(2), (50, 64))
    ids, weights, logits = (np.asarray(a) for a in router(x, cfg))
    scores = 1 / (1 + np.exp(-logits.astype(np.float64)))
    for n in range(50):
        choice = scores[n] + np.asarray(router.bias)
        groups = np.argsort([-np.sort(g)[-2:].sum() for g in choice.reshape(4, 3)])[:2]
        legal = np.isin(np.arange(12) // 3, groups)
        best = np.argsort(-np.where(legal, choice, -np.inf))[:3]
        assert set(ids[n]) == set(best)
        np.testing.assert_allclose(weights[n], 2.0 * scores[n][ids[n]], rtol=1e-5)


def test_bf16_vision_follows_float32(goldens):
    """fault 117: the norm's epsilon is explicit, so bf16 and float32 towers agree."""
    model = tm.load(goldens / "kimi_k3" / "a")
    patches = jax.random.normal(jax.random.key(0), (16, 3, 14, 14))
    images = tm.ImageBatch(patches, [(1, 4, 4)])
    tower = jax.jit(VisionTower.__call__, static_argnums=2)
    exact = tower(model.vision, images, model.config)
    half = tower(cast(model, "bfloat16").vision, images, model.config)
    assert cosine(half, exact) > 0.999


def test_unequal_value_heads_are_refused():
    """fault 7: more value heads than key heads is not a thing this model can be told."""
    q, v = jnp.zeros((1, 2, 3, 8)), jnp.zeros((1, 2, 6, 8))
    with pytest.raises(ValueError, match="heads"):
        kda(q, q, v, q, jnp.zeros((1, 2, 3)))


def test_loss_is_the_mean_over_counted_targets(model, tokens):
    segments = jnp.asarray([[1] * 6 + [2] * 7, [0] * 3 + [1] * 10])
    mask = jax.random.bernoulli(jax.random.key(3), 0.6, tokens.shape)
    value, metrics = tm.loss(model, {"tokens": tokens, "segments": segments, "loss_mask": mask})
    logits, _ = tm.forward(model, tokens, segments=segments)
    log_probs = np.asarray(jax.nn.log_softmax(logits))
    counted = [
        (b, t)
        for b in range(2)
        for t in range(12)
        if segments[b, t] > 0 and segments[b, t] == segments[b, t + 1] and mask[b, t + 1]
    ]
    expected = -np.mean([log_probs[b, t, tokens[b, t + 1]] for b, t in counted])
    assert int(metrics["tokens"]) == len(counted)
    np.testing.assert_allclose(value, expected, rtol=1e-5)


def test_the_loss_never_holds_all_logits(tokens):
    """No array of B T V elements, forward or backward, whatever its shape."""
    model = filled(tiny_k3(**LINEAR))
    batch = {"tokens": jnp.zeros((2, 64), jnp.int32)}
    jaxpr = jax.make_jaxpr(jax.grad(lambda m: tm.loss(m, batch)[0]))(model)
    sizes = [v.aval.size for eqn in every_equation(jaxpr.jaxpr) for v in eqn.outvars if hasattr(v.aval, "size")]
    assert max(sizes) < 2 * 64 * 300


def every_equation(jaxpr):
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from every_equation(inner)


def test_bad_inputs_are_named(goldens):
    model = filled(tiny_k3(**SHORT))
    for bad, error, match in (
        ([[1, 300]], ValueError, "token id 300 at row 0, position 1 is outside 0..299"),
        ([[1, -1]], ValueError, "token id -1"),
        ([[1.5, 2]], TypeError, "integers"),
        ([1, 2], ValueError, "batch, time"),
        ([[1, 3]], ValueError, "row 0, position 1: image placeholder 3"),
    ):
        with pytest.raises(error, match=match):
            tm.forward(model, bad)
    with pytest.raises(ValueError, match=r"segments have shape \(1, 3\), tokens \(1, 2\)"):
        tm.forward(model, [[1, 4]], segments=[[1, 1, 1]])
    with pytest.raises(ValueError, match="segment -1 at row 0"):
        tm.forward(model, [[1, 4]], segments=[[1, -1]])
    with pytest.raises(ValueError, match="no vision tower"):
        tm.forward(model, [[1, 4]], images=tm.ImageBatch(np.zeros((4, 3, 14, 14)), [(1, 2, 2)]))
    _, caches = tm.forward(model, [[1, 4]])
    with pytest.raises(ValueError, match="caches hold 1 rows, tokens 2"):
        tm.forward(model, [[1], [4]], caches=caches)
