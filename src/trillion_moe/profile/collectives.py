"""Every collective over one axis of a mesh: a right result first, then how long calls take.

All groups of devices along the axis run it at once, as they do within a model. Sizes and bandwidths are those of
NVIDIA's nccl-tests (doc/PERFORMANCE.md of github.com/NVIDIA/nccl-tests). The size S is bytes of one device: what it has
of an all-reduce, a permutation and an exchange of all with all, the whole result of an all-gather, the whole input of a
reduce-scatter. The algorithm's bandwidth is S over the time; the bus bandwidth is what each device must send for it,
over the time, so that it is comparable with a link's.

Suffixes: P devices along the axis, N float32 numbers.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from trillion_moe.profile.errors import ProfileError
from trillion_moe.profile.timing import Seconds, timed
from trillion_moe.sharding import AXES, Layout

ITEM = 4
"""Bytes of a number: float32, whose sums of small whole numbers are exact."""

Numbers = Callable[[int, int, int], np.ndarray]
"""Of a device along the axis, from a first one on, so many."""


@dataclass(frozen=True)
class Collective:
    """run: what a device does with its numbers, given the axis. expected: what it must get, from who it is along the
    axis (0 to P - 1), the numbers of each, P and S / `ITEM`. bus: bus bandwidth over the algorithm's, of P. shared:
    whether a device has but its P-th part of S at first."""

    name: str
    run: Callable[[jax.Array, str], jax.Array]
    expected: Callable[[int, Numbers, int, int], np.ndarray]
    bus: Callable[[int], float]
    shared: bool = False


@dataclass(frozen=True)
class Row:
    """A collective over one axis, in `bytes` a device. Bandwidths are bytes a second, of the median time. of_fact: the
    bus bandwidth over that of the tier which the machine's file has for the axis, None without a file."""

    collective: str
    axis: str
    devices: int
    bytes: int
    seconds: Seconds
    algorithm_bandwidth: float
    bus_bandwidth: float
    of_fact: float | None


@dataclass(frozen=True)
class Unavailable:
    """A collective that the platform has not, in the words of its compiler."""

    collective: str
    reason: str


def _ragged(x_N: jax.Array, axis: str) -> jax.Array:
    """`all_to_all` of equal parts, by the operation that also carries unequal ones."""
    p = lax.axis_size(axis)
    each = x_N.size // p
    sizes_P, starts_P = jnp.full(p, each, jnp.int32), jnp.arange(p, dtype=jnp.int32) * each
    at_P = jnp.full(p, lax.axis_index(axis) * each, jnp.int32)
    return lax.ragged_all_to_all(x_N, jnp.zeros_like(x_N), starts_P, sizes_P, at_P, sizes_P, axis_name=axis)


