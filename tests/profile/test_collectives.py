"""Collectives over the axes of a mesh: right results, what is said of them, and that a slow one is seen."""

import dataclasses
import time

import jax
import numpy as np
import pytest
from jax import lax

from trillion_moe.profile import ProfileError, timing
from trillion_moe.profile.collectives import (
    COLLECTIVES,
    Collective,
    Row,
    Unavailable,
    check,
    default_sizes,
    dispatch,
    measure,
    over_devices,
)
from trillion_moe.profile.timing import Seconds, timed
from trillion_moe.sharding import Layout

BY_NAME = {one.name: one for one in COLLECTIVES}


def rows(layout, sizes, calls=2, bandwidths=None, collectives=COLLECTIVES):
    return list(measure(layout, sizes, calls, bandwidths or {}, collectives))


def test_every_collective_over_every_axis() -> None:
    """Each axis above 1, inner, outer and between; where the platform has not the ragged one, by name."""
    found = rows(Layout.make({"dp": 2, "ep": 2, "tp": 2}), [24, 1024])
    measured = [row for row in found if isinstance(row, Row)]
    assert [(row.collective, row.axis, row.bytes) for row in measured] == [
        (one.name, axis, size)
        for one in COLLECTIVES
        if one.name != "ragged_all_to_all"
        for axis in ("dp", "ep", "tp")
        for size in (24, 1024)
    ]
    (absent,) = (row for row in found if isinstance(row, Unavailable))
    assert absent.collective == "ragged_all_to_all"
    assert "`ragged-all-to-all` is not supported by XLA:CPU" in absent.reason


@pytest.mark.parametrize(
    ("name", "algorithm", "bus"),
    [
        ("all_gather", 1.0, 0.75),
        ("reduce_scatter", 1.0, 0.75),
        ("all_reduce", 1.0, 1.5),
        ("all_to_all", 1.0, 0.75),
        ("ppermute", 1.0, 1.0),
    ],
)
def test_bandwidths_are_those_of_nccl_tests(name: str, algorithm: float, bus: float) -> None:
    """Of four devices: bytes over the median, and times what nccl-tests call the bus factor."""
    (row,) = rows(Layout.make({"ep": 4}), [4096], 5, {"ep": 1e9}, [BY_NAME[name]])
    assert (row.devices, row.bytes, row.seconds.calls) == (4, 4096, 5)
    assert row.algorithm_bandwidth == pytest.approx(algorithm * 4096 / row.seconds.p50)
    assert row.bus_bandwidth == pytest.approx(bus * 4096 / row.seconds.p50)
    assert row.of_fact == pytest.approx(row.bus_bandwidth / 1e9)


def test_what_travels_is_the_size_that_is_said() -> None:
    """The whole result of a gather and input of a scatter is the size; what a device has of it is its part."""
    shapes = {}

    def spying(one: Collective) -> Collective:
        def run(x, axis):
            y = one.run(x, axis)
            shapes[one.name] = (x.nbytes, y.nbytes)
            return y

        return dataclasses.replace(one, run=run)

    rows(Layout.make({"cp": 4}), [4096], 1, None, [spying(one) for one in COLLECTIVES[:5]])
    assert shapes == {
        "all_gather": (1024, 4096),
        "reduce_scatter": (4096, 1024),
        "all_reduce": (4096, 4096),
        "all_to_all": (4096, 4096),
        "ppermute": (4096, 4096),
    }


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("all_reduce", lambda x, axis: lax.psum(x, ("ep", "tp"))),  # over another group
        ("all_reduce", lambda x, axis: lax.psum(x, axis).at[3].add(1)),
        ("ppermute", lambda x, axis: x),
        ("all_gather", lambda x, axis: lax.all_gather(x, axis, tiled=True)[::-1]),
        ("reduce_scatter", lambda x, axis: lax.psum(x, axis)),  # another shape
    ],
)
def test_a_wrong_result_is_not_timed(name: str, wrong) -> None:
    with pytest.raises(ProfileError, match=rf"{name} over ep 2 in 256 bytes: [\d,]+ of [\d,]+ numbers on .* are wrong"):
        rows(Layout.make({"ep": 2, "tp": 2}), [256], 1, None, [dataclasses.replace(BY_NAME[name], run=wrong)])


def test_a_slow_collective_is_seen() -> None:
    """One call in ten waits: the worst ones show it and the median does not; a greater message takes longer."""
    plain, calls = BY_NAME["ppermute"], iter(range(1000))

    def wait(x):
        if next(calls) % 40 == 39:  # four devices ask
            time.sleep(0.3)
        return np.asarray(x)

    def run(x, axis):
        return jax.pure_callback(wait, jax.ShapeDtypeStruct(x.shape, x.dtype), plain.run(x, axis))

    (slow,) = rows(Layout.make({"ep": 4}), [256], 40, None, [dataclasses.replace(plain, run=run)])
    assert slow.seconds.max > 0.3 > 3 * slow.seconds.p50
    assert slow.seconds.p95 > slow.seconds.p50
    small, great = rows(Layout.make({"ep": 4}), [256, 2**24], 5, None, [BY_NAME["all_reduce"]])
    assert great.seconds.p50 > 3 * small.seconds.p50


def test_percentiles_are_numpy_s() -> None:
    seconds = np.random.default_rng(0).exponential(size=1000)
    found = Seconds.of(list(seconds))
    ordered = np.sort(seconds)
    assert (found.calls, found.max) == (1000, ordered[-1])
    assert found.mean == pytest.approx(seconds.mean())
    for share, value in ((0.5, found.p50), (0.95, found.p95), (0.99, found.p99)):
        at = share * 999
        low = ordered[int(at)]
        assert value == pytest.approx(low + (at - int(at)) * (ordered[int(at) + 1] - low))
    assert Seconds.of([2.0]) == Seconds(1, 2.0, 2.0, 2.0, 2.0, 2.0)


def test_what_warms_up_is_not_counted() -> None:
    waits = iter([0.3] * timing.WARM_UP + [0.0] * 4)
    assert max(timed(lambda: time.sleep(next(waits)), 4)) < 0.25
    assert next(waits, None) is None


def test_a_call_that_sends_nothing() -> None:
    layout = Layout.make({"ep": 4})
    assert dispatch(layout, 3).calls == 3
    text = jax.jit(over_devices(layout, lambda x: x + 1)).lower(np.zeros((1, 1, 1, 4, 1, 1, 2), np.float32)).as_text()
    assert "all_" not in text
    assert "permute" not in text


def test_sizes_that_no_axis_cuts() -> None:
    layout = Layout.make({"ep": 3, "tp": 2})
    assert default_sizes(layout) == [1032, 65544, 1048584, 16777224]
    check(layout, default_sizes(layout))
    for size in (0, -24, 28):
        with pytest.raises(ProfileError, match=f"--sizes {size}: legal are multiples of 24 bytes, .* ep 3 and tp 2"):
            check(layout, [size])
    with pytest.raises(ProfileError, match="one device, and nothing to send: legal is a mesh with an axis above 1"):
        check(Layout.make({}), [1024])
