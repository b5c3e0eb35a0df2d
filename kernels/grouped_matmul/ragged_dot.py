"""Grouped matmul by `jax.lax.ragged_dot`, differentiated by JAX.

For the platforms where XLA turns it into a grouped kernel (measured compile-only: TPU v5p). Elsewhere it does about E
times the work, so nothing chooses it silently.
"""

import jax
import jax.numpy as jnp


def grouped_matmul(x_RK: jax.Array, w_EKN: jax.Array, group_sizes_E: jax.Array, transpose_w: bool) -> jax.Array:
    """y[r] = x[r] @ w[e(r)]; rows past the last group are zeroed before (NaN) and after (cotangents) the product."""
    live_R1 = (jnp.arange(x_RK.shape[0]) < jnp.sum(group_sizes_E))[:, None]
    acc = jnp.promote_types(jnp.float32, jnp.result_type(x_RK, w_EKN))
    y_RN = jax.lax.ragged_dot(
        jnp.where(live_R1, x_RK, 0),
        w_EKN.swapaxes(1, 2) if transpose_w else w_EKN,
        group_sizes_E,
        preferred_element_type=acc,
    )
    return jnp.where(live_R1, y_RN, 0).astype(x_RK.dtype)
