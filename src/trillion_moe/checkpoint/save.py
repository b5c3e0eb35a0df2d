"""A model as a folder of safetensors: what was loaded comes out bit for bit, under the names it came under."""

import dataclasses
import functools
import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from trillion_moe.checkpoint.atomic import new_folder, write_text
from trillion_moe.checkpoint.errors import CheckpointError
from trillion_moe.checkpoint.names import Slot, slots, to_stored, tree_leaves
from trillion_moe.checkpoint.safetensors_io import NUMPY, STORED, Planned, write_file
from trillion_moe.checkpoint.shards import INDEX, SINGLE
from trillion_moe.config import ModelConfig
from trillion_moe.distributed import current, whole
from trillion_moe.weights import ARRANGED, MXFP4, LoRA, is_arranged


def save(folder: str | Path, model: Any, *, beside: Sequence[Path] = (), shard_bytes: float = 5e9) -> None:
    """Write ``model.safetensors`` (or shards of at most `shard_bytes` and their index) and ``config.json``.

    Every tensor in the dtype it is held in, experts packed if they are, names and A_log as `model.config` says, which
    is as they were read; config.json says the dtype of the embedding. One tensor at a time is in host memory. The
    folder appears complete or not at all, and is never overwritten. beside: files to copy into it.

    Raises CheckpointError if the folder is there already, or with all leaves that have no place in a checkpoint:
    adapters, Specs, float32 tensors in another dtype, experts packed in part.
    """
    leaves = dict(tree_leaves(model)[0])
    if findings := list(_refused(model, leaves)):
        raise CheckpointError(folder, findings)
    cfg = described(model)
    shards = _cut(dict(_planned(model, leaves, cfg)), shard_bytes)
    with new_folder(folder) as temporary:
        copy_files(beside, temporary)
        files = {}
        for i, shard in enumerate(shards):
            file = SINGLE if len(shards) == 1 else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
            write_file(temporary / file, shard, {"format": "pt"})
            files |= dict.fromkeys(shard, file)
        if len(shards) > 1:
            total = sum(planned.nbytes for shard in shards for planned in shard.values())
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
            write_text(temporary / INDEX, json.dumps(index, indent=2) + "\n")
        # Last: a folder without config.json is refused, so that even a killed save's remains cannot be loaded.
        write_text(temporary / "config.json", json.dumps(cfg.to_json(), indent=2, ensure_ascii=False) + "\n")


def described(model: Any) -> ModelConfig:
    """The model's config with dtype and quantization as its arrays have them."""
    packed = any(isinstance(leaf, MXFP4) for _, leaf in tree_leaves(model)[0])
    return dataclasses.replace(model.config, dtype=str(model.embed.dtype), quantization="mxfp4" if packed else None)


def _refused(model: Any, leaves: dict[str, Any]) -> Iterator[str]:
    """Why this model cannot be stored."""
    if is_arranged(model):
        yield ARRANGED
        return
    if adapted := [path for path, leaf in leaves.items() if isinstance(leaf, LoRA)]:
        yield f"{len(adapted)} leaves have an adapter ({adapted[0]}): merge_lora or export_adapter first"
        return
    if missing := [path for path, leaf in leaves.items() if not isinstance(leaf, jax.Array | np.ndarray | MXFP4)]:
        yield f"{len(missing)} leaves hold no array ({missing[0]}: {leaves[missing[0]]!r}): load or init first"
        return
    seen = {(slot.leaf, slot.float32, slot.experts is not None) for slot in slots(model, model.config)}
    experts = {path: isinstance(leaves[path], MXFP4) for path, _, expert in seen if expert}
    if len(set(experts.values())) > 1:
        first = min(path for path, packed in experts.items() if not packed)
        yield f"{sum(experts.values())} of {len(experts)} banks of experts are packed, {first} is not: pack all or none"
    for path, float32, _ in sorted(seen):
        leaf = leaves[path]
        if isinstance(leaf, MXFP4):
            continue
        legal = ("float32",) if float32 else ("float32", "bfloat16", "float16")
        if str(leaf.dtype) not in legal:
            yield f"{path} is {leaf.dtype}: legal is {' or '.join(legal)}"


def _planned(model: Any, leaves: dict[str, Any], cfg: ModelConfig) -> Iterator[tuple[str, Planned]]:
    """Every tensor to write, in the order of the layers."""
    for slot in slots(model, cfg):
        leaf = leaves[slot.leaf]
        packed = isinstance(leaf, MXFP4)
        if (slot.part == "weight") == packed:
            continue
        array = getattr(leaf, slot.part) if packed else leaf
        turned = packed and leaf.layout == "kn"
        for e in range(slot.count):
            fetch = functools.partial(_fetch, array, slot, e, turned)
            dtype = str(array.dtype) if slot.narrow is None else slot.narrow
            yield slot.name(e), Planned(STORED[dtype], slot.shape, fetch)


def _fetch(array: Any, slot: Slot, expert: int, turned: bool) -> np.ndarray:
    """One tensor on the host. Arrays in this host's memory are viewed, others are sliced where they are."""
    index = slot.index(expert)
    here = isinstance(array, np.ndarray) or [d.platform for d in array.devices()] == ["cpu"]
    held = np.asarray(array)[index] if here else whole(array[index])
    stored = held.T if turned else to_stored(slot, held)
    return stored if slot.narrow is None else stored.astype(NUMPY[STORED[slot.narrow]])


def _cut(tensors: dict[str, Planned], shard_bytes: float) -> list[dict[str, Planned]]:
    """Consecutive shards of at most `shard_bytes` each, a larger tensor by itself."""
    shards, size = [{}], 0
    for name, planned in sorted(tensors.items(), key=lambda item: _natural_order(item[0])):
        if shards[-1] and size + planned.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = planned
        size += planned.nbytes
    return shards


def _natural_order(name: str) -> list[tuple[bool, int, str]]:
    """Layer 2 before layer 10."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in name.split(".")]


def files_beside(folder: str | Path) -> list[Path]:
    """The files of a checkpoint's folder that are neither its config nor weights: tokenizer, chat template, settings of
    pictures and of generation. CheckpointError if there is no such folder."""
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(folder, ["no such folder"])
    kept = (".json", ".jinja", ".model", ".txt", ".py")
    names = ("config.json", INDEX, "model.json")
    return sorted(f for f in folder.iterdir() if f.is_file() and f.suffix in kept and f.name not in names)


def copy_files(files: Iterable[Path], folder: Path) -> None:
    """Of several processes the first one copies."""
    for file in files if current().first else ():
        shutil.copyfile(file, folder / file.name)
