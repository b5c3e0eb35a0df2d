"""Codecs: the JSON values of one spelling of a config key <-> one field value, or what is wrong with them."""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


class Absent(enum.Enum):
    ABSENT = "absent"


ABSENT = Absent.ABSENT  # no such key; as an encoded value: "this spelling cannot say it"; as a default: "required"


class CodecError(ValueError):
    """A codec's findings about one value."""

    def __init__(self, *findings: str):
        self.findings = findings
        super().__init__("; ".join(findings))


@dataclass(frozen=True)
class Codec:
    """The JSON values of one spelling (one per path) <-> one field value: `decode(raws, names, num_layers)` or raise
    `CodecError`; `encode(value)` to raws, or to ABSENT where the spelling cannot say it."""

    decode: Callable[[tuple[Any, ...], tuple[str, ...], int], Any]
    encode: Callable[[Any], tuple[Any, ...] | Absent]


def one(accepts: Callable[[Any], bool], legal: str, into: Callable = lambda x: x, out: Callable = lambda x: x) -> Codec:
    """A codec of one path: `accepts` the JSON value or refuses with `legal`; `into` the field, `out` of it."""

    def decode(raws, names, _):
        if not accepts(raws[0]):
            raise CodecError(f"{names[0]} = {raws[0]!r}: legal is {legal}")
        return into(raws[0])

    return Codec(decode, lambda value: (out(value),))


def is_int(x: Any, least: int = 0) -> bool:
    return type(x) is int and x >= least


def is_number(x: Any) -> bool:
    return type(x) in (int, float) and abs(x) <= sys.float_info.max  # an int may be greater than any float


def optional(codec: Codec) -> Codec:
    """`codec`, or null for None."""

    def decode(raws, names, count):
        if raws[0] is None:
            return None
        try:
            return codec.decode(raws, names, count)
        except CodecError as refused:
            raise CodecError(*(f"{f} or null" for f in refused.findings)) from None

    return Codec(decode, lambda value: (None,) if value is None else codec.encode(value))


def choice(*legal: str) -> Codec:
    return one(lambda x: type(x) is str and x in legal, " or ".join(map(repr, legal)))


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else ["not a tuple", value]  # decode refuses the latter


def ints(legal: str, length: int | None = None) -> Codec:
    """A JSON list of integers >= 1 <-> a tuple."""

    def accepts(x):
        return isinstance(x, list) and len(x) == (length or len(x)) > 0 and all(is_int(i, 1) for i in x)

    return one(accepts, legal, tuple, _listed)


INT1 = one(lambda x: is_int(x, 1), "an integer >= 1")
# Bounds that no model comes near: lists of this length are made before a file is looked at.
MOST_LAYERS = 10_000
LAYERS = one(lambda x: is_int(x, 1) and x <= MOST_LAYERS, f"an integer from 1 to {MOST_LAYERS}")
EXPERTS = one(lambda x: is_int(x, 1) and x <= 100_000, "an integer from 1 to 100000")
INT0 = one(lambda x: is_int(x, 0), "an integer >= 0")
BOOL = one(lambda x: type(x) is bool, "true or false")
TEXT = one(lambda x: type(x) is str, "a string")
TEXTS = one(lambda x: isinstance(x, list) and all(type(i) is str for i in x), "a list of strings", tuple, _listed)
POSITIVE = one(lambda x: is_number(x) and x > 0, "a finite number > 0", float)
NEGATIVE = one(lambda x: is_number(x) and x < 0, "a finite number < 0", float)
NOT_NEGATIVE = one(lambda x: is_number(x) and x >= 0, "a finite number >= 0", float)
OFF_OR_INT1 = one(lambda x: x is None or is_int(x, 0), "an integer >= 1, or null or 0 for off", lambda x: x or None)
TOKEN_IDS = one(  # null <-> (), 7 <-> (7,), [7, 8] <-> (7, 8)
    lambda x: x is None or is_int(x) or (isinstance(x, list) and len(x) > 0 and all(is_int(i) for i in x)),
    "a token id, a list of token ids, or null",
    lambda x: () if x is None else tuple(x) if isinstance(x, list) else (x,),
    lambda v: None if v == () else v[0] if isinstance(v, tuple) and len(v) == 1 else _listed(v),
)


def kinds(names: Mapping[str, str]) -> Codec:
    """One name per layer, `names` = field value -> JSON name."""
    back = {theirs: ours for ours, theirs in names.items()}

    def decode(raws, keys, count):
        (listed,), (key,) = raws, keys
        if not isinstance(listed, list):
            raise CodecError(f"{key} = {listed!r}: legal is a list of {' or '.join(map(repr, back))}, one per layer")
        bad = [f"{x!r} at layer {i + 1}" for i, x in enumerate(listed) if type(x) is not str or x not in back]
        if bad:
            raise CodecError(f"{key} holds {', '.join(bad)} (counted from 1): legal is {' or '.join(map(repr, back))}")
        if len(listed) != count:
            raise CodecError(f"{key} has {len(listed)} entries for num_hidden_layers = {count}")
        return tuple(back[x] for x in listed)

    return Codec(decode, lambda value: ([names[kind] for kind in value],))


def layer_lists(*order: str) -> Codec:
    """Lists of layer numbers counted **from 1**, one list per kind in `order`, that together part 1..num_layers."""

    def decode(raws, keys, count):
        found = [
            f"{k} is missing beside {', '.join(x for x in keys if x != k)}"
            for k, raw in zip(keys, raws, strict=True)
            if raw is ABSENT
        ]
        found += [
            f"{k} = {raw!r}: legal is a list of layer numbers from 1 to {count}"
            for k, raw in zip(keys, raws, strict=True)
            if raw is not ABSENT and not (isinstance(raw, list) and all(type(i) is int for i in raw))
        ]
        if found:
            raise CodecError(*found)
        every = [i for raw in raws for i in raw]
        pair = " and ".join(keys)
        for k, raw in zip(keys, raws, strict=True):
            if outside := sorted({i for i in raw if not 1 <= i <= count}):
                found.append(f"{k} holds {outside}: layers count from 1 to num_hidden_layers = {count}")
        if twice := sorted({i for i in every if every.count(i) > 1}):
            found.append(f"{pair} name layers {twice} more than once: every layer has one kind")
        if gaps := sorted(set(range(1, count + 1)) - set(every)):
            found.append(f"{pair} leave out layers {gaps} of 1..{count}")
        if found:
            raise CodecError(*found)
        kind_of = {i: kind for kind, raw in zip(order, raws, strict=True) for i in raw}
        return tuple(kind_of[i] for i in range(1, count + 1))

    return Codec(decode, lambda value: tuple([i + 1 for i, k in enumerate(value) if k == kind] for kind in order))


def leading(first: str, rest: str) -> Codec:
    """A count n <-> n layers of kind `first`, then `rest`; other orders have no such spelling."""

    def decode(raws, names, count):
        if not (is_int(raws[0]) and raws[0] <= count):
            raise CodecError(f"{names[0]} = {raws[0]!r}: legal is an integer from 0 to num_hidden_layers = {count}")
        return (first,) * raws[0] + (rest,) * (count - raws[0])

    def encode(value):
        n = next((i for i, kind in enumerate(value) if kind != first), len(value))
        return ABSENT if first in value[n:] else (n,)

    return Codec(decode, encode)
