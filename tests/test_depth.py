"""Depth as data: scanned or unrolled, recomputed or kept, the numbers are the same and the memory is as promised."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.numerics import TOLERANCE, rel_rms
from tests.tiny import LINEAR, MOE, SHORT, SIX, by_name, filled, restacked, tiny_k3, value_and_grads

import trillion_moe as tm
from trillion_moe.blueprint import abstract
from trillion_moe.layers.block import Context
from trillion_moe.layers.depth import Run, attention_residuals
from trillion_moe.layers.segments import depth_plan
from trillion_moe.model import Model

F32 = TOLERANCE["float32"]


@pytest.fixture(scope="module", params=["kimi_k3", "kimi_linear"])
def model(request):
    return filled(tiny_k3(**(SIX if request.param == "kimi_k3" else LINEAR | SIX)))


@pytest.fixture(scope="module")
def tokens():
    return jax.random.randint(jax.random.key(5), (2, 13), 4, 300)


def test_plan_of_the_real_models(goldens):
    k3 = tm.ModelConfig.from_json(json.loads((goldens / "config" / "kimi_k3_config.json").read_text()))
    assert [(len(s.layers), s.repeats) for s in depth_plan(k3)] == [(12, 1), (12, 6), (9, 1)]
    assert [len(s.layers) for s in depth_plan(k3, scan=False)] == [12] * 7 + [9]
    kinds = ("kda", "kda", "kda", "mla")
    linear = tiny_k3(
        **LINEAR | {"num_layers": 27, "attention": (*(kinds * 7)[:26], "mla"), "mlp": ("dense",) + ("moe",) * 26}
    )
    assert [(len(s.layers), s.repeats) for s in depth_plan(linear)] == [(1, 1), (4, 6), (1, 1), (1, 1)]


@pytest.mark.slow
def test_scanned_equals_unrolled(model, tokens):
    """Values, routing, tokens, every gradient; attention residuals with remat have a hand-written backward."""
    scanned = restacked(model, scan=True)
    assert any(segment.repeats > 1 for segment in scanned.plan)
    batch = {"tokens": tokens, "segments": jnp.asarray([[1] * 6 + [2] * 7, [0] * 3 + [1] * 8 + [0] * 2])}
    plain, grads = value_and_grads(model, batch, remat=False)
    expected = by_name(grads, model)
    for candidate, remat in ((model, True), (scanned, True), (scanned, False)):
        value, grads = value_and_grads(candidate, batch, remat=remat)
        assert abs(value - plain) < 1e-5
        found = by_name(grads, candidate)
        assert found.keys() == expected.keys()
        for name in expected:
            assert rel_rms(found[name], expected[name]) < 5 * F32, (name, remat)
    a, b = tm.trace(model, tokens), tm.trace(scanned, tokens)
    assert a.keys() == b.keys()
    for name in a:
        if jnp.issubdtype(a[name].dtype, jnp.integer):
            np.testing.assert_array_equal(a[name], b[name], err_msg=name)
        else:
            assert rel_rms(a[name], b[name]) < F32, name
    prompts = [[5, 6, 7], [8, 9, 10, 11, 12]]
    assert tm.generate(model, prompts, max_new_tokens=6) == tm.generate(scanned, prompts, max_new_tokens=6)


@pytest.mark.slow
@pytest.mark.parametrize("family", [{}, LINEAR], ids=["kimi_k3", "kimi_linear"])
def test_recomputation_counts_once(family, tokens):
    """fault 34: expert counts with and without recomputation are equal (gradients: the test above)."""

    model = filled(tiny_k3(**family | SHORT))

    def counts(remat):
        grad = jax.jit(jax.grad(lambda m: tm.loss(m, {"tokens": tokens}, remat=remat), has_aux=True))
        return grad(model)[1]["expert_counts"]

    counted = counts(True)
    np.testing.assert_array_equal(counted, counts(False))
    assert counted.sum() == tokens.size * MOE.top_k * 2


@pytest.mark.slow
def test_only_trained_leaves_are_differentiated(tokens):
    """The hand-written backward over the bank gives a gradient to what is trained, and nothing to the rest."""
    model = filled(tiny_k3(**SIX), plan=depth_plan(tiny_k3(**SIX), scan=True))
    trained, frozen = tm.partition(model, trainable=lambda name: name.endswith("attention.o"))
    grads = jax.jit(jax.grad(lambda t: tm.loss(tm.combine(t, frozen), {"tokens": tokens})[0]))(trained)
    everything = value_and_grads(model, {"tokens": tokens}, remat=False)[1]
    expected = by_name(everything, model)
    flat = {k: v for k, v in by_name(grads, model).items() if v.dtype != object}
    assert set(flat) == {f"layers.{i}.attention.o" for i in range(6)}
    for name in flat:
        assert rel_rms(flat[name], expected[name]) < 5 * F32


@pytest.mark.parametrize("frozen_weights", [True, False], ids=["adapters", "all_trained"])
def test_the_bank_is_all_that_is_saved(frozen_weights):
    """Bytes of token size kept for the backward pass: at most 1.2 times the final bank of (1 + blocks) T D."""
    cfg = tiny_k3(num_layers=8, attention=("kda", "mla") * 4, mlp=("dense",) + ("moe",) * 7, attn_res_block=2)
    model = abstract(Model(cfg, plan=depth_plan(cfg, scan=True)))
    if frozen_weights:
        model = abstract(tm.add_lora(Model(cfg, plan=depth_plan(cfg, scan=True)), tm.LoRAConfig(rank=2)))
        trained, frozen = tm.partition(model)
    else:
        trained, frozen = tm.partition(model, trainable="all")
    t = 512
    x = jax.ShapeDtypeStruct((1, t, cfg.hidden_size), jnp.float32)

    def residuals(trained, x, remat):
        def depth(trained, x):
            segments = tm.combine(trained, frozen_arrays).segments
            run = Run(cfg, tuple(s.repeats for s in model.plan), remat=remat)
            return attention_residuals(segments, x, Context(), None, run)[0]

        return jax.vjp(depth, trained, x)[1]

    frozen_arrays = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), frozen)

    def saved(remat):
        kept = jax.eval_shape(lambda trained, x: residuals(trained, x, remat), trained, x)
        return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(kept) if t in a.shape)

    bank = (1 + cfg.num_layers // cfg.attn_res_block) * t * cfg.hidden_size * 4
    assert saved(remat=True) <= 1.2 * bank
    assert saved(remat=False) > 5 * bank


@pytest.mark.slow
def test_compiled_temporaries_shrink(tokens):
    """The same on XLA's own figure: with the bank saved alone, a deeper model adds little to the temporaries."""
    long = jnp.zeros((1, 512), jnp.int32)

    def temporaries(blocks: int, remat: bool) -> int:
        cfg = tiny_k3(
            num_layers=2 * blocks, attention=("kda", "mla") * blocks, mlp=("dense",) + ("moe",) * (2 * blocks - 1)
        )
        model = abstract(tm.add_lora(Model(cfg, plan=depth_plan(cfg, scan=True)), tm.LoRAConfig(rank=2)))
        trained, frozen = tm.partition(model)
        step = jax.jit(
            jax.grad(lambda trained, frozen: tm.loss(tm.combine(trained, frozen), {"tokens": long}, remat=remat)[0])
        )
        return step.lower(trained, frozen).compile().memory_analysis().temp_size_in_bytes

    row = 512 * 64 * 4
    kept = (temporaries(9, True) - temporaries(3, True)) / 6
    assert (
        kept <= 4 * row
    )  # a block adds its row of the bank and of its float32 cotangent, not its layers' intermediates
    assert (temporaries(9, False) - temporaries(3, False)) / 6 > 10 * kept
