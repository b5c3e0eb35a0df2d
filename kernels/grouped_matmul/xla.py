"""Grouped matmul as loops over row tiles whose trip counts are known at run time; portable, made for CPU.

The outer loop visits the groups that have rows and loads each weight once; inner loops walk the group's rows from tall
tiles to short ones, and only the shortest is masked. Work is proportional to the rows there are, not to a capacity,
and no weight is gathered per row. A while loop has no reverse derivative, hence the hand-written VJP:

    dx[r] = dy[r] @ w[e(r)]^T                       the same loop, the weight used the other way
    dw[e] = sum over the rows r of e of x[r]^T dy[r]     a loop of its own: XLA drops it when nobody asks for dw

Operands are cast to the accumulation dtype tile by tile: right for CPU, which has no faster bf16 product.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from . import cases


def grouped_matmul(x_RK: jax.Array, w_EKN: jax.Array, group_sizes_E: jax.Array, transpose_w: bool) -> jax.Array:
    """y[r] = x[r] @ w[e(r)] (w^T with `transpose_w`); see the package for shapes and dtypes."""
    return _grouped(transpose_w, *vary_alike(x_RK, w_EKN, group_sizes_E))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped(transpose_w: bool, x_RK: jax.Array, w_EKN: jax.Array, group_sizes_E: jax.Array) -> jax.Array:
    acc = accumulator(x_RK, w_EKN)
    return tile_loop(
        x_RK,
        lambda e: lax.dynamic_index_in_dim(w_EKN, e, keepdims=False).astype(acc),
        group_sizes_E,
        transpose_w=transpose_w,
        n_out=w_EKN.shape[1 if transpose_w else 2],
    )


def _grouped_fwd(transpose_w, x_RK, w_EKN, group_sizes_E):
    return _grouped(transpose_w, x_RK, w_EKN, group_sizes_E), (x_RK, w_EKN, group_sizes_E)


def _grouped_bwd(transpose_w, residuals, dy_RN):
    x_RK, w_EKN, group_sizes_E = residuals
    dx_RK = _grouped(not transpose_w, dy_RN, w_EKN, group_sizes_E)
    left, right = (dy_RN, x_RK) if transpose_w else (x_RK, dy_RN)
    return dx_RK, weight_grad(left, right, group_sizes_E, accumulator(x_RK, w_EKN)).astype(w_EKN.dtype), None


_grouped.defvjp(_grouped_fwd, _grouped_bwd)


def tile_loop(
    x_RK: jax.Array,
    load: Callable[[jax.Array], jax.Array],
    group_sizes_E: jax.Array,
    *,
    transpose_w: bool,
    n_out: int,
) -> jax.Array:
    """y [R, n_out] in x.dtype: y[r] = x[r] @ load(e(r)), rows past the last group zero.

    `load(e)` makes one group's weight [K, N] ([N, K] with `transpose_w`) in the accumulation dtype. It runs once per
    group that has rows, so a load that unpacks or decodes costs no more than that, and its result stays in cache
    while the group's tiles use it (measured: one loop over all tiles, which loads per tile, is 1.1 to 1.3 x slower).
    """
    rows = x_RK.shape[0]
    y_RN = _zeros((rows, n_out), x_RK.dtype, x_RK)
    if rows == 0:
        return y_RN
    *full, last = cases.row_tiles(rows, group_sizes_E.shape[0])
    end_E = jnp.cumsum(group_sizes_E)
    contract = (((1,), (1 if transpose_w else 0,)), ((), ()))

    def multiply(w: jax.Array, start: jax.Array, height: int) -> jax.Array:
        x_tile = lax.dynamic_slice_in_dim(x_RK, start, height).astype(w.dtype)
        return lax.dot_general(x_tile, w, contract).astype(x_RK.dtype)

    def group(i: jax.Array, y_RN: jax.Array) -> jax.Array:
        e = order_E[i]
        w, end = load(e), end_E[e]
        start = end - group_sizes_E[e]
        for height in full:
            trips = (end - start) // height

            def tile(t, y_RN, start=start, height=height):
                s = start + t * height
                return lax.dynamic_update_slice_in_dim(y_RN, multiply(w, s, height), s, 0)

            y_RN = lax.fori_loop(0, trips, tile, y_RN)
            start = start + trips * height

        def masked_tile(t, y_RN, start=start):
            s, live = _window(start + t * last, end, last, rows)
            old = lax.dynamic_slice_in_dim(y_RN, s, last)
            return lax.dynamic_update_slice_in_dim(y_RN, jnp.where(live, multiply(w, s, last), old), s, 0)

        return lax.fori_loop(0, (end - start + last - 1) // last, masked_tile, y_RN)

    order_E, active = _busy_first(group_sizes_E)
    return lax.fori_loop(0, active, group, y_RN)


def weight_grad(x_RK: jax.Array, dy_RN: jax.Array, group_sizes_E: jax.Array, acc: jnp.dtype) -> jax.Array:
    """dw [E, K, N] in dtype `acc`: dw[e] = sum over the rows r of group e of x[r]^T dy[r]; 0 for an empty group.

    The first tile of a group starts its sum, so each dw[e] is written once. Tiles of one height, all masked: a ladder
    of heights, as in `tile_loop`, is up to 4 x slower here (measured), since every loop moves the sum [K, N].
    """
    rows, experts = x_RK.shape[0], group_sizes_E.shape[0]
    dw_EKN = _zeros((experts, x_RK.shape[1], dy_RN.shape[1]), acc, x_RK)
    if rows == 0:
        return dw_EKN
    height = cases.grad_tile(rows, experts)
    end_E = jnp.cumsum(group_sizes_E)

    def product(start: jax.Array, end: jax.Array) -> jax.Array:
        s, live = _window(start, end, height, rows)
        x = jnp.where(live, lax.dynamic_slice_in_dim(x_RK, s, height), 0).astype(acc)
        dy = jnp.where(live, lax.dynamic_slice_in_dim(dy_RN, s, height), 0).astype(acc)
        return lax.dot_general(x, dy, (((0,), (0,)), ((), ())))

    def group(i: jax.Array, dw_EKN: jax.Array) -> jax.Array:
        e = order_E[i]
        end, start = end_E[e], end_E[e] - group_sizes_E[e]
        tiles = (group_sizes_E[e] + height - 1) // height
        dw_KN = lax.fori_loop(1, tiles, lambda t, dw_KN: dw_KN + product(start + t * height, end), product(start, end))
        return lax.dynamic_update_index_in_dim(dw_EKN, dw_KN, e, 0)

    order_E, active = _busy_first(group_sizes_E)
    return lax.fori_loop(0, active, group, dw_EKN)


def accumulator(*arrays: jax.Array) -> jnp.dtype:
    """The dtype to add in: fp32, or float64 when one of the arrays is."""
    return jnp.promote_types(jnp.float32, jnp.result_type(*arrays))


def vary_alike(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The arrays marked as varying over the union of their `shard_map` axes, as a loop's carry has to be.

    No-op outside `shard_map`. The transpose of the mark is a psum, so the gradient of a replicated weight is summed.
    """
    axes = [jax.typeof(a).manual_axis_type.varying for a in arrays]
    union = frozenset().union(*axes)
    return tuple(
        lax.pcast(a, tuple(sorted(union - own)), to="varying") if union - own else a
        for a, own in zip(arrays, axes, strict=True)
    )


def _zeros(shape: tuple[int, ...], dtype: jnp.dtype, like: jax.Array) -> jax.Array:
    """Zeros that vary over the same `shard_map` axes as `like`."""
    return vary_alike(jnp.zeros(shape, dtype), like)[0]


def _busy_first(group_sizes_E: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(group ids with the non-empty ones first and in order, how many those are)."""
    return jnp.argsort(group_sizes_E == 0, stable=True), jnp.sum(group_sizes_E > 0)


def _window(start: jax.Array, end: jax.Array, height: int, rows: int) -> tuple[jax.Array, jax.Array]:
    """(s, live [height, 1]): a tile of `height` rows inside [0, rows), and which of them lie in [start, end).

    Near the last row the window is moved up to stay inside; the mask leaves the rows that this brings in alone.
    """
    s = jnp.minimum(start, rows - height)
    row = s + jnp.arange(height, dtype=start.dtype)
    return s, ((row >= start) & (row < end))[:, None]
