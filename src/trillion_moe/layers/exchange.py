"""Tokens to the devices that hold their experts, and what comes of them back: runs on every device by itself.

A token travels once to every device that has any of its experts, with their numbers and weights; there its experts are
applied and their weighted sum is made, which travels back. So one row per token and device crosses the wire each way.

Both ways are linear and each is the transpose of the other: that is how their gradients are made. Suffixes: N tokens
of this device, P devices, S slots that it sends from, M slots that it receives in, L width.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from trillion_moe.layers.wire import as_one, narrow, widen
from trillion_moe.ops import accumulator


@dataclasses.dataclass(frozen=True)
class Route:
    """axis: the mesh axis. most: devices that one token can go to. capacity: for "all_to_all", share of the tokens that
    may go to one device; None = all. node: for "hierarchical", neighbours along the axis that reach each other faster.
    twin: gathers in place of ragged exchanges, which XLA has none of on CPU.
    """

    axis: str
    most: int
    capacity: float | None = None
    node: int | None = None
    twin: bool = True


# --- all to all ------------------------------------------------------------------------------------------------------


@partial(jax.tree_util.register_dataclass, data_fields=("sent_NP", "rows_P", "told"), meta_fields=("axis",))
@dataclasses.dataclass(frozen=True)
class Replicated:
    """Every device sees the tokens of all and returns what its experts make of them: nothing is dropped."""

    axis: str
    sent_NP: Any
    rows_P: Any
    told: Any

    def spread(self, tree: Any) -> Any:
        return as_one(lambda x_N: lax.all_gather(x_N, self.axis, axis=0, tiled=True), tree)

    def collect(self, floats: list[jax.Array], wire: str | None = None) -> list[jax.Array]:
        p = lax.axis_size(self.axis)
        back = as_one(partial(_swap, self.axis, p), [narrow(y, wire) for y in floats])
        rows = [
            widen(b, wire, y.dtype).reshape(p, len(y) // p, *y.shape[1:]) for b, y in zip(back, floats, strict=True)
        ]
        return [_sum(y_PN, 0) for y_PN in rows]


def replicated(wanted_NP: jax.Array, route: Route) -> Replicated:
    n, p = wanted_NP.shape
    return Replicated(route.axis, wanted_NP, jnp.full(p, n, jnp.int32), jnp.zeros(()))


def _swap(axis: str, p: int, x_S: jax.Array) -> jax.Array:
    """The p parts of x to the p devices."""
    return lax.all_to_all(x_S.reshape(p, len(x_S) // p, *x_S.shape[1:]), axis, 0, 0).reshape(x_S.shape)


def _sum(x: jax.Array, axis: int) -> jax.Array:
    return jnp.sum(x.astype(accumulator(x.dtype)), axis=axis).astype(x.dtype)


# --- ways of slots ---------------------------------------------------------------------------------------------------


@partial(jax.tree_util.register_dataclass, data_fields=(), meta_fields=("axis", "devices"))
@dataclasses.dataclass(frozen=True)
class Swap:
    """As many slots for each device."""

    axis: str
    devices: int

    def there(self, x_S: jax.Array) -> jax.Array:
        return _swap(self.axis, self.devices, x_S)

    back = there


@dataclasses.dataclass(frozen=True)
class Span:
    """Devices of a mesh axis that talk with each other: `size` of them, `stride` apart, in as many groups as there are.

    twin: as of `Route`.
    """

    axis: str
    size: int
    stride: int
    twin: bool

    def here(self) -> jax.Array:
        """The place of this device among them."""
        return lax.axis_index(self.axis) // self.stride % self.size

    @property
    def groups(self) -> list[list[int]] | None:
        p = lax.axis_size(self.axis)
        if self.size == p:
            return None
        firsts = [d for d in range(p) if d // self.stride % self.size == 0]
        return [[first + i * self.stride for i in range(self.size)] for first in firsts]

    def gather(self, x: jax.Array) -> jax.Array:
        return lax.all_gather(x, self.axis, axis_index_groups=self.groups)


Ways = tuple[jax.Array, jax.Array, jax.Array, jax.Array]  # starts here, sizes sent, starts there, sizes received


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("ways_there", "ways_back"),
    meta_fields=("span", "slots", "room"),
)
@dataclasses.dataclass(frozen=True)
class Ragged:
    """Slices of unlike sizes: out of S = `slots` into M = `room`, and back."""

    span: Span
    slots: int
    room: int
    ways_there: Any
    ways_back: Any

    def there(self, x_S: jax.Array) -> jax.Array:
        return _carry(self.span, self.room, x_S, self.ways_there)

    def back(self, y_M: jax.Array) -> jax.Array:
        return _carry(self.span, self.slots, y_M, self.ways_back)


def _carry(span: Span, room: int, x: jax.Array, ways: Ways) -> jax.Array:
    """Slices of x to the other devices, into ``[room, ...]`` of zeros."""
    out = jnp.zeros((room, *x.shape[1:]), x.dtype)
    if span.twin:
        return _twin(span, x, out, *ways)
    return lax.ragged_all_to_all(x, out, *ways, axis_name=span.axis, axis_index_groups=span.groups)


def _twin(span: Span, x: jax.Array, out: jax.Array, starts, sizes, ends, received) -> jax.Array:
    """What `lax.ragged_all_to_all` does, by gathering everything."""
    me = span.here()
    x_PS = span.gather(x)
    starts_P, sizes_P, ends_P = (span.gather(a)[:, me] for a in (starts, sizes, ends))
    at_M1 = jnp.arange(out.shape[0])[:, None]
    mine_MP = (ends_P <= at_M1) & (at_M1 < ends_P + sizes_P)
    from_M = jnp.argmax(mine_MP, axis=1)
    row_M = jnp.clip(starts_P[from_M] + at_M1[:, 0] - ends_P[from_M], 0, x.shape[0] - 1)
    arrived = jnp.any(mine_MP, axis=1).reshape(-1, *(1,) * (x.ndim - 1))
    return jnp.where(arrived, x_PS[from_M, row_M], out)


# --- slots -----------------------------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slotted:
    """A token is laid into a slot for every device it goes to; `way` carries slots there and back.

    source_S: int32, the token in a slot, N in an empty one. slot_NP: int32, the slot of a token for a device, S for
    none. way: `Swap` or `Ragged`.
    """

    sent_NP: Any
    rows_P: Any
    told: Any
    source_S: Any
    slot_NP: Any
    way: Any

    def spread(self, tree: Any) -> Any:
        return as_one(lambda x_N: self.way.there(_take(x_N, self.source_S)), tree)

    def collect(self, floats: list[jax.Array], wire: str | None = None) -> list[jax.Array]:
        back = as_one(self.way.back, [narrow(y, wire) for y in floats])
        rows = [widen(b, wire, y.dtype) for b, y in zip(back, floats, strict=True)]
        return [_sum(_take(y_S, self.slot_NP), 1) for y_S in rows]


def _sources(slot_NP: jax.Array, slots: int) -> jax.Array:
    """The token in each slot; N in an empty one."""
    n, p = slot_NP.shape
    tokens_NP = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32)[:, None], (n, p))
    return jnp.full(slots, n, jnp.int32).at[slot_NP.reshape(-1)].set(tokens_NP.reshape(-1), mode="drop")


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    """``x[index]``, zeros where the index is past the end."""
    live = (index < x.shape[0]).reshape(*index.shape, *(1,) * (x.ndim - 1))
    return jnp.where(live, x[jnp.minimum(index, x.shape[0] - 1)], jnp.zeros((), x.dtype))


def all_to_all(wanted_NP: jax.Array, route: Route) -> Slotted:
    """As many slots for each device: `capacity` times N, rounded up. What does not fit is dropped, the last first."""
    n, p = wanted_NP.shape
    slots = n if route.capacity is None else math.ceil(route.capacity * n)
    place_NP = jnp.cumsum(wanted_NP, axis=0, dtype=jnp.int32) - 1
    sent_NP = wanted_NP & (place_NP < slots)
    slot_NP = jnp.where(sent_NP, jnp.arange(p, dtype=jnp.int32) * slots + place_NP, p * slots)
    rows_P = jnp.full(p, slots, jnp.int32)
    return Slotted(sent_NP, rows_P, jnp.zeros(()), _sources(slot_NP, p * slots), slot_NP, Swap(route.axis, p))


def ragged(wanted_NP: jax.Array, route: Route) -> Slotted:
    """Every device sends as much as it has, into room for all that could come: nothing is dropped."""
    return _ragged(wanted_NP, Span(route.axis, wanted_NP.shape[1], 1, route.twin), route.most)


def _ragged(wanted_NP: jax.Array, span: Span, most: int) -> Slotted:
    """most: devices of the span that one token can go to."""
    n, p = wanted_NP.shape
    me, send, receive = span.here(), n * min(most, p), n * p
    sizes_PP = span.gather(jnp.sum(wanted_NP, axis=0, dtype=jnp.int32))  # [from, to]
    starts_PP = jnp.cumsum(sizes_PP, axis=1) - sizes_PP  # in the slots of the device it comes from
    ends_PP = jnp.cumsum(sizes_PP, axis=0) - sizes_PP  # in the slots of the device it goes to
    place_NP = jnp.cumsum(wanted_NP, axis=0, dtype=jnp.int32) - 1
    slot_NP = jnp.where(wanted_NP, starts_PP[me] + place_NP, send)
    there = (starts_PP[me], sizes_PP[me], ends_PP[me], sizes_PP[:, me])
    back = (ends_PP[:, me], sizes_PP[:, me], starts_PP[:, me], sizes_PP[me])
    way = Ragged(span, send, receive, there, back)
    told = jnp.asarray(p * (p - 1) * sizes_PP.dtype.itemsize, jnp.float32)  # its own sizes, to all others
    return Slotted(wanted_NP, sizes_PP[me], told, _sources(slot_NP, send), slot_NP, way)


# --- two tiers -------------------------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Staged:
    """First to the device of the same place in every node that a token goes to, from there to the others in that node.

    So a row crosses between two nodes once for each token, whatever it wants there; the rows that come back are summed
    in the node first. nodes, within: `Slotted`.
    """

    sent_NP: Any
    rows_P: Any
    told: Any
    nodes: Any
    within: Any

    def spread(self, tree: Any) -> Any:
        return self.within.spread(self.nodes.spread(tree))

    def collect(self, floats: list[jax.Array], wire: str | None = None) -> list[jax.Array]:
        return self.nodes.collect(self.within.collect(floats, wire), wire)


def hierarchical(wanted_NP: jax.Array, route: Route) -> Staged:
    """Of two ragged exchanges: nothing is dropped."""
    (n, p), size = wanted_NP.shape, route.node
    assert size is not None
    nodes, me = p // size, lax.axis_index(route.axis)
    wanted_NAJ = wanted_NP.reshape(n, nodes, size)
    first = _ragged(jnp.any(wanted_NAJ, axis=2), Span(route.axis, nodes, size, route.twin), route.most)
    # Which devices of its node a row goes to: of all nodes, as bits, since a row is the same for all.
    bits_NW = _bits(wanted_NP)
    wanted_MAJ = _bools(first.spread(bits_NW), p).reshape(n * nodes, nodes, size)
    within = _ragged(wanted_MAJ[:, me // size], Span(route.axis, size, 1, route.twin), route.most)
    across_P = jnp.where(jnp.arange(p) % size == me % size, jnp.repeat(first.rows_P, size), 0)
    inside_P = jnp.where(jnp.arange(p) // size == me // size, jnp.tile(within.rows_P, nodes), 0)
    crossed = jnp.sum(first.rows_P) - first.rows_P[me // size]
    told = first.told + within.told + crossed * bits_NW.shape[1] * bits_NW.dtype.itemsize
    return Staged(wanted_NP, across_P + inside_P, told, first, within)


def _bits(flags_NP: jax.Array) -> jax.Array:
    """-> int32 ``[N, W]``, 31 flags a word."""
    n, p = flags_NP.shape
    words = jnp.pad(flags_NP, ((0, 0), (0, -p % 31))).reshape(n, -(-p // 31), 31)
    return jnp.sum(words.astype(jnp.int32) << jnp.arange(31, dtype=jnp.int32), axis=2, dtype=jnp.int32)


def _bools(words_MW: jax.Array, p: int) -> jax.Array:
    flags = (words_MW[:, :, None] >> jnp.arange(31, dtype=jnp.int32)) & 1
    return (flags == 1).reshape(len(words_MW), 31 * words_MW.shape[1])[:, :p]


# --- any of them -----------------------------------------------------------------------------------------------------

Transport = Replicated | Slotted | Staged
"""How the tokens of one device go.

