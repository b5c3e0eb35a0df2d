"""Packing routed experts and back, and changing the dtype of everything else but what is float32 by definition."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trillion_moe.blueprint import Spec, init
from trillion_moe.kernels.mxfp4 import check
from trillion_moe.model import Model
from trillion_moe.ops import dense
from trillion_moe.transforms import LoRAConfig, add_lora, cast, dequantize_experts, quantize_experts, split_segments
from trillion_moe.transforms.targets import places
from trillion_moe.weights import MXFP4, LoRA, PackedLayout


def leaves(model: Any) -> dict[str, Any]:
    return {n: p.leaf for p in places(model)[0] for n in p.names}


def shapes(tree) -> tuple:
    return jax.tree.structure(tree), [(x.shape, str(x.dtype)) for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize("layout", ["nk", "kn"])
def test_blueprint_and_arrays_get_one_structure(scanned: Model, model: Model, layout: PackedLayout) -> None:
    blueprint, arrays = quantize_experts(scanned, layout=layout), quantize_experts(model, layout=layout)
    assert shapes(blueprint) == shapes(arrays)
    w = leaves(blueprint)["layers.2.ffn.experts.gate"]
    assert w.packed.shape == ((3, 5, 64, 16) if layout == "nk" else (3, 5, 16, 64))
    inner = ("expert_mlp", "expert_embed") if layout == "nk" else ("expert_embed", "expert_mlp")
    assert w.packed.axes == w.scale.axes == ("repeats", "expert", *inner)
    back = dequantize_experts(blueprint)
    assert [(s.shape, s.axes, s.dtype) for s in jax.tree.leaves(back)] == [
        (s.shape, s.axes, s.dtype) for s in jax.tree.leaves(scanned)
    ]


def test_only_routed_experts_are_packed(model: Model) -> None:
    packed = quantize_experts(model)
    assert {n for n, w in leaves(packed).items() if isinstance(w, MXFP4)} == {
        f"layers.{i}.ffn.experts.{m}" for i in range(1, 8) for m in ("gate", "up", "down")
    }
    same = [n for n, w in leaves(packed).items() if not isinstance(w, MXFP4) and w is leaves(model)[n]]
    assert len(same) == len(leaves(model)) - 7 * 3


def test_a_packed_bank_is_near_the_dense_one_and_comes_back(model: Model) -> None:
    banks = [dequantize_experts(quantize_experts(model, layout=layout)) for layout in ("nk", "kn")]
    for name in ("layers.1.ffn.experts.down", "layers.4.ffn.experts.up"):
        want, got = leaves(model)[name], leaves(banks[0])[name]
        assert got.dtype == want.dtype
        error = float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))
        assert 0.05 < error < 0.2
        np.testing.assert_array_equal(got, leaves(banks[1])[name])
    again = dequantize_experts(quantize_experts(banks[0]), "bfloat16")
    np.testing.assert_array_equal(leaves(again)[name].astype("float32"), leaves(banks[0])[name])


def test_random_bytes_have_about_the_initial_range(scanned: Model) -> None:
    w = init(leaves(quantize_experts(scanned))["layers.2.ffn.experts.gate"], jax.random.key(0))
    assert not check(np.asarray(w.packed), np.asarray(w.scale), name="w")
    rms = float(jnp.sqrt(jnp.mean(jnp.square(dense(w, jnp.float32)))))
    assert scanned.config.initializer_range / 2**0.5 < rms < scanned.config.initializer_range * 2**0.5


def test_adapters_stay_on_a_packed_base(scanned: Model) -> None:
    cfg = LoRAConfig(targets=("routed_experts",))
    first, last = quantize_experts(add_lora(scanned, cfg)), add_lora(quantize_experts(scanned), cfg)
    assert shapes(first) == shapes(last)
    assert shapes(dequantize_experts(first)) == shapes(add_lora(scanned, cfg))


def test_what_cannot_be_packed_is_refused(config, scanned: Model) -> None:
    with pytest.raises(ValueError, match="no unpacked routed experts"):
        quantize_experts(quantize_experts(scanned))
    with pytest.raises(ValueError, match="no packed routed experts"):
        dequantize_experts(scanned)
    odd = Model(dataclasses.replace(config, moe=dataclasses.replace(config.moe, hidden_size=48)))
    with pytest.raises(ValueError, match=re.escape("layers.1.ffn.experts.down [48, 32] cannot be MXFP4: K = 48")):
        quantize_experts(odd)
    without = Model(dataclasses.replace(config, mlp=("dense",) * 8))
    with pytest.raises(ValueError, match="no unpacked routed experts"):
        quantize_experts(without)


# --- cast ------------------------------------------------------------------------------------------------------------

PINNED = {"attention.q_conv", "attention.k_conv", "attention.v_conv", "attention.a_log", "attention.dt_bias"}
PINNED |= {"attention.o_norm", "ffn.router.bias"}


@pytest.mark.parametrize("split", [False, True])
def test_cast_leaves_the_float32_tensors(model: Model, scanned: Model, split: bool) -> None:
    for one in (model, scanned):
        low = cast(split_segments(one, [4]) if split else one, "bfloat16")
        by_dtype = {"float32": set(), "bfloat16": set()}
        for name, leaf in leaves(low).items():
            by_dtype[str(leaf.dtype)].add(name.split(".", 2)[-1] if name.startswith("layers.") else name)
        assert by_dtype["float32"] == PINNED
        assert low.dtype == "bfloat16"
        assert one.dtype == "float32"
        reference = Model(one.config, dtype="bfloat16", plan=low.plan)
        assert jax.tree.structure(low) == jax.tree.structure(reference)
        assert [x.dtype for x in jax.tree.leaves(low)] == [s.dtype for s in jax.tree.leaves(reference)]


def test_the_routers_bias_keeps_its_last_bits(model: Model) -> None:
    bias = jnp.asarray([0.5, 0.5 + 2.0**-12, 0, 0, 0], jnp.float32)
    biased = jax.tree.map(lambda x: x, model)
    biased.segments[0][1].ffn.router.bias = bias
    cast_bias = cast(biased, "bfloat16").segments[0][1].ffn.router.bias
    np.testing.assert_array_equal(cast_bias, bias)
    assert cast_bias[1] > cast_bias[0]


def test_cast_leaves_packed_weights_and_adapters(scanned: Model) -> None:
    low = cast(add_lora(quantize_experts(scanned), LoRAConfig(targets=("routed_experts", "kda"))), "bfloat16")
    for name, w in leaves(low).items():
        if isinstance(w, LoRA):
            assert w.a.dtype == w.b.dtype == "float32"
            base: Any = w.base.packed if isinstance(w.base, MXFP4) else w.base
            assert base.dtype == ("uint8" if "experts" in name else "bfloat16")
    assert all(isinstance(leaf, Spec) for leaf in jax.tree.leaves(low))


def test_cast_goes_to_floats_only(scanned: Model) -> None:
    with pytest.raises(ValueError, match="legal is a float dtype"):
        cast(scanned, "int8")
