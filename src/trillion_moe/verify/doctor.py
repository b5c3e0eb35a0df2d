"""`trillion-moe doctor`: versions beside those that were tested, devices, plugins, and what is missing for what."""

import argparse
import dataclasses
import json
import os
import platform
import re
import shutil
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import jax

from trillion_moe import __version__
from trillion_moe.stamp import DRIVER, runtime

PACKAGE = "trillion-moe"
OPTIONAL = {"torch": "parity", "transformers": "parity", "peft": "parity"}
"""Beside what is required: distributions, and the extra that brings them."""
PLUGINS = {
    "tpu": ("libtpu",),
    "cuda13": ("jax-cuda13-plugin", "jax-cuda13-pjrt", "jax-cuda12-plugin", "jax-cuda12-pjrt"),
}
FIRST = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
_REQUIREMENT = re.compile(
    r"(?P<name>[A-Za-z0-9._-]+)(\[[^]]*\])?\s*((?P<how>>=|==)\s*(?P<tested>[0-9][^;,\s]*))?[^;]*"
    r"(;.*extra\s*==\s*[\"'](?P<extra>[^\"']+)[\"'])?"
)


@dataclasses.dataclass(frozen=True)
class Version:
    """A distribution. tested: the version that the tests ran with, at the least; how: ">=" or "==", as it is required.
    extra: that brings it, None where it is required. verdict: "ok", "missing", "too old", "not the tested one"."""

    name: str
    installed: str | None
    tested: str | None
    how: str | None
    extra: str | None

    @property
    def verdict(self) -> str:
        if self.installed is None:
            return "missing"
        if self.tested is not None and release(self.installed) < release(self.tested):
            return "too old"
        if self.how == "==" and release(self.installed) != release(self.tested or ""):
            return "not the tested one"
        return "ok"

    @property
    def wrong(self) -> bool:
        """Whether nothing works before this is mended."""
        return self.extra is None and self.verdict in ("missing", "too old")


def release(version: str) -> tuple[int, ...]:
    """``1.20.3rc1+cu1`` -> (1, 20, 3), zeros at the end left out."""
    numbers = re.match(r"[0-9]+(\.[0-9]+)*", version)
    parts = [int(part) for part in numbers.group().split(".")] if numbers else []
    while parts and not parts[-1]:
        parts.pop()
    return tuple(parts)


def versions(requirements: Sequence[str] | None = None) -> list[Version]:
    """Of all that is required, and of the optional ones, by what this package's metadata requires."""
    requirements = metadata.requires(PACKAGE) or [] if requirements is None else requirements
    found = {}
    for requirement in requirements:
        if match := _REQUIREMENT.match(requirement):
            name, extra = match["name"].lower().replace("_", "-"), match["extra"]
            if extra is None or OPTIONAL.get(name) == extra:
                found[name] = Version(name, _installed(name), match["tested"], match["how"], extra)
    found.setdefault("jaxlib", Version("jaxlib", _installed("jaxlib"), None, None, None))
    order = [*FIRST, *sorted(found.keys() - set(FIRST) - OPTIONAL.keys()), *OPTIONAL]
    return [found[name] for name in order if name in found]


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def devices() -> tuple[list[dict[str, Any]], str]:
    """JAX's devices, and what the back end says of itself, or why there is none."""
    try:
        found = jax.devices()
        says = runtime()
    except (RuntimeError, AssertionError) as error:  # JAX asserts that a platform it was told to use has a plugin
        return [], str(error) or f"JAX has no plugin for JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')}"
    return [_device(device) for device in found], says


def _device(device: Any) -> dict[str, Any]:
    """memory: bytes that JAX may use; None where the back end does not say it, as on CPU."""
    try:
        limit = (device.memory_stats() or {}).get("bytes_limit")
    except jax.errors.JaxRuntimeError:
        limit = None
    return {"id": device.id, "platform": device.platform, "kind": device.device_kind, "memory": limit}


def plugins() -> dict[str, str]:
    """Installed ones, by name."""
    found = {name: _installed(name) for names in PLUGINS.values() for name in names}
    return {name: version for name, version in found.items() if version is not None}


def missing(held: Sequence[Version], here: Sequence[dict[str, Any]], plugged: dict[str, str]) -> list[str]:
    """What is not there, what it would be for, and how to get it."""
    found = [f"{v.name} is {_needs(v)}: {install()}" for v in held if v.wrong]
    for extra, what in {"tpu": "TPU", "cuda13": "GPU"}.items():
        if not any(name in plugged for name in PLUGINS[extra]):
            found.append(f"no {what} plugin, for {what}s only: {install(extra)}")
    platforms = {device["platform"] for device in here}
    if not here:
        found.append("JAX finds no device")
    elif (DRIVER.exists() or shutil.which("nvidia-smi")) and not platforms & {"gpu", "cuda"}:
        found.append(f"an NVIDIA driver is here, but JAX runs on {', '.join(sorted(platforms))}")
    odd = [v for v in held if v.extra is not None and v.verdict != "ok"]
    if odd:
        names = ", ".join(f"{v.name} {_needs(v)}" for v in odd)
        found.append(f"comparisons with other software need {names}: {install('parity')}")
    return found


def _needs(v: Version) -> str:
    says = {"missing": "missing", "too old": f"{v.installed}, too old"}.get(v.verdict, f"{v.installed}")
    return says if v.tested is None else f"{says} (tested: {v.how}{v.tested})"


def install(extra: str = "") -> str:
    """What to type in a clone: this package is on no index."""
    return f"pip install -e '.[{extra}]' in a clone" if extra else "pip install -e . in a clone"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """-> 1 if something that is required is missing or too old, else 0."""
    held, plugged = versions(), plugins()
    here, says = devices()
    lacks = missing(held, here, plugged)
    code = 1 if any(v.wrong for v in held) or not here else 0
    if args.json:
        rows = [dataclasses.asdict(v) | {"verdict": v.verdict} for v in held]
        about = {PACKAGE: __version__, "python": platform.python_version(), "versions": rows}
        print(json.dumps(about | {"devices": here, "backend": says, "plugins": plugged, "missing": lacks}, indent=2))
        return code
    print(f"{PACKAGE} {__version__}, python {platform.python_version()}")
    print(f"{'package':20} {'installed':14} {'tested':14} verdict")
    for v in held:
        tested = "" if v.tested is None else f"{v.how}{v.tested}"
        optional = f" (for {v.extra} only)" if v.extra else ""
        print(f"{v.name:20} {v.installed or '-':14} {tested:14} {v.verdict}{optional}")
    for device in here:
        memory = "" if device["memory"] is None else f", {device['memory']:,} bytes"
        print(f"device {device['id']}: {device['kind']} ({device['platform']}){memory}")
    print(f"back end: {says}")
    print(f"plugins: {', '.join(f'{name} {version}' for name, version in plugged.items()) or 'none'}")
    for finding in lacks:
        print(f"missing: {finding}")
    return code
