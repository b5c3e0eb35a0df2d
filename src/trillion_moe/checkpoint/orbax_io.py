"""A model as an Orbax checkpoint: its arrays as they are held, adapters included, with config and plan beside.

    FOLDER/arrays/        Orbax: one array per path of the tree
    FOLDER/config.json    the model's config
    FOLDER/model.json     written last: depth plan, dtype, and of what kind every weight is, with checksums. Without it
                          nothing is read.

Orbax sees a flat dict of paths, so that neither nnx nor our weight types need be known to read the arrays.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp

from trillion_moe.blueprint import Segment, numbered
from trillion_moe.checkpoint.atomic import new_folder, write_text
from trillion_moe.checkpoint.errors import CheckpointError
from trillion_moe.checkpoint.names import tree_leaves
from trillion_moe.checkpoint.orbax_arrays import ARRAYS, read, write
from trillion_moe.checkpoint.save import copy_files
from trillion_moe.config import ModelConfig
from trillion_moe.sharding import Layout, cut_for, shardings
from trillion_moe.weights import ARRANGED, MXFP4, LoRA, PackedLayout, is_arranged, matrix_shape

MARKER, FORMAT = "model.json", "trillion_moe orbax 4"
STORABLE = ("float32", "bfloat16", "float16", "float64", "int32", "uint8")
Tree = TypeVar("Tree")


def is_orbax(folder: str | Path) -> bool:
    """Whether this is (or was to be) an Orbax checkpoint rather than a folder of safetensors."""
    return (Path(folder) / MARKER).exists() or (Path(folder) / ARRAYS).is_dir()


def save_orbax(folder: str | Path, model: Any, *, beside: Sequence[Path] = ()) -> None:
    """Write a model, whatever its weights are. beside: files to copy along. The folder appears complete
    or not at all, and is never overwritten."""
    if is_arranged(model):
        raise CheckpointError(folder, [ARRANGED])
    leaves, _ = tree_leaves(model)
    arrays: dict[str, jax.Array] = {}
    kinds = {path: _take_apart(path, leaf, arrays) for path, leaf in leaves}
    with new_folder(folder) as temporary:
        copy_files(beside, temporary)
        sums = write(temporary, arrays)
        write_text(temporary / "config.json", json.dumps(model.config.to_json(), indent=2, ensure_ascii=False) + "\n")
        checked = {path: (str(a.dtype), a.shape, sums[path]) for path, a in arrays.items()}
        about = asdict(About(FORMAT, model.dtype, model.plan, kinds, checked))
        write_text(temporary / MARKER, json.dumps(about, indent=1) + "\n")


def load_orbax(
    folder: str | Path, build: Callable[[ModelConfig, str, tuple[Segment, ...]], Tree], *, layout: Layout | None = None
) -> Tree:
    """The model as it was saved, bit for bit, over a mesh if a layout is given, whatever it was saved from. Its depth
    plan is that of the file, also where the mesh has other pipeline stages.

    build: makes the plain blueprint of config, dtype and depth plan; the weights found take the place of its Specs.
    Raises CheckpointError for a folder that is absent, half-written, of another format or short of an array.
    """
    folder = Path(folder).absolute()
    about = _read_about(folder)
    config = ModelConfig.from_file(folder)
    _refuse(folder, _odd_plan(about.plan, config))
    leaves, treedef = tree_leaves(build(config, about.dtype, about.plan))
    paths = {path for path, _ in leaves}
    odd = {path: "checkpoint" if path in paths else "model" for path in sorted(paths ^ set(about.weights))}
    _refuse(folder, [f"{path}: not in the {where}" for path, where in odd.items()])
    missing = {name for path in paths for name in about.weights[path].names(path)} - set(about.arrays)
    _refuse(folder, [f"{MARKER}: no array {name}" for name in sorted(missing)])
    known = {name for path in paths for name in about.weights[path].names(path)}
    _refuse(folder, [f"{MARKER}: array {name} is of no weight" for name in sorted(set(about.arrays) - known)])
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = {p: jax.ShapeDtypeStruct(tuple(s), jnp.dtype(d), sharding=here) for p, (d, s, _) in about.arrays.items()}
    weights = [about.weights[path].put_together(path, target) for path, _ in leaves]
    shapes = [(path, matrix_shape(w), matrix_shape(spec)) for (path, spec), w in zip(leaves, weights, strict=True)]
    _refuse(
        folder, [f"{path} is {list(has)}, config.json makes it {list(due)}" for path, has, due in shapes if has != due]
    )
    if layout is not None:
        target = _over(layout, treedef.unflatten(weights), target)
    arrays = read(folder, target, {path: was for path, (_, _, was) in about.arrays.items()})
    model = treedef.unflatten([about.weights[path].put_together(path, arrays) for path, _ in leaves])
    model.layout = layout
    return model


def _over(layout: Layout, model: Any, target: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays to restore, each where the layout has it; model: made of them."""
    pairs = zip(
        jax.tree.leaves(model),
        jax.tree.leaves(shardings(model, layout, whole=_other_stages(model, layout))),
        strict=True,
    )
    where = {id(leaf): at for leaf, at in pairs}
    return {p: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=where[id(a)]) for p, a in target.items()}


