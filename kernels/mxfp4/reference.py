"""Grouped matmul on MXFP4 weights, the definition: decode the whole bank, then multiply; differentiated by JAX."""

import jax

from ..grouped_matmul import reference as grouped
from ..grouped_matmul.xla import accumulator
from . import codec


def grouped_matmul_mxfp4(
    x_RK: jax.Array, packed: jax.Array, scale: jax.Array, group_sizes_E: jax.Array, layout: str
) -> jax.Array:
    """y[r] = x[r] @ w[e(r)]^T with w = decode(packed, scale); see the package."""
    w = codec.decode(packed, scale, layout=layout, dtype=accumulator(x_RK))
    return grouped.grouped_matmul(x_RK, w, group_sizes_E, layout == "nk")
