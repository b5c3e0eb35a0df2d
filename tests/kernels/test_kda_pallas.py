"""KDA's Pallas kernels, interpreted: values and every gradient against the float64 recurrence, races, refusals."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.kernels.kda_tools import KERNELS, NAMES, RACES, B, K, close, make, pick
from tests.kernels.races import races
from tests.numerics import rel_rms

from trillion_moe.kernels.linear_attention import head, kda, pallas

CHIPS = sorted(KERNELS)
T, CHUNK = 150, 16  # two groups of the TPU's, and a ragged end
slow = pytest.mark.slow  # every shape compiles an interpreter of its own, for seconds


@partial(jax.jit, static_argnames=("kernels", "chunk"))
def _found(kernels, x, state, cotangents, segments, state_segment, chunk):
    def run(x, state):
        options = {"segments": segments, "state_segment": state_segment}
        return pallas.kda(kernels, *x, state=state, chunk=chunk, **options)

    out, pull = jax.vjp(run, x, state)
    dx, dstate = pull(tuple(c.astype(o.dtype) for c, o in zip(cotangents, out, strict=True)))
    return *out, *dx, dstate


@jax.jit
def _exact(x, state, cotangents, segments, state_segment):
    def run(x, state):
        return kda(*x, state=state, segments=segments, state_segment=state_segment, impl="reference")

    out, pull = jax.vjp(run, x, state)
    dx, dstate = pull(cotangents)
    return *out, *dx, dstate


def found(kernels, data, segments=None, state_segment=None, chunk=CHUNK):
    data = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), data)
    segments, state_segment = (None if a is None else jnp.asarray(a, jnp.int32) for a in (segments, state_segment))
    return jax.tree.map(np.asarray, _found(kernels, *data, segments, state_segment, chunk))


def exact(data, segments=None, state_segment=None):
    with jax.enable_x64(True):
        data = jax.tree.map(lambda a: np.asarray(a, np.float64), data)
        segments, state_segment = (None if a is None else np.asarray(a, np.int32) for a in (segments, state_segment))
        return jax.tree.map(np.asarray, _exact(*data, segments, state_segment))


def constant(g):
    return make(T, g)


def mixed():
    """From no decay to one that leaves nothing, channel by channel."""
    x, state, cotangents = make(T)
    g = np.broadcast_to(np.array([0.0, -5.0, -1e-3, -40.0, -1.0]), x[3].shape)
    return (*x[:3], g, x[4]), state, cotangents


def equal_keys():
    """The inverse at its largest norm: one key, written over with all weight."""
    (q, k, v, g, beta), state, cotangents = make(T, 0.0)
    return (q, np.broadcast_to(k[:, :1], k.shape), v, g, np.ones_like(beta)), state, cotangents


def zero_rows():
    (q, k, v, g, beta), state, cotangents = make(T)
    for a in (q[:, ::3], k[:, 1::4], v[:, 2::5], beta[:, ::7]):
        a[...] = 0
    return (q, k, v, g, beta), state, cotangents


LIMITS = {f"gates of {g}": partial(constant, g) for g in (0.0, -1e-4, -1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -40.0)} | {
    "drawn": partial(make, T),
    "mixed": mixed,
    "equal keys": equal_keys,
    "zero rows": zero_rows,
}


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("name", LIMITS)
def test_equals_recurrence_fault_21_22_25(name, chip) -> None:
    """fault 21, 22, 25: at saturated gates, at none, at a softplus' -6 and far below it; finite, and right."""
    data = LIMITS[name]()
    close(found(KERNELS[chip], data), exact(data), "float32")


PACKED = np.stack([np.repeat([3, 1, 2, 0, 2, 7], [20, 1, 60, 9, 30, 30]), np.repeat([0, 1, 2, 0], [5, 59, 80, 6])])


