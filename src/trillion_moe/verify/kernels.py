"""What the Pallas kernels are for chips that are not here: compiled, measured by their compilers, counted.

    python -m trillion_moe.verify.kernels [--chip NAME ...] [--output docs/kernels.md]

Shapes are Kimi K3's on one device of 16 that share its experts: 56 of them, 65,536 rows.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from trillion_moe.aot import compile_for
from trillion_moe.kernels import grouped_matmul as grouped
from trillion_moe.kernels import mxfp4
from trillion_moe.kernels.grouped_matmul import cases
from trillion_moe.meshes.chips import CHIPS, Chip, Gpu
from trillion_moe.verify.flops import count

EXPERTS, ROWS, LATENT, HIDDEN, RANK = 56, 65_536, 3584, 3072, 8
GROUP_SIZES = {name: getattr(cases, name)(ROWS, EXPERTS) for name in ("balanced", "zipf", "all_to_one")}
CALLS = {"tpu": "tpu_custom_call", "gpu": "__gpu$xla.gpu.triton"}


@dataclass(frozen=True)
class Kernel:
    """One program. run(impl, sizes, *arrays); arrays: shapes in order. ideal: FLOPs of its products, each done once.
    passed_on: bytes of results that one of its kernels leaves to the next."""

    name: str
    run: Callable[..., Any]
    arrays: Callable[[str], tuple[Any, ...]]
    bank_bytes: int
    ideal: int
    passed_on: int = 0


@dataclass(frozen=True)
class Proof:
    """Of one kernel on one chip. spills: bytes, None where the compiler does not say. work: executed over ideal FLOPs
    by group sizes; declared: the kernels' own estimates over ideal."""

    chip: str
    kernel: str
    calls: int
    temporaries: int
    share: float
    registers: int | None
    spills: int | None
    work: dict[str, float]
    declared: float


def _rows(n: int, rows: int = ROWS) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((rows, n), jnp.bfloat16)


