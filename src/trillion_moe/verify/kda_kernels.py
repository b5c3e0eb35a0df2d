"""KDA's Pallas kernels for chips that are not here, at Kimi K3's shapes: the second table of docs/kernels.md."""

import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp

from trillion_moe.aot import compile_for
from trillion_moe.kernels.linear_attention import kda
from trillion_moe.meshes.chips import Chip, Gpu
from trillion_moe.verify.compiled import calls, kernel_options, ptxas

HEADS, DIM = 96, 128
PASSES = tuple((tokens, what) for tokens in (8_192, 32_768) for what in ("forward", "gradients"))
WITHIN = {"tpu": {"forward": 32, "gradients": 448}, "gpu": {"forward": 1_312, "gradients": 2_080}}
"""Bytes of temporaries for each token and head, at most.

TPU: the kept states, 4 K V / 512 = 128, and the outputs that gradients alone do not ask for, 2 V = 256. GPU forward:
two squares of a chunk, 2 x 4 x 64 = 512, and three edges, 3 x 2 K = 768. With gradients a third square, 256, two states
of every chunk, 2 x 2 K V / 64 = 1,024, and three of what tokens write, 3 x 2 V = 768: 3,328, of which 1,280 fit into
the memory of the gradients to q, k, v and g.
"""
SHORT = (9, 40)
"""Tokens of prompts below the smallest chunk and between two chunks: gradients compile."""


@dataclass(frozen=True)
class Proof:
    """Of one pass on one chip. per_token: bytes of temporaries for each token and head. spills: bytes of all kernels,
    None where the compiler does not say."""

    chip: str
    tokens: int
    what: str
    calls: int
    per_token: float
    registers: int | None
    spills: int | None


def prove(chip: Chip, tokens: int, what: str) -> Proof:
    """Compile it. Raises `aot.AotError` without the chip's compiler, and what the compiler refuses."""
    platform = "gpu" if isinstance(chip, Gpu) else "tpu"

    def forward(q, k, v, g, beta, state):
        """Of arrays as projections make them [B, T, H K]."""
        q_, k_, v_, g_ = (a.reshape(1, tokens, HEADS, DIM) for a in (q, k, v, g))
        o, final = kda(q_, k_, v_, g_, beta, state=state, impl=platform)
        return o.reshape(q.shape), final

    def backward(x, do, dfinal):
        return jax.vjp(forward, *x)[1]((do, dfinal))

    rows, wide = (jax.ShapeDtypeStruct((1, tokens, HEADS * DIM), dtype) for dtype in (jnp.bfloat16, jnp.float32))
    beta = jax.ShapeDtypeStruct((1, tokens, HEADS), jnp.float32)
    state = jax.ShapeDtypeStruct((1, HEADS, DIM, DIM), jnp.float32)
    x = (rows, rows, rows, wide, beta, state)
    with tempfile.TemporaryDirectory() as folder:
        options = kernel_options(platform, folder)
        if what == "gradients":
            program = compile_for(chip, backward, x, rows, state, options=options)
        else:
            program = compile_for(chip, forward, *x, options=options)
        registers, spills = ptxas(platform, Path(folder), "kda_")
    per_token = program.compiled.memory_analysis().temp_size_in_bytes / (tokens * HEADS)
    return Proof(chip.name, tokens, what, calls(platform, program), per_token, registers, spills)


def table(proofs: Iterable[Proof]) -> str:
    """Markdown."""
    lines = [
        "| chip | tokens | KDA | calls | temporaries, GB | bytes a token and head | registers | spilled |",
        "|---|--:|---|--:|--:|--:|--:|--:|",
    ]
    for p in proofs:
        says = ["-" if value is None else str(value) for value in (p.registers, p.spills)]
        gigabytes = p.per_token * p.tokens * HEADS / 1e9
        lines.append(
            f"| {p.chip} | {p.tokens:,} | {p.what} | {p.calls} | {gigabytes:.2f} | {p.per_token:.0f} "
            f"| {' | '.join(says)} |"
        )
    return "\n".join(lines) + "\n"
