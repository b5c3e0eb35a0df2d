"""A short name for the weights of a model, that stays the same however they are held.

The same checkpoint in bfloat16 or float32, stacked over the depth or not, its experts packed or decoded, in any layout
or spelling, has one fingerprint; other weights, or a config that computes something else, have another.
"""

import dataclasses
import hashlib
import json
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from trillion_moe.blueprint import layer_numbers
from trillion_moe.checkpoint.fill import decode
from trillion_moe.checkpoint.names import tree_leaves
from trillion_moe.config import ModelConfig
from trillion_moe.distributed import whole
from trillion_moe.weights import MXFP4, MXFP4_GROUP, matrix_shape

SAMPLES = 64  # values looked at of a tensor in one layer, spread over all its dims; few enough for a trillion
_SPREAD = 0x9E3779B1  # odd: multiples of it, modulo a size, are spread evenly and in no step with a dim
_STORAGE = ("dtype", "quantization", "checkpoint", "source", "initializer_range", "bos_id", "eos_ids", "pad_id")


def fingerprint(model: Any) -> str:
    """16 hexadecimal digits over config, names, shapes and up to 64 values a tensor and layer, rounded to bfloat16.

    Of a model without adapters. It tells checkpoints apart; it is no proof that no single value was changed.
    """
    found = [one for path, leaf in tree_leaves(model)[0] for one in _layers(path, leaf, model.plan)]
    digest = hashlib.sha256(_config(model.config))
    for name, leaf, repeat in sorted(found, key=lambda one: one[0]):
        shape = matrix_shape(leaf) if repeat is None else matrix_shape(leaf)[1:]
        digest.update(f"{name}{list(shape)}".encode())
        digest.update(_sample(leaf, shape, repeat).astype(ml_dtypes.bfloat16).tobytes())
    return digest.hexdigest()[:16]


def _config(cfg: ModelConfig) -> bytes:
    """What the config says of the computation, not of files and token ids."""
    fields = {key: value for key, value in dataclasses.asdict(cfg).items() if key not in _STORAGE}
    if fields["kda"] is not None:
        del fields["kda"]["a_log_shape"]
    return json.dumps(fields, sort_keys=True).encode()


def _layers(path: str, leaf: Any, plan: Any) -> list[tuple[str, Any, int | None]]:
    """(logical name, leaf, row of it) of every layer that a leaf holds."""
    if not path.startswith("segments."):
        return [(path, leaf, None)]
    _, s, j, rest = path.split(".", 3)
    repeats = layer_numbers(plan)[int(s)]
    rows = [(numbers[int(j)], r if len(repeats) > 1 else None) for r, numbers in enumerate(repeats)]
    return [(f"layers.{number}.{rest}", leaf, row) for number, row in rows if number is not None]


def _sample(leaf: Any, shape: tuple[int, ...], repeat: int | None) -> np.ndarray:
    size = int(np.prod(shape, dtype=np.int64))
    flat = np.arange(min(SAMPLES, size), dtype=np.uint64) * np.uint64(_SPREAD) % np.uint64(size)
    index = np.unravel_index(flat.astype(np.int64), shape)
    rows = () if repeat is None else (np.full(len(flat), repeat),)
    if not isinstance(leaf, MXFP4):
        return host(leaf, (*rows, *index)).astype(np.float32)
    *batch, k, n = index
    group, half = k // MXFP4_GROUP, MXFP4_GROUP // 2
    columns = (group[:, None] * half + np.arange(half), n[:, None])
    at = (*(i[:, None] for i in (*rows, *batch)), *(columns if leaf.layout == "kn" else columns[::-1]))
    scale = host(leaf.scale, (*rows, *batch, *((group, n) if leaf.layout == "kn" else (n, group))))
    values = np.asarray(decode(host(leaf.packed, at), scale[:, None], dtype=jnp.float32))
    return values[np.arange(len(k)), k % MXFP4_GROUP]


def host(array: Any, index: tuple[Any, ...]) -> np.ndarray:
    """A part of an array in numpy, which stays where it is: a view of this host's memory, or sliced before it moves."""
    if isinstance(array, np.ndarray):
        return array[index]
    here = array.is_fully_addressable and {d.platform for d in array.devices()} == {"cpu"}
    return np.asarray(array)[index] if here else whole(array[index])
