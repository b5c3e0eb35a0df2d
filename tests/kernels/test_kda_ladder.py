"""KDA in chunks, portable and as kernels (interpreted): values and every gradient against the float64 recurrence."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from tests.kernels.kda_tools import (
    FORMS,
    LIMITS,
    LONG,
    NAMES,
    B,
    close,
    deep,
    equal_keys,
    exact,
    found,
    interpreted,
    make,
    run,
)  # fmt: skip
from tests.numerics import TOLERANCE, rel_rms

from trillion_moe.kernels.linear_attention import CASES, Case, chunk, documents, gpu, head, pallas

T, CHUNK = 150, 16  # two groups of the TPU's, and a ragged end
INVERSES = ("equal keys", "equal keys, late weight", "long equal keys")  # in chunks of 64
slow = pytest.mark.slow  # every shape compiles an interpreter of its own, for seconds
every_form = pytest.mark.parametrize("form", FORMS)


@every_form
@pytest.mark.parametrize("name", LIMITS)
def test_equals_recurrence_fault_21_22_24_25(name, form) -> None:
    """fault 21, 22, 24, 25: at saturated gates, at none, at a softplus' -6, far below it, where keys repeat."""
    data = LIMITS[name](T)
    size = 64 if form == "xla" or name in INVERSES else CHUNK
    bar = 3e-5 if name == "long equal keys" else None  # no form has more digits where the inverse has norm 17
    close(found(FORMS[form], data, chunk=size), exact(data), "float32", bar=bar)


QUICK = [2, 17, 33, 97]
LENGTHS = [2, 3, 7, 15, 16, 17, 31, 32, 33, 63, 64, 65, 97, 127, 128, 129, 191, 192, 193, 255, 256, 257]


@pytest.mark.parametrize(
    ("length", "form"),
    [
        (length, form) if form == "xla" and length in QUICK else pytest.param(length, form, marks=slow)
        for form in FORMS
        for length in LENGTHS
    ],
)
def test_every_length(length, form) -> None:
    """Edges of chunks, with the chunk that the form has by itself."""
    data = make(length)
    close(found(FORMS[form], data, chunk=None), exact(data), "float32")


@slow
@pytest.mark.parametrize("length", [513, 600])
def test_more_than_a_kernel_takes_in_one_step(length) -> None:
    """Two groups of chunks of 64, the last one ragged: on TPU a step's."""
    data = make(length, -0.01)
    close(found(FORMS["tpu"], data, chunk=None), exact(data), "float32")


@every_form
def test_sizes_that_are_all_equal(form) -> None:
    """No axis is taken for another where their sizes would not show it."""
    sizes = CASES["tiny_equal"]
    data = make(sizes.T, sizes=sizes)
    close(found(FORMS[form], data, chunk=None), exact(data), "float32")


PACKED = np.stack([np.repeat([3, 1, 2, 0, 2, 7], [20, 1, 60, 9, 30, 30]), np.repeat([0, 1, 2, 0], [5, 59, 80, 6])])


@every_form
def test_packed_documents_and_padding_of_nan(form) -> None:
    """fault 15, 16, 18, 20: a row continues a document or drops the state of another; padding takes no gradient."""
    data = make(T)
    real = PACKED != 0
    for a in (*data[0], data[2][0]):
        a[~real] = np.nan
    for before in ([3, 1], [3, 9]):
        got = found(FORMS[form], data, PACKED, before, chunk=CHUNK)
        close(got, exact(data, PACKED, before), "float32")
        assert not any(np.asarray(got[i])[~real].any() for i in (0, 2, 3, 4, 5, 6))


