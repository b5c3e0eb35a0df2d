"""The public names: `import trillion_moe as tm`."""

import dataclasses
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from trillion_moe import checkpoint
from trillion_moe import model as _model
from trillion_moe import trace as _trace
from trillion_moe.blueprint import Segment
from trillion_moe.checkpoint import CheckpointError
from trillion_moe.compiler import jitted
from trillion_moe.config import ConfigError, ModelConfig
from trillion_moe.data.chat import ChatError, ChatOptions
from trillion_moe.data.image_files import ImageError
from trillion_moe.data.processor import Processor, load_processor
from trillion_moe.data.tokenizer import TokenizerError
from trillion_moe.generate import Completion, Piece, Session, generate, stream
from trillion_moe.inputs import Images, InputError, check_inputs, traced
from trillion_moe.layers.segments import plan_for, staged
from trillion_moe.layers.vision import ImageBatch
from trillion_moe.meshes.machine import layout_of
from trillion_moe.model import Caches, Model, bucket, grow
from trillion_moe.ops import using
from trillion_moe.sharding import Layout, LayoutError
from trillion_moe.sharding import place as _place
from trillion_moe.transforms import (
    LoRAConfig,
    add_lora,
    combine,
    merge_lora,
    partition,
    quantize_experts,
    remove_lora,
)
from trillion_moe.transforms.adapters import with_lora
from trillion_moe.transforms.quantize import packed_layout
from trillion_moe.transforms.segments import restack
from trillion_moe.verify import VerifyError, verify
from trillion_moe.verify.report import load as _load_operators

__all__ = [
    "ChatError",
    "ChatOptions",
    "CheckpointError",
    "Completion",
    "ConfigError",
    "ImageBatch",
    "ImageError",
    "InputError",
    "Layout",
    "LayoutError",
    "LoRAConfig",
    "Model",
    "ModelConfig",
    "Piece",
    "Processor",
    "Session",
    "TokenizerError",
    "VerifyError",
    "add_lora",
    "combine",
    "export_adapter",
    "forward",
    "generate",
    "load",
    "load_adapter",
    "load_processor",
    "loss",
    "merge_lora",
    "partition",
    "place",
    "quantize_experts",
    "remove_lora",
    "save",
    "stream",
    "trace",
    "using_verified",
    "verify",
]

Quantization = Literal["keep", "decode"]
Format = Literal["hf", "orbax"]


def load(
    path: str | Path,
    *,
    mesh: str | Mapping[str, int] | Layout | None = None,
    dtype: str | None = None,
    quantization: Quantization = "keep",
    scan: bool | None = None,
) -> Model:
    """A model from a Hugging Face folder (config.json and safetensors) or an Orbax checkpoint written by `save`.

    mesh: the devices it lies on, as sizes of mesh axes (``{"fsdp": 2, "ep": 4}``), the name of a machine
    (`trillion_moe.meshes`), or a file like a machine's; None = one.
    dtype: None keeps every tensor as stored; "float32", "bfloat16" or "float16" casts all but the tensors that are
    float32 by definition. quantization: "keep" leaves packed MXFP4 experts packed, "decode" unpacks them. scan: stack
    repeating layers and scan over them; None decides by depth.

    Raises:
        CheckpointError: everything that is wrong with the files, in one message.
        ConfigError: everything that is wrong with config.json.
        LayoutError: a mesh that is not there, or cannot cut this model.
        ValueError: an argument that is not legal here.
    """
    layout = None if mesh is None else layout_of(mesh)
    if quantization not in get_args(Quantization):
        raise ValueError(f"quantization is {quantization!r}; legal are {', '.join(get_args(Quantization))}")
    if checkpoint.is_orbax(path):
        if (dtype, quantization, scan) != (None, "keep", None):
            raise InputError(f"{path} is an Orbax checkpoint, loaded as it is: no dtype, quantization or scan is legal")
        model = checkpoint.load_orbax(path, _build, layout=layout)
        return model if layout is None and staged(model.plan) is None else place(model, layout)
    stored = checkpoint.read_config(path)
    held = stored if quantization == "keep" else dataclasses.replace(stored, quantization=None)
    model = Model(held, dtype=_dtype_name(dtype), plan=plan_for(held, layout, scan))
    if held.quantization is not None:
        model = quantize_experts(model, layout=packed_layout(jax.default_backend()))
    model = model if layout is None else _place(model, layout)
    return checkpoint.load_into(model, path, stored, keep_dtypes=dtype is None)


def place(model: Model, mesh: str | Mapping[str, int] | Layout | None) -> Model:
    """The model with its arrays on a mesh, given as to `load` (None: on one device), restacked if its layers are to lie
    on pipeline stages, or did; computes the same. LayoutError for a model that the mesh cannot cut."""
    layout = None if mesh is None else layout_of(mesh)
    plan = plan_for(model.config, layout)
    if staged(model.plan) != staged(plan):
        model = restack(model, plan)
    if layout is not None:
        return _place(model, layout)
    model = jax.device_put(model, jax.devices()[0])
    model.layout = None
    return model


def _dtype_name(dtype: str | None) -> str | None:
    legal = ("float32", "bfloat16", "float16")
    if dtype is not None and (name := jnp.dtype(dtype).name) not in legal:
        raise ValueError(f"dtype is {name}; legal are {', '.join(legal)}")
    return None if dtype is None else jnp.dtype(dtype).name


def _build(cfg: ModelConfig, dtype: str, plan: tuple[Segment, ...]) -> Model:
    return Model(cfg, dtype=dtype, plan=plan)


