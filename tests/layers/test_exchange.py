"""One suite for all transports: what arrives where, what comes back, that both ways are each other's transpose."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from trillion_moe.layers.exchange import MAKERS
from trillion_moe.layers.moe import _by_expert
from trillion_moe.sharding import TRANSPORTS

N, DEVICES, L, MOST = 6, 4, 5, 3
WANTED = {
    "some": np.random.default_rng(0).random((DEVICES * N, DEVICES)) < 0.4,
    "none": np.zeros((DEVICES * N, DEVICES), bool),
    "all to the last": np.arange(DEVICES) == np.full((DEVICES * N, 1), DEVICES - 1),
    "nobody to the first": np.tile([False, True, True, False], (DEVICES * N, 1)),
    "one device has none": np.repeat([[True], [False], [True], [True]], N, 0) & (np.arange(DEVICES) < 2),
}
WANTED["some"][WANTED["some"].sum(1) > MOST] = [True, False, True, True]


def over_devices(f, outs):
    mesh = jax.make_mesh((DEVICES,), ("ep",), axis_types=(AxisType.Auto,), devices=jax.devices()[:DEVICES])
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("ep"), out_specs=outs, check_vma=False))


def exchange(transport: str, wanted, capacity=None):
    """-> f(x [tokens, L]) of every token what its devices make of it: the row times (1 + device), summed; and sent."""

    def f(x_NL, wanted_NP):
        made = MAKERS[transport](wanted_NP, "ep", MOST, capacity)
        here = made.dispatch(wanted_NP.astype(jnp.int32) + 1)[:, jax.lax.axis_index("ep")] == 2  # 0 in empty slots
        rows_ML = jnp.where(here[:, None], made.dispatch(x_NL), 0) * (1 + jax.lax.axis_index("ep"))
        return made.combine(rows_ML), made.sent_NP

    return lambda x: over_devices(f, (P("ep"), P("ep")))(x, wanted)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("case", WANTED)
def test_every_token_comes_back_from_every_device_it_wants(transport: str, case: str) -> None:
    wanted = WANTED[case]
    x = np.random.default_rng(1).normal(size=(DEVICES * N, L)).astype(np.float32)
    expected = x * (wanted @ np.arange(1, DEVICES + 1))[:, None]
    (y, back), sent = jax.vjp(lambda x: exchange(transport, wanted)(x)[0], x), exchange(transport, wanted)(x)[1]
    np.testing.assert_array_equal(sent, wanted)
    np.testing.assert_allclose(y, expected, rtol=1e-6)
    g = np.random.default_rng(2).normal(size=x.shape).astype(np.float32)
    np.testing.assert_allclose(back(g)[0], g * (wanted @ np.arange(1, DEVICES + 1))[:, None], rtol=1e-6)


def test_every_transport_is_made() -> None:
    assert tuple(MAKERS) == TRANSPORTS


def test_what_has_no_room_is_dropped_the_last_first() -> None:
    """Two of a device's six tokens may go to one other."""
    wanted = WANTED["some"]
    x = np.ones((DEVICES * N, L), np.float32)
    y, sent = exchange("all_to_all", wanted, capacity=1 / 3)(x)
    kept = wanted & (np.cumsum(wanted.reshape(DEVICES, N, DEVICES), axis=1).reshape(wanted.shape) <= 2)
    assert kept.sum() < wanted.sum()
    np.testing.assert_array_equal(sent, kept)
    np.testing.assert_allclose(y[:, 0], kept @ np.arange(1, DEVICES + 1))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_sums_of_half_precision_rows_are_rounded_once(transport: str) -> None:
    wanted = WANTED["nobody to the first"]
    x = jnp.asarray(np.random.default_rng(1).normal(size=(DEVICES * N, L)), jnp.bfloat16)
    y, _ = exchange(transport, wanted)(x)
    assert y.dtype == jnp.bfloat16
    rows = [(x * (1 + d)).astype(jnp.float32) for d in (1, 2)]
    np.testing.assert_array_equal(y, (rows[0] + rows[1]).astype(jnp.bfloat16))
    g = jnp.asarray(np.random.default_rng(2).normal(size=x.shape), jnp.bfloat16)
    (back,) = jax.vjp(lambda x: exchange(transport, wanted)(x)[0], x)[1](g)
    rows = [(g * (1 + d)).astype(jnp.float32) for d in (1, 2)]
    np.testing.assert_array_equal(back, (rows[0] + rows[1]).astype(jnp.bfloat16))


@pytest.mark.parametrize(("rows", "experts"), [(1, 3), (127, 5), (128, 5), (129, 1), (1000, 16)])
def test_rows_by_expert_are_a_stable_sort(rows: int, experts: int) -> None:
    ids = np.random.default_rng(0).integers(0, experts + 1, rows).astype(np.int32)
    order, place, counts = jax.jit(partial(_by_expert, e=experts))(ids)
    expected = np.argsort(ids, kind="stable")
    np.testing.assert_array_equal(order, expected)
    np.testing.assert_array_equal(place, np.argsort(expected))
    np.testing.assert_array_equal(counts, np.bincount(ids, minlength=experts + 1)[:experts])
