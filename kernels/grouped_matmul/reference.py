"""Grouped matmul, the definition: written to be read, differentiated by JAX, slow and hungry (a weight per row)."""

import jax
import jax.numpy as jnp


def expert_of_row(group_sizes_E: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    """(expert int [R], live bool [R]): the group that each row falls into, and whether it falls into any."""
    end_E = jnp.cumsum(group_sizes_E)
    row_R = jnp.arange(rows)
    expert_R = jnp.sum(row_R[:, None] >= end_E[None, :], axis=1)
    live_R = row_R < end_E[-1]
    return jnp.where(live_R, expert_R, 0), live_R


def grouped_matmul(x_RK: jax.Array, w_EKN: jax.Array, group_sizes_E: jax.Array, transpose_w: bool) -> jax.Array:
    """y[r] = sum_k x[r, k] w[e(r), k, :], zero past the last group; see the package for shapes and dtypes.

    Dead rows are replaced by zeros on the way in and on the way out: the first keeps their NaN out of dw, the second
    keeps the cotangent of a dead row out of dx.
    """
    acc = jnp.promote_types(jnp.float32, jnp.result_type(x_RK, w_EKN))
    expert_R, live_R = expert_of_row(group_sizes_E, x_RK.shape[0])
    x = jnp.where(live_R[:, None], x_RK, 0).astype(acc)
    w_RKN = (w_EKN.swapaxes(1, 2) if transpose_w else w_EKN).astype(acc)[expert_R]
    y_RN = jnp.einsum("rk,rkn->rn", x, w_RKN, precision=jax.lax.Precision.HIGHEST)
    return jnp.where(live_R[:, None], y_RN, 0).astype(x_RK.dtype)
