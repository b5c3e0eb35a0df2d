"""A folder that is there complete or not at all."""

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from trillion_moe.checkpoint.errors import CheckpointError


@contextlib.contextmanager
def new_folder(folder: str | Path) -> Iterator[Path]:
    """Yields a hidden sibling to write into, which becomes `folder` when the block ends.

    A block that raises leaves nothing. A killed process leaves a hidden folder ``.NAME.unfinished-...``, which nothing
    here ever reads and which may be deleted. Raises CheckpointError if `folder` is there already and is not empty.
    """
    folder = Path(os.path.abspath(folder))
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(folder, ["exists already; nothing is overwritten, choose another name or remove it"])
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.unfinished-{os.getpid()}-{secrets.token_hex(4)}")
    temporary.mkdir()
    try:
        yield temporary
        sync(temporary)
        os.rename(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync(folder.parent)


def sync(path: Path) -> None:
    """Wait until a folder's list of names is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """A new file, on disk when this returns."""
    with open(path, "x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
