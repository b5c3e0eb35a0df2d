"""Files against index against model: every tensor expected is there once, in the right shape and dtype, and no other.

Reads headers only, one file at a time, and remembers of a tensor only where it lies: half a million of them fit in
some tens of megabytes.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from trillion_moe.checkpoint.names import PREFIXES, Form, Slot, head_prefix
from trillion_moe.checkpoint.safetensors_io import NAMES, RANK, STORED, Entry, Header, read_header
from trillion_moe.checkpoint.shards import INDEX, Shards
from trillion_moe.config import ModelConfig

PLACE = np.dtype([("file", "i4"), ("start", "i8"), ("dtype", "i1"), ("spelling", "i1"), ("sound", "?")])
EXPERT = re.compile(r"\.experts\.(0|[1-9][0-9]*)\.")
FLOATS = ("BF16", "F16", "F32")
News = Callable[[str], bool]
DTYPES = {"packed": ("U8",), "scale": ("U8", "F8_E8M0")}


@dataclass
class Located:
    """Slots with, for each of their tensors, a PLACE: file (-1 = absent), start in bytes, dtype (index into
    `safetensors_io.NAMES`), spelling; `sound` = shape, dtype and bytes are as they should be."""

    shards: Shards
    slots: list[Slot]
    places: list[np.ndarray]
    findings: list[str] = field(default_factory=list)

    def by_leaf(self) -> dict[str, list[tuple[Slot, np.ndarray]]]:
        table = defaultdict(list)
        for slot, place in zip(self.slots, self.places, strict=True):
            table[slot.leaf].append((slot, place))
        return dict(table)

    def label(self, slot: Slot, place: np.ndarray, expert: int) -> str:
        """ "file: tensor" as it is spelled there."""
        at = place[expert]
        return f"{self.shards.files[at['file']].name}: {slot.name(expert, int(at['spelling']))}"


def locate(slots: list[Slot], shards: Shards, cfg: ModelConfig) -> Located:
    """Find a tensor for every slot and a slot for every tensor; what is amiss goes into `findings`."""
    places = [np.full(slot.count, np.array((-1, 0, 0, 0, False), PLACE)) for slot in slots]
    located = Located(shards, slots, places, list(shards.findings))
    walk = _Walk(located, cfg)
    for number, path in enumerate(shards.files):
        walk.file(number, read_header(path))
    located.findings += walk.closing()
    located.findings += [*expert_findings(located, cfg, walk.news), *_missing(located, walk.news)]
    return located


class _Walk:
    """The state of one pass over the headers."""

    def __init__(self, located: Located, cfg: ModelConfig):
        self.to, self.text = located, cfg.checkpoint.prefix
        self.lookup = {name: (i, k) for i, slot in enumerate(located.slots) for k, name in enumerate(slot.names)}
        self.unseen = dict(located.shards.index or {})  # in the index, in no header yet
        self.foreign: Counter[str] = Counter()  # tensors under another prefix than the rest
        self.example: dict[str, str] = {}
        self.unreadable = set(located.shards.missing)

    def file(self, number: int, header: Header) -> None:
        self.to.findings += header.findings
        if not header.readable:
            self.unreadable.add(header.path.name)
            return
        for name, entry in header.entries.items():
            if self._in_index(name, header.path.name):
                self._tensor(name, entry, number, header)

    def _in_index(self, name: str, file: str) -> bool:
        index = self.to.shards.index
        if index is None:
            return True
        self.unseen.pop(name, None)
        if index.get(name) == file:
            return True
        if name not in index:
            known = "" if self._resolve(name) else ", and it is no tensor of this model"
            self.to.findings.append(f"{file}: {name}: {INDEX} does not list it{known}")
        else:
            self.to.findings.append(f"{file}: {name}: wrong shard: {INDEX} puts it in {index[name]}")
        return self._resolve(name) is not None

    def _resolve(self, name: str) -> tuple[int, int, int] | None:
        """-> slot, spelling, expert; None for a name that is no tensor of this model."""
        if "*" in name:
            return None
        match = EXPERT.search(name)
        template = name if match is None else f"{name[: match.start(1)]}*{name[match.end(1) :]}"
        expert = 0 if match is None else int(match[1])
        hit = self.lookup.get(template) or self.lookup.get(self._under_our_prefix(template))
        if hit is None or expert >= self.to.slots[hit[0]].count:
            return None
        return (*hit, expert)

    def _under_our_prefix(self, name: str) -> str:
        for other in PREFIXES:
            if other != self.text:
                if name == f"{head_prefix(other)}lm_head.weight":
                    return f"{head_prefix(self.text)}lm_head.weight"
                if name.startswith(other):
                    return self.text + name.removeprefix(other)
        return ""

    def _tensor(self, name: str, entry: Entry, number: int, header: Header) -> None:
        hit, file = self._resolve(name), header.path.name
        if hit is None:
            self.to.findings.append(f"{file}: {name}: unexpected: no such tensor in this model")
            return
        i, spelling, expert = hit
        slot, place = self.to.slots[i], self.to.places[i]
        if slot.name(expert, spelling) != name:
            prefix = next(p for p in PREFIXES if p != self.text and name.startswith((p, f"{head_prefix(p)}lm_head.")))
            self.foreign[prefix] += 1
            self.example.setdefault(prefix, f"{file}: {name}")
        if place[expert]["file"] >= 0:
            self.to.findings.append(f"{file}: {name}: duplicate: it is also {self.to.label(slot, place, expert)}")
            return
        wrong = list(_entry_findings(slot, entry))
        self.to.findings += [f"{file}: {name}: {why}" for why in wrong]
        place[expert] = (number, entry.start, RANK[entry.dtype], spelling, header.intact and not wrong)

    def news(self, name: str) -> bool:
        """Whether a tensor's absence is news: not when it was said of its index entry or of its file."""
        return name not in self.unseen and not (self.to.shards.index is None and self.unreadable)

    def closing(self) -> Iterator[str]:
        for name, file in self.unseen.items():
            if file not in self.unreadable:
                yield f"{file}: {name}: {INDEX} lists it, but it is not in the file"
        for other, count in self.foreign.items():
            yield (
                f"{self.example[other]}: mixed prefixes: {count} tensors are under {other!r}, the others under "
                f"{self.text!r}; all must be under one"
            )


