"""To which matrix of a model a tensor of an adapter belongs, in every spelling that adapters come in.

A tensor is called MODULE.lora_A.weight or MODULE.lora_B.weight, behind PEFT's ``base_model.model.`` or bare. MODULE is
spelled as a release stores the matrix (`names.TABLE` without ``.weight``; one per expert) or as transformers calls it
at run time, where all experts of a layer are fused into the parameters gate_up_proj and down_proj of one module:

    MODULE = ...experts              the outer of two adapted parameters, or the only one
    MODULE = ...experts.base_layer   the inner one, which is gate_up_proj

Names are compared as a whole, path by path. Source of the fused names: PEFT 0.21, lora.ParamWrapper.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from trillion_moe.blueprint import layer_numbers
from trillion_moe.checkpoint.audit import EXPERT
from trillion_moe.checkpoint.names import PREFIXES, SUFFIX, Form, Slot, head_prefix, slots, tree_leaves
from trillion_moe.weights import LoRA

Factor = Literal["A", "B"]
WRAPPED = "base_model.model."
ENDINGS: dict[Factor, str] = {"A": ".lora_A.weight", "B": ".lora_B.weight"}
INNER = ".base_layer"
FUSED = {"gate_up": "gate_up_proj", "down": "down_proj"}

# One part of a path, as transformers calls it; and the projections of an expert, as most other families call them.
_RUN_TIME = {"block_sparse_moe": "mlp", "f_a_proj": "forget_gate.f_a_proj", "f_b_proj": "forget_gate.f_b_proj"}
_PROJECTIONS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}

_REFUSED = {  # parts of names of tensors that are no factor of a LoRA
    "lora_magnitude_vector": "a magnitude of DoRA, which is not supported",
    "lora_embedding_A": "an adapter of an embedding: it is looked up, not multiplied",
    "lora_embedding_B": "an adapter of an embedding: it is looked up, not multiplied",
    "modules_to_save": "a whole tensor (modules_to_save), not a low-rank factor",
    "bias": "a bias (lora_bias or bias), and no matrix of these models has one",
}


@dataclass(frozen=True)
class Matrix:
    """One matrix that an adapter may be put on, or the matrices of all experts of one layer.

    name: logical, ``layers.3.attention.q``; block: which matrix of that leaf, for the tower, whose blocks are one leaf.
    release, run_time: its module in the two spellings, ``*`` for an expert's number; spellings: all that are read.
    """

    name: str
    block: int | None
    slot: Slot
    release: str
    run_time: str
    spellings: tuple[str, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """(K, N) of one matrix as it is multiplied."""
        k, n = self.slot.held
        return k, n


@dataclass(frozen=True)
class Bank:
    """The experts of one layer; `module` is their transformers name, without a parameter's."""

    gate: Matrix
    up: Matrix
    down: Matrix
    module: str

    @property
    def experts(self) -> int:
        return self.gate.slot.count

    def of(self, parameter: str) -> tuple[Matrix, ...]:
        """The matrices that a fused parameter holds."""
        return (self.gate, self.up) if parameter == "gate_up" else (self.down,)


@dataclass(frozen=True)
class Home:
    """What a pair of factors adapts: a matrix (an expert's if `expert` is given), or an inner or outer fused parameter.

    module: as the file spells it, which is what rank_pattern and alpha_pattern are matched against.
    """

    module: str
    prefix: str
    matrix: Matrix | None = None
    expert: int | None = None
    bank: Bank | None = None
    inner: bool = False

    @property
    def place(self) -> tuple[str, int | None, int | None, bool]:
        """The same however it is spelled."""
        matrix = self.bank.gate if self.bank is not None else self.matrix
        assert matrix is not None
        return matrix.name, matrix.block, -1 if self.bank is not None else self.expert, self.inner


def without_adapters(model: Any) -> Any:
    """The model with the base of every adapted weight in its place."""
    leaves, treedef = tree_leaves(model)
    return treedef.unflatten([leaf.base if isinstance(leaf, LoRA) else leaf for _, leaf in leaves])


