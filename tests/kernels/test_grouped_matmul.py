"""Grouped matmul against a float64 loop over groups: values and every gradient, group by group."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.grouped_tools import SIZES, K, N, assert_close, expected, problem

from trillion_moe.kernels.grouped_matmul import cases, grouped_matmul, xla

TOLERANCE = {"float32": 2e-6, "bfloat16": 4e-3, "float64": 1e-14}  # relative RMS


@partial(jax.jit, static_argnames=("transpose_w", "impl"))
def value_and_grads(x, w, dy, sizes, transpose_w=False, impl="xla"):
    """(y, dx, dw) under jit, the group sizes traced: one compilation serves all sizes of the same row count."""
    y, vjp = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, transpose_w=transpose_w, impl=impl), x, w)
    return y, *vjp(dy)


@pytest.mark.parametrize("transpose_w", [False, True])
@pytest.mark.parametrize("name", SIZES)
def test_xla_matches_float64(name, transpose_w):
    rows, sizes = SIZES[name]
    x, w, dy = problem(rows, sizes, transpose_w)
    x32, w32, dy32 = (a.astype(np.float32) for a in (x, w, dy))
    got = value_and_grads(x32, w32, dy32, sizes, transpose_w=transpose_w)
    want = expected(*(a.astype(np.float64) for a in (x32, w32, dy32)), sizes, transpose_w)
    assert_close(got, want, sizes, TOLERANCE["float32"])


@pytest.mark.parametrize("impl", ["reference", "ragged_dot"])
@pytest.mark.parametrize(("name", "transpose_w"), [("dead_tail", False), ("decode", True)])
def test_other_impls_match_float64(name, transpose_w, impl):
    rows, sizes = SIZES[name]
    x, w, dy = (a.astype(np.float32) for a in problem(rows, sizes, transpose_w))
    got = value_and_grads(x, w, dy, sizes, transpose_w=transpose_w, impl=impl)
    want = expected(*(a.astype(np.float64) for a in (x, w, dy)), sizes, transpose_w)
    assert_close(got, want, sizes, TOLERANCE["float32"])


@pytest.mark.parametrize("impl", ["reference", "xla", "ragged_dot"])
def test_bfloat16_accumulates_in_float32(impl):
    """Output and gradients are bf16, with the error of one rounding, not of a bf16 sum over 300 rows."""
    rows, sizes = SIZES["tall"]
    x, w, dy = (jnp.asarray(a, jnp.bfloat16) for a in problem(rows, sizes))
    got = value_and_grads(x, w, dy, sizes, impl=impl)
    assert [a.dtype for a in got] == [jnp.bfloat16] * 3
    want = expected(*(np.asarray(a, np.float64) for a in (x, w, dy)), sizes)
    assert_close(got, want, sizes, TOLERANCE["bfloat16"])


def test_bfloat16_rows_with_float32_weights():
    rows, sizes = SIZES["dead_tail"]
    x, w, dy = problem(rows, sizes)
    x, w, dy = jnp.asarray(x, jnp.bfloat16), jnp.asarray(w, jnp.float32), jnp.asarray(dy, jnp.bfloat16)
    y, dx, dw = value_and_grads(x, w, dy, sizes)
    assert (y.dtype, dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    want = expected(*(np.asarray(a, np.float64) for a in (x, w, dy)), sizes)
    assert_close((y, dx, dw), want, sizes, TOLERANCE["bfloat16"])


def test_float64_stays_float64():
    transpose_w = True
    rows, sizes = SIZES["dead_tail"]
    x, w, dy = problem(rows, sizes, transpose_w)
    with jax.enable_x64(True):
        got = value_and_grads(x, w, dy, sizes, transpose_w=transpose_w)
        assert [a.dtype for a in got] == [jnp.float64] * 3
        assert_close(got, expected(x, w, dy, sizes, transpose_w), sizes, TOLERANCE["float64"])


@settings(max_examples=12, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=4, max_size=4), st.integers(0, 2**16))
def test_any_group_sizes(sizes, seed):
    """One shape (one compilation), the sizes drawn: whatever the skew, and wherever the dead tail begins."""
    rows = 160
    x, w, dy = (a.astype(np.float32) for a in problem(rows, sizes, seed=seed))
    y, dx, dw = value_and_grads(x, w, dy, np.array(sizes))
    want = expected(*(a.astype(np.float64) for a in (x, w, dy)), sizes)
    assert_close((y, dx, dw), want, sizes, TOLERANCE["float32"])


def test_no_rows_at_all():
    x, w = jnp.zeros((0, K)), jnp.ones((3, K, N))
    y, vjp = jax.vjp(lambda x, w: grouped_matmul(x, w, jnp.zeros(3, jnp.int32)), x, w)
    dx, dw = vjp(y)
    assert y.shape == (0, N)
    assert dx.shape == (0, K)
    assert not np.any(dw)


def test_infinite_rows_stay_in_their_group():
    """A tile reads rows of its neighbours: an inf or a NaN there must not cross, in dw as little as in y."""
    sizes = np.array([5, 3, 50, 0, 17])
    x, w, dy = (a.astype(np.float32) for a in problem(75, sizes))
    x[5:8] = np.inf
    y, dx, dw = (np.array(a) for a in value_and_grads(x, w, dy, sizes))
    assert np.isfinite(np.delete(y, range(5, 8), axis=0)).all()
    assert np.isfinite(dx).all()
    assert np.isfinite(np.delete(dw, 1, axis=0)).all()


def test_unused_dw_is_dropped():
    """With only dx asked for, nothing of dw's size is left in the compiled program."""
    experts, k, n, rows = 64, 48, 40, 64
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((rows, k), (experts, k, n))]
    sizes = jax.ShapeDtypeStruct((experts,), jnp.int32)

    def loss(x, w, sizes):
        return jnp.sum(grouped_matmul(x, w, sizes) ** 2)

    def temporaries(argnums):
        compiled = jax.jit(jax.grad(loss, argnums)).lower(*shapes, sizes).compile()
        memory = compiled.memory_analysis()
        return memory.temp_size_in_bytes + memory.output_size_in_bytes

    bank = experts * k * n * 4
    assert temporaries(0) < 0.25 * bank
    assert temporaries((0, 1)) > bank


