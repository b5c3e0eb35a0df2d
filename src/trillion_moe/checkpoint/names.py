"""Where every tensor of a checkpoint has its place in the tree: one table of leaf paths, stored names and forms.

A `Slot` is the place of one stored tensor, or of one per expert (``*`` in its names stands for the expert's number),
in one repeat of one leaf. Names follow the releases of Kimi K3 and Kimi Linear; the other spellings are read as well.
"""

import enum
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from trillion_moe.blueprint import layer_numbers
from trillion_moe.config import ModelConfig
from trillion_moe.weights import MXFP4, MXFP4_GROUP, LoRA, is_weight, matrix_shape

Part = Literal["weight", "packed", "scale"]
SUFFIX: dict[Part, str] = {"weight": ".weight", "packed": ".weight_packed", "scale": ".weight_scale"}
PREFIXES = ("language_model.model.", "model.")


class Form(enum.Enum):
    """How a tensor is stored, against how it is held."""

    SAME = "as it is"
    MATRIX = "[N, K] for [K, N]"
    EXPERTS = "one [N, K] per expert for [E, K, N], or a packed pair"
    CONV = "[C, 1, W] for [C, W]"
    ROW = "[1, D] for [D]"
    PATCHES = "[D, 3, p, p] for [3 p p, D]"
    A_LOG = "[H], [1, 1, H, 1] or zero-padded [P] for [H]"


class Row(NamedTuple):
    """leaf: path in the model, with "layer." for that of any decoder layer. float32: stored so, and held so."""

    leaf: str
    stored: str
    form: Form = Form.SAME
    transformers: str | None = None  # what `save_pretrained` writes instead
    also: tuple[str, ...] = ()  # further homes that are read
    float32: bool = False


_ATTENTION = {name: f"{name}_proj" for name in ("q", "k", "v", "o", "q_a", "q_b", "kv_b")}
_ATTENTION |= {"kv_a": "kv_a_proj_with_mqa", "beta": "b_proj", "decay_a": "f_a_proj", "decay_b": "f_b_proj"}
_ATTENTION |= {"gate": "g_proj", "gate_a": "g_a_proj", "gate_b": "g_b_proj"}
_MLP = {"gate": "w1", "up": "w3", "down": "w2"}
_SELF, _MOE = "{layer}self_attn.", "{layer}block_sparse_moe."
_BIAS = "e_score_correction_bias"

