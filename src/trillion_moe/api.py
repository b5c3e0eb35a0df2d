"""The public names: `import trillion_moe as tm`."""

from typing import Any

import jax

from trillion_moe import model as _model
from trillion_moe import trace as _trace
from trillion_moe.generate import Completion, generate
from trillion_moe.inputs import Images, check_inputs
from trillion_moe.layers.vision import ImageBatch
from trillion_moe.model import Caches, Model, grow, init_caches, loss
from trillion_moe.transforms import LoRAConfig, add_lora, combine, merge_lora, partition, remove_lora

__all__ = [
    "Caches",
    "Completion",
    "ImageBatch",
    "LoRAConfig",
    "Model",
    "add_lora",
    "combine",
    "forward",
    "generate",
    "init_caches",
    "load",
    "loss",
    "merge_lora",
    "partition",
    "remove_lora",
    "save",
    "trace",
]

_forward = jax.jit(_model.forward)
_traced = jax.jit(_trace.trace)


def forward(model: Model, tokens_BT: Any, *, segments: Any = None, images: Images = None, caches: Caches | None = None):
    """-> logits float32 ``[B, T, V]`` and the caches after these tokens, to be handed to the next call.

    tokens_BT: integer ids. segments: ``[B, T]``, 0 = padding (anywhere; its logits mean nothing), 1, 2, ... =
    documents; None = one document a row, or its continuation if `caches` are given. images: one ImageBatch for all
    rows, or one (or None) a row; one placeholder an image, which is expanded (T then grows), or the expanded run.
    caches: grown as needed, except under a JAX transformation, where a row that does not fit comes out as NaN.
    """
    tokens_BT, segments, images = check_inputs(model.config, tokens_BT, segments, images)
    if caches is not None and not isinstance(caches.length, jax.core.Tracer):
        if caches.length.shape[0] != tokens_BT.shape[0]:
            raise ValueError(f"caches hold {caches.length.shape[0]} rows, tokens {tokens_BT.shape[0]}")
        caches = grow(caches, int(caches.length.max()) + tokens_BT.shape[1])
    return _forward(model, tokens_BT, segments=segments, images=images, caches=caches)


def trace(model: Model, tokens_BT: Any, *, segments: Any = None, images: Images = None) -> dict[str, jax.Array]:
    """Every intermediate array of a forward pass by name, see `trillion_moe.trace.trace`."""
    tokens_BT, segments, images = check_inputs(model.config, tokens_BT, segments, images)
    return _traced(model, tokens_BT, segments=segments, images=images)
