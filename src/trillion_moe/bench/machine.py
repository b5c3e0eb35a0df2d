"""What a measurement was made on."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any


def machine() -> dict[str, Any]:
    packages = ("trillion-moe", "jax", "jaxlib", "flax", "numpy", "torch", "transformers", "peft")
    return {
        "cores": os.cpu_count(),
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "glibc_tunables": os.environ.get("GLIBC_TUNABLES"),  # of malloc; large pages change CPU times
        "versions": {name: _version(name) for name in packages},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
