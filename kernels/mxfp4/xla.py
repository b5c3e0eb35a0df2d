"""Grouped matmul on MXFP4 weights: the tile loop of `grouped_matmul`, whose load of one weight is a decode.

At most one expert is decoded at a time, once per call and group that has rows, into the scratch that the group's tiles
then read. The decode runs along N ("kn"), where neighbours share a shift and the compiler vectorises; one expert's
bytes are turned first when they are stored "nk" (measured on CPU: 2.4 x faster than decoding along K). The backward
pass decodes again: residuals are the packed bytes, and x is not kept, as dx does not need it.
"""

from functools import partial

import jax
from jax import lax

from ..grouped_matmul.xla import accumulator, tile_loop, vary_alike
from . import codec


def grouped_matmul_mxfp4(
    x_RK: jax.Array, packed: jax.Array, scale: jax.Array, group_sizes_E: jax.Array, layout: str
) -> jax.Array:
    """y[r] = x[r] @ w[e(r)]^T with w = decode(packed, scale); see the package."""
    return _grouped(layout, *vary_alike(x_RK, packed, scale, group_sizes_E))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped(layout, x_RK, packed, scale, group_sizes_E):
    n, _ = codec.dims(packed.shape, scale.shape, layout)
    return _multiply(x_RK, packed, scale, group_sizes_E, layout, transpose_w=False, n_out=n)


def _grouped_fwd(layout, x_RK, packed, scale, group_sizes_E):
    return _grouped(layout, x_RK, packed, scale, group_sizes_E), (packed, scale, group_sizes_E)


def _grouped_bwd(layout, residuals, dy_RN):
    packed, scale, group_sizes_E = residuals
    _, k = codec.dims(packed.shape, scale.shape, layout)
    dx_RK = _multiply(dy_RN, packed, scale, group_sizes_E, layout, transpose_w=True, n_out=k)
    return dx_RK, None, None, None


_grouped.defvjp(_grouped_fwd, _grouped_bwd)


def _multiply(rows_RC, packed, scale, group_sizes_E, layout, *, transpose_w, n_out):
    """rows[r] @ w[e(r)], or @ w[e(r)]^T with `transpose_w`, w [K, N] decoded; C is the dim contracted."""
    dtype = accumulator(rows_RC)

    def load(e: jax.Array) -> jax.Array:
        packed_e, scale_e = (lax.dynamic_index_in_dim(a, e, keepdims=False) for a in (packed, scale))
        turned = codec.to_layout(packed_e, scale_e, layout, "kn")
        if layout == "nk":
            # Keep the byte transpose from being fused into the decode, where its strided reads cost more.
            turned = lax.optimization_barrier(turned)
        packed_kn, scale_kn = turned
        return codec.decode(packed_kn, scale_kn, layout="kn", dtype=dtype)

    return tile_loop(rows_RC, load, group_sizes_E, transpose_w=transpose_w, n_out=n_out)
