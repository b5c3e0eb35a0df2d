"""The adapters of a model as a folder that PEFT, servers and `adapters.read_adapter` load; formats as described there.

    names="peft"     transformers' names, the experts of a layer fused: what PEFT loads onto a transformers model
    names="release"  the release's names, two tensors for every expert's matrix: what servers load

Gate and up of a bank that read through equal A are one pair of rank r. Otherwise A is both, one above the other, and B
has the gate's rows and the up's in different columns: rank r + r, alpha to match, by rank_pattern and alpha_pattern.
"""

import functools
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from trillion_moe.checkpoint.adapter_files import CONFIG, KEY, TENSORS
from trillion_moe.checkpoint.adapter_names import (
    ENDINGS,
    FUSED,
    INNER,
    WRAPPED,
    Bank,
    Factor,
    Matrix,
    Names,
    without_adapters,
)
from trillion_moe.checkpoint.adapters import effective
from trillion_moe.checkpoint.atomic import new_folder, write_text
from trillion_moe.checkpoint.errors import CheckpointError
from trillion_moe.checkpoint.fingerprint import fingerprint, host
from trillion_moe.checkpoint.names import Form, tree_leaves
from trillion_moe.checkpoint.safetensors_io import STORED, Planned, write_file
from trillion_moe.distributed import whole
from trillion_moe.weights import ARRANGED, LoRA, is_arranged

Naming = Literal["peft", "release"]


def export_adapter(folder: str | Path, model: Any, *, names: Naming = "peft") -> None:
    """Write every adapter of a model, in its dtypes, to adapter_config.json and adapter_model.safetensors.

    names: see above. What the format cannot say is noted in the safetensors metadata and read back: the fingerprint of
    the base, factors that are one for all experts, experts without an adapter. The folder appears complete or not at
    all, and is never overwritten; the factors of one layer at a time are in host memory.

    Raises CheckpointError if the folder is there already, and with all that is wrong with the adapters: none, without
    effect, values that are not finite, a dtype that is not stored.
    """
    if names not in get_args(Naming):
        raise ValueError(f"names is {names!r}; legal are {', '.join(get_args(Naming))}")
    leaves = dict(tree_leaves(model)[0])
    if findings := list(_unexportable(model, leaves)):
        raise CheckpointError(folder, findings)
    base = without_adapters(model)
    table = Names(base)
    adapted = {m: _Layer(leaves[m.slot.leaf], m) for m in table.matrices if isinstance(leaves[m.slot.leaf], LoRA)}
    if not any(effective(layer.fetch()) for layer in adapted.values()):
        zero = f"without effect: a, b or the scaling is 0 in all {len(adapted)} matrices; train the adapter first"
        raise CheckpointError(folder, [zero])
    note = {"base": fingerprint(base), "experts": {}}
    entries = list((_peft if names == "peft" else _release)(table, adapted, note["experts"]))
    tensors = {f"{WRAPPED}{e.stored}{ENDINGS[factor]}": e.tensors[factor] for e in entries for factor in ENDINGS}
    with new_folder(folder) as temporary:
        write_file(temporary / TENSORS, tensors, {"format": "pt", KEY: json.dumps(note)})
        # Last: a folder without it is refused, so that even a killed export's remains cannot be loaded.
        write_text(temporary / CONFIG, json.dumps(_config(table, entries, names), indent=2) + "\n")


def _unexportable(model: Any, leaves: Mapping[str, Any]) -> Iterator[str]:
    if is_arranged(model):
        yield ARRANGED
        return
    if not all(isinstance(array, jax.Array | np.ndarray) for array in jax.tree.leaves(model)):
        yield "the model is a blueprint without arrays: load or init it first"
        return
    adapters = {path: leaf for path, leaf in leaves.items() if isinstance(leaf, LoRA)}
    if not adapters:
        yield "the model has no adapter: add_lora or load_adapter first"
    legal = ("float32", "bfloat16", "float16")
    for path, array in [(f"{p}.{name}", getattr(leaf, name)) for p, leaf in adapters.items() for name in ("a", "b")]:
        if str(array.dtype) not in legal:
            yield f"{path} is {array.dtype}: legal is {' or '.join(legal)}"
        elif not np.isfinite(whole(array)).all():
            yield f"{path} holds values that are not finite"