def test_work_follows_the_rows_not_the_groups():
    """No capacity: memory of the compiled loop has no term in experts x rows."""
    rows, k, n, experts = 256, 32, 32, 128
    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((rows, k), (experts, k, n))]
    sizes = jax.ShapeDtypeStruct((experts,), jnp.int32)
    memory = jax.jit(grouped_matmul).lower(*args, sizes).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 3 * rows * max(k, n) * 4 + 64 * experts


def test_inside_shard_map_with_replicated_weights():
    """Rows split, weights replicated: the loops type-check, and dw is summed over the axis."""
    mesh = jax.make_mesh((1,), ("ep",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    rows, sizes = SIZES["dead_tail"]
    x, w, dy = (a.astype(np.float32) for a in problem(rows, sizes))
    split = jax.shard_map(
        lambda x, w, s: grouped_matmul(x, w, s[0]),
        mesh=mesh,
        in_specs=(spec("ep"), spec(), spec("ep")),
        out_specs=spec("ep"),
    )
    y, vjp = jax.vjp(lambda x, w: jax.jit(split)(x, w, jnp.asarray(sizes)[None]), x, w)
    want = expected(*(a.astype(np.float64) for a in (x, w, dy)), sizes)
    assert_close((y, *vjp(jnp.asarray(dy))), want, sizes, TOLERANCE["float32"])


def test_errors_name_what_is_legal():
    x, w, sizes = jnp.ones((4, K)), jnp.ones((2, K, N)), jnp.array([2, 2])
    with pytest.raises(ValueError, match=r"'pallas'; legal: gpu, ragged_dot, reference, tpu, xla"):
        grouped_matmul(x, w, sizes, impl="pallas")
    with pytest.raises(ValueError, match=rf"x must be \[R, {N}\].*\(4, {K}\)"):
        grouped_matmul(x, w, sizes, transpose_w=True)
    with pytest.raises(ValueError, match=r"group_sizes must be \[2\].*\(3,\)"):
        grouped_matmul(x, w, jnp.array([1, 1, 2]))
    with pytest.raises(ValueError, match=r"w must be \[E, K, N\]"):
        grouped_matmul(x, w[0], sizes)
    with pytest.raises(TypeError, match="integers, got float32"):
        grouped_matmul(x, w, sizes.astype(jnp.float32))


@pytest.mark.parametrize("name", cases.CASES)
def test_group_sizes_of_the_cases(name):
    """Every maker of sizes spends all rows; the tiles never exceed the rows and fall strictly."""
    case = cases.CASES[name]
    rows = case.rows(7)
    makers = (cases.balanced, cases.zipf, cases.all_to_one)
    for sizes in (make(rows, case.experts) for make in makers):
        assert sizes.sum() == rows
        assert sizes.shape == (case.experts,)
        assert sizes.min() >= 0
    for r in (1, 3, rows, 8192 * case.top_k):
        tiles = cases.row_tiles(r, case.experts)
        assert max(tiles) <= r
        assert list(tiles) == sorted(set(tiles), reverse=True)


def test_real_shapes_trace_forward_and_backward():
    """Kimi K3's experts, abstractly: shapes and dtypes come out right with nothing allocated."""
    case = cases.CASES["kimi_k3"]
    x = jax.ShapeDtypeStruct((case.rows(64), case.k), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((case.experts, case.k, case.n), jnp.bfloat16)
    sizes = jax.ShapeDtypeStruct((case.experts,), jnp.int32)
    dx, dw = jax.eval_shape(
        jax.grad(lambda x, w, s: grouped_matmul(x, w, s).astype(jnp.float32).sum(), (0, 1)), x, w, sizes
    )
    assert (dx.shape, dx.dtype, dw.shape, dw.dtype) == (x.shape, x.dtype, w.shape, w.dtype)


def test_windows_near_the_end_stay_inside():
    """A tile that would overrun the last row is moved up, and its mask leaves the moved-in rows out."""
    start, live = xla._window(jnp.int32(9), jnp.int32(10), 4, 10)
    assert int(start) == 6
    assert np.asarray(live)[:, 0].tolist() == [False, False, False, True]
