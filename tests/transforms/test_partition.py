"""Cutting a model into trained and frozen: inside the leaf, with gradients and optimizer state for one side only."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from trillion_moe.model import Model, loss
from trillion_moe.transforms import LoRAConfig, add_lora, combine, count_by_group, partition, quantize_experts
from trillion_moe.transforms.targets import places
from trillion_moe.weights import LoRA

CFG = LoRAConfig(rank=3, targets=("attention", "routed_experts", "shared_experts"), experts=(0, 3))


def names(tree) -> set[str]:
    return {n for p in places(tree, inside=True)[0] for n in p.names}


@pytest.fixture(scope="module")
def grown(model: Model, adapted, moved):
    return moved(adapted(quantize_experts(model), CFG))


def test_the_cut_goes_through_the_leaf(grown) -> None:
    trained, frozen = partition(grown)
    assert names(trained).isdisjoint(names(frozen))
    assert names(trained) | names(frozen) == names(grown)
    assert {n.rsplit(".", 1)[1] for n in names(trained)} == {"a", "b"}
    assert {"layers.3.ffn.experts.up.base.packed", "layers.3.ffn.experts.up.base.scale"} < names(frozen)
    assert {"layers.3.ffn.experts.up.slots", "layers.0.attention.q.base", "embed"} < names(frozen)
    assert len(names(trained)) == 2 * (4 * 8 + 4 * 6 + 7 * 3 + 7 * 3)


def test_combine_undoes_partition(grown, scanned: Model) -> None:
    for whole in (grown, add_lora(scanned, CFG)):
        for trainable in ("lora", "all", lambda name: name.endswith(".attention.o.a")):
            both = combine(*partition(whole, trainable=trainable))
            assert jax.tree.structure(both) == jax.tree.structure(whole)
            assert all(a is b for a, b in zip(jax.tree.leaves(both), jax.tree.leaves(whole), strict=True))
    trained, _ = partition(grown)
    with pytest.raises(ValueError, match="both hold an array"):
        combine(trained, trained)


def test_optimizer_state_is_two_arrays_per_trained_one(grown) -> None:
    trained, _ = partition(grown)
    state = jax.tree.leaves(jax.eval_shape(optax.adamw(1e-3).init, trained))
    counters = sum(x.dtype.itemsize for x in state if x.ndim == 0)
    size = sum(x.nbytes for x in jax.tree.leaves(trained))
    assert counters <= 8
    assert sum(x.size * x.dtype.itemsize for x in state) == 2 * size + counters
    assert size == 4 * sum(parameters for _, parameters in count_by_group(grown).values())


def test_gradients_reach_every_adapter_and_nothing_else(two_layers: Model, adapted, moved, quick, tokens) -> None:
    """Through the scan over depth and its recomputation, also of packed experts."""
    grown = moved(adapted(quantize_experts(two_layers), CFG))
    trained, frozen = partition(grown)
    gradients = quick(jax.grad(lambda trained: loss(combine(trained, frozen), {"tokens": tokens})[0]))(trained)
    assert jax.tree.structure(gradients) == jax.tree.structure(trained)
    for place in places(gradients, inside=True)[0]:
        assert np.isfinite(place.leaf).all(), place.names[0]
        for name, one in zip(place.names, place.leaf if len(place.names) > 1 else place.leaf[None], strict=True):
            assert jnp.abs(one).max() > 0, name


def test_all_is_every_float_that_is_not_packed(grown, scanned: Model) -> None:
    """And not the router's bias: weight decay would move it, and with it the choice of experts."""
    trained, frozen = partition(grown, trainable="all")
    assert {n.rsplit(".", 1)[1] for n in names(frozen)} == {"packed", "scale", "slots", "bias"}
    assert "layers.0.attention.a_log" in names(trained)
    assert names(partition(scanned, trainable="all")[1]) == {f"layers.{i}.ffn.router.bias" for i in range(1, 8)}


def test_a_function_of_the_name(grown) -> None:
    trained, _ = partition(grown, trainable=lambda name: ".attention.o." in name or name == "head" or "slots" in name)
    assert names(trained) == {"head"} | {f"layers.{i}.attention.o.{x}" for i in range(8) for x in ("a", "b", "base")}
    with pytest.raises(ValueError, match=r"chooses layers\.4\.attn_norm and not layers\.2\.attn_norm.*split_segments"):
        partition(grown, trainable=lambda name: name == "layers.4.attn_norm")


def test_nothing_to_train_is_refused(model: Model, grown) -> None:
    with pytest.raises(ValueError, match="nothing is trainable with trainable = 'lora'"):
        partition(model)
    with pytest.raises(ValueError, match="nothing is trainable"):
        partition(grown, trainable=lambda name: name.endswith("slots"))


def test_partition_holds_under_jit(grown) -> None:
    """No array is copied or looked at: a step may cut the model it is given."""
    trained = jax.eval_shape(lambda model: partition(model)[0], grown)
    assert jax.tree.structure(trained) == jax.tree.structure(partition(grown)[0])
    assert any(isinstance(p.leaf, LoRA) for p in places(trained)[0])