class _Layer(NamedTuple):
    """The adapter of one matrix, or of a layer's experts, fetched when it is needed."""

    leaf: LoRA
    matrix: Matrix

    @property
    def rank(self) -> int:
        return self.leaf.a.shape[-1]

    @property
    def row(self) -> tuple[int, ...]:
        """Where in the leaf it lies."""
        return () if self.matrix.slot.repeat is None else (self.matrix.slot.repeat,)

    def slots(self) -> np.ndarray | None:
        return None if self.leaf.slots is None else host(self.leaf.slots, self.row)

    def fetch(self) -> LoRA:
        """a ``[K, r]``, b ``[r, N]``; of experts, unless one serves all, ``[S, ...]``, and slots ``[E]`` or None."""
        a, b = (host(factor, self.row) for factor in (self.leaf.a, self.leaf.b))
        return LoRA(None, a, b, self.slots(), self.leaf.scaling)

    def dense(self) -> LoRA:
        """Of experts: a ``[E, K, r]``, b ``[E, r, N]``, zero for one without an adapter."""
        lora = self.fetch()
        a, b = (_per_expert(m, lora.slots, self.matrix.slot.count) for m in (lora.a, lora.b))
        return LoRA(None, a, b, None, lora.scaling)


def _per_expert(factor: np.ndarray, slots: np.ndarray | None, experts: int) -> np.ndarray:
    shared = factor.ndim == 2
    rows = np.broadcast_to(factor, (experts, *factor.shape)) if shared else factor
    if slots is None:
        return rows
    live = (slots >= 0)[:, None, None]
    return np.where(live, rows if shared else rows[np.maximum(slots, 0)], factor.dtype.type(0))


# --- what is written -------------------------------------------------------------------------------------------------


class _Entry(NamedTuple):
    """One pair of tensors.

    stored: what precedes ``.lora_A.weight``; target: what PEFT is told to adapt, key: a regular expression for it;
    parameter: whether it is a fused parameter, not a module.
    """

    stored: str
    target: str
    key: str
    parameter: bool
    rank: int
    scaling: float
    tensors: dict[Factor, Planned]


def _planned(dtype: Any, shape: Iterable[int], fetch: Callable[[], np.ndarray]) -> Planned:
    return Planned(STORED[str(dtype)], tuple(shape), fetch)


def _module(layer: _Layer, stored: str) -> _Entry:
    """A matrix outside the banks. Patches are convolved: A ``[r, 3, p, p]``, B ``[N, r, 1, 1]``."""
    leaf, slot, (k, n) = layer.leaf, layer.matrix.slot, layer.matrix.shape
    inputs, one = (slot.shape[1:], (1, 1)) if slot.form is Form.PATCHES else ((k,), ())
    a_shape, b_shape = (layer.rank, *inputs), (n, layer.rank, *one)
    a = _planned(leaf.a.dtype, a_shape, lambda: layer.fetch().a.T.reshape(a_shape))
    b = _planned(leaf.b.dtype, b_shape, lambda: layer.fetch().b.T.reshape(b_shape))
    return _Entry(stored, stored, stored, False, layer.rank, leaf.scaling, {"A": a, "B": b})


def _release(table: Names, adapted: Mapping[Matrix, _Layer], note: dict[str, Any]) -> Iterator[_Entry]:
    for matrix, layer in adapted.items():
        if matrix.slot.experts is None:
            yield _module(layer, matrix.release)
            continue
        note |= _structure(layer)
        slots, (k, n), rank, leaf = layer.slots(), matrix.shape, layer.rank, layer.leaf
        target, key = matrix.release.rpartition(".")[2], matrix.release.replace("*", r"\d+")
        for e in range(matrix.slot.count):
            slot = e if slots is None else int(slots[e])
            if slot >= 0:
                a = _planned(leaf.a.dtype, (rank, k), functools.partial(_expert, leaf.a, layer, slot))
                b = _planned(leaf.b.dtype, (n, rank), functools.partial(_expert, leaf.b, layer, slot))
                stored = matrix.release.replace("*", str(e))
                yield _Entry(stored, target, key, False, rank, leaf.scaling, {"A": a, "B": b})


