"""Tokens to the devices that hold their experts, and what comes of them back: runs on every device by itself.

A token travels once to every device that has any of its experts, with their numbers and weights; there its experts are
applied and their weighted sum is made, which travels back. So one row per token and device crosses the wire each way,
in the dtype of the rows.

Both ways are linear and each is the transpose of the other: that is how their gradients are made. Suffixes: N tokens
of this device, P devices, S slots that it sends from, M slots that it receives in, L width.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from trillion_moe.ops import accumulator

Wire = Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Replicated:
    """Every device sees the tokens of all and returns what its experts make of them: nothing is dropped."""

    axis: str
    sent_NP: jax.Array

    def dispatch(self, x_N: jax.Array) -> jax.Array:
        """``[N, ...] -> [M, ...]``: the rows that arrive here, zeros in slots where none does."""
        return _to_all(self.axis, x_N) if jnp.issubdtype(x_N.dtype, jnp.inexact) else _spread(self.axis, x_N)

    def combine(self, y_M: jax.Array) -> jax.Array:
        """``[M, L] -> [N, L]``: for each token the sum of the rows that come back, summed in float32."""
        return _from_all(self.axis, y_M)


@dataclasses.dataclass(frozen=True)
class Slotted:
    """The same by slots: a token is laid into one for every device it goes to; `there` and `back` carry slots.

    source_S: int32, the token in a slot, N in an empty one. slot_NP: int32, the slot of a token for a device, S for
    none.
    """

    sent_NP: jax.Array
    source_S: jax.Array
    slot_NP: jax.Array
    there: Wire
    back: Wire

    def dispatch(self, x_N: jax.Array) -> jax.Array:
        return self.there(_gather(x_N, self.source_S, self.slot_NP))

    def combine(self, y_M: jax.Array) -> jax.Array:
        return _gather_sum(self.back(y_M), self.slot_NP, self.source_S)


Transport = Replicated | Slotted
"""sent_NP: bool, which tokens go to which device. What is wanted and not sent is dropped."""


def replicated(wanted_NP: jax.Array, axis: str, most: int, capacity: float | None) -> Replicated:
    del most, capacity
    return Replicated(axis, wanted_NP)


def all_to_all(wanted_NP: jax.Array, axis: str, most: int, capacity: float | None) -> Slotted:
    """As many slots for each device: `capacity` times N, rounded up. What does not fit is dropped, the last first."""
    del most
    n, p = wanted_NP.shape
    slots = n if capacity is None else math.ceil(capacity * n)
    place_NP = jnp.cumsum(wanted_NP, axis=0, dtype=jnp.int32) - 1
    sent_NP = wanted_NP & (place_NP < slots)
    slot_NP = jnp.where(sent_NP, jnp.arange(p, dtype=jnp.int32) * slots + place_NP, p * slots)

    def swap(x_S: jax.Array) -> jax.Array:
        return lax.all_to_all(x_S.reshape(p, slots, *x_S.shape[1:]), axis, 0, 0).reshape(x_S.shape)

    return Slotted(sent_NP, _sources(slot_NP, p * slots), slot_NP, swap, swap)


def ragged(wanted_NP: jax.Array, axis: str, most: int, capacity: float | None) -> Slotted:
    """Every device sends as much as it has, into room for all that could come: nothing is dropped.

    most: devices that one token can go to.
    """
    del capacity
    n, p = wanted_NP.shape
    me, send, receive = lax.axis_index(axis), n * most, n * p
    sizes_PP = lax.all_gather(jnp.sum(wanted_NP, axis=0, dtype=jnp.int32), axis)  # [from, to]
    starts_PP = jnp.cumsum(sizes_PP, axis=1) - sizes_PP  # in the slots of the device it comes from
    ends_PP = jnp.cumsum(sizes_PP, axis=0) - sizes_PP  # in the slots of the device it goes to
    place_NP = jnp.cumsum(wanted_NP, axis=0, dtype=jnp.int32) - 1
    slot_NP = jnp.where(wanted_NP, starts_PP[me] + place_NP, send)
    there = (starts_PP[me], sizes_PP[me], ends_PP[me], sizes_PP[:, me])
    back = (ends_PP[:, me], sizes_PP[:, me], starts_PP[:, me], sizes_PP[me])
    return Slotted(
        wanted_NP,
        _sources(slot_NP, send),
        slot_NP,
        lambda x_S: _ragged_both(axis, receive, x_S, there, back),
        lambda y_M: _ragged_both(axis, send, y_M, back, there),
    )


MAKERS: dict[str, Callable[[jax.Array, str, int, float | None], Transport]] = {
    "replicated": replicated,
    "all_to_all": all_to_all,
    "ragged": ragged,
}
"""How an exchange is made, by the names of `sharding.TRANSPORTS`: from which tokens want to go to which device
(bool [N, P]), the mesh axis, the most devices that a token can go to, and the capacity (for "all_to_all")."""


# --- all to all ------------------------------------------------------------------------------------------------------


def _spread(axis: str, x_N: jax.Array) -> jax.Array:
    return lax.all_gather(x_N, axis, axis=0, tiled=True)


def _collected(axis: str, y_M: jax.Array) -> jax.Array:
    y_PN = lax.all_to_all(y_M.reshape(lax.axis_size(axis), -1, *y_M.shape[1:]), axis, 0, 0)
    return jnp.sum(y_PN.astype(accumulator(y_M.dtype)), axis=0).astype(y_M.dtype)


_to_all = jax.custom_vjp(_spread, nondiff_argnums=(0,))
_from_all = jax.custom_vjp(_collected, nondiff_argnums=(0,))
_to_all.defvjp(lambda axis, x: (_spread(axis, x), None), lambda axis, _, g: (_collected(axis, g),))
_from_all.defvjp(lambda axis, y: (_collected(axis, y), None), lambda axis, _, g: (_spread(axis, g),))


# --- slots -----------------------------------------------------------------------------------------------------------


def _sources(slot_NP: jax.Array, slots: int) -> jax.Array:
    """The token in each slot; N in an empty one."""
    n, p = slot_NP.shape
    tokens_NP = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32)[:, None], (n, p))
    return jnp.full(slots, n, jnp.int32).at[slot_NP.reshape(-1)].set(tokens_NP.reshape(-1), mode="drop")


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    """``x[index]``, zeros where the index is past the end."""
    live = (index < x.shape[0]).reshape(*index.shape, *(1,) * (x.ndim - 1))
    return jnp.where(live, x[jnp.minimum(index, x.shape[0] - 1)], 0)


def _gather(x_N: jax.Array, source_S: jax.Array, slot_NP: jax.Array) -> jax.Array:
    """Slots filled from tokens. The gradient gathers by slot: never a scatter."""
    if not jnp.issubdtype(x_N.dtype, jnp.inexact):
        return _take(x_N, source_S)
    return _filled(x_N, source_S, slot_NP)


@jax.custom_vjp
def _filled(x_N: jax.Array, source_S: jax.Array, slot_NP: jax.Array) -> jax.Array:
    return _take(x_N, source_S)


@jax.custom_vjp
def _gather_sum(y_S: jax.Array, slot_NP: jax.Array, source_S: jax.Array) -> jax.Array:
    """For each token the sum of its slots."""
    return _summed(y_S, slot_NP)


def _summed(y_S: jax.Array, slot_NP: jax.Array) -> jax.Array:
    return jnp.sum(_take(y_S, slot_NP).astype(accumulator(y_S.dtype)), axis=1).astype(y_S.dtype)


_filled.defvjp(
    lambda x_N, source_S, slot_NP: (_take(x_N, source_S), slot_NP),
    lambda slot_NP, g_S: (_summed(g_S, slot_NP), None, None),
)
_gather_sum.defvjp(
    lambda y_S, slot_NP, source_S: (_summed(y_S, slot_NP), source_S),
    lambda source_S, g_N: (_take(g_N, source_S), None, None),
)


# --- the ragged wire -------------------------------------------------------------------------------------------------

Ways = tuple[jax.Array, jax.Array, jax.Array, jax.Array]  # starts here, sizes sent, starts there, sizes received


def _ragged_both(axis: str, room: int, x: jax.Array, there: Ways, back: Ways) -> jax.Array:
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return _carry(axis, room, x, there)
    return _carried(axis, room, x.shape[0], x, there, back)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _carried(axis: str, room: int, sender: int, x: jax.Array, there: Ways, back: Ways) -> jax.Array:
    return _carry(axis, room, x, there)


_carried.defvjp(
    lambda axis, room, sender, x, there, back: (_carry(axis, room, x, there), back),
    lambda axis, room, sender, back, g: (_carry(axis, sender, g, back), None, None),
)


def _carry(axis: str, room: int, x: jax.Array, ways: Ways) -> jax.Array:
    """Slices of x to the other devices, into ``[room, ...]`` of zeros."""
    out = jnp.zeros((room, *x.shape[1:]), x.dtype)
    real = partial(lax.ragged_all_to_all, axis_name=axis)
    return lax.platform_dependent(x, out, *ways, cpu=partial(_twin, axis), default=real)


def _twin(axis: str, x: jax.Array, out: jax.Array, starts, sizes, ends, received) -> jax.Array:
    """What `lax.ragged_all_to_all` does, by gathering everything: XLA has none on CPU."""
    me = lax.axis_index(axis)
    x_PS = lax.all_gather(x, axis)
    starts_P, sizes_P, ends_P = (lax.all_gather(a, axis)[:, me] for a in (starts, sizes, ends))
    at_M1 = jnp.arange(out.shape[0])[:, None]
    mine_MP = (ends_P <= at_M1) & (at_M1 < ends_P + sizes_P)
    from_M = jnp.argmax(mine_MP, axis=1)
    row_M = jnp.clip(starts_P[from_M] + at_M1[:, 0] - ends_P[from_M], 0, x.shape[0] - 1)
    arrived = jnp.any(mine_MP, axis=1).reshape(-1, *(1,) * (x.ndim - 1))
    return jnp.where(arrived, x_PS[from_M, row_M], out)