def _other_stages(model: Any, layout: Layout) -> tuple[str, ...]:
    return () if cut_for(model) == (layout.size("pp"), layout.virtual) else ("stages",)


def _refuse(folder: Path, findings: list[str]) -> None:
    if findings:
        raise CheckpointError(folder, findings)


def _odd_plan(plan: tuple[Segment, ...], config: ModelConfig) -> list[str]:
    """What a depth plan has otherwise than config.json; counted before it is written out, it may be anything."""
    if (count := sum(segment.count for segment in plan)) != config.num_layers:
        return [f"{MARKER}: the plan has {count} layers, config.json {config.num_layers}"]
    found = numbered(plan)
    if [number for number, _ in found] != list(range(config.num_layers)):
        return [f"{MARKER}: the plan's layers are not 0 to {config.num_layers - 1}"]
    stated = zip(config.attention, config.mlp, strict=True)
    return [
        f"{MARKER}: layer {i} is {kind.attention}, {kind.ffn}, in config.json {a}, {b}"
        for (i, kind), (a, b) in zip(found, stated, strict=True)
        if (kind.attention, kind.ffn) != (a, b)
    ]


def _read_about(folder: Path) -> "About":
    import pydantic

    if not (folder / MARKER).is_file():
        what = f"no {MARKER}, which is written last: the save was not finished" if folder.is_dir() else "no such folder"
        raise CheckpointError(folder, [what])
    try:
        about = json.loads((folder / MARKER).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(folder, [f"{MARKER} is not JSON: {error}"]) from None
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise CheckpointError(folder, [f"{MARKER} is not of the format {FORMAT!r}"])
    try:
        return pydantic.TypeAdapter(About).validate_python(about)
    except pydantic.ValidationError as error:
        wrong = [f"{MARKER}: {'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        raise CheckpointError(folder, wrong) from None


# --- model.json ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plain:
    """One array, under the path of the weight."""

    kind: Literal["array"] = "array"

    def names(self, path: str) -> list[str]:
        return [path]

    def put_together(self, path: str, arrays: Mapping[str, Any]) -> Any:
        return arrays[path]


@dataclass(frozen=True)
class Packed:
    """The two arrays of an MXFP4 weight."""

    layout: PackedLayout
    kind: Literal["MXFP4"] = "MXFP4"

    def names(self, path: str) -> list[str]:
        return [f"{path}.packed", f"{path}.scale"]

    def put_together(self, path: str, arrays: Mapping[str, Any]) -> Any:
        packed, scale = (arrays[name] for name in self.names(path))
        return MXFP4(packed, scale, layout=self.layout)


@dataclass(frozen=True)
class Adapted:
    """A LoRA weight: how its base is held, and which of its own arrays there are."""

    base: "Plain | Packed | Adapted"
    arrays: tuple[Literal["a", "b", "slots"], ...]
    scaling: float
    kind: Literal["LoRA"] = "LoRA"

    def names(self, path: str) -> list[str]:
        return [*self.base.names(f"{path}.base"), *(f"{path}.{name}" for name in self.arrays)]

    def put_together(self, path: str, arrays: Mapping[str, Any]) -> Any:
        own = {name: arrays[f"{path}.{name}"] for name in self.arrays}
        return LoRA(self.base.put_together(f"{path}.base", arrays), **own, scaling=self.scaling)


@dataclass(frozen=True)
class About:
    """What model.json says. arrays: dtype, shape and checksum by name."""

    format: str
    dtype: Literal["float32", "bfloat16", "float16", "float64"]
    plan: tuple[Segment, ...]
    weights: dict[str, Plain | Packed | Adapted]
    arrays: dict[str, tuple[str, tuple[int, ...], int]]

    def __post_init__(self):
        for name, (dtype, shape, _) in self.arrays.items():
            if dtype not in STORABLE or min(shape, default=0) < 0:
                raise ValueError(f"{name} is {dtype} {list(shape)}: legal are {', '.join(STORABLE)}, no dim below 0")


def _take_apart(path: str, leaf: Any, arrays: dict[str, jax.Array]) -> Plain | Packed | Adapted:
    """Enter the arrays of a weight under their paths -> how to put them together again."""
    match leaf:
        case MXFP4():
            arrays[f"{path}.packed"], arrays[f"{path}.scale"] = leaf.packed, leaf.scale
            return Packed(leaf.layout)
        case LoRA():
            base = _take_apart(f"{path}.base", leaf.base, arrays)
            parts: Any = {name: getattr(leaf, name) for name in ("a", "b", "slots") if getattr(leaf, name) is not None}
            arrays.update({f"{path}.{name}": array for name, array in parts.items()})
            return Adapted(base, tuple(parts), leaf.scaling)
        case jax.Array():
            arrays[path] = leaf
            return Plain()
        case _:
            raise ValueError(f"{path} holds no array but a {type(leaf).__name__}: load or init the model first")
