"""The Pallas kernels, interpreted: values and every gradient by group against float64, races, refusals."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from tests.kernels.grouped_tools import (
    DENSE,
    PACKED,
    SIZES,
    assert_close,
    assert_rows_close,
    bank,
    expected,
    interpreted,
    problem,
)
from tests.kernels.races import races
from tests.numerics import rel_rms

from trillion_moe.kernels import mxfp4
from trillion_moe.kernels.grouped_matmul import Silu, Situ, gated_grouped_matmul, grouped_matmul, pallas, tiles, tpu
from trillion_moe.kernels.mxfp4 import gated_grouped_matmul_mxfp4, grouped_matmul_mxfp4
from trillion_moe.kernels.mxfp4 import tpu as mxfp4_tpu

TOLERANCE = {"float32": 2e-6, "bfloat16": 4e-3}
CHIPS = sorted(DENSE)
slow = pytest.mark.slow  # every shape compiles an interpreter of its own, for seconds


@partial(jax.jit, static_argnames=("chip", "transpose_w"))
def value_and_grads(x, w, dy, sizes, chip, transpose_w=False):
    y, vjp = jax.vjp(lambda x, w: pallas.matmul(DENSE[chip], transpose_w, x, (w,), sizes), x, w)
    return y, *vjp(dy)


# --- one bank ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("transpose_w", [False, pytest.param(True, marks=slow)])
@pytest.mark.parametrize("name", [pytest.param(n, marks=slow if rows < 75 else ()) for n, (rows, _) in SIZES.items()])
def test_dense_matches_float64(name, transpose_w, chip) -> None:
    rows, sizes = SIZES[name]
    x, w, dy = (a.astype(np.float32) for a in problem(rows, sizes, transpose_w))
    got = value_and_grads(x, w, dy, sizes, chip, transpose_w)
    want = expected(*(a.astype(np.float64) for a in (x, w, dy)), sizes, transpose_w)
    assert_close(got, want, sizes, TOLERANCE["float32"])


@pytest.mark.parametrize("chip", CHIPS)
def test_bfloat16_is_added_up_in_float32(chip) -> None:
    """The error is that of one rounding, not of a bfloat16 sum over 300 rows."""
    rows, sizes = SIZES["tall"]
    x, w, dy = (jnp.asarray(a, jnp.bfloat16) for a in problem(rows, sizes))
    got = value_and_grads(x, w, dy, sizes, chip)
    assert [a.dtype for a in got] == [jnp.bfloat16] * 3
    want = expected(*(np.asarray(a, np.float64) for a in (x, w, dy)), sizes)
    assert_close(got, want, sizes, TOLERANCE["bfloat16"])


@slow
@pytest.mark.parametrize("chip", CHIPS)
def test_more_than_one_tile_of_columns(chip) -> None:
    """N and K above every tile, and multiples of none."""
    sizes = np.array([3, 0, 22])
    x, w, dy = (a.astype(np.float32) for a in problem(30, sizes, k=530, n=650))
    got = value_and_grads(x, w, dy, sizes, chip)
    want = expected(*(a.astype(np.float64) for a in (x, w, dy)), sizes)
    assert_close(got, want, sizes, TOLERANCE["float32"])


# --- packed -----------------------------------------------------------------------------------------------------------


@partial(jax.jit, static_argnames="chip")
def packed_value_and_grad(x, packed, scale, dy, sizes, chip):
    y, vjp = jax.vjp(lambda x: pallas.matmul(PACKED[chip], False, x, (packed, scale), sizes), x)
    return y, *vjp(dy)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(
    ("name", "k", "n"),
    [("dead_tail", 96, 17), pytest.param("tall", 96, 17, marks=slow), pytest.param("decode", 512, 264, marks=slow)],
)
def test_packed_matches_float64(name, k, n, chip) -> None:
    rows, sizes = SIZES[name]
    stored = bank(np.random.default_rng(1), len(sizes), n, k, chip)
    w = np.asarray(mxfp4.decode(*map(jnp.asarray, stored), layout=mxfp4.LAYOUT[chip]), np.float64)
    x, _, dy = (a.astype(np.float32) for a in problem(rows, sizes, k=k, n=n))
    got = packed_value_and_grad(x, *stored, dy, sizes, chip)
    wide = (a.astype(np.float64) for a in (x, w if mxfp4.LAYOUT[chip] == "kn" else w.swapaxes(1, 2), dy))
    assert_rows_close(got, expected(*wide, sizes)[:2], sizes, TOLERANCE["float32"])


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_every_code_is_decoded_exactly(chip, dtype) -> None:
    """Rows of the identity read every byte, at scale codes from end to end (0 and 1 where all values are 0)."""
    n, k = 16, 32
    packed = np.arange(256, dtype=np.uint8).reshape(1, n, k // 2).repeat(8, axis=0)
    scale = np.tile(np.array([2, 7, 90, 127, 128, 200, 251, 252], np.uint8)[:, None, None], (1, n, 1))
    packed[0, 0] = 0x80
    scale[0, 0] = 1
    scale[1, 0], packed[1, 0] = 0, 0
    stored = mxfp4.to_layout(packed, scale, "nk", mxfp4.LAYOUT[chip])
    rows = jnp.tile(jnp.eye(k, dtype=dtype), (8, 1))
    y = pallas.matmul(PACKED[chip], False, rows, tuple(map(jnp.asarray, stored)), jnp.full(8, k))
    want = mxfp4.decode(jnp.asarray(packed), jnp.asarray(scale), dtype=dtype)
    assert np.array_equal(np.asarray(y, np.float32).reshape(8, k, n).swapaxes(1, 2), np.asarray(want, np.float32))


# --- gate and up ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize(
    ("activation", "with_added", "packed"),
    [
        (Silu(), False, False),
        (Situ(4.0, 25.0), True, True),
        pytest.param(Silu(), True, False, marks=slow),
        pytest.param(Situ(4.0, 25.0), False, False, marks=slow),
        pytest.param(Situ(), True, False, marks=slow),
        pytest.param(Situ(), False, True, marks=slow),
    ],
)
def test_gated_matches_float64(chip, activation, with_added, packed) -> None:
    """Values, and gradients to rows, to both banks and to what is added, in float64 by autodiff of the definition."""
    rows, sizes = SIZES["dead_tail"]
    rng, (k, n), experts = np.random.default_rng(2), (96, 17), len(sizes)
    x, _, dy = (a.astype(np.float32) for a in problem(rows, sizes, k=k, n=n))
    x, dy = jnp.asarray(x), jnp.asarray(dy)
    added = tuple(jnp.asarray(rng.normal(size=(rows, n)), jnp.float32) for _ in range(2 * with_added))
    if packed:
        banks = [bank(rng, experts, n, k, chip) for _ in range(2)]
        layout = mxfp4.LAYOUT[chip]
        dense = [mxfp4.decode(*map(jnp.asarray, each), layout=layout) for each in banks]
        plain = [np.asarray(w if layout == "kn" else w.swapaxes(1, 2)) for w in dense]
        kernels, trained = PACKED[chip], ()
    else:
        plain = [jnp.asarray(rng.normal(size=(experts, k, n)), jnp.float32) for _ in range(2)]
        kernels, trained = DENSE[chip], tuple(plain)

    def ours(x, added, banks):
        gate, up = ((w,) for w in banks) if banks else stored
        return pallas.gated(kernels, activation, x, gate, up, added, jnp.asarray(sizes))

    stored = tuple(tuple(map(jnp.asarray, each)) for each in banks) if packed else ()
    y, vjp = jax.vjp(ours, x, added, trained)
    found = (y, *vjp(jnp.asarray(dy)))
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), (x, added, tuple(plain)))

        def defined(x, added, banks):
            return gated_grouped_matmul(x, *banks, jnp.asarray(sizes), activation, added=added, impl="reference")

        y, vjp = jax.vjp(defined, *wide)
        want = jax.tree.map(np.asarray, (y, *vjp(jnp.asarray(dy, jnp.float64))))
    live = sum(sizes)
    for got, exact in zip(jax.tree.leaves(found[:3]), jax.tree.leaves(want[:3]), strict=True):
        assert rel_rms(got[:live], exact[:live]) < 2e-6
    for got, exact in zip(found[3], want[3] if trained else (), strict=True):
        for e in range(experts):
            assert rel_rms(got[e], exact[e]) < 2e-6
    assert not np.any(found[0][live:])
    assert not np.any(found[1][live:])


def test_gated_keeps_no_product() -> None:
    """What the backward pass holds on to: rows, banks and sizes, and nothing [R, F]."""
    sizes = jnp.array([40, 35])
    x, w = jnp.ones((75, 96)), jnp.ones((2, 96, 40))
    _, vjp = jax.vjp(lambda x: pallas.gated(DENSE["gpu"], Silu(), x, (w,), (w,), (), sizes), x)
    assert (75, 40) not in {a.shape for a in jax.tree.leaves(vjp)}


# --- which rows a step works on ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("tile", [16, 64])
def test_every_row_has_one_owner(name, tile) -> None:
    """Each row is in one tile of the group that it belongs to; tiles of the fixed grid are visited in order."""
    rows, sizes = SIZES[name]
    owner = np.repeat(np.arange(len(sizes) + 1), [*sizes, rows - sum(sizes)])
    seen = np.full(rows, -1)
    for group, first, end in zip(*map(np.asarray, tiles.owned(jnp.asarray(sizes), rows, tile)), strict=True):
        assert 0 <= end - first <= tile
        assert (seen[first:end] == -1).all()
        seen[first:end] = group
    assert np.array_equal(seen, owner)
    visit = tiles.visits(jnp.asarray(sizes), rows, tile)
    pairs = list(zip(np.asarray(visit.tile), np.asarray(visit.group), strict=True))[: int(visit.count)]
    assert pairs == sorted({(r // tile, g) for r, g in enumerate(owner)})
    assert int(visit.count) <= len(visit.tile)


# --- races ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", [pytest.param("dense", marks=slow), "packed"])
def test_no_race(what) -> None:
    """Two cores share the parallel dims of the grid; every pair of conflicting accesses would be reported."""
    params = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2)
    rows, sizes = SIZES["dead_tail"]
    sizes, rng = jnp.asarray(sizes), np.random.default_rng(0)
    x, dy = jnp.ones((rows, 96)), jnp.ones((rows, 264))
    if what == "dense":
        kernels, stored = interpreted(tpu.KERNELS, params), (jnp.ones((5, 96, 264)),)
    else:
        stored = tuple(map(jnp.asarray, bank(rng, 5, 264, 96, "tpu")))
        kernels = interpreted(mxfp4_tpu.KERNELS, params)

    def run():
        _, vjp = jax.vjp(lambda x: pallas.matmul(kernels, False, x, stored, sizes), x)
        return vjp(dy), kernels.weight_grad(x, dy, sizes) if what == "dense" else None

    assert not races(run)


def test_a_planted_race_is_found() -> None:
    """Two cores write one block."""

    def body(x, y):
        y[...] = x[...]

    call = pl.pallas_call(
        body,
        grid=(2,),
        in_specs=[pl.BlockSpec((8, 128), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((8, 128), lambda i: (0, 0)),
        out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2),
    )
    assert races(lambda: call(jnp.ones((16, 128))))


# --- what is refused --------------------------------------------------------------------------------------------------


def test_refusals() -> None:
    x, w, sizes = jnp.ones((4, 64)), jnp.ones((2, 64, 8)), jnp.array([2, 2])
    with pytest.raises(TypeError, match="'tpu' takes rows of float32 or bfloat16, got float16"):
        grouped_matmul(x.astype(jnp.float16), w, sizes, impl="tpu")
    with pytest.raises(TypeError, match="rows are int32; they must be floating"):
        grouped_matmul(x.astype(jnp.int32), w, sizes)
    with pytest.raises(TypeError, match="rows are bfloat16, other operands float32"):
        grouped_matmul(x.astype(jnp.bfloat16), w, sizes, impl="gpu")
    with pytest.raises(ValueError, match=r"gate and up must be \[E, K, F\]"):
        gated_grouped_matmul(x, w, w[:1], sizes, Silu())
    with pytest.raises(ValueError, match=r"added must be two arrays \[4, 8\]"):
        gated_grouped_matmul(x, w, w, sizes, Silu(), added=(jnp.ones((4, 8)),))
    stored = bank(np.random.default_rng(0), 2, 8, 64, "gpu")
    with pytest.raises(ValueError, match="'tpu' reads layout 'kn', the bank has 'nk'"):
        grouped_matmul_mxfp4(x, *stored, sizes, impl="tpu")
    with pytest.raises(ValueError, match="gate and up must have one shape"):
        gated_grouped_matmul_mxfp4(x, stored, tuple(a[:, :4] for a in stored), sizes, Silu())


def test_a_kernel_does_not_run_on_another_platform() -> None:
    """And no other implementation takes its place."""
    x, w, sizes = jnp.ones((4, 64)), jnp.ones((2, 64, 8)), jnp.array([2, 2])
    for chip in CHIPS:
        with pytest.raises(Exception, match="interpret mode"):
            grouped_matmul(x, w, sizes, impl=chip)


@pytest.mark.parametrize("impl", ["reference", "xla", "ragged_dot"])
def test_what_is_added_to_dead_rows_counts_for_nothing(impl) -> None:
    """In no implementation: a row past the last group is zero, and so is its gradient."""
    x, w, sizes = jnp.ones((4, 64)), jnp.ones((2, 64, 8)), jnp.array([2, 0])
    added = (jnp.ones((4, 8)).at[3].set(jnp.nan), jnp.ones((4, 8)).at[2].set(jnp.nan))
    y, vjp = jax.vjp(lambda added: gated_grouped_matmul(x, w, w, sizes, Silu(), added=added, impl=impl), added)
    ((gate, up),) = vjp(jnp.ones_like(y))
    for array in (y, gate, up):
        assert np.asarray(array[:2]).all()
        assert not np.asarray(array[2:]).any()


def test_scales_under_either_dtype_are_codes() -> None:
    """fault 53: float8_e8m0fnu holds the same bytes as uint8."""
    packed, scale = map(jnp.asarray, bank(np.random.default_rng(0), 2, 8, 64, "gpu"))
    x, sizes = jnp.ones((4, 64)), jnp.array([2, 2])
    seen = jax.lax.bitcast_convert_type(scale, jnp.float8_e8m0fnu)
    assert np.array_equal(*(grouped_matmul_mxfp4(x, packed, s, sizes) for s in (scale, seen)))
    with pytest.raises(TypeError, match="packed must be uint8"):
        grouped_matmul_mxfp4(x, packed.astype(jnp.int8), scale, sizes)
