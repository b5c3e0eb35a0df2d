"""KDA's Pallas kernels, interpreted, beyond what every form is held to: cuts, tiles, races, work, refusals."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.kernels.kda_tools import FORMS, KERNELS, RACES, K, close, exact, found, make, pick, run
from tests.kernels.races import races
from tests.numerics import rel_rms

from trillion_moe.kernels.linear_attention import gpu, kda, pallas, tpu

CHIPS = sorted(KERNELS)
T, CHUNK = 150, 16  # two groups of the TPU's, and a ragged end
slow = pytest.mark.slow  # every shape compiles an interpreter of its own, for seconds
by_chunks = partial(found, chunk=CHUNK)


@slow
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("cut", [37, 64, 128])
def test_cut_anywhere_equals_one_go(cut, chip) -> None:
    """fault 3: the state passes the cut, and its gradient passes back."""
    data = make(T)
    _, state, (_, dstate) = data
    parts = [pick(data, np.s_[:, :cut]), pick(data, np.s_[:, cut:])]
    middle = by_chunks(FORMS[chip], (parts[0][0], state, (parts[0][2][0], np.zeros_like(dstate))))[1]
    rest = by_chunks(FORMS[chip], (parts[1][0], middle, (parts[1][2][0], dstate)))
    first = by_chunks(FORMS[chip], (parts[0][0], state, (parts[0][2][0], rest[7])))
    joined = [np.concatenate(pair, axis=1) for pair in zip(first, rest, strict=True)]
    joined[1], joined[7] = rest[1], first[7]
    close(joined, exact(data), "float32")


@slow
@pytest.mark.parametrize("chip", CHIPS)
def test_more_than_one_block_of_keys_and_values(chip) -> None:
    """K = 140 and V = 40: above every tile, multiples of none, and different."""
    rng = np.random.default_rng(0)
    draw = partial(rng.normal, size=(1, 40, 2, 140))
    q, k = (a / np.linalg.norm(a, axis=-1, keepdims=True) for a in (draw(), draw()))
    v, do = rng.normal(size=(2, 1, 40, 2, 40))
    x = (q, k, v, -np.abs(draw()), rng.uniform(size=(1, 40, 2)))
    data = (x, rng.normal(size=(1, 2, 140, 40)), (do, rng.normal(size=(1, 2, 140, 40))))
    close(by_chunks(FORMS[chip], data), exact(data), "float32")


# --- races, work, refusals --------------------------------------------------------------------------------------------


def test_no_race() -> None:
    """Two cores share heads and rows; every pair of conflicting accesses would be reported."""
    data = make(T)
    assert not races(lambda: close(by_chunks(partial(pallas.kda, RACES), data), exact(data), "float32"))


def test_filling_up_takes_less_than_a_chunk_for_each_step() -> None:
    """513 tokens are two steps of five chunks, not of eight."""
    assert [tpu.length(64, T) for T in (1, 64, 512, 513, 600, 1030)] == [64, 64, 512, 640, 640, 1152]
    for T in range(1, 3000, 7):
        assert gpu.length(64, T) - T < 64
        assert 0 <= tpu.length(64, T) - T < 64 * -(-T // 512)
        assert tpu.length(64, T) == tpu.length(64, tpu.length(64, T))


def test_refusals() -> None:
    x, state, _ = jax.tree.map(jnp.asarray, make(3))
    with jax.enable_x64(True), pytest.raises(TypeError, match="takes float32 and bfloat16, got float64"):
        kda(*jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), x), impl="tpu")
    for chip in CHIPS:
        with pytest.raises(Exception, match="interpret mode"):
            kda(*x, state=state, impl=chip)
    with pytest.raises(ValueError, match="chunk is 24"):
        kda(*x, impl="gpu", chunk=24)


@slow
def test_under_x64() -> None:
    """Where Python's integers are 64 bits wide. The GPU's compiles there, but JAX's interpreter mixes widths itself."""
    data = make(20)
    with jax.enable_x64(True):
        x = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), data)
        got = run(FORMS["tpu"], *x, None, None, CHUNK)
    close(got, exact(data), "float32")


@pytest.mark.parametrize("chip", CHIPS)
def test_chunks_that_a_kernel_has_not(chip) -> None:
    for chunk in (8, 512):
        with pytest.raises(ValueError, match=f"chunk is {chunk}; this kernel takes 16 to"):
            found(FORMS[chip], make(20), chunk=chunk)


def test_a_token_by_itself_runs_no_kernel() -> None:
    """Decoding is one step of the recurrence, on every chip the same."""
    x, state, _ = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), make(1))
    for impl in ("tpu", "gpu"):
        got, want = kda(*x, state=state, impl=impl), kda(*x, state=state, impl="xla")
        assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))
    assert rel_rms(got[1], kda(*x, state=state, impl="reference")[1]) < 1e-6
    assert got[1].shape[2] == K
