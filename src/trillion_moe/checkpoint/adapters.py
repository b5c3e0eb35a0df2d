"""Adapters in PEFT's folder format, read for a model and checked as a whole before the first array is made.

Of a matrix ``[N, K]`` as torch multiplies it: lora_A ``[r, K]``, lora_B ``[N, r]``, scaled by alpha / r. Of a fused
parameter of all E experts, PEFT lays A out expert by expert and B rank by rank, the expert fastest:

    A [E r, K]: expert e has rows e r to (e + 1) r        B [N, r E]: expert e has columns e, E + e, 2 E + e, ...

gate_up_proj holds the gate's rows first; both read through one A. `adapter_export` writes what is read here.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from trillion_moe.checkpoint.adapter_files import CONFIG, TENSORS, Settings, read_files
from trillion_moe.checkpoint.adapter_names import ENDINGS, FUSED, Bank, Factor, Home, Matrix, Names
from trillion_moe.checkpoint.audit import FLOATS
from trillion_moe.checkpoint.errors import CheckpointError
from trillion_moe.checkpoint.fingerprint import fingerprint
from trillion_moe.checkpoint.names import Form, tree_leaves
from trillion_moe.checkpoint.safetensors_io import Entry, Reader
from trillion_moe.weights import ARRANGED, LoRA, is_arranged


def read_adapter(folder: str | Path, model: Any, *, check_base: bool = True) -> dict[str, LoRA]:
    """The adapters of a folder by the logical name of the matrix they are for, ``layers.3.attention.q``.

    Each is ``LoRA(None, a, b, slots, scaling)`` of one layer in numpy arrays of the stored dtype, oriented as the model
    multiplies: a ``[K, r]``, b ``[r, N]``; of experts a ``[S, K, r]``, b ``[S, r, N]``, with int32 slots ``[E]`` where
    only S of the E experts have one. `transforms.adapters.with_lora` puts them on. check_base: refuse an adapter that
    was exported from other weights than this model's; one that does not say is accepted.

    Every tensor is used, or nothing is: raises CheckpointError with all findings, also for an adapter that would change
    no weight and for a model that has adapters already.
    """
    folder = Path(folder)
    _check_model(folder, model)
    settings, entries = read_files(folder)
    names = Names(model)
    pairs, findings = _paired(names, entries)
    for pair in pairs:
        findings += pair.measure(settings, pairs)
    findings += [*_doubtful(pairs, settings), *_twice(pairs), *_without_experts(pairs, settings)]
    if all(pair.matrices for pair in pairs):
        findings += settings.unmatched(pair.module for pair in pairs)
    findings += _base_findings(settings, model) if check_base else ()
    if findings:
        raise CheckpointError(folder, findings)
    with Reader([folder / TENSORS]) as reader:
        adapters, findings = _gathered(pairs, settings, reader, names)
    if not findings and not any(map(effective, adapters.values())):
        findings.append(f"{TENSORS}: without effect: A, B or the scaling is 0 in all {len(adapters)} matrices")
    if findings:
        raise CheckpointError(folder, findings)
    return adapters


def _check_model(folder: Path, model: Any) -> None:
    if is_arranged(model):
        raise CheckpointError(folder, [f"the model takes no adapter: {ARRANGED}"])
    leaves, _ = tree_leaves(model)
    if adapted := [path for path, leaf in leaves if isinstance(leaf, LoRA)]:
        raise CheckpointError(folder, [f"the model has adapters already ({adapted[0]}): merge or remove them first"])
    if not all(isinstance(array, jax.Array | np.ndarray) for array in jax.tree.leaves(model)):
        raise CheckpointError(folder, ["the model is a blueprint without arrays: load or init it first"])


def _base_findings(settings: Settings, model: Any) -> Iterator[str]:
    if settings.ours and settings.ours["base"] != (base := fingerprint(model)):
        yield (
            f"{TENSORS}: exported from weights with fingerprint {settings.ours['base']}, this model's are {base}: "
            "load the base it was trained on, or give check_base=False"
        )


def effective(lora: LoRA) -> bool:
    """Whether an adapter changes any weight: some matrix has neither factor zero."""
    a, b = (np.asarray(m).astype(bool).any(axis=(-2, -1)) for m in (lora.a, lora.b))
    return lora.scaling != 0 and bool(np.any(a & b))


# --- which tensors belong together -----------------------------------------------------------------------------------


@dataclass
class _Pair:
    """lora_A and lora_B of one thing; `measure` finds out its rank, and which matrices it adapts."""

    home: Home
    tensors: dict[Factor, tuple[str, Entry]] = field(default_factory=dict)
    module: str = ""  # that patterns are matched against
    rank: int = 0
    matrices: tuple[Matrix, ...] = ()

    def measure(self, settings: Settings, pairs: list["_Pair"]) -> Iterator[str]:
        (name, a), (_, b) = self.tensors["A"], self.tensors["B"]
        if self.home.bank is not None:
            found = _parameter(self, self.home.bank, pairs)
        else:
            found = _plain_rank(self.home.matrix, a.shape, b.shape)
        if isinstance(found, str):
            yield f"{TENSORS}: {name} {list(a.shape)}, its lora_B {list(b.shape)}: {found}"
            return
        self.rank, parameter = found
        bank, matrix = self.home.bank, self.home.matrix
        self.module = self.home.module if bank is None else f"{self.home.module}.{FUSED[parameter]}"
        self.matrices = bank.of(parameter) if bank is not None else (matrix,) if matrix is not None else ()
        if self.rank != (said := settings.rank_of(self.module)):
            of = "" if bank is None else f" for each of {bank.experts} experts"
            yield (
                f"{TENSORS}: {name} {list(a.shape)}: rank {self.rank}{of}, but {CONFIG} says {said} "
                f"(r, or rank_pattern) for {self.module}"
            )


def _paired(names: Names, entries: dict[str, Entry]) -> tuple[list[_Pair], list[str]]:
    """Every tensor at its place, and what is wrong with names and dtypes."""
    pairs: dict[Any, _Pair] = {}
    findings, prefixes = [], Counter[str]()
    for tensor, entry in sorted(entries.items()):
        hit = names.resolve(tensor)
        if isinstance(hit, str):
            findings.append(f"{TENSORS}: {tensor}: {hit}")
            continue
        factor, home = hit
        prefixes[home.prefix] += 1
        pair = pairs.setdefault(home.place, _Pair(home))
        if home.module != pair.home.module or factor in pair.tensors:
            findings.append(f"{TENSORS}: {tensor}: duplicate: {pair.home.module} is the same matrix")
            continue
        pair.tensors[factor] = (tensor, entry)
        if entry.dtype not in FLOATS:
            findings.append(f"{TENSORS}: {tensor}: wrong dtype {entry.dtype}: legal is {' or '.join(FLOATS)}")
    for pair in pairs.values():
        for factor in ENDINGS.keys() - pair.tensors.keys():
            name = next(name for name, _ in pair.tensors.values())
            findings.append(f"{TENSORS}: {name}: its lora_{factor} is missing")
    del prefixes[""]
    if len(prefixes) > 1:
        told = " and ".join(f"{count} under {prefix!r}" for prefix, count in prefixes.most_common())
        findings.append(f"{TENSORS}: mixed prefixes: {told} tensors; all must be under one")
    return [pair for pair in pairs.values() if len(pair.tensors) == 2], findings


# --- shapes ----------------------------------------------------------------------------------------------------------

Sizes = tuple[int, ...]


def _plain_rank(matrix: Matrix | None, a: Sizes, b: Sizes) -> tuple[int, str] | str:
    assert matrix is not None
    k, n = matrix.shape
    patches = matrix.slot.form is Form.PATCHES
    inputs, one = (matrix.slot.shape[1:], (1, 1)) if patches else ((k,), ())
    if len(a) < 2 or a[0] < 1 or a[1:] != inputs or b != (n, a[0], *one):
        legal = [["r", *inputs], [n, "r", *one]]
        return f"wrong shape: {matrix.name} is [{k}, {n}] and needs A {_shape(legal[0])} and B {_shape(legal[1])}"
    return a[0], ""


def _shape(sizes: Iterable[Any]) -> str:
    return f"[{', '.join(map(str, sizes))}]"


def _parameter(pair: _Pair, bank: Bank, pairs: list[_Pair]) -> tuple[int, str] | str:
    """Rank, and which of the two fused parameters this is: the inner is gate_up_proj; an outer is down_proj if there
    is an inner, and else what its shape says."""
    (_, a), (_, b) = pair.tensors["A"], pair.tensors["B"]
    legal = _fused_widths(bank)
    with_inner = any(p.home.inner and p.home.bank is bank for p in pairs)
    possible = ["gate_up"] if pair.home.inner else ["down"] if with_inner else list(legal)
    experts = bank.experts
    if len(a.shape) == len(b.shape) == 2 and a.shape[0] == b.shape[1] and a.shape[0] and a.shape[0] % experts == 0:
        widths = a.shape[1], b.shape[0]
        for parameter in possible:
            if widths == legal[parameter]:
                return a.shape[0] // experts, parameter
        for parameter in possible:
            if widths == legal[parameter][::-1]:
                return (
                    f"transposed: A reads {widths[0]} and B writes {widths[1]}, the inputs and outputs of "
                    f"{FUSED[parameter]} the wrong way round, as PEFT before 0.19 trained them; train it again with "
                    "a later one"
                )
    wanted = " or ".join(
        f"A [{experts} r, {legal[p][0]}] and B [{legal[p][1]}, r {experts}] of {FUSED[p]}" for p in possible
    )
    return f"wrong shape: {bank.module} of {experts} experts needs {wanted}"


def _fused_widths(bank: Bank) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of the two fused parameters."""
    k, n = bank.gate.shape
    return {"gate_up": (k, 2 * n), "down": bank.down.shape}