TABLE = (
    Row("embed", "{text}embed_tokens.weight"),
    Row("norm", "{text}norm.weight"),
    Row("head", "{head}lm_head.weight", Form.MATRIX),
    Row("out_res.norm", "{text}output_attn_res_norm.weight"),
    Row("out_res.query", "{text}output_attn_res_proj.weight", Form.ROW),
    Row("layer.attn_norm", "{layer}input_layernorm.weight"),
    Row("layer.ffn_norm", "{layer}post_attention_layernorm.weight"),
    Row("layer.attn_res.norm", "{layer}self_attention_res_norm.weight"),
    Row("layer.attn_res.query", "{layer}self_attention_res_proj.weight", Form.ROW),
    Row("layer.ffn_res.norm", "{layer}mlp_res_norm.weight"),
    Row("layer.ffn_res.query", "{layer}mlp_res_proj.weight", Form.ROW),
    *(Row(f"layer.attention.{x}", f"{_SELF}{name}.weight", Form.MATRIX) for x, name in _ATTENTION.items()),
    *(Row(f"layer.attention.{x}_conv", f"{_SELF}{x}_conv1d.weight", Form.CONV, float32=True) for x in "qkv"),
    Row("layer.attention.a_log", f"{_SELF}A_log", Form.A_LOG, float32=True),
    Row("layer.attention.dt_bias", f"{_SELF}dt_bias", float32=True),
    Row("layer.attention.o_norm", f"{_SELF}o_norm.weight", float32=True),
    Row("layer.attention.q_norm", f"{_SELF}q_a_layernorm.weight"),
    Row("layer.attention.kv_norm", f"{_SELF}kv_a_layernorm.weight"),
    *(Row(f"layer.ffn.{x}", f"{{layer}}mlp.{x}_proj.weight", Form.MATRIX, f"{_MOE}{x}_proj.weight") for x in _MLP),
    Row("layer.ffn.router.weight", f"{_MOE}gate.weight", Form.MATRIX),
    Row(
        "layer.ffn.router.bias",
        f"{_MOE}gate.{_BIAS}",
        also=(f"{_MOE}{_BIAS}", f"{{layer}}mlp.gate.{_BIAS}"),
        float32=True,
    ),
    *(Row(f"layer.ffn.experts.{x}", f"{_MOE}experts.*.{w}", Form.EXPERTS) for x, w in _MLP.items()),
    *(Row(f"layer.ffn.shared.{x}", f"{_MOE}shared_experts.{x}_proj.weight", Form.MATRIX) for x in _MLP),
    Row("layer.ffn.latent_down", f"{_MOE}routed_expert_down_proj.weight", Form.MATRIX),
    Row("layer.ffn.latent_norm", f"{_MOE}routed_expert_norm.weight"),
    Row("layer.ffn.latent_up", f"{_MOE}routed_expert_up_proj.weight", Form.MATRIX),
    Row("vision.patch_embed", "vision_tower.patch_embed.proj.weight", Form.PATCHES),
    Row("vision.pos_emb", "vision_tower.patch_embed.pos_emb.weight"),
    Row("vision.blocks.attn_norm", "{block}norm0.weight"),
    Row("vision.blocks.mlp_norm", "{block}norm1.weight"),
    Row("vision.blocks.qkv", "{block}wqkv.weight", Form.MATRIX),
    Row("vision.blocks.o", "{block}wo.weight", Form.MATRIX),
    Row("vision.blocks.up", "{block}mlp.fc0.weight", Form.MATRIX),
    Row("vision.blocks.down", "{block}mlp.fc1.weight", Form.MATRIX),
    Row("vision.final_norm", "vision_tower.encoder.final_layernorm.weight"),
    Row("projector.proj_0", "mm_projector.proj.0.weight", Form.MATRIX),
    Row("projector.proj_2", "mm_projector.proj.2.weight", Form.MATRIX),
    Row("projector.norm", "mm_projector.post_norm.weight"),
)
ROWS = {row.leaf: row for row in TABLE}
NARROWABLE = tuple(row.stored.removeprefix(_SELF) for row in TABLE if row.float32 and row.stored.startswith(_SELF))
"""Ends of the names of the tensors that `CheckpointNames.narrow` may name: KDA's, never the router's bias."""


@dataclass(frozen=True, slots=True)
class Slot:
    """leaf: path of the leaf in the tree; repeat: row of a leaf stacked over the depth; shape: of one stored tensor;
    held: of what it becomes; names: the first is written, all are read; experts: how many tensors, None = one."""

    leaf: str
    repeat: int | None
    part: Part
    form: Form
    shape: tuple[int, ...]
    held: tuple[int, ...]
    names: tuple[str, ...]
    experts: int | None
    float32: bool
    narrow: str | None = None  # dtype it is stored in if that is narrower than float32

    @property
    def count(self) -> int:
        return 1 if self.experts is None else self.experts

    def name(self, expert: int, spelling: int = 0) -> str:
        return self.names[spelling].replace("*", str(expert))

    def index(self, expert: int) -> tuple[int, ...]:
        """Where in its leaf the tensor lies."""
        return (() if self.repeat is None else (self.repeat,)) + (() if self.experts is None else (expert,))