def _expert(factor: Any, layer: _Layer, slot: int) -> np.ndarray:
    """One expert's A ``[r, K]`` or B ``[N, r]``, without the others'."""
    shared = factor.ndim == len(layer.row) + 2
    return host(factor, layer.row if shared else (*layer.row, slot)).T


def _peft(table: Names, adapted: Mapping[Matrix, _Layer], note: dict[str, Any]) -> Iterator[_Entry]:
    for matrix, layer in adapted.items():
        if matrix.slot.experts is None:
            yield _module(layer, matrix.run_time)
        else:
            note |= _structure(layer)
    for bank in table.banks:
        down = adapted.get(bank.down)
        if gate_up := [adapted[matrix] for matrix in (bank.gate, bank.up) if matrix in adapted]:
            inner = INNER if down else ""  # a parameter that is adapted alone is the outer one
            yield _fused("gate_up", bank, inner, _gate_up(bank, gate_up, note), gate_up)
        if down:
            yield _fused("down", bank, "", (down.rank, down.dense), [down])


Dense = tuple[int, Callable[[], LoRA]]  # rank, and of all experts a [E, K, r] and b [E, r, N]


def _fused(parameter: str, bank: Bank, inner: str, dense: Dense, layers: list[_Layer]) -> _Entry:
    """One of the two parameters of a layer's experts, in PEFT's layout."""
    rank, fetch = dense
    experts, matrices = bank.experts, bank.of(parameter)
    k, n = matrices[0].shape[0], sum(matrix.shape[1] for matrix in matrices)
    a_type = functools.reduce(jnp.promote_types, (layer.leaf.a.dtype for layer in layers))
    b_type = functools.reduce(jnp.promote_types, (layer.leaf.b.dtype for layer in layers))
    a = _planned(
        a_type, (experts * rank, k), lambda: fetch().a.transpose(0, 2, 1).reshape(experts * rank, k).astype(a_type)
    )
    b = _planned(
        b_type, (n, rank * experts), lambda: fetch().b.transpose(2, 1, 0).reshape(n, rank * experts).astype(b_type)
    )
    name = f"{bank.module}.{FUSED[parameter]}"
    return _Entry(bank.module + inner, name, name, True, rank, layers[0].leaf.scaling, {"A": a, "B": b})


def _gate_up(bank: Bank, layers: list[_Layer], note: dict[str, Any]) -> Dense:
    """One pair for gate and up, or for the one of them that is adapted; notes which part of the rank is whose."""
    if len(layers) == 2 and _read_alike(*(layer.dense() for layer in layers)):
        return layers[0].rank, lambda: _side_by_side(*(layer.dense() for layer in layers))
    rank = 0
    for matrix in (bank.gate, bank.up):
        end = rank + sum(layer.rank for layer in layers if layer.matrix is matrix)
        note.setdefault(matrix.name, {})["ranks"] = [rank, end]
        rank = end
    return rank, lambda: _in_blocks(bank, layers)


def _read_alike(gate: LoRA, up: LoRA) -> bool:
    return gate.scaling == up.scaling and gate.a.dtype == up.a.dtype and np.array_equal(gate.a, up.a)


def _side_by_side(gate: LoRA, up: LoRA) -> LoRA:
    return replace(gate, b=np.concatenate([gate.b, up.b], axis=-1))