def _exchanged(me: int, of: Numbers, p: int, n: int) -> np.ndarray:
    return np.concatenate([of(other, me * (n // p), n // p) for other in range(p)])


def _sum(of: Numbers, p: int, first: int, count: int) -> np.ndarray:
    return functools.reduce(np.add, (of(other, first, count) for other in range(p)))


COLLECTIVES = (
    Collective(
        "all_gather",
        lambda x, axis: lax.all_gather(x, axis, tiled=True),
        lambda me, of, p, n: np.concatenate([of(other, 0, n // p) for other in range(p)]),
        lambda p: (p - 1) / p,
        shared=True,
    ),
    Collective(
        "reduce_scatter",
        lambda x, axis: lax.psum_scatter(x, axis, tiled=True),
        lambda me, of, p, n: _sum(of, p, me * (n // p), n // p),
        lambda p: (p - 1) / p,
    ),
    Collective(
        "all_reduce",
        lambda x, axis: lax.psum(x, axis),
        lambda me, of, p, n: _sum(of, p, 0, n),
        lambda p: 2 * (p - 1) / p,
    ),
    Collective(
        "all_to_all",
        lambda x, axis: lax.all_to_all(x.reshape(lax.axis_size(axis), -1), axis, 0, 0).reshape(-1),
        _exchanged,
        lambda p: (p - 1) / p,
    ),
    Collective(
        "ppermute",
        lambda x, axis: lax.ppermute(x, axis, [(i, (i + 1) % lax.axis_size(axis)) for i in range(lax.axis_size(axis))]),
        lambda me, of, p, n: of((me - 1) % p, 0, n),
        lambda p: 1.0,
    ),
    Collective("ragged_all_to_all", _ragged, _exchanged, lambda p: (p - 1) / p),
)


def axes_of(layout: Layout) -> list[str]:
    """The mesh axes over which there is anything to send."""
    return [axis for axis in AXES if layout.size(axis) > 1]


def unit(layout: Layout) -> int:
    """Bytes of which sizes must be multiples, so that every axis cuts them into whole numbers."""
    return ITEM * int(np.lcm.reduce([layout.size(axis) for axis in axes_of(layout)]))


def default_sizes(layout: Layout) -> list[int]:
    """1 KiB, 64 KiB, 1 MiB, 16 MiB, or what comes next that can be cut. ProfileError for a mesh of one device."""
    check(layout, [])
    return [-(-size // unit(layout)) * unit(layout) for size in (2**10, 2**16, 2**20, 2**24)]


def check(layout: Layout, sizes: Sequence[int]) -> None:
    """ProfileError for a mesh of one device, and for a size that the axes do not cut."""
    if not axes_of(layout):
        raise ProfileError("--mesh has one device, and nothing to send: legal is a mesh with an axis above 1")
    for size in sizes:
        if size < 1 or size % unit(layout):
            cut = " and ".join(f"{axis} {layout.size(axis)}" for axis in axes_of(layout))
            raise ProfileError(f"--sizes {size}: legal are multiples of {unit(layout)} bytes, float32 cut over {cut}")


def measure(
    layout: Layout,
    sizes: Sequence[int],
    calls: int,
    bandwidths: dict[str, float],
    collectives: Sequence[Collective] = COLLECTIVES,
) -> Iterator[Row | Unavailable]:
    """Each collective over each axis in each size. bandwidths: of the axes, by the machine's file; may be empty.

    Raises ProfileError where a result is wrong, and where the devices refuse one.
    """
    for one in collectives:
        yield from _everywhere(one, layout, sizes, calls, bandwidths)


def _everywhere(one: Collective, layout: Layout, sizes: Sequence[int], calls: int, bandwidths: dict[str, float]):
    for axis in axes_of(layout):
        for size in sizes:
            found = _measured(one, axis, size, layout, calls, bandwidths.get(axis))
            yield found
            if isinstance(found, Unavailable):
                return


def _measured(one: Collective, axis: str, size: int, layout: Layout, calls: int, fact: float | None):
    p, n = layout.size(axis), size // ITEM
    x = _numbers(layout, n // p if one.shared else n)
    run = over_devices(layout, lambda x_N: one.run(x_N, axis))
    where = f"{one.name} over {axis} {p} in {size:,} bytes"
    try:
        compiled = jax.jit(run).lower(x).compile()
    except jax.errors.JaxRuntimeError as error:
        if "UNIMPLEMENTED" not in str(error):
            raise ProfileError(f"{where}: {error}") from error
        return Unavailable(one.name, str(error).splitlines()[0])
    try:
        _check(compiled(x), one, axis, layout, n, where)
        seconds = Seconds.of(timed(lambda: compiled(x), calls))
    except jax.errors.JaxRuntimeError as error:
        raise ProfileError(f"{where}: {error}") from error
    bus = one.bus(p) * size / seconds.p50
    return Row(one.name, axis, p, size, seconds, size / seconds.p50, bus, None if fact is None else bus / fact)


def dispatch(layout: Layout, calls: int) -> Seconds:
    """Of a call over the same devices that sends nothing: what of a small message's time is none of the wire's."""
    x = _numbers(layout, 1)
    compiled = jax.jit(over_devices(layout, lambda x_N: x_N + 1)).lower(x).compile()
    return Seconds.of(timed(lambda: compiled(x), calls))


def over_devices(layout: Layout, f: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """f of the numbers ``[N]`` of each device; they lie as ``[pp, dp, fsdp, ep, cp, tp, N]``."""
    spec = PartitionSpec(*AXES)
    ones = (1,) * len(AXES)
    return jax.shard_map(
        lambda x: f(x.reshape(-1)).reshape(*ones, -1), mesh=layout.mesh, in_specs=spec, out_specs=spec, check_vma=False
    )


def numbers(device: int, first: int, count: int) -> np.ndarray:
    """Small whole ones, other on each device of the mesh."""
    return ((7 * device + np.arange(first, first + count)) % 13).astype(np.float32)


def _numbers(layout: Layout, n: int) -> jax.Array:
    """What each device has, by its place in the mesh."""
    sizes = layout.mesh.devices.shape

    def part(index: Any) -> np.ndarray:
        return numbers(_place(index, sizes), 0, n).reshape(*(1,) * len(sizes), n)

    return jax.make_array_from_callback((*sizes, n), NamedSharding(layout.mesh, PartitionSpec(*AXES)), part)


def _place(index: Sequence[slice], sizes: Sequence[int]) -> int:
    return int(np.ravel_multi_index([at.start or 0 for at in index[: len(sizes)]], sizes))


def _check(y: jax.Array, one: Collective, axis: str, layout: Layout, n: int, where: str) -> None:
    """ProfileError if a device of this process did not get what it should."""
    sizes, dim = layout.mesh.devices.shape, AXES.index(axis)
    for shard in y.addressable_shards:
        me = list(np.unravel_index(_place(shard.index, sizes), sizes))

        def of(other: int, first: int, count: int, me: list = me) -> np.ndarray:
            there = [other if i == dim else at for i, at in enumerate(me)]
            return numbers(int(np.ravel_multi_index(there, sizes)), first, count)

        expected = one.expected(int(me[dim]), of, sizes[dim], n)
        got = np.asarray(shard.data).reshape(-1)
        if got.shape != expected.shape or not np.array_equal(got, expected):
            wrong = np.sum(got != expected) if got.shape == expected.shape else got.size
            raise ProfileError(f"{where}: {wrong:,} of {expected.size:,} numbers on {shard.device} are wrong")
