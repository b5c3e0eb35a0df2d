"""MXFP4: the codec against a slow definition of its own, and the grouped matmul that never decodes the bank."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels import grouped_tools
from tests.kernels.grouped_tools import SIZES, assert_rows_close
from tests.numerics import rel_rms

from trillion_moe.kernels import mxfp4
from trillion_moe.kernels.grouped_matmul import grouped_matmul
from trillion_moe.kernels.mxfp4 import cases, codec, grouped_matmul_mxfp4

GRID = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
TOLERANCE = {"float32": 2e-6, "bfloat16": 4e-3}  # relative RMS


def value_of(nibble: int, code: int) -> float:
    """e2m1 times E8M0 in Python floats, from the fields of the formats."""
    sign, exponent, mantissa = nibble >> 3, (nibble >> 1) & 3, nibble & 1
    magnitude = mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return (-magnitude if sign else magnitude) * 2.0 ** (code - 127)


def same_bits(a, b):
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    return np.array_equal(a.view(np.uint32), b.view(np.uint32))


def one_group(byte, code):
    """decode of a row of 32 whose bytes are all `byte`."""
    return np.asarray(mxfp4.decode(np.full((1, 16), byte, np.uint8), np.array([[code]], np.uint8)))[0]


def random_bank(experts, n, k, seed=0):
    """packed and scale u8 in layout "nk", scales near 1."""
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 256, (experts, n, k // 2), np.uint8)
    return packed, rng.integers(120, 131, (experts, n, k // 32), np.uint8)


# ---- decode


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("layout", codec.LAYOUTS)
def test_every_byte_at_many_scales(layout, dtype):
    """All 256 bytes x scales from the smallest to the largest that is always exact, signs of zero included."""
    codes = [2, 3, 64, 120, 126, 127, 128, 140, 200, 251, 252]
    packed = np.tile(np.arange(256, dtype=np.uint8), (len(codes), 1))
    scale = np.repeat(np.array(codes, np.uint8)[:, None], 16, axis=1)
    want = [[value_of(n, c) for b in range(256) for n in (b & 15, b >> 4)] for c in codes]
    stored = mxfp4.to_layout(packed, scale, "nk", layout)
    w = jax.jit(lambda p, s: mxfp4.decode(p, s, layout=layout, dtype=dtype))(*stored)
    assert w.dtype == dtype
    w = np.asarray(w.astype(jnp.float32))
    assert same_bits(w.T if layout == "kn" else w, want)


def test_fault_52_scale_bytes_are_exponents():
    """fault 52: bytes 120, 125, 127, 130, 140 are 2^-7, 0.25, 1, 8, 8192, also for expert 0 by itself."""
    scale = np.array([120, 125, 127, 130, 140], np.uint8)
    packed = np.full((2, 1, 16 * 5), 0x22, np.uint8)  # 1.0 everywhere
    both = np.stack([scale[None], scale[None, ::-1]])
    w = np.asarray(mxfp4.decode(packed, both))[:, 0, ::32]
    assert w[0].tolist() == [2.0**-7, 0.25, 1.0, 8.0, 8192.0]
    assert w[1].tolist() == w[0, ::-1].tolist()


def test_fault_52_scales_that_were_never_written():
    """fault 52: a matrix whose scale codes are all 0 is refused, each expert looked at by itself."""
    packed, scale = random_bank(3, 4, 64)
    scale[0] = 0
    found = mxfp4.check(packed, scale, name="w1")
    assert found[0] == "w1: matrix [0]: every scale code is 0, the scales were never written"
    assert "row [0, 0], group 0: scale code 0 is legal only where" in found[1]
    assert mxfp4.check(np.zeros_like(packed[0]), np.zeros_like(scale[0]), name="w")[0].startswith("w: matrix []: every")


def test_fault_53_one_meaning_under_two_dtypes():
    """fault 53: the same bytes as U8 and as F8_E8M0 decode to identical values, in the matmul too."""
    packed, scale = random_bank(2, 8, 64)
    named = scale.view(ml_dtypes.float8_e8m0fnu)
    assert same_bits(mxfp4.decode(packed, named), mxfp4.decode(packed, scale))
    assert mxfp4.check(packed, named, name="w") == []
    x, sizes = jnp.ones((5, 64)), jnp.array([2, 3])
    product = jax.jit(grouped_matmul_mxfp4)
    assert same_bits(product(x, packed, named, sizes), product(x, packed, scale, sizes))
    for wrong in (np.float32, np.int8, ml_dtypes.float8_e4m3fn):
        with pytest.raises(TypeError, match="scale must be uint8 or float8_e8m0fnu"):
            mxfp4.decode(packed, scale.astype(wrong))


def test_fault_54_bias_is_127():
    """fault 54: byte 127 is 1.0 (a bias of 125 would be off by 4)."""
    assert one_group(0x22, 127).tolist() == [1.0] * 32


def test_fault_55_low_nibble_is_the_even_column():
    """fault 55: byte 0x21 at scale 128 is [1.0, 2.0]."""
    assert one_group(0x21, 128)[:2].tolist() == [1.0, 2.0]


def test_edge_codes():
    """0 and 1 give zeros for zeros, 253 and 254 are right up to overflow, 255 is NaN; -0 keeps its sign."""
    for code in (0, 1):
        zeros = one_group(0x80, code)
        assert not zeros.any()
        assert np.signbit(zeros)[:2].tolist() == [False, True]
    assert one_group(0x5A, 253)[:2].tolist() == [-(2.0**126), 3 * 2.0**126]
    assert one_group(0x3A, 254)[:2].tolist() == [-(2.0**127), 1.5 * 2.0**127]
    assert np.isinf(one_group(0x77, 254)).all()
    assert np.isnan(one_group(0x27, 255)).all()


def test_decode_refuses():
    packed, scale = random_bank(2, 8, 64)
    with pytest.raises(ValueError, match="unknown layout 'mn'; legal: nk, kn"):
        mxfp4.decode(packed, scale, layout="mn")
    with pytest.raises(ValueError, match=r"needs K % 32 == 0 and scale \(2, 8, 2\); got scale \(2, 8, 1\)"):
        mxfp4.decode(packed, scale[..., :1])
    with pytest.raises(ValueError, match="not float16"):
        mxfp4.decode(packed, scale, dtype=jnp.float16)
    with pytest.raises(TypeError, match="packed must be uint8, got int8"):
        mxfp4.decode(packed.view(np.int8), scale)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2), st.integers(1, 5), st.integers(1, 3), st.integers(0, 2**16))
def test_layouts_are_a_byte_transpose(leading, n, groups, seed):
    """There and back is the identity on bytes, whatever the leading dims."""
    rng = np.random.default_rng(seed)
    packed = rng.integers(0, 256, (2,) * leading + (n, groups * 16), np.uint8)
    scale = rng.integers(2, 253, (2,) * leading + (n, groups), np.uint8)
    turned = mxfp4.to_layout(packed, scale, "nk", "kn")
    assert turned[0].shape == (*packed.shape[:-2], groups * 16, n)
    assert turned[0].nbytes == packed.nbytes
    back = mxfp4.to_layout(*turned, "kn", "nk")
    assert np.array_equal(back[0], packed)
    assert np.array_equal(back[1], scale)


# ---- encode


def nearest(a: float) -> float:
    """The grid value nearest to a >= 0, a tie to the one with an even index."""
    return min(enumerate(GRID), key=lambda c: (abs(c[1] - a), c[0] % 2))[1]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=32, max_size=32))
def test_encode_is_nearest_and_bounded(values):
    """Any fp32 group, subnormals too: scale by the definition, every element the nearest, errors within the bound."""
    w = np.array([values], np.float32)
    packed, scale = mxfp4.encode(w)
    code, amax = int(scale[0, 0]), float(np.abs(w).max())
    assert mxfp4.check(packed, scale, name="w") == []
    if amax == 0:
        assert code == 127
    else:
        want = np.frexp(amax)[1] - 1 - 2 + 127
        assert code == min(max(want, 2), 252)
    step = 2.0 ** (code - 127)
    nibbles = [n for b in packed[0] for n in (b & 15, b >> 4)]
    for v, n in zip(w[0].astype(float), nibbles, strict=True):
        got = value_of(int(n), code)
        assert abs(got) == nearest(abs(v) / step) * step
        assert np.signbit(got) == np.signbit(v)
        if code > 2:
            assert abs(got - v) <= amax / 5 if abs(v) <= 6 * step else abs(got - v) < amax / 4


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 255), min_size=16, max_size=16), st.integers(2, 252))
def test_encode_of_decode_changes_no_value(data, code):
    packed, scale = np.array([data], np.uint8), np.array([[code]], np.uint8)
    w = np.asarray(mxfp4.decode(packed, scale))
    again = mxfp4.encode(w)
    assert same_bits(mxfp4.decode(*again), w)
    if max(n & 7 for b in data for n in (b & 15, b >> 4)) >= 6:  # a group that uses the top binade: same bytes
        assert np.array_equal(again[0], packed)
        assert np.array_equal(again[1], scale)


def test_encode_ties_and_saturation():
    """Halfway goes to the even code; above 6 x scale saturates (the scale comes from the largest, 7.9)."""
    w = np.zeros((1, 32), np.float32)
    w[0, :10] = [7.9, -6.5, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.0]
    packed, scale = mxfp4.encode(w)
    got = np.asarray(mxfp4.decode(packed, scale))[0]
    assert scale.tolist() == [[127]]
    assert got[:9].tolist() == [6, -6, 0, 1, 1, 2, 2, 4, 4]
    assert np.signbit(got[9])


def test_encode_at_the_ends_of_float32():
    """Subnormals and the largest float give legal codes; the exponent is exact next to a power of two."""
    tiny, huge = np.float32(2.0**-149), np.finfo(np.float32).max
    below_one = np.nextafter(np.float32(1), np.float32(0))
    w = np.zeros((4, 32), np.float32)
    w[:, 3] = [tiny, huge, 1.0, below_one]
    _, scale = mxfp4.encode(w)
    assert scale[:, 0].tolist() == [2, 252, 125, 124]


def test_encode_refuses_what_is_not_finite():
    w = np.zeros((2, 3, 32), np.float32)
    w[1, 2, 7] = np.inf
    with pytest.raises(ValueError, match=r"w\[1, 2, 7\] is inf"):
        mxfp4.encode(w)
    w[0, 1, 5] = np.nan
    with pytest.raises(ValueError, match=r"w\[0, 1, 5\] is nan"):
        mxfp4.encode(w)
    with pytest.raises(ValueError, match=r"K % 32 == 0, got shape \(4, 48\)"):
        mxfp4.encode(np.zeros((4, 48), np.float32))


def test_encode_takes_bfloat16():
    w = np.random.default_rng(0).normal(size=(4, 64)).astype(ml_dtypes.bfloat16)
    a, b = mxfp4.encode(w), mxfp4.encode(w.astype(np.float32))
    assert np.array_equal(a[0], b[0])
    assert np.array_equal(a[1], b[1])


# ---- check


def test_check_finds_each_illegal_code_with_its_place():
    packed, scale = random_bank(2, 4, 96)
    assert mxfp4.check(packed, scale, name="w2") == []
    packed[1, 2, 16:32], scale[1, 2, 1] = 0x80, 1  # zeros of both signs: legal under code 1
    packed[0, 0, :16], scale[0, 0, 0] = 0x12, 253  # nothing above 1 x 2^126: legal
    assert mxfp4.check(packed, scale, name="w2") == []
    packed[1, 2, 20] = 0x18
    packed[0, 0, 5] = 0x61
    scale[0, 3, 2] = scale[1, 0, 0] = 255
    assert mxfp4.check(packed, scale, name="w2") == [
        "w2: row [0, 3], group 2: scale code 255 is NaN (2 such groups)",
        "w2: row [1, 2], group 1: scale code 1 is legal only where all 32 values are zero (1 such groups)",
        "w2: row [0, 0], group 0: scale code 253 overflows fp32 (1 such groups)",
    ]
    assert mxfp4.check(packed[1], scale[1], name="e1.w2")[0] == (
        "e1.w2: row 0, group 0: scale code 255 is NaN (1 such groups)"
    )


def test_check_refuses_shapes_and_dtypes():
    packed, scale = random_bank(1, 4, 96)
    with pytest.raises(ValueError, match=r"scale \(1, 4, 3\); got scale \(1, 4, 2\)"):
        mxfp4.check(packed, scale[..., :2], name="w")
    with pytest.raises(TypeError, match="w: packed must be uint8, got int8"):
        mxfp4.check(packed.view(np.int8), scale, name="w")
    with pytest.raises(TypeError, match="w: scale must be uint8 or float8_e8m0fnu, got float32"):
        mxfp4.check(packed, scale.astype(np.float32), name="w")


# ---- grouped matmul

N, K = 9, 96


def problem(rows, sizes):
    """x, dy float32; the rows past the last group hold NaN."""
    x, _, dy = grouped_tools.problem(rows, sizes, seed=1, k=K, n=N)
    return x.astype(np.float32), dy.astype(np.float32)


def expected(x, w, dy, sizes):
    """(y, dx) in float64; w [E, N, K]."""
    return grouped_tools.expected(*(np.asarray(a, np.float64) for a in (x, w, dy)), sizes, transpose_w=True)[:2]


@partial(jax.jit, static_argnames=("layout", "impl"))
def value_and_grad(x, bank, dy, sizes, layout="nk", impl="xla"):
    y, vjp = jax.vjp(lambda x: grouped_matmul_mxfp4(x, *bank, sizes, layout=layout, impl=impl), x)
    return y, *vjp(dy)


@pytest.mark.parametrize("layout", codec.LAYOUTS)
@pytest.mark.parametrize("name", SIZES)
def test_matmul_matches_float64(name, layout):
    """Values and dx per group, against weights from the slow definition; the dead tail is NaN on the way in."""
    rows, sizes = SIZES[name]
    x, dy = problem(rows, sizes)
    packed, scale = random_bank(5, N, K)
    got = value_and_grad(x, mxfp4.to_layout(packed, scale, "nk", layout), dy, sizes, layout=layout)
    want = expected(x, slow_decode(packed, scale), dy, sizes)
    assert_rows_close(got, want, sizes, TOLERANCE["float32"])


def slow_decode(packed, scale):
    nibbles = np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)
    table = np.array([[value_of(n, c) for n in range(16)] for c in range(110, 140)])
    return table[np.repeat(scale, 32, axis=-1).astype(int) - 110, nibbles]


@pytest.mark.parametrize("layout", codec.LAYOUTS)
def test_matmul_reference_agrees(layout):
    rows, sizes = SIZES["dead_tail"]
    x, dy = problem(rows, sizes)
    bank = mxfp4.to_layout(*random_bank(5, N, K), "nk", layout)
    a = value_and_grad(x, bank, dy, sizes, layout=layout, impl="xla")
    b = value_and_grad(x, bank, dy, sizes, layout=layout, impl="reference")
    assert_rows_close(a, b, sizes, TOLERANCE["float32"])


def test_matmul_equals_that_on_unpacked_weights():
    """Decoding is exact, so the packed product is the loop of the unpacked one, up to the order of sums."""
    rows, sizes = SIZES["decode"]
    x, dy = problem(rows, sizes)
    packed, scale = random_bank(5, N, K)
    y, dx = value_and_grad(x, (packed, scale), dy, sizes)
    w = mxfp4.decode(packed, scale)

    @jax.jit
    def unpacked(x, w, dy, sizes):
        y, vjp = jax.vjp(lambda x: grouped_matmul(x, w, sizes, transpose_w=True), x)
        return y, *vjp(dy)

    y_, dx_ = unpacked(x, w, dy, sizes)
    assert rel_rms(y, y_) < 1e-6
    assert rel_rms(dx, dx_) < 1e-6


@pytest.mark.parametrize("layout", codec.LAYOUTS)
def test_matmul_bfloat16(layout):
    rows, sizes = SIZES["dead_tail"]
    x, dy = (jnp.asarray(a, jnp.bfloat16) for a in problem(rows, sizes))
    packed, scale = random_bank(5, N, K)
    got = value_and_grad(x, mxfp4.to_layout(packed, scale, "nk", layout), dy, sizes, layout=layout)
    assert [a.dtype for a in got] == [jnp.bfloat16] * 2
    want = expected(x, slow_decode(packed, scale), dy, sizes)
    assert_rows_close(got, want, sizes, TOLERANCE["bfloat16"])


def test_bytes_have_no_gradient():
    packed, scale = (jnp.asarray(a) for a in random_bank(2, 8, 64))
    x, sizes = jnp.ones((4, 64)), jnp.array([1, 3])
    _, vjp = jax.vjp(lambda x, p, s: grouped_matmul_mxfp4(x, p, s, sizes), x, packed, scale)
    dx, *rest = vjp(jnp.ones((4, 8)))
    assert dx.dtype == jnp.float32
    assert [a.dtype for a in rest] == [jax.dtypes.float0] * 2


@pytest.mark.parametrize("layout", codec.LAYOUTS)
@pytest.mark.parametrize("what", ["forward", "gradient"])
def test_bank_is_never_decoded_as_a_whole(what, layout):
    """Compiled temporaries hold one decoded expert and the rows, far below the decoded bank; the reference does not."""
    experts, n, k, rows = 64, 128, 128, 64
    bank = experts * n * k * 4
    packed, scale = mxfp4.to_layout(*random_bank(experts, n, k), "nk", layout)
    args = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (packed, scale)]
    x, sizes = jax.ShapeDtypeStruct((rows, k), jnp.float32), jax.ShapeDtypeStruct((experts,), jnp.int32)

    def temporaries(impl):
        def run(x, packed, scale, sizes):
            return grouped_matmul_mxfp4(x, packed, scale, sizes, layout=layout, impl=impl)

        f = run if what == "forward" else jax.grad(lambda *a: jnp.sum(run(*a) ** 2))
        return jax.jit(f).lower(x, *args, sizes).compile().memory_analysis().temp_size_in_bytes

    assert temporaries("xla") < bank / 10
    assert temporaries("reference") > bank


def test_matmul_errors():
    packed, scale = random_bank(2, 8, 64)
    x, sizes = jnp.ones((4, 64)), jnp.array([1, 3])
    with pytest.raises(ValueError, match="'triton'; legal: gpu, reference, tpu, xla"):
        grouped_matmul_mxfp4(x, packed, scale, sizes, impl="triton")
    with pytest.raises(ValueError, match=r"x must be \[R, 64\].*\(4, 32\)"):
        grouped_matmul_mxfp4(x[:, :32], packed, scale, sizes)
    with pytest.raises(ValueError, match="packed must have 3 dims"):
        grouped_matmul_mxfp4(x, packed[0], scale[0], sizes)
    with pytest.raises(ValueError, match=r"group_sizes must be \[2\]"):
        grouped_matmul_mxfp4(x, packed, scale, jnp.array([4]))
    with pytest.raises(TypeError, match="packed must be uint8"):
        grouped_matmul_mxfp4(x, packed.astype(np.int32), scale, sizes)


@pytest.mark.parametrize("name", cases.CASES)
def test_real_shapes_trace(name):
    case = cases.CASES[name]
    x = jax.ShapeDtypeStruct((case.rows(2), case.k), jnp.bfloat16)
    packed = jax.ShapeDtypeStruct((case.experts, case.n, case.k // 2), jnp.uint8)
    scale = jax.ShapeDtypeStruct((case.experts, case.n, case.k // 32), jnp.uint8)
    sizes = jax.ShapeDtypeStruct((case.experts,), jnp.int32)
    dx = jax.eval_shape(
        jax.grad(lambda x, *a: grouped_matmul_mxfp4(x, *a).astype(jnp.float32).sum()), x, packed, scale, sizes
    )
    assert (dx.shape, dx.dtype) == (x.shape, x.dtype)
