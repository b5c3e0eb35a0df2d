"""One suite for all transports: what arrives where, what comes back, that both ways are each other's transpose."""

import functools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from tests.numerics import rel_rms

from trillion_moe.layers.exchange import MAKERS, SHARES, Route, combine, demand, dispatch, traffic
from trillion_moe.layers.moe import _by_expert
from trillion_moe.layers.wire import BLOCK, Narrow, narrow, row_bytes, widen
from trillion_moe.sharding import TRANSPORTS, WIRES

N, DEVICES, L, MOST, NODE = 9, 4, 5, 3, 2
LIVE = np.arange(N) < np.array([[5], [9], [0], [2]])  # tokens on each device
WANTED = {
    "some": np.random.default_rng(0).random((DEVICES * N, DEVICES)) < 0.4,
    "none": np.zeros((DEVICES * N, DEVICES), bool),
    "all to the last": np.arange(DEVICES) == np.full((DEVICES * N, 1), DEVICES - 1),
    "nobody to the first": np.tile([False, True, True, False], (DEVICES * N, 1)),
    "one device has none": np.repeat([[True], [False], [True], [True]], N, 0) & (np.arange(DEVICES) < 2),
    "5, 9, 0 and 2 tokens": (np.random.default_rng(3).random((DEVICES, N, DEVICES)) < 0.5) & LIVE[:, :, None],
}
WANTED = {name: wanted.reshape(-1, DEVICES) for name, wanted in WANTED.items()}
for wanted in WANTED.values():
    wanted[wanted.sum(1) > MOST] = [True, False, True, True]


def over_devices(f, outs, devices=DEVICES):
    mesh = jax.make_mesh((devices,), ("ep",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("ep"), out_specs=outs, check_vma=False))


def make(transport: str, wanted_NP, capacity=None, most=MOST, node=NODE):
    return MAKERS[transport](wanted_NP, Route("ep", most, capacity, node if transport == "hierarchical" else None))


@functools.cache
def compiled(transport: str, capacity, wire):
    def f(x_NL, wanted_NP, g_NL):
        made = make(transport, wanted_NP, capacity)

        def through(x_NL):
            x_ML, wants_MP = dispatch(made, x_NL, wanted_NP.astype(jnp.int32) + 1, wire)
            here_M = wants_MP[:, jax.lax.axis_index("ep")] == 2  # 0 in empty slots
            rows_ML = jnp.where(here_M[:, None], x_ML, 0) * (1 + jax.lax.axis_index("ep")).astype(x_ML.dtype)
            return combine(made, rows_ML, wire)

        y_NL, back = jax.vjp(through, x_NL)
        return y_NL, back(g_NL)[0], made.sent_NP

    return over_devices(f, P("ep"))


def exchange(transport: str, wanted, x, g=None, capacity=None, wire=None):
    """Of every token x [tokens, L] what its devices make of it: the row times (1 + device), summed -> y, the gradient
    of x where that of y is g, and which tokens were sent to which device."""
    return compiled(transport, capacity, wire)(x, wanted, x if g is None else g)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("case", WANTED)
def test_every_token_comes_back_from_every_device_it_wants(transport: str, case: str) -> None:
    wanted = WANTED[case]
    x, g = np.random.default_rng(1).normal(size=(2, len(wanted), L)).astype(np.float32)
    times = (wanted @ np.arange(1, DEVICES + 1))[:, None]
    y, back, sent = exchange(transport, wanted, x, g)
    np.testing.assert_array_equal(sent, wanted)
    np.testing.assert_allclose(y, x * times, rtol=1e-6)
    np.testing.assert_allclose(back, g * times, rtol=1e-6)


def test_every_transport_is_made() -> None:
    assert tuple(MAKERS) == TRANSPORTS


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_both_ways_are_each_others_transpose(transport: str) -> None:
    """<there(x), y> = <x, back(y)> for every x and y, what goes along too; `combine` is the gradient, to the bit."""
    wanted = WANTED["some"]

    def f(x_NL, w_NK, wanted_NP, y_ML, v_MK):
        made = make(transport, wanted_NP)
        x_ML, w_MK = dispatch(made, x_NL, w_NK)
        back = jax.vjp(lambda x, w: dispatch(made, x, w), x_NL, w_NK)[1]
        g_NL, g_NK = back((y_ML[: len(x_ML)], v_MK[: len(x_ML)]))
        there = jnp.sum(x_ML * y_ML[: len(x_ML)]) + jnp.sum(w_MK * v_MK[: len(x_ML)])
        here = jnp.sum(x_NL * g_NL) + jnp.sum(w_NK * g_NK)
        return jax.lax.psum(jnp.stack([there, here]), "ep"), combine(made, y_ML[: len(x_ML)]) - g_NL

    with jax.enable_x64(True):
        random = np.random.default_rng(1)
        x, w = random.normal(size=(DEVICES * N, L)), random.normal(size=(DEVICES * N, 3)).astype(np.float32)
        y, v = (random.normal(size=(DEVICES * N * DEVICES, k)) for k in (L, 3))
        (there, here), same = over_devices(f, (P(), P("ep")))(x, w, wanted, y, v.astype(np.float32))
    assert float(there) == pytest.approx(float(here), rel=1e-6)
    np.testing.assert_array_equal(same, 0)