def _doubtful(pairs: list[_Pair], settings: Settings) -> Iterator[str]:
    """A square gate_up_proj looks the same transposed. A down_proj beside it, never square then, has been seen to be
    the right way round; without one, PEFT's version must tell."""
    fused = [pair for pair in pairs if pair.home.bank is not None and pair.matrices]
    if settings.ours or settings.transposes is False or any(len(pair.matrices) == 1 for pair in fused):
        return
    for pair in fused:
        assert pair.home.bank is not None
        inputs, outputs = _fused_widths(pair.home.bank)["gate_up"]
        if inputs == outputs:
            said = "is missing" if settings.version is None else f"= {settings.version!r}"
            yield (
                f"{TENSORS}: {pair.tensors['A'][0]}: gate_up_proj is [{outputs}, {inputs}], so its shape cannot tell "
                f"whether PEFT before 0.19 trained it transposed, and peft_version {said} in {CONFIG}: legal is 0.19 "
                "or later"
            )


def _twice(pairs: list[_Pair]) -> Iterator[str]:
    """Experts that are adapted fused and one by one."""
    fused = {m.name: pair for pair in pairs if pair.home.bank is not None for m in pair.matrices}
    for pair in pairs:
        if pair.home.bank is None and pair.home.matrix is not None and pair.home.matrix.name in fused:
            other = fused[pair.home.matrix.name].tensors["A"][0]
            yield f"{TENSORS}: {pair.tensors['A'][0]}: duplicate: {other} adapts this expert too"


