"""The Pallas kernels compiled for chips that are not here, and the counter of what they execute."""

import dataclasses
import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from trillion_moe.kernels import mxfp4
from trillion_moe.kernels.grouped_matmul import grouped_matmul
from trillion_moe.kernels.linear_attention import gpu, tpu
from trillion_moe.meshes.chips import CHIPS, Gpu
from trillion_moe.verify import grouped_kernels as kernels
from trillion_moe.verify import kda_kernels
from trillion_moe.verify.flops import count

DOCUMENT = Path(__file__).parents[2] / "docs" / "kernels.md"


# --- compiled ---------------------------------------------------------------------------------------------------------


@pytest.mark.aot
@pytest.mark.parametrize("name", kernels.KERNELS)
@pytest.mark.parametrize("chip", CHIPS)
def test_compiled_at_kimi_k3_s_shapes(chip, name) -> None:
    """A kernel call for every product, no bank decoded or copied outside, no spills, work within 1.1 of ideal."""
    proof = kernels.prove(CHIPS[chip], kernels.KERNELS[name])
    assert proof.calls == (2 if "gradient" in name and "down" not in name else 1)
    assert not proof.spills
    assert proof.registers is None or proof.registers > 0  # ptxas has seen the kernels
    assert (proof.registers is None) == (proof.spills is None) == (not isinstance(CHIPS[chip], Gpu))
    assert proof.declared == 1.0
    if name in kernels.LORA:  # the lanes of a TPU are padded from the rank to 128
        assert proof.temporaries < 100e6
    else:
        assert proof.share < 0.01
        assert max(proof.work.values()) <= 1.1
    (row,) = [line for line in DOCUMENT.read_text().splitlines() if line.startswith(f"| {chip} | {name} |")]
    assert row.endswith(" | ".join(f"{work:.3f}" for work in proof.work.values()) + " |")


@pytest.mark.aot
def test_a_bank_that_is_decoded_outside_is_seen() -> None:
    """What the bars above are for: the definition decodes the whole bank."""

    def whole(impl, sizes, x, packed, scale):
        return mxfp4.grouped_matmul_mxfp4(x, packed, scale, sizes, layout=mxfp4.LAYOUT[impl], impl="xla")

    kernel = dataclasses.replace(kernels.KERNELS["MXFP4 down"], run=whole)
    program = kernels.prove(CHIPS["v5p"], kernel)
    assert program.calls == 0
    assert program.share > 0.01


@pytest.mark.aot
@pytest.mark.parametrize(("tokens", "what"), kda_kernels.PASSES)
@pytest.mark.parametrize("chip", CHIPS)
def test_kda_compiled_at_kimi_k3_s_shapes(chip, tokens, what) -> None:
    """Kernels alone; temporaries linear in the tokens, by the constants stated."""
    proof, platform = kda_kernels.prove(CHIPS[chip], tokens, what), "gpu" if isinstance(CHIPS[chip], Gpu) else "tpu"
    assert proof.calls == {"tpu": {"forward": 1, "gradients": 2}, "gpu": {"forward": 2, "gradients": 6}}[platform][what]
    assert proof.per_token <= kda_kernels.WITHIN[platform][what]
    assert proof.registers is None or proof.registers > 0
    assert what == "gradients" or (proof.spills or 0) <= 8
    (row,) = kda_kernels.table([proof]).splitlines()[2:]
    assert row in DOCUMENT.read_text().splitlines()


@pytest.mark.aot
@pytest.mark.parametrize("tokens", kda_kernels.SHORT)
@pytest.mark.parametrize("chip", CHIPS)
def test_kda_compiles_for_short_prompts(chip, tokens) -> None:
    assert kda_kernels.prove(CHIPS[chip], tokens, "gradients").calls == (6 if isinstance(CHIPS[chip], Gpu) else 2)


def test_the_document_has_every_kernel_on_every_chip() -> None:
    rows = re.findall(r"^\| (\w+) \| ([^|]+) \|", DOCUMENT.read_text().split("| chip | tokens |")[0], re.MULTILINE)
    expected = [(chip, name) for chip in CHIPS for name in kernels.KERNELS]
    assert rows[1:] == expected


# --- counted ----------------------------------------------------------------------------------------------------------


def shape(*dims: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, jnp.float32)


@pytest.mark.parametrize("impl", ["tpu", "gpu"])
def test_work_of_known_tiles(impl) -> None:
    """Two groups of 512 rows fill their tiles; one row more costs one more sub-tile, or tile."""
    product, per_row = partial(grouped_matmul, impl=impl), 2 * 64 * 128

    def executed(*sizes: int) -> float:
        return count(product, shape(2048, 64), shape(len(sizes), 64, 128), np.array(sizes)).executed / per_row

    assert executed(512, 512) == 1024
    assert executed(512, 512, 1) == 1024 + 64
    assert executed(0, 0) == 0


@pytest.mark.parametrize("chip", [tpu, gpu], ids=["tpu", "gpu"])
def test_kda_declares_what_it_executes(chip) -> None:
    heads, state = shape(1, 1024, 2, 128), shape(1, 2, 128, 128)
    x = (heads, heads, heads, heads, shape(1, 1024, 2))
    kept = shape(1, 2, 2, 128, 128) if chip is tpu else state
    forward = count(lambda *a: chip.forward(64, a[:5], a[5], True), *x, state)
    backward = count(lambda *a: chip.backward(64, a[:5], *a[5:]), *x, kept, heads, state)
    assert (forward.kernels, backward.kernels) == ((1, 1) if chip is tpu else (2, 4))
    assert forward.executed == forward.declared > 0
    assert backward.executed == backward.declared > forward.executed


def test_branches_and_loops_are_followed() -> None:
    """One product in two of three steps, and as many as a number in memory says in the third."""

    def body(times, x, y):
        step = pl.program_id(0)

        @pl.when(step < 2)
        def _():
            y[...] = jnp.dot(x[...], x[...])

        @pl.when(step == 2)
        def _():
            y[...] = jax.lax.fori_loop(0, times[0], lambda i, total: total + jnp.dot(x[...], x[...]), x[...])

    def f(times, x):
        return pl.pallas_call(body, grid=(3,), out_shape=shape(8, 8))(times, x)

    found = count(f, np.array([5], np.int32), shape(8, 8))
    assert (found.executed, found.kernels, found.declared) == (7 * 2 * 8**3, 1, 0)


def test_what_cannot_be_followed_is_refused() -> None:
    def body(x, y):
        @pl.when(x[0, 0] > 0)
        def _():
            y[...] = jnp.dot(x[...], x[...])

    with pytest.raises(ValueError, match="a branch depends on an array"):
        count(lambda x: pl.pallas_call(body, out_shape=shape(8, 8))(x), shape(8, 8))
