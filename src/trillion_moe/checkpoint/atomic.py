"""A folder that is there complete or not at all, written by one process or by several that share a disk."""

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from trillion_moe.checkpoint.errors import CheckpointError
from trillion_moe.distributed import current


@contextlib.contextmanager
def new_folder(folder: str | Path) -> Iterator[Path]:
    """Yields a hidden sibling to write into, which becomes `folder` when the block ends.

    A block that raises leaves nothing. A killed process leaves a hidden folder ``.NAME.unfinished-...``, which nothing
    here ever reads and which may be deleted. Raises CheckpointError if `folder` is there already and is not empty.

    All processes of a run are in the block together and are given the same folder; the first makes and renames it.
    """
    processes = current()
    folder = Path(os.path.abspath(folder))
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(folder, ["exists already; nothing is overwritten, choose another name or remove it"])
    mark = processes.gather(f"name of {folder.name}", f"{os.getpid()}-{secrets.token_hex(4)}")[0]
    temporary = folder.with_name(f".{folder.name}.unfinished-{mark}")
    if processes.first:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
    processes.wait(f"start of {folder.name}")
    try:
        yield temporary
        processes.wait(f"end of {folder.name}")
        if processes.first:
            sync(temporary)
            os.rename(temporary, folder)
            sync(folder.parent)
    except BaseException:
        if processes.first:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    processes.wait(f"name of {folder.name} given")


def sync(path: Path) -> None:
    """Wait until a folder's list of names is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """A new file, on disk when this returns; of several processes the first one writes it."""
    if not current().first:
        return
    with open(path, "x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