@pytest.mark.parametrize("chip", CHIPS)
def test_packed_documents_and_padding_of_nan(chip) -> None:
    """fault 15, 16, 18, 20: a row continues a document or drops the state of another; padding takes no gradient."""
    data = make(T)
    real = PACKED != 0
    for a in (*data[0], data[2][0]):
        a[~real] = np.nan
    for before in ([3, 1], [3, 9]):
        got = found(KERNELS[chip], data, PACKED, before)
        close(got, exact(data, PACKED, before), "float32")
        assert not any(np.asarray(got[i])[~real].any() for i in (0, 2, 3, 4, 5, 6))


@pytest.mark.parametrize("chip", CHIPS)
def test_documents_do_not_meet_in_rounding(chip) -> None:
    """A document with cotangents 1e8 times larger leaves the gradients of its neighbours at full float32 precision."""
    x, state, (do, dstate) = make(T)
    segments = np.stack([np.repeat([1, 2, 3], [51, 42, 57])] * B)
    do = do * np.repeat([1.0, 1e8, 1.0], [51, 42, 57])[None, :, None, None]
    data, before = (x, state, (do, dstate)), [1, 1]
    got, want = found(KERNELS[chip], data, segments, before), exact(data, segments, before)
    for part in (np.s_[:, :51], np.s_[:, 51:93], np.s_[:, 93:]):
        close([a[part] for a in got[2:7]], [a[part] for a in want[2:7]], "float32", NAMES[2:7])


@slow
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("length", [2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 257])
def test_every_length(length, chip) -> None:
    """Edges of chunks and of groups, with the chunk that the chip has."""
    data = make(length)
    close(found(KERNELS[chip], data, chunk=None), exact(data), "float32")


@slow
@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("cut", [37, 64, 128])
def test_cut_anywhere_equals_one_go(cut, chip) -> None:
    """fault 3: the state passes the cut, and its gradient passes back."""
    data = make(T)
    _, state, (_, dstate) = data
    parts = [pick(data, np.s_[:, :cut]), pick(data, np.s_[:, cut:])]
    middle = found(KERNELS[chip], (parts[0][0], state, (parts[0][2][0], np.zeros_like(dstate))))[1]
    rest = found(KERNELS[chip], (parts[1][0], middle, (parts[1][2][0], dstate)))
    first = found(KERNELS[chip], (parts[0][0], state, (parts[0][2][0], rest[7])))
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
    close(found(KERNELS[chip], data), exact(data), "float32")


@pytest.mark.parametrize("chip", CHIPS)
def test_bfloat16(chip) -> None:
    """Inputs and outputs are rounded once; the state that comes out is float32, and so are gates and their gradient."""
    x, state, cotangents = make(65)
    low = tuple(jnp.asarray(a, jnp.bfloat16) for a in x[:3])
    low = (*low, jnp.asarray(x[3], jnp.float32), jnp.asarray(x[4], jnp.float32))
    got = _found(KERNELS[chip], low, jnp.asarray(state, jnp.float32), cotangents, None, None, CHUNK)
    do = np.asarray(jnp.asarray(cotangents[0], jnp.bfloat16), np.float64)
    want = exact((tuple(np.asarray(a, np.float64) for a in low), state, (do, cotangents[1])))
    close(got, want, "bfloat16")
    assert [str(a.dtype) for a in got] == ["bfloat16", "float32", *["bfloat16"] * 3, *["float32"] * 3]


@pytest.mark.parametrize("g", [0.0, -5.0, -40.0, -1e4, -1e9])
def test_no_factor_comes_from_a_positive_exponent(g) -> None:
    """fault 25: every decay factor is exp of something <= 0, in float32, however deep the gates."""

    def swap(x, h):
        return x[np.arange(64) ^ h]

    factors = jax.tree.leaves(head.decays(swap, jnp.full((64, 3), g))[0])
    assert all(np.all((np.asarray(f) >= 0) & (np.asarray(f) <= 1)) for f in factors if not isinstance(f, int))


