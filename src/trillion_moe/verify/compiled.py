"""What is asked of a program of Pallas kernels that was compiled for a chip which is not here."""

import re
import subprocess
from pathlib import Path
from typing import Any

from trillion_moe.aot import Program

_CALLS = {"tpu": "tpu_custom_call", "gpu": "__gpu$xla.gpu.triton"}


def calls(platform: str, program: Program) -> int:
    """How many Mosaic or Triton kernels it runs."""
    return program.lowered.as_text().count(f"@{_CALLS[platform]}(")


def kernel_options(platform: str, folder: str) -> dict[str, Any] | None:
    """Options of XLA that leave a GPU program's PTX in a folder.

    Optimised, whatever the tests' XLA_FLAGS say: they turn it off for CPU, and ptxas then sees other code.
    """
    return {"xla_dump_to": folder, "xla_backend_optimization_level": 3} if platform == "gpu" else None


def ptxas(platform: str, folder: Path, entry: str) -> tuple[int | None, int | None]:
    """Most registers of a thread, and bytes spilled, over the kernels whose names begin like that in a program's PTX.

    None for TPUs, whose compiler does not say.
    """
    if platform != "gpu":
        return None, None
    registers, spills = 0, 0
    for file in sorted(folder.glob("*.ptx")):
        text = file.read_text()
        if not re.search(rf"\.entry {entry}", text):
            continue
        target = re.search(r"\.target (\w+)", text)
        assert target is not None
        said = subprocess.run(
            ["ptxas", "-v", f"-arch={target[1]}", str(file), "-o", "/dev/null"],
            capture_output=True, text=True, check=True,
        ).stderr  # fmt: skip
        registers = max(registers, *map(int, re.findall(r"Used (\d+) registers", said)))
        spills += sum(map(int, re.findall(r"(\d+) bytes spill", said)))
    return registers, spills
