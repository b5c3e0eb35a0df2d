"""One strict, frozen description of a model, and the table that ties it to a Hugging Face `config.json`.

`ModelConfig.from_json` reads `model_type` kimi_k3 and kimi_linear, spelled as in the releases or as in transformers;
`to_json` gives the same dict back, changed only where a field was changed. Nothing is ignored silently: an unknown key,
a value that changes the computation in a way not implemented, two spellings that disagree: each is a finding, and all
findings come in one `ConfigError`. What the file format has no key for (a norm epsilon, the stored shape of a tensor)
goes into one key, `trillion_moe`. Sizes are element counts, layer tuples count from 0 (the JSON lists count from 1).
Sources: Kimi K3's and Kimi-Linear-48B's config.json, transformers' `KimiLinearConfig`, compressed-tensors' metadata.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from . import config_codecs as codecs
from . import config_json as cj
from .config_codecs import ABSENT, BOOL, INT0, INT1, NEGATIVE, POSITIVE, Codec, CodecError, choice, optional
from .config_json import Check, ConfigError, Key, Spelling, key

__all__ = ["CheckpointNames", "ConfigError", "KDAConfig", "MLAConfig", "MoEConfig", "ModelConfig", "VisionConfig"]


class _Section:
    """A part of `ModelConfig` that checks itself: every field by its codec in the table, then its `_problems`."""

    def _problems(self) -> Iterator[str]:
        yield from ()

    def __post_init__(self) -> None:
        name = next(name for name, cls in _SECTIONS.items() if type(self) is cls)
        found = list(cj.field_problems(SCHEMA, name, self)) or list(self._problems())
        if found:
            raise ConfigError(type(self).__name__, found)


@dataclass(frozen=True, kw_only=True)
class KDAConfig(_Section):
    """Kimi Delta Attention: `num_heads` heads of `head_dim` keys and as many values; `conv_width` in tokens.

    `gate_lower_bound`: the least log-decay per token (K3: -5.0); None = the unbounded softplus form of Kimi Linear.
    `full_rank_gate`: one output-gate matrix, not two of rank `head_dim`. `a_log_shape`: of `A_log` as stored in the
    checkpoint, maybe zero-padded (K3: (128,) for 96 heads; Kimi Linear: (1, 1, heads, 1)); None = (num_heads,).
    """

    num_heads: int
    head_dim: int
    conv_width: int
    gate_lower_bound: float | None = None
    full_rank_gate: bool = False
    a_log_shape: tuple[int, ...] | None = None

    def _problems(self) -> Iterator[str]:
        shape = self.a_log_shape
        if shape is not None and (math.prod(shape) < self.num_heads or max(shape) != math.prod(shape)):
            yield f"kda.a_log_shape = {shape}: legal is one dim of at least num_heads = {self.num_heads}, all others 1"


@dataclass(frozen=True, kw_only=True)
class MLAConfig(_Section):
    """Multi-head latent attention without positions. `q_lora_rank` None = one query matrix. `lora_norm_eps` is that of
    the norms of query and key-value latents, which the releases leave at 1e-6 whatever `rms_norm_eps` is."""

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    output_gate: bool = False
    lora_norm_eps: float = 1e-6

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True, kw_only=True)
class MoEConfig(_Section):
    """Routed and shared experts of width `hidden_size`. `latent_size`: width the routed experts read and write, None =
    the model's. A token keeps its best `topk_groups` of `num_groups` expert groups, then its `top_k` experts."""

    num_experts: int
    top_k: int
    hidden_size: int
    num_shared: int
    scaling_factor: float
    latent_size: int | None = None
    latent_norm: bool = False
    renormalize: bool = True
    num_groups: int = 1
    topk_groups: int = 1

    def _problems(self) -> Iterator[str]:
        experts, groups = self.num_experts, self.num_groups
        if self.top_k > experts:
            yield f"moe.top_k = {self.top_k} exceeds moe.num_experts = {experts}"
        if experts % groups:
            yield f"moe.num_groups = {groups} does not divide moe.num_experts = {experts}"
        elif groups > 1 and experts // groups < 2:
            yield f"moe.num_groups = {groups} leaves 1 of {experts} experts per group: a group's score needs 2"
        if self.topk_groups > groups:
            yield f"moe.topk_groups = {self.topk_groups} exceeds moe.num_groups = {groups}"
        elif self.top_k > (reach := self.topk_groups * experts // groups) and self.top_k <= experts:
            yield f"moe.top_k = {self.top_k} exceeds the {reach} experts of moe.topk_groups = {self.topk_groups} groups"
        if self.latent_norm and self.latent_size is None:
            yield "moe.latent_norm = True has no effect while moe.latent_size is None: legal is False"


@dataclass(frozen=True, kw_only=True)
class VisionConfig(_Section):
    """The vision tower and projector of K3. The position table is sized in patches and frames, `patch_size` in pixels,
    `merge` in patches. `norm_eps` is the tower's (torch's float32 default), `projector_eps` the projector's."""

    hidden_size: int
    num_layers: int
    num_heads: int
    qkv_size: int
    mlp_size: int
    patch_size: int
    pos_emb_height: int
    pos_emb_width: int
    pos_emb_time: int
    text_hidden_size: int
    merge: tuple[int, int] = (2, 2)
    projector_eps: float = 1e-5
    norm_eps: float = 1.1920929e-07

    @property
    def head_dim(self) -> int:
        return self.qkv_size // self.num_heads

    @property
    def projector_size(self) -> int:
        """Width of the projector's input and hidden layer: one merged window of patches."""
        return self.hidden_size * math.prod(self.merge)

    def _problems(self) -> Iterator[str]:
        if self.qkv_size % self.num_heads:
            yield f"vision.qkv_size = {self.qkv_size} is not a multiple of vision.num_heads = {self.num_heads}"
        elif self.head_dim % 4:
            yield f"vision head dim {self.qkv_size} / {self.num_heads} = {self.head_dim}: 2D RoPE needs a multiple of 4"
        if self.hidden_size % 2:
            yield f"vision.hidden_size = {self.hidden_size}: the time table [sin | cos] needs a multiple of 2"


@dataclass(frozen=True)
class CheckpointNames(_Section):
    """`prefix` stands before `layers.0`; `names` "release" puts dense MLPs under `mlp.`, "transformers" (its
    `save_pretrained` of kimi_linear) under `block_sparse_moe.`; `narrow`: ends of the names of float32 tensors that are
    stored in the dtype of the others (transformers' bf16 models)."""

    prefix: str
    names: Literal["release", "transformers"] = "release"
    narrow: tuple[str, ...] = ()


_PREFIX = {"kimi_k3": "language_model.model.", "kimi_linear": "model."}
_DTYPES = ("bfloat16", "float32", "float16")
_RELEASE = cast(CheckpointNames, None)  # stands for the release's names, which depend on model_type
_SECTIONS = {
    "kda": KDAConfig,
    "mla": MLAConfig,
    "moe": MoEConfig,
    "vision": VisionConfig,
    "checkpoint": CheckpointNames,
}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder of `num_layers` layers, each of one kind of `attention` and of `mlp`, with an optional vision tower.

    `attn_res_block`: decoder layers per block of attention residuals, None = ordinary residuals. `situ_beta`,
    `situ_linear_beta`: caps of SiTU on the gate and up branch; None = 1.0 and no cap. `dtype`: of the stored weights.
    `checkpoint` defaults to the release's names. `source`, the JSON text this came from, is not compared or hashed.
    """

    model_type: Literal["kimi_k3", "kimi_linear"]
    vocab_size: int
    hidden_size: int
    num_layers: int
    dense_hidden_size: int
    attention: tuple[Literal["kda", "mla"], ...]
    mlp: tuple[Literal["dense", "moe"], ...]
    activation: Literal["situ", "silu"]
    rms_norm_eps: float
    dtype: str
    situ_beta: float | None = None
    situ_linear_beta: float | None = None
    attn_res_block: int | None = None
    tie_embeddings: bool = False
    initializer_range: float = 0.02
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None
    media_id: int | None = None
    kda: KDAConfig | None = None
    mla: MLAConfig | None = None
    moe: MoEConfig | None = None
    vision: VisionConfig | None = None
    quantization: Literal["mxfp4"] | None = None
    checkpoint: CheckpointNames = _RELEASE
    source: str | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.checkpoint is _RELEASE:
            object.__setattr__(self, "checkpoint", CheckpointNames(_PREFIX.get(self.model_type, "model.")))
        found = list(cj.field_problems(SCHEMA, "", self)) + list(_layer_problems(self))
        found = found or [*_part_problems(self), *cj.placeless(SCHEMA, _fields(self))]
        if found:
            raise ConfigError("ModelConfig", found)

    @classmethod
    def from_json(cls, data: Any, *, where: str = "config.json") -> ModelConfig:
        """The config of a parsed `config.json`, which errors call `where`. Raises `ConfigError` with all findings."""
        values, found = cj.read(SCHEMA, data)
        cfg = _build(values, data, found)
        if cfg is not None:
            found += cj.refused_checks(SCHEMA, data, cfg.model_type, cfg)
        if found or cfg is None:
            raise ConfigError(where, found)
        return cfg

    @classmethod
    def from_file(cls, path: str | Path) -> ModelConfig:
        """`from_json` of a file, or of `config.json` in a folder."""
        path = Path(path)
        path = path / "config.json" if path.is_dir() else path
        try:
            data = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=cj.distinct)
        except (ValueError, RecursionError) as error:
            raise ConfigError(str(path), [f"not a JSON object with distinct keys: {error}"]) from None
        return cls.from_json(data, where=str(path))

    def to_json(self) -> dict[str, Any]:
        """The source with changed fields written in every spelling it has; without one, a new file as in releases."""
        source = None if self.source is None else json.loads(self.source)
        return cj.write(SCHEMA, self, _fields(self), source)


def _fields(cfg: ModelConfig) -> dict[str, Any]:
    """`cfg` flattened to the table's field names; absent sections are left out."""
    parts = {name: part for name in _SECTIONS if (part := getattr(cfg, name)) is not None} | {"": cfg}
    rows = (row for row in SCHEMA.keys if row.section in parts)
    return {row.field: getattr(parts[row.section], row.field.rpartition(".")[2]) for row in rows}


def _build(values: dict[str, Any], data: Any, found: list[str]) -> ModelConfig | None:
    """The dataclasses of field values; what they refuse is appended to `found`. None if any row or part was refused."""

    def build(name: str, cls: Any, **more: Any) -> Any:
        rows = [row.field for row in SCHEMA.keys if row.section == name]
        try:
            return cls(**{row.rpartition(".")[2]: values[row] for row in rows}, **more)
        except ConfigError as error:
            found.extend(error.findings)
        except KeyError:  # a refused row, already reported
            pass
        return None

    present = [name for name in _SECTIONS if any(field.startswith(f"{name}.") for field in values)]
    parts = {name: build(name, _SECTIONS[name]) for name in present}
    return None if None in parts.values() else build("", ModelConfig, source=json.dumps(data), **parts)


def _layer_problems(cfg: ModelConfig) -> Iterator[str]:
    for name, legal in (("attention", ("kda", "mla")), ("mlp", ("dense", "moe"))):
        value = getattr(cfg, name)
        if not isinstance(value, tuple) or not set(value) <= set(legal):
            yield f"{name} = {value!r}: legal is a tuple of {' or '.join(map(repr, legal))}, one per layer"
        elif len(value) != cfg.num_layers:
            yield f"{name} has {len(value)} entries for num_layers = {cfg.num_layers}"


def _part_problems(cfg: ModelConfig) -> Iterator[str]:
    """What holds between fields of different parts."""
    for name, per_layer in (("kda", cfg.attention), ("mla", cfg.attention), ("moe", cfg.mlp)):
        if name in per_layer and getattr(cfg, name) is None:
            yield f"{name} is None, but layer {per_layer.index(name)} (counted from 0) needs it"
    for name in ("situ_beta", "situ_linear_beta"):
        if cfg.activation != "situ" and getattr(cfg, name) is not None:
            yield f"{name} = {getattr(cfg, name)} has no effect with activation = {cfg.activation!r}: legal is None"
    ids = {"bos_id": cfg.bos_id, "pad_id": cfg.pad_id, "media_id": cfg.media_id}
    for name, value in [*ids.items(), *(("eos_ids", i) for i in cfg.eos_ids)]:
        if value is not None and value >= cfg.vocab_size:
            yield f"{name} = {value} is outside vocab_size = {cfg.vocab_size}"
    if cfg.vision is not None and cfg.vision.text_hidden_size != cfg.hidden_size:
        yield f"vision.text_hidden_size = {cfg.vision.text_hidden_size} must equal hidden_size = {cfg.hidden_size}"
    if cfg.vision is not None and cfg.media_id is None:
        yield "media_id is None, but vision needs the id whose places images take (media_placeholder_token_id)"
    if cfg.quantization is not None and cfg.moe is None:
        yield f"quantization = {cfg.quantization!r} is of routed experts, but moe is None: legal is None"
    elif cfg.quantization is not None and cfg.moe is not None:
        sizes = (cfg.moe.latent_size or cfg.hidden_size, cfg.moe.hidden_size)
        if any(size % 32 for size in sizes):
            yield f"quantization = 'mxfp4' needs experts whose input and hidden width {sizes} are multiples of 32"


# --- quantization_config (compressed-tensors) ------------------------------------------------------------------------

_QUANT: dict[str, tuple[Any, ...]] = {  # dotted path ("*" = the one group) -> legal values; "!" = must be present
    "!quant_method": ("compressed-tensors",), "!format": ("mxfp4-pack-quantized",), "kv_cache_scheme": (None,),
    "quantization_status": ("compressed",), "sparsity_config": (ABSENT, None, {}),
    "transform_config": (ABSENT, None, {}),
    "config_groups.*.format": ("mxfp4-pack-quantized",), "!config_groups.*.targets": (["Linear"],),
    "config_groups.*.input_activations": (None,), "config_groups.*.output_activations": (None,),
    "!config_groups.*.weights.num_bits": (4,), "!config_groups.*.weights.type": ("float",),
    "!config_groups.*.weights.group_size": (32,), "!config_groups.*.weights.symmetric": (True,),
    "!config_groups.*.weights.strategy": ("group",), "config_groups.*.weights.dynamic": (False,),
    "config_groups.*.weights.actorder": (None,), "config_groups.*.weights.block_structure": (None,),
    "config_groups.*.weights.scale_dtype": ("torch.uint8", None), "config_groups.*.weights.zp_dtype": (None,),
}  # fmt: skip
_QUANT_INERT: dict[str, Any] = {  # path -> what a new file gets
    "ignore": [r"re:.*self_attn.*", r"re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
               r"re:.*lm_head.*", r"re:.*vision_tower.*", r"re:.*mm_projector.*"],  # a tensor's suffix says it better
    "global_compression_ratio": None,
    "version": ABSENT,
    "config_groups.*.weights.observer": "minmax",  # how it was calibrated
    "config_groups.*.weights.observer_kwargs": {},
}  # fmt: skip


def _read_quantization(raws: tuple[Any, ...], names: tuple[str, ...], _: int) -> str | None:
    """A `quantization_config` that says what the mxfp4 loader does, in every detail, or null."""
    (block,), (name,) = raws, names
    if block is None:
        return None
    groups = block.get("config_groups") if isinstance(block, dict) else None
    if not isinstance(groups, dict) or len(groups) != 1:
        raise CodecError(f"{name} must be an object with one group in config_groups, not {groups!r}")
    (group,) = groups
    found, known = [], {tuple(p.replace("*", group).split(".")) for p in _QUANT_INERT}
    for dotted, legal in _QUANT.items():
        path = tuple(dotted.removeprefix("!").replace("*", group).split("."))
        known.add(path)
        value = cj.get(block, path)
        if (value is ABSENT and dotted[0] == "!") or (value is not ABSENT and not cj.allowed(value, legal)):
            says = "is missing" if value is ABSENT else f"= {value!r}"
            shown = " or ".join(repr(x) for x in legal if x is not ABSENT)
            found.append(f"{'.'.join((name, *path))} {says}: only {shown} is implemented")
    found += cj.unknown(block, known, (name,))
    if found:
        raise CodecError(*found)
    return "mxfp4"


def _write_quantization(value: str | None) -> Any:
    block: dict[str, Any] = {}
    for dotted, raw in {**{path: legal[0] for path, legal in _QUANT.items()}, **_QUANT_INERT}.items():
        if raw is not ABSENT:
            cj.put(block, tuple(dotted.removeprefix("!").replace("*", "group_0").split(".")), raw)
    return ABSENT if value is None else (block if value == "mxfp4" else value,)


# --- the table -------------------------------------------------------------------------------------------------------

# Where a scope lies: `text` the decoder, `top` what K3 says outside text_config, `ours` what only we have.
_SCOPES = {
    "kimi_k3": {"root": "", "top": "", "text": "text_config.", "vision": "vision_config.", "ours": "trillion_moe."},
    "kimi_linear": {"root": "", "text": "", "ours": "trillion_moe."},
}
_CLASSES = {"kimi_k3": "KimiK3ForConditionalGeneration", "kimi_linear": "KimiLinearForCausalLM"}
_KDA = "text:linear_attn_config."
_KINDS = codecs.kinds({"kda": "linear_attention", "mla": "full_attention"})
_BETA = optional(POSITIVE)
_TOKEN = optional(INT0)
_MXFP4 = Codec(_read_quantization, _write_quantization)

# Defaults are those that the releases' configuration classes and transformers' KimiLinearConfig share; where the two
# differ the row is `disputed` and transformers' value holds for its own spelling only. Token ids and dtype: none known,
# and torch's default. No default where a wrong one would go unnoticed.
_KEYS = (
    key("model_type", choice(*_SCOPES), "root:model_type"),
    key("dtype", choice(*_DTYPES), "text:dtype", "top:dtype", alt=("text:torch_dtype", "top:torch_dtype"),
        default="float32"),
    key("vocab_size", INT1, "text:vocab_size"),
    key("hidden_size", INT1, "text:hidden_size"),
    key("num_layers", codecs.LAYERS, "text:num_hidden_layers"),
    key("dense_hidden_size", INT1, "text:intermediate_size"),
    Key("attention", (Spelling((_KDA + "kda_layers", _KDA + "full_attn_layers"), codecs.layer_lists("kda", "mla")),
                      Spelling(("text:layer_types",), _KINDS, False))),
    Key("mlp", (Spelling(("text:first_k_dense_replace",), codecs.leading("dense", "moe")),
                Spelling(("text:mlp_layer_types",), codecs.kinds({"dense": "dense", "moe": "sparse"}), False))),
    key("activation", choice("situ", "silu"), "text:hidden_act", default="silu"),
    key("situ_beta", _BETA, "text:activation_situ_beta", default=None),
    key("situ_linear_beta", _BETA, "text:activation_situ_linear_beta", default=None),
    key("attn_res_block", codecs.OFF_OR_INT1, "text:attn_res_block_size", default=None),
    key("rms_norm_eps", POSITIVE, "text:rms_norm_eps", default=1e-5, disputed=True),  # the release's class: 1e-6
    key("tie_embeddings", BOOL, "text:tie_word_embeddings", "top:tie_word_embeddings",
        default=lambda model_type: ABSENT if model_type == "kimi_k3" else False),  # K3's two classes differ
    key("initializer_range", codecs.NOT_NEGATIVE, "text:initializer_range", default=0.02),
    key("bos_id", _TOKEN, "text:bos_token_id", "top:bos_token_id", default=None),
    key("eos_ids", codecs.TOKEN_IDS, "text:eos_token_id", "top:eos_token_id", default=()),
    key("pad_id", _TOKEN, "text:pad_token_id", "top:pad_token_id", default=None),
    key("media_id", _TOKEN, "top:media_placeholder_token_id", default=None),
    key("kda.num_heads", INT1, _KDA + "num_heads", alt=("text:linear_num_heads",)),
    key("kda.head_dim", INT1, _KDA + "head_dim", alt=("text:linear_head_dim",)),
    key("kda.conv_width", INT1, _KDA + "short_conv_kernel_size", alt=("text:linear_conv_kernel_dim",)),
    key("kda.gate_lower_bound", optional(NEGATIVE), _KDA + "gate_lower_bound", default=None),
    key("kda.full_rank_gate", BOOL, _KDA + "use_full_rank_gate", default=False),
    key("kda.a_log_shape", optional(codecs.ints("a list of integers >= 1")), "ours:kda.a_log_shape", default=None),
    key("mla.num_heads", INT1, "text:num_attention_heads"),
    key("mla.q_lora_rank", optional(INT1), "text:q_lora_rank", default=None),
    key("mla.kv_lora_rank", INT1, "text:kv_lora_rank"),
    key("mla.qk_nope_head_dim", INT1, "text:qk_nope_head_dim"),
    key("mla.qk_rope_head_dim", INT0, "text:qk_rope_head_dim"),
    key("mla.v_head_dim", INT1, "text:v_head_dim"),
    key("mla.output_gate", BOOL, "text:mla_use_output_gate", default=False),
    key("mla.lora_norm_eps", POSITIVE, "ours:mla.lora_norm_eps", default=1e-6),
    key("moe.num_experts", codecs.EXPERTS, "text:num_experts", alt=("text:num_local_experts",)),
    key("moe.top_k", INT1, "text:num_experts_per_token", alt=("text:num_experts_per_tok",)),
    key("moe.hidden_size", INT1, "text:moe_intermediate_size"),
    key("moe.latent_size", optional(INT1), "text:routed_expert_hidden_size", default=None),
    key("moe.latent_norm", BOOL, "text:latent_moe_use_norm", default=False),
    key("moe.num_shared", INT0, "text:num_shared_experts", alt=("text:n_shared_experts",)),
    key("moe.renormalize", BOOL, "text:moe_renormalize", alt=("text:norm_topk_prob",), default=True),
    key("moe.scaling_factor", POSITIVE, "text:routed_scaling_factor", default=2.446, disputed=True),  # release: 1.0
    key("moe.num_groups", INT1, "text:num_expert_group", alt=("text:n_group",), default=1),
    key("moe.topk_groups", INT1, "text:topk_group", default=1),
    key("vision.hidden_size", INT1, "vision:vt_hidden_size"),
    key("vision.num_layers", codecs.LAYERS, "vision:vt_num_hidden_layers"),
    key("vision.num_heads", INT1, "vision:vt_num_attention_heads"),
    key("vision.qkv_size", INT1, "vision:qkv_hidden_size"),
    key("vision.mlp_size", INT1, "vision:vt_intermediate_size"),
    key("vision.patch_size", INT1, "vision:patch_size"),
    key("vision.merge", codecs.ints("a list of two integers >= 1", 2), "vision:merge_kernel_size", default=(2, 2)),
    key("vision.pos_emb_height", INT1, "vision:init_pos_emb_height"),
    key("vision.pos_emb_width", INT1, "vision:init_pos_emb_width"),
    key("vision.pos_emb_time", INT1, "vision:init_pos_emb_time"),
    key("vision.text_hidden_size", INT1, "vision:text_hidden_size"),
    key("vision.projector_eps", POSITIVE, "vision:projector_ln_eps", default=1e-5),
    key("vision.norm_eps", POSITIVE, "ours:vision.norm_eps", default=1.1920929e-07),
    key("quantization", _MXFP4, "text:quantization_config", alt=("top:quantization_config",), default=None),
    key("checkpoint.prefix", codecs.TEXT, "ours:checkpoint.prefix", default=_PREFIX.get),
    key("checkpoint.names", choice("release", "transformers"), "ours:checkpoint.names", default="release"),
    key("checkpoint.narrow", codecs.TEXTS, "ours:checkpoint.narrow", default=()),
)  # fmt: skip

# Keys that would change the computation, at the only value implemented, and numbers that follow.
_CHECKS = (
    Check("text:model_type", ("kimi_linear",)),
    Check("text:num_nextn_predict_layers", (0,)),
    Check("text:mla_use_nope", (True,), "mla"),
    Check("text:num_key_value_heads", lambda cfg: (cfg.mla.num_heads, None, 32), "mla"),  # 32: transformers' default
    Check("text:qk_head_dim", lambda cfg: (cfg.mla.qk_head_dim,), "mla", fresh=False),
    Check("text:attention_bias", (False,), fresh=False),
    Check("text:attention_dropout", (0,), fresh=False),
    Check("text:add_cross_attention", (False,), fresh=False),
    Check("text:is_encoder_decoder", (False,), fresh=False),
    Check("text:pruned_heads", ({},), fresh=False),
    Check("text:moe_router_activation_func", ("sigmoid",), "moe"),
    Check("text:topk_method", ("noaux_tc",), "moe"),
    Check("text:moe_layer_freq", (1,), "moe"),
    Check("text:use_grouped_topk", lambda cfg: (True, False)[: 2 if cfg.moe.num_groups == 1 else 1], "moe"),
    Check("vision:mm_hidden_size", lambda cfg: (cfg.vision.hidden_size, None), "vision"),
    *(Check(f"vision:{name}", (False,), "vision") for name in ("attn_bias", "linear_bias", "patch_embed_proj_bias")),
    Check("vision:norm_type", ("rmsnorm",), "vision"),
    Check("vision:activation_func", ("gelu_pytorch_tanh",), "vision"),
    Check("vision:mlp_type", ("mlp2",), "vision"),
    Check("vision:merge_type", ("sd2_tpool",), "vision"),
    Check("vision:mm_projector_type", ("patchmergerv2",), "vision"),
    Check("vision:pos_emb_type", ("divided_fixed",), "vision"),
    Check("vision:pos_emb_interpolation_mode", ("bilinear",), "vision"),
    Check("vision:projector_hidden_act", ("gelu",), "vision"),
)

_INERT_BECAUSE = {  # reason -> scopes (joined by +) and the keys
    "names a class or file of other software": "root+text architectures auto_map _name_or_path transformers_version",
    "how other software computes, not what": """root+text+vision _attn_implementation use_cache use_bfloat16 torchscript
        pretraining_tp chunk_size_feed_forward return_dict output_attentions output_hidden_states
        output_router_logits""",
    "a limit or warning of other software; no layer has positions": "text max_position_embeddings model_max_length",
    "attention has no rotary embedding (NoPE)": "text rope_theta rope_scaling rope_parameters",
    "legacy: KDA and MLA have head dims of their own": "text head_dim",
    "what the loss leaves out is said by the data": "top ignore_index",
    "a word of the prompt text, known to the image processor": "top image_placeholder",
    "sampling (so `top_k` is not the router's): generate takes arguments or generation_config.json": """root+text
        temperature top_k top_p typical_p do_sample num_beams num_beam_groups num_return_sequences max_length min_length
        bad_words_ids begin_suppress_tokens suppress_tokens decoder_start_token_id diversity_penalty early_stopping
        length_penalty encoder_no_repeat_ngram_size no_repeat_ngram_size exponential_decay_length_penalty output_scores
        forced_bos_token_id forced_eos_token_id remove_invalid_values repetition_penalty return_dict_in_generate
        sep_token_id prefix""",
    "about tasks and encoder-decoders": """root+text id2label label2id problem_type finetuning_task is_decoder
        task_specific_params tokenizer_class tie_encoder_decoder cross_attention_hidden_size tf_legacy_loss""",
}
_INERT_ROWS = [(reason, *words.split()) for reason, words in _INERT_BECAUSE.items()]
INERT = {f"{scope}:{name}": why for why, at, *names in _INERT_ROWS for scope in at.split("+") for name in names}

_BEGIN = {model_type: {"architectures": [name]} for model_type, name in _CLASSES.items()}
SCHEMA = cj.Schema(_SCOPES, _KEYS, _CHECKS, INERT, ("kda", "mla", "moe", "vision"), _BEGIN)
