"""Checkpoints of a training run: everything that the next step needs, complete or not there.

    OUTPUT/checkpoints/00000120/arrays/     Orbax: trainable weights and optimizer state, by path
    OUTPUT/checkpoints/00000120/state.json  written last: step, data position, best loss, the run's configuration

A checkpoint is verified by reading it back before an older one is removed.
"""

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from trillion_moe.blueprint import Segment
from trillion_moe.checkpoint.atomic import new_folder, write_text
from trillion_moe.checkpoint.errors import CheckpointError
from trillion_moe.checkpoint.orbax_arrays import in_parts, read, write
from trillion_moe.checkpoint.shared_disk import check_seen
from trillion_moe.distributed import current

FOLDER, STATE = "checkpoints", "state.json"
NAME, UNFINISHED = re.compile("[0-9]{8,}"), re.compile(r"\.[0-9]{8,}\.unfinished-.*")
SUMS = "checksums"  # in the state: of every array, which Orbax does not check


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint on disk. state: what was saved beside the arrays."""

    folder: Path
    state: Mapping[str, Any]

    @property
    def step(self) -> int:
        return int(self.state["step"])


def save(output: Path, arrays: Any, state: Mapping[str, Any], *, keep: int, best: int | None) -> Saved:
    """Write the checkpoint of ``state["step"]``, then remove all but the last `keep` and the one of step `best`. All
    processes of a run call this; arrays lie over them, each writes its part."""
    processes = current()
    if processes.first:
        _remove_unfinished(output)
    folder = output / FOLDER / f"{state['step']:08d}"
    with new_folder(folder) as temporary:
        state = {**state, SUMS: write(temporary, _by_path(arrays))}
        write_text(temporary / STATE, json.dumps(state, indent=1) + "\n")
    saved = Saved(folder, state)
    check_seen(folder / STATE)  # who does not see it would leave the others waiting inside of Orbax
    for part in in_parts(_targets(arrays)):
        read(folder, part, state[SUMS])
    processes.wait("checkpoint read back")
    for old in found(output)[:-keep] if processes.first else ():
        if old.step != best:
            (old.folder / STATE).unlink()  # first, so that what a kill leaves of the folder is no checkpoint
            shutil.rmtree(old.folder)
    processes.wait("old checkpoints removed")
    return saved


def found(output: Path) -> list[Saved]:
    """The complete checkpoints of a run, oldest first. What a killed save left behind is passed over.

    Raises CheckpointError for a state that cannot be read.
    """
    folders = [f for f in _inside(output) if NAME.fullmatch(f.name) and (f / STATE).is_file()]
    return [Saved(folder, _state(folder)) for folder in sorted(folders, key=lambda f: int(f.name))]


def agreed(output: Path, step: int | None = None) -> Saved | None:
    """The checkpoint of an update, or else the latest, as process 0 finds it; None where it finds none. All processes
    of a run call this and are given the same: another's own list of the folder may be an older one.

    Raises CheckpointError, in all of them, naming those that do not see it.
    """
    processes = current()
    there = [saved for saved in found(output) if step in (None, saved.step)] if processes.first else []
    what = "latest checkpoint" if step is None else f"checkpoint of update {step}"
    name = processes.gather(what, there[-1].folder.name if there else None)[0]
    if name is None:
        return None
    folder = output / FOLDER / name
    check_seen(folder / STATE)
    return Saved(folder, _state(folder))


def restore(saved: Saved, into: Any, *, part: bool = False) -> Any:
    """The arrays of a checkpoint in the tree of `into`, and where its leaves lie, bit for bit. part: these are not all
    that it has.

    What is an array in `into` is given up, in parts, as each has been read: but for one of them no device holds both.
    Raises CheckpointError if they do not fit, or are not what was saved; of `into` some is then gone.
    """
    leaves, targets = _by_path(into), _targets(into)
    sums = saved.state[SUMS]
    odd = targets.keys() - sums.keys() if part else targets.keys() ^ sums.keys()
    _refuse(saved, [f"{path} is not in the {'run' if path in sums else 'checkpoint'}" for path in sorted(odd)])
    found: dict[str, jax.Array] = {}
    for some in in_parts(targets):
        found |= read(saved.folder, some, sums)
        for path in some:
            if isinstance(leaf := leaves[path], jax.Array):
                leaf.delete()
    return jax.tree.unflatten(jax.tree.structure(into), [found[path] for path in leaves])


def depth(saved: Saved) -> tuple[Segment, ...]:
    """The depth plan of the arrays. CheckpointError if it is none."""
    import pydantic

    try:
        return pydantic.TypeAdapter(tuple[Segment, ...]).validate_python(saved.state["depth"])
    except pydantic.ValidationError as error:
        raise CheckpointError(saved.folder, [f"{STATE}: depth: {error.errors()[0]['msg']}"]) from None


@dataclass(frozen=True)
class _State:
    """What is in state.json."""

    step: int
    tokens: int
    best: float | None
    best_step: int | None
    stale: int
    data: dict[str, Any]
    config: dict[str, Any]
    depth: list[Any]
    capacity: float | None
    checksums: dict[str, int]


def _state(folder: Path) -> Mapping[str, Any]:
    import pydantic

    text = (folder / STATE).read_bytes()
    try:
        state = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(folder, [f"{STATE} is not JSON: {error}"]) from None
    try:
        step = pydantic.TypeAdapter(_State).validate_json(text, strict=True).step
    except pydantic.ValidationError as error:
        wrong = [f"{': '.join([STATE, *map(str, e['loc'])])}: {e['msg']}" for e in error.errors()]
        raise CheckpointError(folder, wrong) from None
    if step != int(folder.name):
        raise CheckpointError(folder, [f"{STATE} is of update {step}"])
    return state


def _remove_unfinished(output: Path) -> None:
    """What killed processes left of a save or of a removal, hidden or not."""
    for folder in _inside(output):
        if UNFINISHED.fullmatch(folder.name) or (NAME.fullmatch(folder.name) and not (folder / STATE).is_file()):
            shutil.rmtree(folder)


def _inside(output: Path) -> list[Path]:
    folder = output / FOLDER
    return [one for one in folder.iterdir() if one.is_dir()] if folder.is_dir() else []


def _refuse(saved: Saved, findings: list[str]) -> None:
    if findings:
        raise CheckpointError(saved.folder, findings)


def _targets(tree: Any) -> dict[str, jax.ShapeDtypeStruct]:
    return {p: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding) for p, a in _by_path(tree).items()}


def _by_path(tree: Any) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}
