"""Dropout on the inputs of adapters: what is left out, what stays, and by whom."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.numerics import TOLERANCE, rel_rms

from trillion_moe.ops import dense, dot, grouped_dot
from trillion_moe.transforms.dropout import drop_inputs
from trillion_moe.weights import MXFP4, LoRA

KEY = jax.random.key(7)
K, N, R, E = 256, 6, 3, 4
RATE = 0.25


def adapter(*batch: int, a_batch: tuple[int, ...] | None = None, dtype: str = "float32", slots=None) -> LoRA:
    keys = jax.random.split(jax.random.key(1), 3)
    base = jax.random.normal(keys[0], (*batch, K, N))
    a = jax.random.normal(keys[1], (*(batch if a_batch is None else a_batch), K, R), dtype)
    b = jax.random.normal(keys[2], (*batch, R, N), dtype)
    return LoRA(base, a, b, slots, 0.5)


def kept(dropped: LoRA, whole: LoRA) -> np.ndarray:
    """Which rows of a are there, ``[*b, K]``; each is there or not as a whole."""
    zero = np.asarray(dropped.a) == 0
    assert not (np.asarray(whole.a) == 0).any()
    np.testing.assert_array_equal(zero.all(axis=-1), zero.any(axis=-1))
    return ~zero.all(axis=-1)


def test_rows_are_left_out_and_the_others_scaled() -> None:
    whole = adapter()
    dropped = drop_inputs({"w": whole}, KEY, RATE)["w"]
    rows = kept(dropped, whole)
    assert abs(rows.mean() - (1 - RATE)) < 0.1
    np.testing.assert_array_equal(dropped.a[rows], whole.a[rows] / (1 - RATE))
    for name in ("base", "b"):
        assert getattr(dropped, name) is getattr(whole, name)
    assert (dropped.slots, dropped.scaling) == (None, 0.5)


def test_it_is_dropout_of_the_adapters_input() -> None:
    """The base sees all of x, the adapter x with features left out."""
    whole = adapter()
    dropped = drop_inputs(whole, KEY, RATE)
    x = jax.random.normal(jax.random.key(2), (5, K))
    seen = x * kept(dropped, whole) / (1 - RATE)
    expected = dot(x, whole.base) + 0.5 * dot(dot(seen, whole.a), whole.b)
    assert rel_rms(dot(x, dropped), expected) < TOLERANCE["float32"]
    assert rel_rms(dot(x, dropped), dot(x, whole)) > 0.1


def test_the_mean_over_keys_is_the_adapter() -> None:
    whole = adapter()
    many = jax.vmap(lambda key: drop_inputs(whole, key, RATE).a)(jax.random.split(KEY, 2000))
    assert rel_rms(many.mean(axis=0), whole.a) < 0.05


def test_without_a_rate_nothing_changes() -> None:
    model = {"w": adapter(), "norm": jnp.ones(3)}
    assert drop_inputs(model, KEY, 0.0) is model


def test_what_is_no_adapter_stays() -> None:
    packed = MXFP4(jnp.ones((N, K // 2), jnp.uint8), jnp.full((N, K // 32), 127, jnp.uint8))
    whole = adapter()
    model = {"adapted": LoRA(packed, whole.a, whole.b), "packed": packed, "norm": jnp.ones(3)}
    dropped = drop_inputs(model, KEY, RATE)
    assert dropped["packed"] is packed
    assert dropped["adapted"].base is packed
    assert dropped["norm"] is model["norm"]
    assert not np.array_equal(dropped["adapted"].a, model["adapted"].a)
    assert jax.tree.structure(dropped) == jax.tree.structure(model)


def test_every_adapter_expert_and_layer_draws_its_own() -> None:
    whole = adapter(2, E)
    first, second = drop_inputs((whole, whole), KEY, RATE)
    rows = np.concatenate([kept(one, whole).reshape(-1, K) for one in (first, second)])
    assert len({row.tobytes() for row in rows}) == 2 * 2 * E


@pytest.mark.parametrize("slots", [None, jnp.array([1, -1, 0, 2], jnp.int32)])
def test_banks_of_experts(slots) -> None:
    """An a that all experts share loses one set of rows; slots stay."""
    count = E if slots is None else 3
    whole = adapter(count, a_batch=(), slots=slots)
    whole = LoRA(jnp.ones((E, K, N)), whole.a, whole.b, slots, 0.5)
    dropped = drop_inputs(whole, KEY, RATE)
    assert kept(dropped, whole).shape == (K,)
    assert dropped.slots is slots
    x = jax.random.normal(jax.random.key(2), (8, K))
    sizes = jnp.array([3, 1, 0, 4], jnp.int32)
    matrices = np.repeat(dense(dropped, jnp.float32), sizes, axis=0)
    expected = np.einsum("rk,rkn->rn", x, matrices)
    assert rel_rms(grouped_dot(x, dropped, sizes), expected) < TOLERANCE["float32"]


def test_the_key_decides() -> None:
    whole = adapter()
    first, again, other = (drop_inputs(whole, key, RATE).a for key in (KEY, KEY, jax.random.key(8)))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    np.testing.assert_array_equal(jax.jit(drop_inputs, static_argnums=2)(whole, KEY, RATE).a == 0, first == 0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtypes_stay(dtype) -> None:
    whole = adapter(dtype=dtype)
    dropped = drop_inputs(whole, KEY, RATE)
    assert (dropped.a.dtype, dropped.b.dtype) == (dtype, dtype)
    assert rel_rms(dropped.a[kept(dropped, whole)] * (1 - RATE), whole.a[kept(dropped, whole)]) < TOLERANCE["bfloat16"]


def test_gradients_reach_what_was_not_left_out() -> None:
    """And are those of the factor that the adapter was scaled by."""
    whole = adapter()
    dropped, back = jax.vjp(lambda w: drop_inputs(w, KEY, RATE), whole)
    (grads,) = back(jax.tree.map(jnp.ones_like, whole))
    expected = np.broadcast_to(kept(dropped, whole)[:, None] / (1 - RATE), (K, R))
    np.testing.assert_allclose(grads.a, expected, rtol=1e-6)
    for name in ("base", "b"):
        np.testing.assert_array_equal(getattr(grads, name), jnp.ones_like(getattr(whole, name)))