def test_the_inverse_is_accurate_at_its_largest_norm() -> None:
    """I + A with ones below the diagonal: the inverse has two diagonals, powers of A have binomials."""
    size = 64
    x = head.Inputs(jnp.ones((size, 1)), jnp.ones((size, 1)), jnp.ones((size, 1)), jnp.ones((size, 1)))
    ones, dot = jnp.ones((size, 1)), lambda a, b, dims: jax.lax.dot_general(a, b, ((dims[:1], dims[1:]), ((), ())))
    decay = head.Decays(tuple((1 << i, ones, ones) for i in range(6)), ones, ones)
    ops = head.Ops(dot, dot, lambda a, b, w, dims: (dot(a, w, dims), dot(b, w, dims)))
    assert np.array_equal(head.pairs(ops, x, decay).t, np.eye(size) - np.eye(size, k=-1))


# --- races, memory, refusals ------------------------------------------------------------------------------------------


def test_no_race() -> None:
    """Two cores share heads and rows; every pair of conflicting accesses would be reported."""
    data = make(T)
    assert not races(lambda: close(found(RACES, data), exact(data), "float32"))


def test_what_is_kept_is_linear_in_tokens_by_a_stated_constant() -> None:
    """A state for 8 chunks of 64 tokens on TPU, the first one on GPU; beside the inputs."""
    state = jax.ShapeDtypeStruct((1, 4, 128, 128), jnp.float32)
    for tokens in (1024, 4096):
        shape = (1, tokens, 4, 128)
        x = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for _ in range(4))
        x = (*x, jax.ShapeDtypeStruct(shape[:3], jnp.float32))
        for chip, kept in (("tpu", tokens // 512), ("gpu", 1)):

            def residuals(x, state, chip=chip):
                run = partial(pallas.kda, KERNELS[chip], state=None, segments=None, state_segment=None, chunk=None)
                return jax.vjp(lambda *x: run(*x), *x)[1]

            found = sum(a.size for a in jax.tree.leaves(jax.eval_shape(residuals, x, state)))
            assert found <= sum(a.size for a in x) + kept * 4 * 128 * 128


def test_refusals() -> None:
    x, state, _ = jax.tree.map(jnp.asarray, make(3))
    with jax.enable_x64(True), pytest.raises(TypeError, match="takes float32 and bfloat16, got float64"):
        kda(*jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), x), impl="tpu")
    for chip in CHIPS:
        with pytest.raises(Exception, match="interpret mode"):
            kda(*x, state=state, impl=chip)
    with pytest.raises(ValueError, match="chunk is 24"):
        kda(*x, impl="gpu", chunk=24)


@pytest.mark.parametrize("chip", CHIPS)
def test_a_decay_of_minus_infinity_forgets(chip) -> None:
    """It has no sums, and no neighbours to lose."""
    x, state, cotangents = make(T)
    x[3][:, 20] = -np.inf
    close(found(KERNELS[chip], (x, state, cotangents))[:5], exact((x, state, cotangents))[:5], "float32", NAMES[:5])


@slow
def test_under_x64() -> None:
    """Where Python's integers are 64 bits wide. The GPU's compiles there, but JAX's interpreter mixes widths itself."""
    data = make(20)
    with jax.enable_x64(True):
        x = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), data)
        got = _found(KERNELS["tpu"], *x, None, None, CHUNK)
    close(got, exact(data), "float32")


@pytest.mark.parametrize("chip", CHIPS)
def test_chunks_that_a_kernel_has_not(chip) -> None:
    for chunk in (8, 512):
        with pytest.raises(ValueError, match=f"chunk is {chunk}; this kernel takes 16 to"):
            found(KERNELS[chip], make(20), chunk=chunk)


def test_a_token_by_itself_runs_no_kernel() -> None:
    """Decoding is one step of the recurrence, on every chip the same."""
    x, state, _ = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), make(1))
    for impl in ("tpu", "gpu"):
        got, want = kda(*x, state=state, impl=impl), kda(*x, state=state, impl="xla")
        assert all(np.array_equal(a, b) for a, b in zip(got, want, strict=True))
    assert rel_rms(got[1], kda(*x, state=state, impl="reference")[1]) < 1e-6
    assert got[1].shape[2] == K