def _without_experts(pairs: list[_Pair], settings: Settings) -> Iterator[str]:
    """Adapters of experts that were trained and then lost by whoever saved or renamed them."""
    trained = [name for name in settings.parameters if name.rpartition(".")[2] in FUSED.values()]
    if trained and not any(pair.home.bank is not None or pair.home.expert is not None for pair in pairs):
        yield f"{TENSORS}: no tensor adapts an expert, but {CONFIG} has target_parameters {', '.join(trained)}"


# --- values ----------------------------------------------------------------------------------------------------------


def _gathered(
    pairs: list[_Pair], settings: Settings, reader: Reader, names: Names
) -> tuple[dict[str, LoRA], list[str]]:
    """One adapter a matrix, or a bank of experts, or the whole tower, and what the values say against it."""
    findings: list[str] = []
    plain: dict[str, dict[int | None, LoRA]] = defaultdict(dict)  # by block of the tower
    fused: dict[str, LoRA] = {}
    single: dict[str, dict[int, LoRA]] = defaultdict(dict)
    for pair in pairs:
        a, b = (_read(reader, *pair.tensors[factor], findings) for factor in ENDINGS)
        scaling, matrix = settings.scaling_of(pair.module), pair.home.matrix
        if pair.home.bank is not None:
            fused |= _unfused(pair, a, b, scaling)
            continue
        assert matrix is not None
        lora = LoRA(None, a.reshape(len(a), -1).T, b.reshape(len(b), -1).T, None, scaling)
        if pair.home.expert is None:
            plain[matrix.name][matrix.block] = lora
        else:
            single[matrix.name][pair.home.expert] = lora
    count = {matrix.name: matrix.slot.count for matrix in names.matrices}
    depth = Counter(matrix.name for matrix in names.matrices if matrix.block is not None)
    note = settings.ours.get("experts", {})
    builders: dict[str, Callable[[], LoRA | None]] = {}
    for name, blocks in plain.items():
        builders[name] = partial(_tower, name, blocks, depth[name]) if name in depth else partial(blocks.get, None)
    builders |= {name: partial(_as_noted, name, lora, note) for name, lora in fused.items()}
    builders |= {name: partial(_bank, name, experts, count[name], note) for name, experts in single.items()}
    adapters = {}
    for name, build in builders.items():
        try:
            adapters[name] = build()
        except _Uneven as error:
            findings.append(f"{TENSORS}: {error}")
    return {name: lora for name, lora in adapters.items() if lora is not None}, findings


