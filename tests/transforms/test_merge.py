"""Folding adapters in: equal to running them, on arrays and on packed experts, and what packing again costs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trillion_moe.kernels.mxfp4 import decode, encode
from trillion_moe.model import Model
from trillion_moe.ops import dense, dot, grouped_dot
from trillion_moe.transforms import (
    GROUPS,
    LoRAConfig,
    add_lora,
    merge_lora,
    merge_report,
    quantize_experts,
)
from trillion_moe.transforms.targets import dims, places
from trillion_moe.weights import MXFP4, LoRA, PackedLayout

ROUTED = {
    "independent": LoRAConfig(rank=2, targets=("routed_experts",), routed="independent"),
    "shared_a": LoRAConfig(rank=2, targets=("routed_experts",), routed="shared_a"),
    "shared": LoRAConfig(rank=2, targets=("routed_experts",), routed="shared"),
    "slots": LoRAConfig(rank=2, targets=("routed_experts",), routed="independent", experts=(4, 1, 2)),
    "slots_shared_a": LoRAConfig(rank=2, targets=("routed_experts",), routed="shared_a", experts=(3, 0)),
}


def leaves(model: Any) -> dict[str, Any]:
    return {p.names[0]: p.leaf for p in places(model)[0]}


def rows(w: Any) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(size=(9, dims(w)[1])), jnp.float32)


def at(w: Any, repeat: int) -> Any:
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x)[repeat]), w)


def reference(w: LoRA) -> np.ndarray:
    """base + scaling a b in float64, expert by expert as the doc of `LoRA` says, of one layer's bank."""
    base = np.asarray(dense(w.base, jnp.float32), np.float64)
    a, b = np.asarray(w.a, np.float64), np.asarray(w.b, np.float64)
    for e in range(len(base)):
        slot = e if w.slots is None else int(w.slots[e])
        if slot >= 0:
            base[e] += w.scaling * (a if a.ndim == 2 else a[slot]) @ (b if b.ndim == 2 else b[slot])
    return base


def test_every_group_merges_to_what_it_computes(model: Model, adapted, quick, moved) -> None:
    """One leaf of every group that `ops.dot` multiplies, stacked ones at their second repeat."""
    grown = moved(adapted(model, LoRAConfig(rank=3, targets=tuple(GROUPS))))
    merged, seen = leaves(quick(merge_lora)(grown)), set()
    for place in places(grown)[0]:
        if place.group in seen or place.group in (None, "routed_experts"):
            continue
        seen.add(place.group)
        stacked = bool(dims(place.leaf)[0])
        w, m = (at(x, 1) if stacked else x for x in (place.leaf, merged[place.names[0]]))
        assert m.dtype == w.base.dtype
        x = rows(w)
        base, a, b, m = (np.asarray(array, np.float64) for array in (w.base, w.a, w.b, m))
        np.testing.assert_allclose(m, base + w.scaling * (a @ b), atol=1e-6)
        assert (np.abs(dot(x, w) - np.asarray(x) @ m) < 1e-6 * (np.abs(x) @ np.abs(m) + 1)).all()
        assert np.abs(m - base).max() > 1e-3
    assert seen | {"routed_experts"} == set(GROUPS) - {"attention"}


@pytest.mark.parametrize("cfg", ROUTED.values(), ids=ROUTED)
def test_routed_adapters_merge_to_what_they_compute(model: Model, adapted, quick, moved, cfg: LoRAConfig) -> None:
    grown = moved(adapted(model, cfg))
    merged = leaves(quick(merge_lora)(grown))
    adapters: dict[str, Any] = {name: w for name, w in leaves(grown).items() if isinstance(w, LoRA)}
    assert len(adapters) == 3 * 3
    for name, w in adapters.items():
        one, m = (at(x, 2) if w.base.ndim == 4 else x for x in (w, merged[name]))
        np.testing.assert_allclose(m, reference(one), atol=1e-6)
    sizes = jnp.asarray([2, 0, 3, 1, 3], jnp.int32)
    w, m = leaves(grown)["layers.1.ffn.experts.down"], merged["layers.1.ffn.experts.down"]
    np.testing.assert_allclose(grouped_dot(rows(w), w, sizes), grouped_dot(rows(w), m, sizes), atol=1e-5)


def test_merged_logits_are_the_adapters(small: Model, adapted, quick, moved, logits) -> None:
    grown = moved(adapted(small, LoRAConfig(rank=3, targets=tuple(GROUPS))))
    merged = quick(merge_lora)(grown)
    assert jax.tree.structure(merged) == jax.tree.structure(small)
    np.testing.assert_allclose(logits(merged), logits(grown), atol=1e-10, rtol=0)