def _entry_findings(slot: Slot, entry: Entry) -> Iterator[str]:
    legal = (STORED[slot.narrow or "float32"],) if slot.float32 else DTYPES.get(slot.part, FLOATS)
    if entry.dtype not in legal:
        why = ", because rounding it changes the model" if slot.float32 else ""
        yield f"wrong dtype {entry.dtype}: legal is {' or '.join(legal)}{why}"
    if entry.shape != slot.shape:
        yield f"wrong shape {list(entry.shape)}: {_shape_wanted(slot, entry.shape)}"


def _shape_wanted(slot: Slot, shape: tuple[int, ...]) -> str:
    if slot.form is not Form.A_LOG:
        return f"the config needs {list(slot.shape)}"
    (heads,) = slot.held
    if legal_a_log(shape, heads):
        return f"other layers have {list(slot.shape)}, all must be stored alike"
    return f"{heads} heads need [{heads}], [1, 1, {heads}, 1] or a longer vector padded with zeros"


def legal_a_log(shape: tuple[int, ...], heads: int) -> bool:
    """Whether A_log of so many heads may be stored in this shape."""
    return shape == (1, 1, heads, 1) or (len(shape) == 1 and shape[0] >= heads)


def _missing(located: Located, news: News) -> Iterator[str]:
    """Absent tensors other than experts."""
    for slot, place in zip(located.slots, located.places, strict=True):
        if slot.experts is None and place[0]["file"] < 0 and all(map(news, slot.names)):
            yield f"missing: {slot.name(0)}"


def dtype_findings(located: Located) -> Iterator[str]:
    """Leaves whose tensors cannot keep their dtypes, because an array has one."""
    for leaf, pairs in located.by_leaf().items():
        first: dict[int, str] = {}
        for slot, place in pairs:
            if slot.part == "weight":
                for code in np.unique(place["dtype"][place["sound"]]):
                    expert = int(np.flatnonzero(place["sound"] & (place["dtype"] == code))[0])
                    first.setdefault(int(code), located.label(slot, place, expert))
        if len(first) > 1:
            says = ", ".join(f"{label} is {NAMES[code]}" for code, label in first.items())
            yield f"{says}; both are held in one array ({leaf}): give a dtype to load them in"


# --- routed experts ---------------------------------------------------------------------------------------------------

Bank = dict[str, tuple[Slot, np.ndarray]]  # the three parts of one experts leaf in one layer


def expert_findings(located: Located, cfg: ModelConfig, news: News) -> list[str]:
    """All experts are plain, or all are packed pairs and config.json says so; which are absent."""
    banks: dict[tuple[str, int | None], Bank] = defaultdict(dict)
    for slot, place in zip(located.slots, located.places, strict=True):
        if slot.experts is not None:
            banks[slot.leaf, slot.repeat][slot.part] = (slot, place)
    (plain, a_plain), (packed, a_packed), (scales, a_scale) = (
        _present(located, banks.values(), part) for part in ("weight", "packed", "scale")
    )
    if plain and packed + scales:
        where = f"{packed} packed ({a_packed or a_scale})"
        return [f"{a_plain}: mixed experts: {plain} matrices are plain, {where}; all must be stored alike"]
    found = []
    if packed + scales and cfg.quantization is None:
        found.append(
            f"{a_packed or a_scale}: packed, but config.json has no quantization_config that says in what format"
        )
    elif plain and cfg.quantization is not None:
        found.append(f"{a_plain}: plain, but the quantization_config in config.json says {cfg.quantization}")
    for bank in banks.values():
        found += [*_halves(located, bank, news), *_absent(bank, "packed" if packed + scales else "weight", news)]
    return found


def _present(located: Located, banks, part: str) -> tuple[int, str]:
    """How many tensors of this part there are, and the first."""
    count, first = 0, ""
    for slot, place in (bank[part] for bank in banks):
        there = np.flatnonzero(place["file"] >= 0)
        count += len(there)
        first = first or (located.label(slot, place, int(there[0])) if len(there) else "")
    return count, first


def _halves(located: Located, bank: Bank, news: News) -> Iterator[str]:
    for part, other in (("packed", "scale"), ("scale", "packed")):
        (slot, place), (partner, partner_place) = bank[part], bank[other]
        for e in np.flatnonzero((place["file"] >= 0) & (partner_place["file"] < 0)):
            if news(name := partner.name(int(e))):
                yield f"{located.label(slot, place, int(e))}: its other half {name} is missing"


def _absent(bank: Bank, part: str, news: News) -> Iterator[str]:
    there = np.any([place["file"] >= 0 for _, place in bank.values()], axis=0)
    for e in np.flatnonzero(~there):
        if news(name := bank[part][0].name(int(e))):
            yield f"missing: {name}"