sent_NP: bool, which go to which device; what is wanted and not sent is dropped. rows_P: int32, rows on the wire from
here to each device for one dispatch, those to itself and empty ones too; as many come back. told: float32, bytes that
had left this device before.

spread(tree): arrays ``[N, ...] -> [M, ...]``, the rows that arrive here, zeros in slots where none does.
collect(floats, wire): arrays ``[M, ...] -> [N, ...]``, for each token the sum of the rows that come back, summed in
float32.
"""


MAKERS: dict[str, Callable[[jax.Array, Route], Transport]] = {
    "replicated": replicated,
    "all_to_all": all_to_all,
    "ragged": ragged,
    "hierarchical": hierarchical,
}
"""How an exchange is made, by the names of `sharding.TRANSPORTS`: from which tokens want to go to which device."""


def dispatch(made: Transport, x_NL: jax.Array, exact: Any = (), wire: str | None = None) -> tuple[jax.Array, Any]:
    """Rows x and a tree of arrays that go with them, in one message -> those that arrive here, zeros in empty slots.

    wire: the dtype in which x travels, its own if None. Gradients travel in their own.
    """
    leaves, treedef = jax.tree.flatten(exact)
    linear = [jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves]
    floats = [leaf for leaf, yes in zip(leaves, linear, strict=True) if yes]
    others = [leaf for leaf, yes in zip(leaves, linear, strict=True) if not yes]
    moved: Any = _dispatched(wire, made, x_NL, floats, others)
    x_ML, floats, others = moved
    arrived = {True: iter(floats), False: iter(others)}
    return x_ML, treedef.unflatten([next(arrived[yes]) for yes in linear])


SHARES = 64


def demand(wanted_NP: jax.Array) -> jax.Array:
    """One in that of 65 places which says what share of a device's tokens it asked to send to one device at the most:
    place b for a share above (b - 1) / 64 up to b / 64. Sums over exchanges are their histogram."""
    most = jnp.max(jnp.sum(wanted_NP, axis=0, dtype=jnp.int32))
    place = -(-most * SHARES // len(wanted_NP))
    return (jnp.arange(SHARES + 1) == place).astype(jnp.int32)


def traffic(made: Transport, axis: str, wanted_NP: jax.Array, row_bytes: int, ideal_bytes: int) -> jax.Array:
    """Bytes that leave this device for one dispatch -> float32 [2]: those on the wire, and those of the ideal, one row
    to every other device that a token wants.

    row_bytes: of a row as it travels, with what goes with it. On the wire are empty slots too, and what had to be told
    before. What stays on the device is in neither.
    """
    others_P = jnp.arange(wanted_NP.shape[1]) != lax.axis_index(axis)
    rows = jnp.stack([jnp.sum(made.rows_P * others_P), jnp.sum(wanted_NP & others_P)]).astype(jnp.float32)
    return rows * jnp.array([row_bytes, ideal_bytes], jnp.float32) + jnp.stack([made.told, jnp.zeros(())])


def combine(made: Transport, y_ML: jax.Array, wire: str | None = None) -> jax.Array:
    """``[M, L] -> [N, L]``: for each token the sum of the rows that come back."""
    return _combined(wire, made, y_ML)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dispatched(wire: str | None, made: Transport, x_NL: jax.Array, floats: list, others: list):
    x, floats, others = made.spread((narrow(x_NL, wire), floats, others))
    return widen(x, wire, x_NL.dtype), floats, others


def _dispatched_back(wire: str | None, made: Transport, g: Any):
    g_NL, *floats = made.collect([g[0], *g[1]])
    return None, g_NL, floats, None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _combined(wire: str | None, made: Transport, y_ML: jax.Array) -> jax.Array:
    return made.collect([y_ML], wire)[0]


_dispatched.defvjp(lambda wire, made, *args: (_dispatched(wire, made, *args), made), _dispatched_back)
_combined.defvjp(lambda wire, made, y: (_combined(wire, made, y), made), lambda wire, made, g: (None, made.spread(g)))
