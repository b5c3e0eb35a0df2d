"""The short convolution of KDA against its definition, token by token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from tests.numerics import TOLERANCE, rel_rms

from trillion_moe.kernels import linear_attention

short_conv = jax.jit(linear_attention.short_conv)

B, C, W = 2, 5, 4


@pytest.fixture(autouse=True)
def _x64():
    with jax.enable_x64(True):
        yield


def make(T, width=W, seed=0):
    r = np.random.default_rng(seed)
    shapes = (B, T, C), (C, width), (B, width - 1, C)
    return tuple(jnp.asarray(r.normal(size=shape)) for shape in shapes)


def definition(x, w, history):
    """(y, new history) of one document, one output at a time."""
    inputs = np.concatenate([history, x], axis=1)
    width = w.shape[1]
    rows = [np.einsum("bwc,cw->bc", inputs[:, t : t + width], w) for t in range(x.shape[1])]
    total = np.stack(rows, axis=1)
    return total / (1 + np.exp(-total)), inputs[:, inputs.shape[1] - (width - 1) :]


@pytest.mark.parametrize("T", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_equals_definition(T, dtype):
    x, w, history = make(T)
    low_x, low_history = x.astype(dtype), history.astype(dtype)
    low_w = w.astype(jnp.promote_types(dtype, jnp.float32))
    y, new = short_conv(low_x, low_w, history=low_history)
    want, want_new = definition(*(np.asarray(a, np.float64) for a in (low_x, low_w, low_history)))
    assert y.dtype == new.dtype == low_x.dtype
    assert rel_rms(y, want) < TOLERANCE[dtype]
    np.testing.assert_array_equal(np.asarray(new, np.float64), want_new)


@pytest.mark.parametrize("width", [1, 2, 3])
def test_other_widths_and_no_history(width):
    x, w, history = make(3, width)
    y, new = short_conv(x, w)
    want, want_new = definition(*map(np.asarray, (x, w, jnp.zeros_like(history))))
    assert rel_rms(y, want) < TOLERANCE["float64"]
    np.testing.assert_array_equal(new, want_new)


@pytest.mark.parametrize("T", [1, 2, 3])
@pytest.mark.parametrize("packed", [False, True])
def test_gradients_of_short_sequences_fault_10(T, packed):
    """fault 10: sequences shorter than W - 1; finite differences of both outputs by input, weight and history."""
    segments = jnp.asarray([[2] * T, [2] * (T - 1) + [3]], jnp.int32) if packed else None
    check_grads(lambda *a: short_conv(a[0], a[1], history=a[2], segments=segments), make(T), order=1, modes=["rev"])


def test_packed_equals_alone_fault_15():
    """fault 15: also the first three tokens of the second document, and documents shorter than the conv."""
    x, w, _ = make(14)
    lengths = [5, 1, 2, 6]
    segments = jnp.asarray(np.repeat([1, 2, 1, 9], lengths)[None].repeat(B, 0), jnp.int32)

    def packed(x):
        return short_conv(x, w, segments=segments)

    (y, new), pull = jax.vjp(packed, x)
    rng = np.random.default_rng(1)
    dy, dnew = jnp.asarray(rng.normal(size=y.shape)), jnp.asarray(rng.normal(size=new.shape))
    (dx,) = pull((dy, dnew))
    start = 0
    for length in lengths:
        part = np.s_[:, start : start + length]
        (want_y, want_new), pull = jax.vjp(lambda x: short_conv(x, w), x[part])
        last = start + length == 14
        (want_dx,) = pull((dy[part], dnew if last else jnp.zeros_like(dnew)))
        assert rel_rms(y[part], want_y) < TOLERANCE["float64"]
        assert rel_rms(dx[part], want_dx) < TOLERANCE["float64"]
        start += length
    np.testing.assert_array_equal(new, want_new)


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 6, 7, 8, 9])
@pytest.mark.parametrize("packed", [False, True])
def test_cut_anywhere_equals_one_go(cut, packed):
    x, w, history = make(10)
    segments = jnp.asarray([[1] * 4 + [2] * 3 + [3] * 3, [1] * 1 + [2] * 7 + [3] * 2], jnp.int32) if packed else None
    y, new = short_conv(x, w, history=history, segments=segments)
    if packed:
        y1, middle = short_conv(x[:, :cut], w, history=history, segments=segments[:, :cut])
        last = segments[:, cut - 1]
        y2, end = short_conv(x[:, cut:], w, history=middle, segments=segments[:, cut:], history_segment=last)
    else:
        y1, middle = short_conv(x[:, :cut], w, history=history)
        y2, end = short_conv(x[:, cut:], w, history=middle)
    assert rel_rms(jnp.concatenate([y1, y2], axis=1), y) < TOLERANCE["float64"]
    np.testing.assert_array_equal(end, new)


@pytest.mark.parametrize("real", [0, 1, 2, 5])
def test_nan_padding_at_the_end_does_not_leak_fault_18(real):
    """fault 18: outputs, history, gradients of a padded row are those of the row without it; padding takes none."""
    x, w, history = make(7)
    x = x.at[:, real:].set(jnp.nan)
    segments = jnp.asarray([[4] * real + [0] * (7 - real)] * B, jnp.int32)
    call = lambda x, w, history, segments: short_conv(x, w, history=history, segments=segments)  # noqa: E731
    (y, new), pull = jax.vjp(lambda *a: call(*a, segments), x, w, history)
    dx, dw, dhistory = pull((jnp.ones_like(y), jnp.ones_like(new)))
    assert not np.asarray(y[:, real:]).any()
    assert not np.asarray(dx[:, real:]).any()
    if not real:
        np.testing.assert_array_equal(new, history)
        np.testing.assert_array_equal(dhistory, 1)
        assert not np.asarray(dw).any()
        return
    (want_y, want_new), pull = jax.vjp(lambda *a: call(*a, None), x[:, :real], w, history)
    want = pull((jnp.ones_like(want_y), jnp.ones_like(want_new)))
    assert rel_rms(y[:, :real], want_y) < TOLERANCE["float64"]
    np.testing.assert_array_equal(new, want_new)
    for got, expected in zip((dx[:, :real], dw, dhistory), want, strict=True):
        assert rel_rms(got, expected) < TOLERANCE["float64"]


@pytest.mark.parametrize("T", [1, 2, 6])
def test_history_of_another_document_is_dropped(T):
    """Row 0 continues its history, row 1 starts a new document: even a NaN history leaves no trace there."""
    x, w, history = make(T)
    spoiled = history.at[1].set(jnp.nan)
    segments = jnp.full((B, T), 2, jnp.int32)
    y, new = short_conv(x, w, history=spoiled, segments=segments, history_segment=jnp.asarray([2, 1], jnp.int32))
    want_y, want_new = short_conv(x, w, history=history.at[1].set(0))
    assert rel_rms(y, want_y) < TOLERANCE["float64"]
    np.testing.assert_array_equal(new, want_new)


def test_refusals_give_numbers():
    x, w, history = make(3)
    with pytest.raises(ValueError, match=r"w has shape \(4, 4\)"):
        short_conv(x, w[:4])
    with pytest.raises(ValueError, match=r"history has shape \(2, 2, 5\), .* want \(2, 3, 5\)"):
        short_conv(x, w, history=history[:, 1:])
    with pytest.raises(ValueError, match=r"segments has shape \(2, 2\)"):
        short_conv(x, w, segments=jnp.ones((B, 2), jnp.int32))
    with pytest.raises(ValueError, match="T=0"):
        short_conv(x[:, :0], w)
    with pytest.raises(ValueError, match="history_segment without segments"):
        short_conv(x, w, history_segment=jnp.ones(B, jnp.int32))
