"""What a measurement was made on, and the file that holds it: whole or not there, and never over something else."""

import json
import os
import platform
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from jax.extend import backend

DRIVER = Path("/proc/driver/nvidia/version")
_STRICT: dict[str, Any] = {"extra": "forbid", "strict": True}


class OutputError(ValueError):
    """A file that cannot be written, or that holds something else."""


@dataclass(frozen=True)
class Stamp:
    """The machine and its software. runtime: what the back end says of itself; driver: the kernel module's version."""

    __pydantic_config__ = _STRICT

    platform: str
    device: str
    count: int
    runtime: str
    driver: str | None
    matmul_precision: str | None
    versions: dict[str, str]

    @classmethod
    def here(cls) -> "Stamp":
        from trillion_moe import __version__  # not while this package is imported

        device = jax.devices()[0]
        versions = {"trillion_moe": __version__, "python": platform.python_version()}
        return cls(
            platform=device.platform,
            device=device.device_kind,
            count=jax.device_count(),
            runtime=runtime(),
            driver=_driver() if device.platform in ("gpu", "cuda") else None,
            matmul_precision=jax.config.jax_default_matmul_precision,  # pyright: ignore[reportAttributeAccessIssue]
            versions=versions | {name: version(name) for name in ("jax", "jaxlib", "numpy")},
        )


def runtime() -> str:
    """What the back end says of itself, in one line."""
    return " ".join(backend.get_backend().platform_version.split())


def _driver() -> str | None:
    """NVIDIA's, in its own words; None where the kernel does not say it."""
    try:
        return DRIVER.read_text(encoding="utf-8").splitlines()[0].strip()
    except (OSError, IndexError):
        return None


def write_report(path: str | Path, fields: Mapping[str, Any]) -> None:
    """To a JSON file, which has its name only when it is whole; one that is there is replaced."""
    path = Path(path).resolve()
    part = _part_of(path)
    text = json.dumps(fields, indent=2, allow_nan=False)
    try:
        with part.open("x", encoding="utf-8") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _part_of(path: Path) -> Path:
    """What a file is called until it is whole."""
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.part")


def check_new(path: Path) -> None:
    """OutputError, before minutes are spent, where the file is there or cannot be written."""
    check_output(path, "")
    if path.exists() or path.is_symlink():
        raise OutputError(f"--json: {path} is there: legal is a new file")


def check_output(path: Path, key: str) -> None:
    """OutputError, before minutes are spent, where the file cannot be written, or is something else than a report.

    key: the name that stands first in a report of this kind.
    """
    try:
        target = path.resolve()
        if not target.parent.is_dir():
            raise OutputError(f"--json: {target.parent} is no folder that is there")
        if target.exists() and not target.is_file():
            raise OutputError(f"--json: {path} is there and is no file")
        if target.exists():
            with target.open("rb") as file:
                if key.encode() not in file.read(100):
                    raise OutputError(f"--json: {path} is there and is no report, only a report is replaced")
        part = _part_of(target)
        part.touch(exist_ok=False)
        part.unlink()
    except (OSError, RuntimeError) as error:  # a loop of links is a RuntimeError
        raise OutputError(f"--json: {path} cannot be written: {getattr(error, 'strerror', error)}") from None