def test_what_has_no_room_is_dropped_the_last_first() -> None:
    """Three of a device's nine tokens may go to one other."""
    wanted = WANTED["some"]
    y, _, sent = exchange("all_to_all", wanted, np.ones((DEVICES * N, L), np.float32), capacity=1 / 3)
    kept = wanted & (np.cumsum(wanted.reshape(DEVICES, N, DEVICES), axis=1).reshape(wanted.shape) <= 3)
    assert kept.sum() < wanted.sum()
    np.testing.assert_array_equal(sent, kept)
    np.testing.assert_allclose(y[:, 0], kept @ np.arange(1, DEVICES + 1))


@pytest.mark.parametrize("transport", ["replicated", "all_to_all", "ragged"])
def test_sums_of_half_precision_rows_are_rounded_once(transport: str) -> None:
    wanted = WANTED["nobody to the first"]
    x, g = jnp.asarray(np.random.default_rng(1).normal(size=(2, DEVICES * N, L)), jnp.bfloat16)
    y, back, _ = exchange(transport, wanted, x, g)
    assert y.dtype == back.dtype == jnp.bfloat16
    for found, of in ((y, x), (back, g)):
        rows = [(of * (1 + d)).astype(jnp.float32) for d in (1, 2)]
        np.testing.assert_array_equal(found, (rows[0] + rows[1]).astype(jnp.bfloat16))


# --- what travels ----------------------------------------------------------------------------------------------------

K3_WIDTH, K3_TOP = 3584, 16


def travelled(transport: str, wanted, devices=8, node=4, wire=None) -> tuple[np.ndarray, np.ndarray]:
    """Rows of Kimi K3 in bfloat16 -> bytes on the wire and of the ideal, and rows from each device to each."""

    def f(wanted_NP):
        made = make(transport, wanted_NP, most=min(devices, K3_TOP), node=node)
        x_NL = jnp.zeros((len(wanted_NP), K3_WIDTH), jnp.bfloat16)
        exact = jnp.zeros((len(x_NL), K3_TOP), jnp.int32), jnp.zeros((len(x_NL), K3_TOP), jnp.float32)
        moved = traffic(made, "ep", wanted_NP, row_bytes(x_NL, exact, wire), row_bytes(x_NL))
        return jax.lax.psum(moved, "ep"), made.rows_P[None]

    return jax.tree.map(np.asarray, over_devices(f, (P(), P("ep")), devices)(wanted))


def routed(kind: str, tokens: int, devices: int) -> np.ndarray:
    """Which devices have any of 16 of 896 experts; "skewed": expert e is chosen 1 / (1 + e) as often as the first."""
    random, share = np.random.default_rng(0), 1 / (1 + np.arange(896)) if kind == "skewed" else np.ones(896)
    keys = np.log(share) + random.gumbel(size=(tokens, 896))
    chosen = np.argpartition(-keys, K3_TOP)[:, :K3_TOP] // (896 // devices)
    return (chosen[:, :, None] == np.arange(devices)).any(1)


@pytest.mark.parametrize("kind", ["balanced", "skewed"])
def test_a_ragged_exchange_sends_little_more_than_the_ideal(kind: str) -> None:
    """Ideal: 3,584 numbers in bfloat16 for each distinct device of a token other than its own. With ids, weights and
    sizes at most 1.15 of it; of two tiers it is the rows between nodes that are few."""
    wanted = routed(kind, 8 * 64, 8)
    (sent, ideal), rows = travelled("ragged", wanted)
    apart = wanted & (np.arange(8) != np.repeat(np.arange(8), 64)[:, None])
    assert ideal == apart.sum() * K3_WIDTH * 2
    np.testing.assert_array_equal(rows, wanted.reshape(8, 64, 8).sum(1))
    assert sent == apart.sum() * (K3_WIDTH * 2 + K3_TOP * 8) + 8 * 7 * 8 * 4
    assert 1 < sent / ideal <= 1.15
    (full, _), _ = travelled("all_to_all", wanted)
    assert full / ideal > 1.05