@every_form
def test_documents_do_not_meet_in_rounding(form) -> None:
    """A document with cotangents 1e8 times larger leaves the gradients of its neighbours at full float32 precision."""
    x, state, (do, dstate) = make(T)
    segments = np.stack([np.repeat([1, 2, 3], [51, 42, 57])] * B)
    do = do * np.repeat([1.0, 1e8, 1.0], [51, 42, 57])[None, :, None, None]
    data, before = (x, state, (do, dstate)), [1, 1]
    got, want = found(FORMS[form], data, segments, before, chunk=CHUNK), exact(data, segments, before)
    for part in (np.s_[:, :51], np.s_[:, 51:93], np.s_[:, 93:]):
        close([a[part] for a in got[2:7]], [a[part] for a in want[2:7]], "float32", NAMES[2:7])


@every_form
def test_what_is_before_a_deep_decay_does_not_meet_what_is_after(form) -> None:
    """As between documents, without one: in the middle of a chunk."""
    data = deep(T)
    got, want = found(FORMS[form], data, chunk=CHUNK), exact(data)
    for part in (np.s_[:, : T // 2], np.s_[:, T // 2 :]):
        close([a[part] for a in got[2:7]], [a[part] for a in want[2:7]], "float32", NAMES[2:7])


@every_form
def test_a_decay_of_minus_infinity_forgets(form) -> None:
    """It has no sums, and no neighbours to lose."""
    data = make(T)
    data[0][3][:, 20] = -np.inf
    close(found(FORMS[form], data, chunk=CHUNK), exact(data), "float32")


# --- bfloat16 ---------------------------------------------------------------------------------------------------------


def in_bfloat16(form, data, size):
    """(found, exact of the same rounded inputs); gates and beta stay float32."""
    x, state, (do, dstate) = data
    q, k, v, do = (jnp.asarray(a, jnp.bfloat16) for a in (*x[:3], do))
    low = (q, k, v, *(jnp.asarray(a, jnp.float32) for a in x[3:]))
    got = run(form, low, jnp.asarray(state, jnp.float32), (do, dstate), None, None, size)
    rounded = tuple(np.asarray(a, np.float64) for a in low)
    return got, exact((rounded, state, (np.asarray(do, np.float64), dstate)))


def check_bfloat16(got, want, form, bar) -> None:
    """What comes out in float32 has been rounded only by the GPU, to multiply it."""
    assert [str(a.dtype) for a in got] == ["bfloat16", "float32", *["bfloat16"] * 3, *["float32"] * 3]
    close(got, want, "bfloat16", bar=bar)
    if form != "gpu":
        wide = (1, 5, 6, 7)
        close([got[i] for i in wide], [want[i] for i in wide], "float32", [NAMES[i] for i in wide])


@every_form
def test_bfloat16(form) -> None:
    check_bfloat16(*in_bfloat16(FORMS[form], make(T), CHUNK), form, TOLERANCE["bfloat16"])


@every_form
def test_bfloat16_where_keys_repeat(form) -> None:
    """The inverse takes differences of tokens, and what the GPU stores in bfloat16 loses in them: up to 2 %."""
    got, want = in_bfloat16(FORMS[form], equal_keys(T, beta=0.999, g=-1e-3), 64)
    check_bfloat16(got, want, form, 2e-2 if form == "gpu" else TOLERANCE["bfloat16"])


def tf32(a):
    """Rounded to 10 bits behind the point, ties to even."""
    bits = lax.bitcast_convert_type(a, jnp.int32)
    return lax.bitcast_convert_type((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF, jnp.float32)


GPU_OPS = gpu.ops


def rounding_ops(dtype, interpret):
    """`gpu.ops` that rounds as the chip does; an interpreter multiplies in float32."""
    right = GPU_OPS(dtype, interpret)

    def dot(a, b, dims):  # bfloat16 stays as it is
        return right.dot(tf32(a.astype(jnp.float32)), tf32(b.astype(jnp.float32)), dims)

    return head.Ops(dot, right.exact, lambda a, b, w, dims: (dot(a, w, dims), dot(b, w, dims)))


def test_products_in_tf32_where_keys_repeat(monkeypatch) -> None:
    """The inverse and what it multiplies are not rounded to TF32: those to v and beta would be off by 1.3 %."""
    form = partial(pallas.kda, interpreted(gpu.KERNELS, True))
    monkeypatch.setattr(gpu, "ops", rounding_ops)
    sizes = Case(B=1, T=256, H=2, K=32, V=32)
    close(*in_bfloat16(form, equal_keys(sizes.T, beta=0.999, sizes=sizes), 64), "bfloat16")


# --- parts ------------------------------------------------------------------------------------------------------------


def swap(x, h):
    return x[np.arange(len(x)) ^ h]


DECAYS = {
    "xla": lambda g: chunk.decays(g[None, None]),
    "tpu": lambda g: head.decays(swap, g),
    "gpu": lambda g: [gpu._decays(g, 1 << i) for i in range(7)],
}


@every_form
@pytest.mark.parametrize("g", [0.0, -5.0, -40.0, -1e4, documents.RESET])
def test_no_factor_comes_from_a_positive_exponent(g, form) -> None:
    """fault 25: every decay factor is exp of something <= 0, in float32, however deep the gates."""
    factors = [f for f in jax.tree.leaves(DECAYS[form](jnp.full((64, 3), g, jnp.float32))) if not isinstance(f, int)]
    assert len(factors) >= 14  # two of every level, and those to the edges
    assert all(np.all((np.asarray(f) >= 0) & (np.asarray(f) <= 1)) for f in factors)


def _dot(a, b, dims):
    return lax.dot_general(a, b, ((dims[:1], dims[1:]), ((), ())), precision=lax.Precision.HIGHEST)


def by_blocks(beta_C1):
    return chunk.inverse(jnp.tril(jnp.broadcast_to(beta_C1, (64, 64)), -1)[None, None])[0, 0]


def by_masks(beta_C1):
    ones, ops = jnp.ones((64, 1)), head.Ops(_dot, _dot, lambda a, b, w, dims: (_dot(a, w, dims), _dot(b, w, dims)))
    decay = head.Decays(tuple((1 << i, ones, ones) for i in range(6)), ones, ones)
    return head.pairs(ops, head.Inputs(ones, ones, ones, beta_C1), decay).t


NORMS = {"equal keys": (2, np.ones(64)), "late weight": (8, np.arange(64) == 63), "long": (17, np.full(64, LONG**2))}


@pytest.mark.parametrize("inverse", [by_blocks, by_masks])
@pytest.mark.parametrize("name", NORMS)
def test_the_inverse_is_accurate_at_large_norms(name, inverse) -> None:
    """Of I + A for equal keys, A = beta below the diagonal: a series of powers, which have binomials, loses all."""
    norm, beta = NORMS[name]
    want = np.linalg.inv(np.eye(64) + beta[:, None] * np.tri(64, k=-1))
    assert np.linalg.norm(want, 2) == pytest.approx(norm, rel=0.02)
    assert rel_rms(inverse(jnp.asarray(beta, jnp.float32)[:, None]), want) < 3e-6


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("form", "per_state"), [("xla", 32), ("tpu", 512), ("gpu", None)])
def test_what_is_kept_is_linear_in_tokens_by_a_stated_constant(form, per_state) -> None:
    """Bytes beside the inputs: a float32 state for so many tokens; on GPU the first one alone."""
    for tokens in (1024, 4096):
        shape = (1, tokens, 4, 128)
        x = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for _ in range(4))
        x = (*x, jax.ShapeDtypeStruct(shape[:3], jnp.float32))

        def residuals(*x):
            return jax.vjp(partial(FORMS[form], state=None, segments=None, state_segment=None, chunk=None), *x)[1]

        kept = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(jax.eval_shape(residuals, *x)))
        states = tokens // per_state if per_state else 1
        assert kept <= sum(4 * a.size for a in x) + states * 4 * 4 * 128 * 128