def _in_blocks(bank: Bank, layers: list[_Layer]) -> LoRA:
    """a [E, K, r + r'], b [E, r + r', 2 N] in which each matrix has its own ranks; all scaled as the first is."""
    scaling, rows = layers[0].leaf.scaling, []
    loras = [layer.dense() for layer in layers]
    for layer, lora in zip(layers, loras, strict=True):
        b = lora.b
        if lora.scaling != scaling:
            b = (b.astype(np.float64) * (lora.scaling / scaling)).astype(b.dtype)
        halves = [b, np.zeros_like(b)]
        rows.append(np.concatenate(halves if layer.matrix is bank.gate else halves[::-1], axis=-1))
    return LoRA(None, _joined([lora.a for lora in loras], -1), _joined(rows, 1), None, scaling)


def _joined(arrays: list[np.ndarray], axis: int) -> np.ndarray:
    dtype = functools.reduce(jnp.promote_types, (array.dtype for array in arrays))
    return np.concatenate([array.astype(dtype) for array in arrays], axis=axis)


def _structure(layer: _Layer) -> dict[str, Any]:
    """What no naming says of a bank's adapter: factors that all experts share, and which experts have one, in order."""
    about: dict[str, Any] = {}
    if shared := [name for name in ("a", "b") if getattr(layer.leaf, name).ndim == len(layer.row) + 2]:
        about["shared"] = shared
    slots = layer.slots()
    if slots is not None and len(used := sorted(slots[slots >= 0].tolist())) == len({*used}):
        about["ids"] = [int(np.flatnonzero(slots == slot)[0]) for slot in used]
    return {layer.matrix.name: about} if about else {}


# --- adapter_config.json ---------------------------------------------------------------------------------------------


def _config(table: Names, entries: list[_Entry], names: Naming) -> dict[str, Any]:
    """PEFT's keys. r and lora_alpha are the most frequent (the smaller of two), patterns say the others."""
    ranks = {entry.key: entry.rank for entry in entries}
    alphas = {entry.key: _alpha(entry.scaling, entry.rank) for entry in entries}
    rank, alpha = _usual(ranks.values()), _usual(alphas.values())
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": _pattern(table, ranks, rank),
        "alpha_pattern": _pattern(table, alphas, alpha),
        "target_modules": _targets(table, [entry for entry in entries if not entry.parameter], names),
        "target_parameters": _targets(table, [entry for entry in entries if entry.parameter], names) or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
    }


def _usual(values: Iterable[Any]) -> Any:
    count = Counter(values)
    return min(count, key=lambda value: (-count[value], value))


def _alpha(scaling: float, rank: int) -> int | float:
    """The number that divided by the rank gives the scaling, to the last bit if there is one."""
    near = scaling * rank
    candidates = [float(round(near)), near, float(np.nextafter(near, -np.inf)), float(np.nextafter(near, np.inf))]
    alpha = min(candidates, key=lambda candidate: abs(candidate / rank - scaling))
    return int(alpha) if alpha.is_integer() else alpha


def _pattern(table: Names, values: Mapping[str, Any], default: Any) -> dict[str, Any]:
    """Keys for all that differs from the default: one for a kind of module whose layers agree, else one a layer."""
    kinds: dict[str, set[Any]] = defaultdict(set)
    for key, value in values.items():
        kinds[table.tail(key)].add(value)
    agreed = {key: len(kinds[table.tail(key)]) == 1 for key in values}
    return {table.tail(key) if agreed[key] else key: value for key, value in values.items() if value != default}


def _targets(table: Names, entries: list[_Entry], names: Naming) -> list[str]:
    """What PEFT shall adapt: ends of paths where every layer has an adapter, else whole paths."""
    adapted: dict[str, set[str]] = defaultdict(set)
    for entry in entries:
        adapted[table.tail(entry.target)].add(entry.target)
    present: dict[str, set[str]] = defaultdict(set)
    for target in _all_targets(table, names):
        present[table.tail(target)].add(target)
    return sorted(name for tail, found in adapted.items() for name in ([tail] if found >= present[tail] else found))


def _all_targets(table: Names, names: Naming) -> Iterator[str]:
    for matrix in table.matrices:
        if matrix.slot.experts is None:
            yield matrix.run_time if names == "peft" else matrix.release
    for bank in table.banks:
        yield from (f"{bank.module}.{parameter}" for parameter in FUSED.values())