@pytest.mark.parametrize("kind", ["balanced", "skewed"])
def test_a_row_crosses_to_a_node_once(kind: str) -> None:
    wanted = routed(kind, 8 * 64, 8)
    (sent, _), rows = travelled("hierarchical", wanted)
    home = np.repeat(np.arange(8), 64) // 4
    nodes = wanted.reshape(-1, 2, 4).any(2)
    device = np.arange(8)
    other = device[:, None] // 4 != device // 4
    assert rows[other].sum() == (nodes & (np.arange(2) != home[:, None])).sum()
    assert not rows[other & (device[:, None] % 4 != device % 4)].any()
    assert rows[other].sum() < travelled("ragged", wanted)[1][other].sum()
    words = (rows[other].sum()) * 4 + 8 * (2 * 1 + 4 * 3) * 4  # which devices of a node a row is for, and sizes
    away = rows.sum() - np.trace(rows)
    # Within a node a row may go to its own device, which is no traffic, but was counted by the place it stays in.
    assert sent == away * (K3_WIDTH * 2 + K3_TOP * 8) + words


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_rows_in_eight_bits(transport: str) -> None:
    """Both ways narrow, gradients not: three bits of mantissa, and what goes along is exact."""
    wanted = WANTED["some"]
    x, g = np.random.default_rng(1).normal(size=(2, DEVICES * N, 2 * BLOCK + 5)).astype(np.float32)
    x *= np.logspace(-6, 6, DEVICES * N, dtype=np.float32)[:, None]
    exact, wide, _ = exchange(transport, wanted, x, g)
    y, back, sent = exchange(transport, wanted, x, g, wire=WIRES[0])
    np.testing.assert_array_equal(sent, wanted)
    errors = [rel_rms(y[i], exact[i]) for i in np.flatnonzero(wanted.any(1))]
    assert 0.01 < min(errors) < max(errors) < 0.05
    np.testing.assert_array_equal(back, wide)


def test_eight_bits_are_half_the_bytes_and_hide_nothing_that_is_not_finite() -> None:
    wanted = routed("balanced", 8 * 16, 8)
    (narrow, _), _ = travelled("ragged", wanted, wire=WIRES[0])
    (wide, _), _ = travelled("ragged", wanted)
    assert narrow / wide == pytest.approx((3584 + 28 * 4 + 128) / (7168 + 128), rel=0.01)
    x = np.ones((DEVICES * N, L), np.float32)
    x[3, 2], x[4, 1] = np.inf, np.nan
    y, _, _ = exchange("ragged", np.ones((DEVICES * N, DEVICES), bool) & (np.arange(DEVICES) < MOST), x, wire=WIRES[0])
    np.testing.assert_array_equal(np.isfinite(y).all(1), np.isfinite(x).all(1))


def test_blocks_of_the_smallest_numbers_travel_in_eight_bits() -> None:
    """Their scale would be too small for a device that has no subnormal numbers."""
    x = jnp.full((1, BLOCK), 3e-37, jnp.float32)
    narrowed = narrow(x, "float8_e4m3fn")
    assert isinstance(narrowed, Narrow)
    assert float(narrowed.scales[0, 0]) >= np.finfo(np.float32).tiny
    np.testing.assert_allclose(widen(narrowed, "float8_e4m3fn", x.dtype), x, rtol=0.07)


@pytest.mark.parametrize(("most", "of", "place"), [(0, 6, 0), (1, 64, 1), (3, 64, 3), (1, 6, 11), (6, 6, 64)])
def test_what_was_asked_for_is_a_histogram(most: int, of: int, place: int) -> None:
    wanted = np.zeros((of, 4), bool)
    wanted[:most, 2] = True
    np.testing.assert_array_equal(demand(jnp.asarray(wanted)), np.arange(SHARES + 1) == place)


@pytest.mark.parametrize(("rows", "experts"), [(1, 3), (127, 5), (128, 5), (129, 1), (1000, 16)])
def test_rows_by_expert_are_a_stable_sort(rows: int, experts: int) -> None:
    ids = np.random.default_rng(0).integers(0, experts + 1, rows).astype(np.int32)
    order, place, counts = jax.jit(partial(_by_expert, e=experts))(ids)
    expected = np.argsort(ids, kind="stable")
    np.testing.assert_array_equal(order, expected)
    np.testing.assert_array_equal(place, np.argsort(expected))
    np.testing.assert_array_equal(counts, np.bincount(ids, minlength=experts + 1)[:experts])
