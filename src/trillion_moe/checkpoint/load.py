"""A folder of safetensors into the arrays of a blueprint, checked as a whole before the first array is made."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from trillion_moe.checkpoint.audit import Located, dtype_findings, legal_a_log, locate
from trillion_moe.checkpoint.content import content_findings
from trillion_moe.checkpoint.errors import CheckpointError
from trillion_moe.checkpoint.fill import Fill, boxes, held
from trillion_moe.checkpoint.names import NARROWABLE, PREFIXES, Slot, slots, tree_leaves
from trillion_moe.checkpoint.safetensors_io import Entry, Reader, read_header
from trillion_moe.checkpoint.shards import Shards, find_shards
from trillion_moe.config import ModelConfig
from trillion_moe.sharding import shardings
from trillion_moe.weights import MXFP4, LoRA

Tree = TypeVar("Tree")
DTYPE_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def read_config(folder: str | Path) -> ModelConfig:
    """`refine(ModelConfig.from_file(folder), folder)`.

    Raises CheckpointError if there is no folder, no config.json or no checkpoint in it, ConfigError for the config.
    """
    folder = Path(folder)
    shards = find_shards(folder)
    if not (folder / "config.json").is_file():
        raise CheckpointError(folder, ["config.json is missing"])
    return _refined(ModelConfig.from_file(folder), shards)


def refine(cfg: ModelConfig, folder: str | Path) -> ModelConfig:
    """The config with what only the files know: prefix and spelling of the names, stored shape of A_log, and dtype.

    dtype becomes that of the stored embedding, whatever config.json says, so that a model made from this config keeps
    its weights as they are. Where the files contradict themselves the first or the more frequent wins here, and
    `load_into` refuses the rest. Raises CheckpointError only if there are no files to look at.
    """
    return _refined(cfg, find_shards(folder))


def _refined(cfg: ModelConfig, shards: Shards) -> ModelConfig:
    prefixes, transformers, seen, narrow = Counter(), False, {}, set()
    beginnings = {
        prefix: (f"{prefix}layers.", f"{prefix}embed_tokens.") for prefix in (*PREFIXES, cfg.checkpoint.prefix)
    }
    for name, entry in _entries(shards):
        prefixes.update(prefix for prefix, beginning in beginnings.items() if name.startswith(beginning))
        if name.endswith(".block_sparse_moe.gate_proj.weight"):
            transformers = True
        elif name.endswith(("embed_tokens.weight", "self_attn.A_log")):
            seen.setdefault(name.rpartition(".")[2], []).append(entry)
        end = name.rpartition("self_attn.")[2]
        if cfg.model_type == "kimi_linear" and end in NARROWABLE and entry.dtype in ("BF16", "F16"):
            narrow.add(end)
    prefix = prefixes.most_common(1)[0][0] if prefixes else cfg.checkpoint.prefix
    names = dataclasses.replace(
        cfg.checkpoint,
        prefix=prefix,
        names="transformers" if transformers else "release",
        narrow=tuple(end for end in NARROWABLE if end in narrow),
    )
    dtypes = [DTYPE_NAMES[e.dtype] for e in seen.get("weight", ()) if e.dtype in DTYPE_NAMES]
    kda = cfg.kda
    if kda is not None:
        shapes = [e.shape for e in seen.get("A_log", ()) if legal_a_log(e.shape, kda.num_heads)]
        if shapes:
            kda = dataclasses.replace(kda, a_log_shape=None if shapes[0] == (kda.num_heads,) else shapes[0])
    return dataclasses.replace(cfg, checkpoint=names, kda=kda, dtype=dtypes[0] if dtypes else cfg.dtype)


def _entries(shards: Shards) -> Iterator[tuple[str, Entry]]:
    for path in shards.files:
        yield from read_header(path).entries.items()


def load_into(blueprint: Tree, folder: str | Path, stored: ModelConfig, *, keep_dtypes: bool = True) -> Tree:
    """The blueprint (a `Model` of Specs) with every Spec replaced by the array stored in the folder.

    stored: the refined config of the *files*, with their quantization even if the blueprint is not quantized. A routed
    experts leaf that is an `MXFP4` of Specs takes the packed bytes as they are, in its layout; one that is a Spec is
    decoded. keep_dtypes: every tensor keeps its stored dtype; False casts to the Spec's. What is float32 by definition
    (A_log, dt_bias, convolutions, o_norm, router bias) must be stored so and stays so. A blueprint that has a layout is
    filled over its mesh.

    Every tensor of every file has its place. Of several processes each reads what its own devices have, of a tensor
    whole rows, and looks into no more. Raises CheckpointError with all findings, before any array is put on a device;
    later only for a value that a cast would turn into infinity.
    """
    leaves, treedef = tree_leaves(blueprint)
    if adapted := [path for path, leaf in leaves if isinstance(leaf, LoRA)]:
        raise ValueError(f"the blueprint has adapters ({adapted[0]}): load the model first, then add_lora")
    located = locate(list(slots(blueprint, stored)), find_shards(folder), stored)
    layout = getattr(blueprint, "layout", None)
    where = [None] * len(leaves) if layout is None else treedef.flatten_up_to(shardings(blueprint, layout))
    findings = [*located.findings, *(dtype_findings(located) if keep_dtypes else ())]
    findings += content_findings(located, _here(leaves, where))
    findings += _unpackable(leaves, located) if not findings else ()
    if findings:
        raise CheckpointError(folder, findings)
    homes = located.by_leaf()
    with Reader(located.shards.files) as reader:
        fill = Fill(located, reader, keep_dtypes)
        return treedef.unflatten(
            [fill.leaf(leaf, homes[path], at) for (path, leaf), at in zip(leaves, where, strict=True)]
        )


def _here(leaves: list[tuple[str, Any]], where: list[Any]) -> Callable[[Slot], np.ndarray]:
    """Which tensors of a slot this process has some of."""
    arrays = [
        (path, jax.tree.leaves(leaf)[0], jax.tree.leaves(at)) for (path, leaf), at in zip(leaves, where, strict=True)
    ]
    parts = {path: boxes(array.shape, at[0] if at else None) for path, array, at in arrays}
    return lambda slot: held(slot, parts[slot.leaf])


def _unpackable(leaves: list[tuple[str, Any]], located: Located) -> Iterator[str]:
    homes = located.by_leaf()
    for path, leaf in leaves:
        if isinstance(leaf, MXFP4) and homes[path][0][1][0]["file"] >= 0:
            label = located.label(*homes[path][0], 0)
            yield f"{label}: plain, but {path} of the blueprint is packed: load first, then quantize"