class _Uneven(ValueError):
    """Matrices that one array is to hold, and that it cannot."""


def _read(reader: Reader, name: str, entry: Entry, findings: list[str]) -> np.ndarray:
    array = reader.read(0, entry.start, entry.shape, entry.dtype)
    if not np.isfinite(array).all():
        findings.append(f"{TENSORS}: {name}: {np.count_nonzero(~np.isfinite(array))} values are not finite")
    return array


def _unfused(pair: _Pair, a: np.ndarray, b: np.ndarray, scaling: float) -> dict[str, LoRA]:
    """The matrices of a fused parameter: a [E, K, r], b [E, r, N], gate before up."""
    rank = pair.rank
    a = a.reshape(-1, rank, a.shape[1]).transpose(0, 2, 1)
    b = b.reshape(len(b), rank, -1).transpose(2, 1, 0)
    parts = np.split(b, len(pair.matrices), axis=-1)
    return {m.name: LoRA(None, a, part, None, scaling) for m, part in zip(pair.matrices, parts, strict=True)}


def _tower(name: str, blocks: dict[int | None, LoRA], depth: int) -> LoRA:
    """The blocks of the tower are one stacked leaf, which is adapted whole."""
    if len(blocks) < depth:
        absent = sorted(set(range(depth)) - {block for block in blocks if block is not None})
        raise _Uneven(f"{name}: blocks {absent} have no adapter; the {depth} blocks of the tower have all one or none")
    return _stacked(name, [blocks[i] for i in range(depth)], "the blocks of the tower")


def _bank(name: str, experts: dict[int, LoRA], count: int, note: dict[str, Any]) -> LoRA:
    """One adapter of the experts that have one; those that we noted come in the order they had."""
    ids = sorted(experts)
    if (noted := note.get(name, {}).get("ids")) is not None:
        if sorted(noted) != ids:
            raise _Uneven(f"{name}: experts {ids} have an adapter, exported were {noted}")
        ids = noted
    lora = _stacked(name, [experts[e] for e in ids], "the experts of a layer")
    slots = None if ids == list(range(count)) else _slots(ids, count)
    return _shared(name, replace(lora, slots=slots), note)


def _stacked(name: str, loras: list[LoRA], which: str) -> LoRA:
    kinds = {(one.a.shape[-1], one.scaling, str(one.a.dtype), str(one.b.dtype)) for one in loras}
    if len(kinds) > 1:
        told = "; ".join(f"rank {r}, scaling {s:g}, {a} and {b}" for r, s, a, b in sorted(kinds))
        raise _Uneven(f"{name}: {which} must have one rank, scaling and dtype, and have: {told}")
    return replace(loras[0], a=np.stack([one.a for one in loras]), b=np.stack([one.b for one in loras]))


def _slots(ids: list[int], count: int) -> np.ndarray:
    slots = np.full(count, -1, np.int32)
    slots[ids] = np.arange(len(ids), dtype=np.int32)
    return slots


def _as_noted(name: str, lora: LoRA, note: dict[str, Any]) -> LoRA | None:
    """A fused adapter as it was before it was exported: its own part of the rank, and only the experts that had one."""
    about = note.get(name, {})
    if "ranks" in about:
        low, high = about["ranks"]
        if high > (rank := lora.a.shape[-1]):
            raise _Uneven(f"{name}: exported were the ranks {low} to {high}, the adapter has {rank}")
        rest = np.delete(lora.b, slice(low, high), axis=1)
        if rest.any():
            raise _Uneven(f"{name}: exported were the ranks {low} to {high}, but B is not 0 in the others")
        lora = replace(lora, a=lora.a[..., low:high], b=lora.b[:, low:high])
        if low == high:
            return None
    if "ids" in about:
        ids, count = about["ids"], len(lora.b)
        if max(ids, default=0) >= count:
            raise _Uneven(f"{name}: exported were the experts {ids}, the adapter has {count}")
        if np.delete(lora.b, ids, axis=0).any():
            raise _Uneven(f"{name}: exported were the experts {ids}, but B is not 0 in the others")
        lora = replace(lora, a=lora.a[ids], b=lora.b[ids], slots=_slots(ids, count))
    return _shared(name, lora, note)


def _shared(name: str, lora: LoRA, note: dict[str, Any]) -> LoRA:
    """One factor for all experts where it was one."""
    for factor in note.get(name, {}).get("shared", ()):
        array = getattr(lora, factor)
        if (array != array[0]).any():
            raise _Uneven(f"{name}: {factor} was one for all experts when exported, and differs among them")
        lora = replace(lora, **{factor: array[0]})
    return lora