def _packed(platform: str, k: int, n: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    nk = mxfp4.LAYOUT[platform] == "nk"
    shapes = [(EXPERTS, n, k // each) if nk else (EXPERTS, k // each, n) for each in (2, 32)]
    return tuple(jax.ShapeDtypeStruct(shape, jnp.uint8) for shape in shapes)


def _dense(k: int, n: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((EXPERTS, k, n), jnp.bfloat16)


def _multiply(impl, sizes, x, packed, scale):
    return mxfp4.grouped_matmul_mxfp4(x, packed, scale, sizes, layout=mxfp4.LAYOUT[impl], impl=impl)


def _gated(impl, sizes, x, gate_packed, gate_scale, up_packed, up_scale):
    banks = (gate_packed, gate_scale), (up_packed, up_scale)
    situ = grouped.Situ(4.0, 25.0)
    return mxfp4.gated_grouped_matmul_mxfp4(x, *banks, sizes, situ, layout=mxfp4.LAYOUT[impl], impl=impl)


def _dense_product(impl, sizes, x, w):
    return grouped.grouped_matmul(x, w, sizes, impl=impl)


def _gradient(f: Callable, wanted: int, impl, sizes, dy, x, *banks):
    """To the first `wanted` of x and the banks."""
    given = (x, *banks)
    _, vjp = jax.vjp(lambda *moving: f(impl, sizes, *moving, *given[wanted:]), *given[:wanted])
    return vjp(dy)


def _kernels() -> Iterable[Kernel]:
    flops, bank = 2 * ROWS * LATENT * HIDDEN, EXPERTS * LATENT * HIDDEN
    packed, dense = bank // 2 + bank // 32, 2 * bank
    both = 2 * 2 * ROWS * HIDDEN  # gradients to gate and up, which one kernel leaves to the next
    yield Kernel(
        "MXFP4 gate and up, SiTU", _gated,
        lambda p: (_rows(LATENT), *_packed(p, LATENT, HIDDEN), *_packed(p, LATENT, HIDDEN)), 2 * packed, 2 * flops,
    )  # fmt: skip
    yield Kernel(
        "MXFP4 gate and up, gradient to rows", partial(_gradient, _gated, 1),
        lambda p: (_rows(HIDDEN), _rows(LATENT), *_packed(p, LATENT, HIDDEN), *_packed(p, LATENT, HIDDEN)),
        2 * packed, 4 * flops, both,
    )  # fmt: skip
    yield Kernel("MXFP4 down", _multiply, lambda p: (_rows(HIDDEN), *_packed(p, HIDDEN, LATENT)), packed, flops)
    yield Kernel(
        "MXFP4 down, gradient to rows", partial(_gradient, _multiply, 1),
        lambda p: (_rows(LATENT), _rows(HIDDEN), *_packed(p, HIDDEN, LATENT)), packed, flops,
    )  # fmt: skip
    yield Kernel("bf16", _dense_product, lambda p: (_rows(LATENT), _dense(LATENT, HIDDEN)), dense, flops)
    yield Kernel(
        "bf16, both gradients", partial(_gradient, _dense_product, 2),
        lambda p: (_rows(HIDDEN), _rows(LATENT), _dense(LATENT, HIDDEN)), dense, 2 * flops,
    )  # fmt: skip


def _lora_kernels() -> Iterable[Kernel]:
    """Rank 8 wastes most of a matrix unit and is bound by memory: what is asked of it is that it compiles."""
    for name, k, n in (("A", LATENT, RANK), ("B", RANK, HIDDEN)):
        yield Kernel(
            f"LoRA {name}, rank {RANK}, both gradients", partial(_gradient, _dense_product, 2),
            lambda p, k=k, n=n: (_rows(n), _rows(k), _dense(k, n)), 2 * EXPERTS * k * n, 4 * ROWS * k * n,
        )  # fmt: skip


_LORA = tuple(_lora_kernels())
KERNELS = {kernel.name: kernel for kernel in (*_kernels(), *_LORA)}
LORA = tuple(kernel.name for kernel in _LORA)


def prove(chip: Chip, kernel: Kernel) -> Proof:
    """Compile it, and count. Raises `aot.AotError` without the chip's compiler, and what the compiler refuses."""
    platform = "gpu" if isinstance(chip, Gpu) else "tpu"
    sizes = jax.ShapeDtypeStruct((EXPERTS,), jnp.int32)
    with tempfile.TemporaryDirectory() as folder:
        # Optimised, whatever the tests' XLA_FLAGS say: they turn it off for CPU, and ptxas then sees other code.
        options = {"xla_dump_to": folder, "xla_backend_optimization_level": 3} if platform == "gpu" else None
        program = compile_for(chip, partial(kernel.run, platform), sizes, *kernel.arrays(platform), options=options)
        registers, spills = ptxas(Path(folder), "grouped_") if platform == "gpu" else (None, None)
    temporaries = program.compiled.memory_analysis().temp_size_in_bytes - kernel.passed_on
    work, declared = counted(platform, kernel.name)
    return Proof(
        chip.name, kernel.name, program.lowered.as_text().count(f"@{CALLS[platform]}("), temporaries,
        temporaries / kernel.bank_bytes, registers, spills, work, declared,
    )  # fmt: skip


@cache
def counted(platform: str, name: str) -> tuple[dict[str, float], float]:
    """(executed over ideal FLOPs by group sizes, declared over ideal) of one platform's kernels."""
    kernel = KERNELS[name]
    work, declared = {}, 0.0
    for sizes, values in GROUP_SIZES.items():
        # As compiled: what nobody asks for, such as the forward product in a gradient, is dropped first.
        found = count(partial(kernel.run, platform), values, *kernel.arrays(platform))
        work[sizes], declared = found.executed / kernel.ideal, found.declared / kernel.ideal
    return work, declared


def ptxas(folder: Path, entry: str) -> tuple[int, int]:
    """Most registers of a thread, and bytes spilled, over the kernels of that name among a program's PTX."""
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


def table(proofs: Iterable[Proof]) -> str:
    """Markdown."""
    lines = [
        "| chip | kernel | calls | temporaries, MB | of the bank | registers | spilled | work: balanced | Zipf | one |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for p in proofs:
        work = " | ".join(f"{p.work[name]:.3f}" for name in GROUP_SIZES)
        says = ["-" if value is None else str(value) for value in (p.registers, p.spills)]
        lines.append(
            f"| {p.chip} | {p.kernel} | {p.calls} | {p.temporaries / 1e6:.2f} | {p.share:.3%} "
            f"| {' | '.join(says)} | {work} |"
        )
    return "\n".join(lines) + "\n"


HEAD = """# Kernels, compiled for chips that were not there

Written by `python -m trillion_moe.verify.kernels --output docs/kernels.md` (`make aot` makes its environment); the
tests marked `aot` hold every row to its bars. Kimi K3's shapes on one device of 16 that share its experts: {experts}
experts, {rows:,} rows, {latent} x {hidden}, bfloat16. Nothing here ran on an accelerator.

- *calls*: Mosaic (TPU) or Triton (GPU) kernels in the program; none of it falls back to XLA's own products.
- *temporaries*: beyond arguments and results, as the compiler reports, and as a share of the bank's bytes: no expert is
  decoded outside a kernel. In the gradient of gate and up the two arrays that one kernel leaves to the next ({both} MB)
  are taken off.
- *registers*, *spilled*: the most of a thread and bytes, as ptxas reports.
- *work*: floating-point operations that the kernels execute, counted from their own products along their own control
  flow, over the ideal number; for equal groups, groups drawn with popularity 1/rank, and all rows in one group. What
  kernels declare to XLA (`CostEstimate`) is the ideal number.
- Factors of rank {rank}: a GPU's tile is 16 wide, twice the work. A TPU's lanes are padded to 128, and for v5p
  and tpu7x XLA copies a factor into that form first, which shows in the temporaries. Both are bound by memory.

{versions}

"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chip", choices=sorted(CHIPS), action="append", help="may be repeated; all by default")
    parser.add_argument("--output", type=Path, help="a Markdown file; printed without")
    args = parser.parse_args()
    if args.chip and args.output:
        parser.error("--output is of all chips: without --chip")
    proofs = [prove(CHIPS[chip], kernel) for chip in args.chip or CHIPS for kernel in KERNELS.values()]
    names = ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "nvidia-cuda-nvcc")
    versions = "Versions: " + ", ".join(f"{name} {version(name)}" for name in names) + "."
    head = HEAD.format(
        experts=EXPERTS, rows=ROWS, latent=LATENT, hidden=HIDDEN, rank=RANK, versions=versions,
        both=round(4 * ROWS * HIDDEN / 1e6),
    )  # fmt: skip
    if args.output is None:
        print(table(proofs))
    else:
        args.output.write_text(head + table(proofs), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