def test_low_precision_base_is_summed_in_float32(scanned: Model) -> None:
    base = jnp.full((4, 4), 256.0, jnp.bfloat16)
    a, b = jnp.full((4, 2), 0.5, jnp.float32), jnp.full((2, 4), 0.75, jnp.float32)
    model = jax.tree.map(lambda leaf: leaf, scanned)
    model.head = LoRA(base, a, b, None, 1.0)
    merged = merge_lora(model).head
    assert merged.dtype == jnp.bfloat16
    assert float(merged[0, 0]) == float(jnp.bfloat16(256.75))
    assert merge_report(model) == {"head": pytest.approx(0.75 / 256.75)}


def test_nothing_to_merge_is_refused(model: Model) -> None:
    for fold in (merge_lora, merge_report):
        with pytest.raises(ValueError, match="no adapter"):
            fold(model)


# --- packed base -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def packed(model: Model):
    return quantize_experts(model)


@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize("name", ["shared_a", "slots"])
def test_merge_into_packed_experts(model: Model, adapted, moved, name: str, layout: PackedLayout) -> None:
    """The delta arrives, within half a step of e2m1; experts without an adapter keep their bytes."""
    grown = moved(adapted(quantize_experts(model, layout=layout), ROUTED[name]))
    merged, report = leaves(merge_lora(grown)), merge_report(grown)
    path = "layers.2.ffn.experts.up"
    for repeat in range(3):
        w, m = at(leaves(grown)[path], repeat), at(merged[path], repeat)
        assert isinstance(m, MXFP4)
        assert m.layout == layout
        exact, got = reference(w), np.asarray(dense(m, jnp.float32), np.float64)
        step = np.abs(exact).reshape(5, -1, 32, 64).max(axis=2, keepdims=True) / 4
        assert (np.abs(got - exact).reshape(5, -1, 32, 64) <= step).all()
        delta = exact - np.asarray(dense(w.base, jnp.float32), np.float64)
        moved_by = got - np.asarray(dense(w.base, jnp.float32), np.float64)
        assert np.corrcoef(moved_by.ravel(), delta.ravel())[0, 1] > 0.7
        for e in range(5) if w.slots is not None else ():
            if w.slots[e] < 0:
                np.testing.assert_array_equal(m.packed[e], w.base.packed[e])
                np.testing.assert_array_equal(m.scale[e], w.base.scale[e])
        error = np.sqrt(np.square(got - exact).sum() / np.square(exact).sum())
        assert report[f"layers.{2 + 2 * repeat}.ffn.experts.up"] == pytest.approx(error, rel=1e-5)
        assert 0.03 < error < 0.2
    assert set(report) == {f"layers.{i}.ffn.experts.{m}" for i in range(1, 8) for m in ("gate", "up", "down")}


@pytest.mark.slow
def test_merging_nothing_into_packed_experts_changes_no_value(packed, adapted) -> None:
    fresh = adapted(packed, ROUTED["shared_a"])
    assert max(merge_report(fresh).values()) == 0.0
    for name, w in leaves(merge_lora(fresh)).items():
        if isinstance(w, MXFP4):
            np.testing.assert_array_equal(dense(w, jnp.float32), dense(leaves(packed)[name], jnp.float32))


def test_packed_experts_can_be_left_decoded(packed, adapted, moved) -> None:
    grown = moved(adapted(packed, ROUTED["independent"]))
    w = leaves(merge_lora(grown, packed="decode"))["layers.2.ffn.experts.down"]
    assert (w.shape, w.dtype) == ((3, 5, 64, 32), jnp.float32)
    np.testing.assert_allclose(w[1], reference(at(leaves(grown)["layers.2.ffn.experts.down"], 1)), atol=1e-6)


def test_a_blueprint_is_merged_too(scanned: Model) -> None:
    for blueprint in (scanned, quantize_experts(scanned)):
        merged = merge_lora(add_lora(blueprint, LoRAConfig(targets=("routed_experts",))))
        assert jax.tree.leaves(merged) == jax.tree.leaves(blueprint)
    decoded = merge_lora(add_lora(quantize_experts(scanned), LoRAConfig(targets=("routed_experts",))), packed="decode")
    kinds = [[(s.shape, s.axes, s.dtype) for s in jax.tree.leaves(m)] for m in (decoded, scanned)]
    assert kinds[0] == kinds[1]


def test_encode_is_the_kernels(packed, model: Model) -> None:
    """A packed bank holds each expert's matrix transposed, as checkpoints store it."""
    w, bank = leaves(model)["layers.1.ffn.experts.up"], leaves(packed)["layers.1.ffn.experts.up"]
    for e in (0, 4):
        bytes_, codes = encode(np.asarray(w[e]).T)
        np.testing.assert_array_equal(bank.packed[e], bytes_)
        np.testing.assert_array_equal(bank.scale[e], codes)
        np.testing.assert_array_equal(dense(bank, jnp.float32)[e].T, decode(jnp.asarray(bytes_), jnp.asarray(codes)))