class Names:
    """The matrices of a model without adapters (or of its blueprint), and the way from a tensor's name to them."""

    def __init__(self, model: Any):
        self.text: str = model.config.checkpoint.prefix
        self.matrices: list[Matrix] = []
        self._why_not: dict[str, str] = {}
        for name, slot in _named_slots(model):
            if slot.form not in (Form.MATRIX, Form.PATCHES):
                what = "it is no matrix that is multiplied"
            elif name.endswith(".router.weight"):
                what = "the router multiplies its matrix by itself, in float32, and takes no adapter"
            else:
                self.matrices.append(_matrix(name, slot))
                continue
            spellings = [spelled.removesuffix(SUFFIX["weight"]) for spelled in slot.names]
            self._why_not |= dict.fromkeys([*spellings, *map(_at_run_time, spellings)], what)
        self._by_module = {spelled: matrix for matrix in self.matrices for spelled in matrix.spellings}
        self.banks = list(_banks(self.matrices))
        self._by_container = {_container(s): bank for bank in self.banks for s in bank.gate.spellings}

    def tail(self, module: str) -> str:
        """What comes after ``layers.3.``, which is the same in every layer; the whole outside the layers."""
        layers = f"{self.text}layers."
        return module.removeprefix(layers).partition(".")[2] if module.startswith(layers) else module

    def resolve(self, tensor: str) -> tuple[Factor, Home] | str:
        """Which factor of what, or why it is none."""
        factor: Factor = "A" if tensor.endswith(ENDINGS["A"]) else "B"
        if not tensor.endswith(ENDINGS[factor]):
            return _why_no_factor(tensor)
        module = tensor.removesuffix(ENDINGS[factor]).removeprefix(WRAPPED)
        ours, prefix = self._under_our_prefix(module)
        match = EXPERT.search(ours)
        template = ours if match is None else f"{ours[: match.start(1)]}*{ours[match.end(1) :]}"
        matrix = self._by_module.get(template) if "*" not in ours else None
        if matrix is not None and (match is None or int(match[1]) < matrix.slot.count):
            return factor, Home(module, prefix, matrix, None if match is None else int(match[1]))
        if (bank := self._by_container.get(ours.removesuffix(INNER))) is not None:
            inner = ours.endswith(INNER)
            return factor, Home(module.removesuffix(INNER), prefix, bank=bank, inner=inner)
        if matrix is not None:
            return f"unexpected: the model has experts 0 to {matrix.slot.count - 1}"
        if ours in self._why_not:
            return f"cannot be adapted: {self._why_not[ours]}"
        return "unexpected: it matches no matrix of this model"

    def _under_our_prefix(self, module: str) -> tuple[str, str]:
        """A module as this model's checkpoint would spell it, and the prefix that it came under ("" for the tower)."""
        for prefix in sorted({*PREFIXES, self.text}, key=len, reverse=True):
            if module == f"{head_prefix(prefix)}lm_head":
                return f"{head_prefix(self.text)}lm_head", prefix
            if module.startswith(prefix):
                return self.text + module.removeprefix(prefix), prefix
        return module, ""


def _named_slots(model: Any) -> Iterator[tuple[str, Slot]]:
    """The slots of unpacked tensors under the release's names, each with the logical name of its leaf."""
    released = dataclasses.replace(model.config.checkpoint, names="release")
    numbers = layer_numbers(model.plan)
    for slot in slots(model, dataclasses.replace(model.config, checkpoint=released)):
        if slot.part != "weight":
            continue
        name = slot.leaf
        if name.startswith("segments."):
            _, s, j, leaf = name.split(".", 3)
            name = f"layers.{numbers[int(s)][slot.repeat or 0][int(j)]}.{leaf}"
        yield name, slot


def _matrix(name: str, slot: Slot) -> Matrix:
    stored = [spelled.removesuffix(SUFFIX["weight"]) for spelled in slot.names]
    spellings = [*stored, *map(_at_run_time, stored)]
    if slot.experts is not None:
        spellings += [_respelled(spelled, _PROJECTIONS) for spelled in spellings]
    block = slot.repeat if name.startswith("vision.blocks.") else None
    return Matrix(name, block, slot, stored[0], _at_run_time(stored[0]), tuple(dict.fromkeys(spellings)))


def _banks(matrices: list[Matrix]) -> Iterator[Bank]:
    by_name = {matrix.name: matrix for matrix in matrices}
    for gate in (matrix for matrix in matrices if matrix.name.endswith(".experts.gate")):
        up, down = (by_name[f"{gate.name.removesuffix('gate')}{other}"] for other in ("up", "down"))
        yield Bank(gate, up, down, _container(gate.run_time))


def _container(expert: str) -> str:
    """...experts.*.w1 -> ...experts."""
    return expert.rpartition(".*.")[0]


def _at_run_time(module: str) -> str:
    return _respelled(module, _RUN_TIME)


def _respelled(module: str, table: dict[str, str]) -> str:
    return ".".join(table.get(part, part) for part in module.split("."))


def _why_no_factor(tensor: str) -> str:
    parts = tensor.split(".")
    for part, why in _REFUSED.items():
        if part in parts:
            return f"not loadable: {why}"
    legal = " or ".join(ending.removeprefix(".") for ending in ENDINGS.values())
    return f"unexpected: no factor of an adapter, whose name ends with {legal}"
