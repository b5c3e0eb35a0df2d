"""Checkpoints of a training run: everything that the next step needs, complete or not there.

    OUTPUT/checkpoints/00000120/arrays/     Orbax: trainable weights and optimizer state, by path
    OUTPUT/checkpoints/00000120/state.json  written last: step, data position, best loss, the run's configuration

A checkpoint is verified by reading it back before an older one is removed.
"""

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from trillion_moe.blueprint import Segment
from trillion_moe.checkpoint.atomic import new_folder, write_text
from trillion_moe.checkpoint.checksums import checksums
from trillion_moe.checkpoint.errors import CheckpointError
from trillion_moe.checkpoint.shared_disk import check_seen
from trillion_moe.distributed import current

FOLDER, ARRAYS, STATE = "checkpoints", "arrays", "state.json"
AT_ONCE = 1 << 30  # bytes of a device, read together
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
    import orbax.checkpoint as ocp

    processes = current()
    if processes.first:
        _remove_unfinished(output)
    by_path = _by_path(arrays)
    state = {**state, SUMS: checksums(by_path)}
    folder = output / FOLDER / f"{state['step']:08d}"
    with new_folder(folder) as temporary:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save((temporary / ARRAYS).absolute(), by_path)
        write_text(temporary / STATE, json.dumps(state, indent=1) + "\n")
    saved = Saved(folder, state)
    check_seen(folder / STATE)  # who does not see it would leave the others waiting inside of Orbax
    for _ in _parts(saved, by_path):
        pass
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
    folders = sorted((output / FOLDER).glob("[0-9]*")) if (output / FOLDER).is_dir() else []
    return [Saved(folder, _state(folder)) for folder in folders if (folder / STATE).is_file()]


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


def restore(saved: Saved, into: Any) -> Any:
    """The arrays of a checkpoint, in the tree of `into` and where its arrays lie, bit for bit. They take the place of
    those, which are given up one after the other, so that no device holds both.

    Raises CheckpointError if they do not fit, or are not what was saved.
    """
    paths, found = _by_path(into), {}
    for part in _parts(saved, paths):
        for path in part:
            paths[path].delete()
        found |= part
    return jax.tree.unflatten(jax.tree.structure(into), [found[path] for path in paths])


def _parts(saved: Saved, like: Mapping[str, jax.Array]) -> Iterator[dict[str, jax.Array]]:
    """The arrays of a checkpoint that lie as these do, checked, as many at a time as AT_ONCE allows, or else one."""
    sums = saved.state[SUMS]
    if odd := sorted(sums.keys() ^ like.keys()):
        what = [f"{path} is not in the {'run' if path in sums else 'checkpoint'}" for path in odd]
        raise CheckpointError(saved.folder, what)
    group: list[str] = []
    room = AT_ONCE
    for path, array in like.items():
        size = math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
        if group and size > room:
            yield _read(saved, {path: like[path] for path in group})
            group, room = [], AT_ONCE
        group.append(path)
        room -= size
    yield _read(saved, {path: like[path] for path in group})


def _read(saved: Saved, like: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    import orbax.checkpoint as ocp

    target = {path: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding) for path, a in like.items()}
    wanted = ocp.args.PyTreeRestore(
        target, restore_args=ocp.checkpoint_utils.construct_restore_args(target), partial_restore=True
    )
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            found = checkpointer.restore((saved.folder / ARRAYS).absolute(), args=wanted)
    except Exception as error:  # Orbax raises many kinds for an incomplete folder
        raise CheckpointError(saved.folder, [f"Orbax cannot restore: {type(error).__name__}: {error}"]) from error
    if lost := [path for path, array in found.items() if not isinstance(array, jax.Array)]:
        raise CheckpointError(saved.folder, [f"Orbax has no {path}" for path in lost])
    now = checksums(found)
    if spoilt := [path for path in found if now[path] != saved.state[SUMS][path]]:
        raise CheckpointError(saved.folder, [f"{path} has other values than were saved" for path in spoilt])
    return found


def depth(saved: Saved) -> tuple[Segment, ...]:
    """The depth plan of the arrays. CheckpointError if it is none."""
    import pydantic

    try:
        return pydantic.TypeAdapter(tuple[Segment, ...]).validate_python(saved.state["depth"])
    except pydantic.ValidationError as error:
        raise CheckpointError(saved.folder, [f"{STATE}: depth: {error.errors()[0]['msg']}"]) from None


def _state(folder: Path) -> Mapping[str, Any]:
    try:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(folder, [f"{STATE} is not JSON: {error}"]) from None
    if not isinstance(state, dict) or (missing := {"step", "depth", "capacity", SUMS} - state.keys()):
        what = "no object" if not isinstance(state, dict) else f"without {', '.join(map(repr, sorted(missing)))}"
        raise CheckpointError(folder, [f"{STATE} is {what}: no checkpoint of a training run of this version"])
    return state


def _remove_unfinished(output: Path) -> None:
    """What killed processes left of a save or of a removal, hidden or not."""
    for folder in (output / FOLDER).glob("*") if (output / FOLDER).is_dir() else ():
        if (folder.is_dir() and not (folder / STATE).is_file()) or ".unfinished-" in folder.name:
            shutil.rmtree(folder)


def _by_path(tree: Any) -> dict[str, jax.Array]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}
