"""Arrays by name in a folder of Orbax, with the checksums that Orbax does not have."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import jax

from trillion_moe.checkpoint.checksums import checksums
from trillion_moe.checkpoint.errors import CheckpointError
from trillion_moe.sharding import bytes_on_a_device

ARRAYS = "arrays"  # the folder's name
AT_ONCE = 1 << 30  # bytes on a device

Targets = Mapping[str, jax.ShapeDtypeStruct]


def write(folder: Path, arrays: Mapping[str, jax.Array]) -> dict[str, int]:
    """-> their checksums, which `read` wants. CheckpointError where the disk does not take them."""
    import orbax.checkpoint as ocp

    found = checksums(arrays)
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save((folder / ARRAYS).absolute(), dict(arrays))
    except Exception as error:  # Orbax raises a ValueError for a full disk
        raise CheckpointError(folder, [f"Orbax cannot write: {type(error).__name__}: {error}"]) from error
    return found


def read(folder: Path, targets: Targets, sums: Mapping[str, int]) -> dict[str, jax.Array]:
    """These arrays, all or some of the folder's, where their targets lie, bit for bit. CheckpointError for one that is
    not there, has another shape, or is not what was saved."""
    import orbax.checkpoint as ocp

    wanted = ocp.args.PyTreeRestore(
        targets, restore_args=ocp.checkpoint_utils.construct_restore_args(targets), partial_restore=True
    )
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            found = checkpointer.restore((folder / ARRAYS).absolute(), args=wanted)
    except Exception as error:  # Orbax raises many kinds for an incomplete folder
        raise CheckpointError(folder, [f"Orbax cannot restore: {type(error).__name__}: {error}"]) from error
    if lost := [name for name in targets if not isinstance(found[name], jax.Array)]:  # but the target, as it was
        raise CheckpointError(folder, [f"Orbax has no {name}" for name in lost])
    now = checksums(found)
    if spoilt := [name for name in targets if now[name] != sums[name]]:
        what = [f"{name}, as {found[name].dtype}, has other values than were saved" for name in spoilt]
        raise CheckpointError(folder, what)
    return found


def in_parts(targets: Targets) -> Iterator[Targets]:
    """In their order, as many together as have AT_ONCE bytes on a device, or one."""
    part: dict[str, jax.ShapeDtypeStruct] = {}
    for name, target in targets.items():
        if part and bytes_on_a_device([*part.values(), target]) > AT_ONCE:
            yield part
            part = {}
        part[name] = target
    if part:
        yield part
