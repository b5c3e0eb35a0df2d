"""A model as an Orbax checkpoint: its arrays as they are held, adapters included, with config and plan beside.

    FOLDER/arrays/        Orbax: one array per path of the tree
    FOLDER/config.json    the model's config
    FOLDER/model.json     written last: depth plan, dtype, and of what kind every weight is, with checksums. Without it
                          nothing is read.

Orbax sees a flat dict of paths, so that neither nnx nor our weight types need be known to read the arrays.
"""

import dataclasses
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from trillion_moe.checkpoint.atomic import new_folder, write_text
from trillion_moe.checkpoint.errors import CheckpointError
from trillion_moe.checkpoint.names import tree_leaves
from trillion_moe.config import ModelConfig
from trillion_moe.weights import MXFP4, LoRA

MARKER, ARRAYS, FORMAT = "model.json", "arrays", "trillion_moe orbax 2"
Tree = TypeVar("Tree")
Plan = tuple[tuple[tuple[tuple[str, str], ...], int], ...]  # per segment: (attention, ffn) of its layers, and repeats


def is_orbax(folder: str | Path) -> bool:
    """Whether this is (or was to be) an Orbax checkpoint rather than a folder of safetensors."""
    return (Path(folder) / MARKER).exists() or (Path(folder) / ARRAYS).is_dir()


def save_orbax(folder: str | Path, model: Any) -> None:
    """Write a model, whatever its weights are. The folder appears complete or not at all, and is never overwritten."""
    import orbax.checkpoint as ocp

    leaves, _ = tree_leaves(model)
    arrays: dict[str, jax.Array] = {}
    kinds = {path: _take_apart(path, leaf, arrays) for path, leaf in leaves}
    plan = [[[(kind.attention, kind.ffn) for kind in segment.layers], segment.repeats] for segment in model.plan]
    about = {"format": FORMAT, "dtype": model.dtype, "plan": plan, "weights": kinds}
    about["arrays"] = {path: [str(a.dtype), list(a.shape), checksum(a)] for path, a in arrays.items()}
    with new_folder(folder) as temporary:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(temporary / ARRAYS, arrays)
        write_text(temporary / "config.json", json.dumps(model.config.to_json(), indent=2, ensure_ascii=False) + "\n")
        write_text(temporary / MARKER, json.dumps(about, indent=1) + "\n")


def load_orbax(folder: str | Path, build: Callable[[ModelConfig, str, Plan], Tree]) -> Tree:
    """The model as it was saved, bit for bit.

    build: makes the plain blueprint of config, dtype and depth plan; the weights found take the place of its Specs.
    Raises CheckpointError for a folder that is absent, half-written, of another format or short of an array.
    """
    folder = Path(folder).absolute()
    about = _read_about(folder)
    plan = tuple((tuple(tuple(kind) for kind in layers), repeats) for layers, repeats in about["plan"])
    blueprint = build(ModelConfig.from_file(folder), about["dtype"], plan)
    leaves, treedef = tree_leaves(blueprint)
    paths = {path for path, _ in leaves}
    if paths != set(about["weights"]):
        odd = {path: "checkpoint" if path in paths else "model" for path in sorted(paths ^ set(about["weights"]))}
        raise CheckpointError(folder, [f"{path}: not in the {where}" for path, where in odd.items()])
    arrays = _restore(folder, about["arrays"])
    return treedef.unflatten([_put_together(path, about["weights"][path], arrays) for path, _ in leaves])


def _read_about(folder: Path) -> dict[str, Any]:
    if not (folder / MARKER).is_file():
        what = f"no {MARKER}, which is written last: the save was not finished" if folder.is_dir() else "no such folder"
        raise CheckpointError(folder, [what])
    try:
        about = json.loads((folder / MARKER).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(folder, [f"{MARKER} is not JSON: {error}"]) from None
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise CheckpointError(folder, [f"{MARKER} is not of the format {FORMAT!r}"])
    return about


def _restore(folder: Path, arrays: dict[str, Any]) -> dict[str, jax.Array]:
    import orbax.checkpoint as ocp

    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = {p: jax.ShapeDtypeStruct(tuple(s), jnp.dtype(d), sharding=device) for p, (d, s, _) in arrays.items()}
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            found = checkpointer.restore(folder / ARRAYS, target)
    except Exception as error:  # Orbax raises many kinds for an incomplete folder
        raise CheckpointError(folder, [f"Orbax cannot restore the arrays: {type(error).__name__}: {error}"]) from error
    if damaged := [path for path, (_, _, was) in arrays.items() if checksum(found[path]) != was]:
        raise CheckpointError(folder, [f"{path}: its bytes are not those that were saved" for path in damaged])
    return found


def checksum(array: jax.Array) -> int:
    """CRC-32 of an array's bytes: the store itself does not notice values that changed on disk."""
    return zlib.crc32(np.asarray(array).tobytes())


def _take_apart(path: str, leaf: Any, arrays: dict[str, jax.Array]) -> Any:
    """Enter the arrays of a weight under their paths -> how to put them together again, as JSON."""
    match leaf:
        case MXFP4():
            arrays[f"{path}.packed"], arrays[f"{path}.scale"] = leaf.packed, leaf.scale
            return {"kind": "MXFP4", "layout": leaf.layout}
        case LoRA():
            base = _take_apart(f"{path}.base", leaf.base, arrays)
            parts = {name: getattr(leaf, name) for name in _adapter_arrays() if getattr(leaf, name) is not None}
            arrays.update({f"{path}.{name}": array for name, array in parts.items()})
            return {"kind": "LoRA", "base": base, "arrays": sorted(parts), "scaling": leaf.scaling}
        case jax.Array():
            arrays[path] = leaf
            return {"kind": "array"}
        case _:
            raise ValueError(f"{path} holds no array but a {type(leaf).__name__}: load or init the model first")


def _adapter_arrays() -> list[str]:
    return [f.name for f in dataclasses.fields(LoRA) if f.name != "base" and not f.metadata.get("static")]


def _put_together(path: str, kind: Any, arrays: dict[str, jax.Array]) -> Any:
    match kind["kind"]:
        case "array":
            return arrays[path]
        case "MXFP4":
            return MXFP4(arrays[f"{path}.packed"], arrays[f"{path}.scale"], layout=kind["layout"])
        case "LoRA":
            base = _put_together(f"{path}.base", kind["base"], arrays)
            return LoRA(base, **{name: arrays[f"{path}.{name}"] for name in kind["arrays"]}, scaling=kind["scaling"])
        case other:
            raise ValueError(f"{path}: unknown kind of weight {other!r}")