def save(
    path: str | Path,
    model: Model,
    *,
    format: Format = "hf",  # noqa: A002
    beside: str | Path | None = None,
) -> None:
    """Write a model to a new folder: "hf", config and tensors as they were read, bit for bit; "orbax", with adapters
    and whatever it holds.

    beside: a checkpoint's folder whose other files are copied too, so that the new one can be asked in words:
    tokenizer, chat template, settings of pictures and of generation.

    Raises CheckpointError if the folder exists or the model has what the format cannot hold. Nothing half-written is
    ever loaded.
    """
    if format not in get_args(Format):
        raise ValueError(f"format is {format!r}; legal are {', '.join(get_args(Format))}")
    files = [] if beside is None else checkpoint.files_beside(beside)
    if beside is not None and not files:
        raise CheckpointError(beside, ["holds no file to copy: no tokenizer, template or settings beside the weights"])
    (checkpoint.save if format == "hf" else checkpoint.save_orbax)(path, model, beside=files)


def export_adapter(path: str | Path, model: Model, *, names: Literal["peft", "release"] = "peft") -> None:
    """Write a model's adapters to a new folder, as PEFT does or, for routed experts, under each expert's released name.

    Raises CheckpointError if the folder exists, or with all that the format cannot hold.
    """
    checkpoint.export_adapter(path, model, names=names)


def using_verified(path: str | Path, model: Model) -> AbstractContextManager[None]:
    """Inside, a model runs the implementations that passed here: the first of each list in a file that
    ``verify(...).write(path)`` or `trillion-moe verify --json` wrote.

    Raises VerifyError, at once, for a file of another machine, other versions or another model, and where nothing
    passed in the model's dtype.
    """
    return using(_load_operators(path, model.config, model.dtype))


def load_adapter(model: Model, path: str | Path, *, check_base: bool = True) -> Model:
    """The model with the adapters of a folder, in PEFT's or the released names, on top; packed bases stay packed.

    check_base: refuse an adapter that says it was made on other weights. Raises CheckpointError with all findings;
    nothing is loaded in part.
    """
    return with_lora(model, checkpoint.read_adapter(path, model, check_base=check_base))


_forward = jitted(_model.forward)
_loss = jitted(_model.loss, static_argnames="remat")
_traced = jitted(_trace.trace)


def forward(
    model: Model, tokens_BT: Any, *, segments: Any = None, images: Images = None, caches: Caches | None = None
) -> tuple[Float[jax.Array, "B T V"], Caches | None]:
    """-> logits float32 ``[B, T, V]`` and the caches after these tokens, to be handed to the next call (None over a
    mesh that cuts sequences, which has none).

    tokens_BT: integer ids. segments: ``[B, T]``, 0 = padding (anywhere; its logits mean nothing), 1, 2, ... =
    documents; None = one document a row, or its continuation if `caches` are given. images: one ImageBatch for all
    rows, or one (or None) a row; one placeholder an image, which is expanded (T then grows), or the expanded run.
    caches: grown as needed, except under a JAX transformation, where a row that does not fit comes out as NaN.
    """
    tokens_BT, segments, images = check_inputs(model.config, tokens_BT, segments, images)
    if caches is not None and not traced(caches.length, tokens_BT, segments):
        _check_continuation(tokens_BT, segments, caches)
        needed = int(caches.length.max()) + tokens_BT.shape[1]
        caches = caches if needed <= caches.capacity else grow(caches, bucket(needed))
    return _forward(model, tokens_BT, segments=segments, images=images, caches=caches)


def _check_continuation(tokens_BT: np.ndarray, segments: np.ndarray | None, caches: Caches) -> None:
    if caches.length.shape[0] != len(tokens_BT):
        raise InputError(f"caches hold {caches.length.shape[0]} rows, tokens {len(tokens_BT)}")
    if segments is None:
        return
    for row, (new, held, now) in enumerate(zip(segments, np.asarray(caches.segments), caches.segment, strict=True)):
        ended = sorted((set(new.tolist()) & set(held.tolist())) - {0, int(now)})
        if ended:
            raise InputError(
                f"row {row}: document {ended[0]} had ended in the cached tokens; give a new one a new number"
            )


def loss(
    model: Model, batch: Mapping[str, Any], *, remat: bool = True
) -> tuple[Float[jax.Array, ""], dict[str, jax.Array]]:
    """Mean next-token cross-entropy in float32, and metrics; see `trillion_moe.model.loss` for what a batch holds.

    Raises InputError for an unknown key and, outside JAX transformations, for inputs that do not fit or a batch in
    which no token is supervised.
    """
    legal = ("tokens", "segments", "loss_mask", "images")
    if unknown := sorted(set(batch) - set(legal)):
        raise InputError(f"the batch has {', '.join(map(repr, unknown))}; legal keys are {', '.join(legal)}")
    tokens, mask = batch["tokens"], batch.get("loss_mask")
    ids, segments, images = check_inputs(model.config, tokens, batch.get("segments"), batch.get("images"))
    if mask is not None and mask.shape != ids.shape:
        raise InputError(f"loss_mask has shape {mask.shape}, the tokens (images expanded) {ids.shape}")
    value, metrics = _loss(
        model, {"tokens": ids, "segments": segments, "loss_mask": mask, "images": images}, remat=remat
    )
    if not traced(value) and not int(metrics["tokens"]):
        raise InputError("no token of the batch is supervised: check segments and loss_mask")
    return value, metrics


def trace(model: Model, tokens_BT: Any, *, segments: Any = None, images: Images = None) -> dict[str, jax.Array]:
    """Every intermediate array of a forward pass by name, see `trillion_moe.trace.trace`."""
    tokens_BT, segments, images = check_inputs(model.config, tokens_BT, segments, images)
    return _traced(model, tokens_BT, segments=segments, images=images)
