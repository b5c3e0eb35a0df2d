"""A disk that processes share, which may show one host later what another has written."""

import contextlib
import os
import time
from pathlib import Path

from trillion_moe.checkpoint.errors import CheckpointError
from trillion_moe.distributed import current

SEEN = 10.0  # seconds that a shared disk may take
AGAIN = 0.1  # seconds between two looks


def blind(path: Path) -> list[str]:
    """Wait until every process sees what the first one has written by now -> by name those that do not in SEEN seconds.
    All processes of a run call this and are given the same."""
    processes = current()
    if processes.count == 1:
        return []
    name = f"{path.parent.name}/{path.name}"
    processes.wait(f"{name} written")
    until = time.monotonic() + SEEN
    while not (seen := _sees(path)) and time.monotonic() < until:
        time.sleep(AGAIN)
    found = processes.gather(f"sight of {name}", seen)
    return [f"process {i} (host {processes.hosts[i]})" for i in range(processes.count) if not found.get(i, found[0])]


def check_seen(path: Path) -> None:
    """`blind`, which nobody may be: CheckpointError in all processes, so that none of them waits for another."""
    if who := blind(path):
        raise CheckpointError(
            path.parent, [f"{one} does not see {path.name} here in {SEEN:g} s: share a disk" for one in who]
        )


def _sees(path: Path) -> bool:
    """NFS asks its server for a folder that is opened; what was not in it a moment ago is else taken not to be there
    for up to a minute."""
    for folder in reversed(path.absolute().parents):
        with contextlib.suppress(OSError):
            os.close(os.open(folder, os.O_RDONLY))
    return os.path.exists(path)