def tree_leaves(tree: Any) -> tuple[list[tuple[str, Any]], Any]:
    """The weights of a model by path ("segments.0.1.attention.q"), and the tree without them."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_weight)
    return [(".".join(_key(k) for k in path), leaf) for path, leaf in leaves], treedef


def _key(key: Any) -> str:
    for attribute in ("name", "idx", "key"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    raise TypeError(f"unknown kind of tree key: {key!r}")


def slots(tree: Any, cfg: ModelConfig) -> Iterator[Slot]:
    """Every slot of a model or blueprint, a leaf's slots together. Names follow `cfg.checkpoint`.

    An experts leaf has all three parts, for the plain and the packed form. Raises ValueError for a leaf that has no
    stored form: unknown, with an adapter, or packed without being routed experts.
    """
    for path, leaf in tree_leaves(tree)[0]:
        row, stacked, homes = _homes(path, tree.plan, cfg)
        if isinstance(leaf, LoRA) or (isinstance(leaf, MXFP4) and row.form is not Form.EXPERTS):
            raise ValueError(f"{path} is {type(leaf).__name__}: only routed experts are stored packed, adapters never")
        shape = matrix_shape(leaf)
        held = shape[1:] if stacked else shape
        for repeat, where in enumerate(homes):
            if where is not None:
                yield from _slots_of(path, repeat if stacked else None, row, held, where, cfg)


def _homes(path: str, plan: Sequence[Any], cfg: ModelConfig) -> tuple[Row, bool, list[dict[str, str] | None]]:
    """The table's row, whether the leaf is stacked over the depth, and what to fill into its names per repeat: None
    where a repeat has no such layer."""
    text = cfg.checkpoint.prefix
    model = {"text": text, "head": head_prefix(text)}
    if path.startswith("segments."):
        _, s, j, leaf = path.split(".", 3)
        numbers = [repeat[int(j)] for repeat in layer_numbers(plan)[int(s)]]
        homes = [None if i is None else model | {"layer": f"{text}layers.{i}."} for i in numbers]
        return _row(f"layer.{leaf}"), len(numbers) > 1, homes
    if path.startswith("vision.blocks."):
        depth = cfg.vision.num_layers if cfg.vision is not None else 0
        return _row(path), depth > 1, [{"block": f"vision_tower.encoder.blocks.{i}."} for i in range(depth)]
    return _row(path), False, [model]


def _row(leaf: str) -> Row:
    if leaf not in ROWS:
        raise ValueError(f"no stored name is known for the leaf {leaf!r}")
    return ROWS[leaf]


def head_prefix(text: str) -> str:
    """What stands before lm_head where `text` stands before layers."""
    return text.removesuffix("model.")


def _slots_of(
    path: str, repeat: int | None, row: Row, held: tuple[int, ...], where: dict[str, str], cfg: ModelConfig
) -> Iterator[Slot]:
    spellings = [row.stored, *([row.transformers] if row.transformers else []), *row.also]
    if row.transformers and cfg.checkpoint.names == "transformers":
        spellings[:2] = spellings[1::-1]
    names = tuple(spelling.format(**where) for spelling in spellings)
    if row.form is not Form.EXPERTS:
        shape = stored_shape(row.form, held, cfg)
        narrow = cfg.dtype if names[0].endswith(tuple(f".{end}" for end in cfg.checkpoint.narrow)) else None
        yield Slot(path, repeat, "weight", row.form, shape, held, names, None, row.float32, narrow)
        return
    experts, k, n = held
    shapes: dict[Part, tuple[int, ...]] = {"weight": (n, k), "packed": (n, k // 2), "scale": (n, k // MXFP4_GROUP)}
    for part, shape in shapes.items():
        full = tuple(name + SUFFIX[part] for name in names)
        form = Form.MATRIX if part == "weight" else Form.SAME
        yield Slot(path, repeat, part, form, shape, (k, n) if part == "weight" else shape, full, experts, False)


def stored_shape(form: Form, held: tuple[int, ...], cfg: ModelConfig) -> tuple[int, ...]:
    match form:
        case Form.MATRIX:
            return held[::-1]
        case Form.CONV:
            return (held[0], 1, held[1])
        case Form.ROW:
            return (1, *held)
        case Form.PATCHES:
            side = math.isqrt(held[0] // 3)
            return (held[1], 3, side, side)
        case Form.A_LOG:
            return (cfg.kda.a_log_shape if cfg.kda is not None else None) or held
        case _:
            return held


def flipped(slot: Slot) -> bool:
    """Whether a tensor is stored as the transpose of what is held; otherwise its bytes are in the order of those held,
    in front of what pads them."""
    return slot.form in (Form.MATRIX, Form.PATCHES)


def to_stored(slot: Slot, held: np.ndarray) -> np.ndarray:
    """What is held as a stored tensor, padding written as zeros."""
    if flipped(slot):
        held = held.T
    elif slot.form is Form.A_LOG:
        held = np.pad(held, (0, math.prod(slot.shape) - len(held)))
    return held.reshape(slot.shape)
