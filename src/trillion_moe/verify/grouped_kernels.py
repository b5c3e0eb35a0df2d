"""Grouped matmul's Pallas kernels for chips that are not here: compiled, measured by their compilers, counted.

Shapes are Kimi K3's on one device of 16 that share its experts: 56 of them, 65,536 rows.
"""

import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from trillion_moe.aot import compile_for
from trillion_moe.kernels import grouped_matmul as grouped
from trillion_moe.kernels import mxfp4
from trillion_moe.kernels.grouped_matmul import cases
from trillion_moe.meshes.chips import Chip, Gpu
from trillion_moe.verify.compiled import calls, kernel_options, ptxas
from trillion_moe.verify.flops import count

EXPERTS, ROWS, LATENT, HIDDEN, RANK = 56, 65_536, 3584, 3072, 8
GROUP_SIZES = {name: getattr(cases, name)(ROWS, EXPERTS) for name in ("balanced", "zipf", "all_to_one")}


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
    """Of one kernel on one chip. temporaries: bytes, without those that one kernel leaves to the next, `passed_on`;
    share: of the bank. spills: bytes, None where the compiler does not say. work: executed over ideal FLOPs by group
    sizes; declared: the kernels' own estimates over ideal."""

    chip: str
    kernel: str
    calls: int
    temporaries: int
    passed_on: int
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
        options = kernel_options(platform, folder)
        program = compile_for(chip, partial(kernel.run, platform), sizes, *kernel.arrays(platform), options=options)
        registers, spills = ptxas(platform, Path(folder), "grouped_")
    temporaries = program.compiled.memory_analysis().temp_size_in_bytes - kernel.passed_on
    work, declared = counted(platform, kernel.name)
    return Proof(
        chip.name, kernel.name, calls(platform, program), temporaries, kernel.passed_on,
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


def table(proofs: Iterable[Proof]) -> str:
    """Markdown."""
    lines = [
        "| chip | kernel | calls | left to the next, MB | temporaries, MB | of the bank | registers | spilled "
        "| work: balanced | Zipf | one |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for p in proofs:
        work = " | ".join(f"{p.work[name]:.3f}" for name in GROUP_SIZES)
        says = ["-" if value is None else str(value) for value in (p.registers, p.spills)]
        lines.append(
            f"| {p.chip} | {p.kernel} | {p.calls} | {p.passed_on / 1e6:.0f} | {p.temporaries / 1e6:.2f} "
            f"| {'-' if p.kernel in LORA else f'{p.share:.3%}'} | {' | '.join(says)} | {work} |"
        )
    return "\n".join(lines) + "\n"
