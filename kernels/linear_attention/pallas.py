"""KDA with its gradients over whatever kernels a chip has for the forward and the backward pass.

Residuals are the inputs and the state before every group of chunks; the backward pass makes the rest again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from . import documents

Arrays = tuple[jax.Array, ...]


@dataclass(frozen=True)
class Kernels:
    """forward(chunk, x, state, keep) -> outputs [B,T,H,V], final state, and states before each group if `keep`.
    backward(chunk, x, states, do, dfinal) -> gradients to x and to the state.

    x: q, k [B,T,H,K], v [B,T,H,V], g [B,T,H,K], beta [B,T,H] float32; states [B,H,K,V] float32. T is what `length`
    makes of it, K and V what `width` does; zeros fill up. chunk: tokens, unless asked for another number from smallest
    to largest.
    """

    forward: Callable[[int, Arrays, jax.Array, bool], tuple[jax.Array, jax.Array, jax.Array | None]]
    backward: Callable[[int, Arrays, jax.Array, jax.Array, jax.Array], tuple[Arrays, jax.Array]]
    length: Callable[[int, int], int]
    width: Callable[[int], int]
    chunk: int
    smallest: int
    largest: int


def kda(kernels: Kernels, q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH, *, state, segments, state_segment, chunk):
    """Arguments as in the public `kda`. TypeError for float64, ValueError for a chunk that the kernel has not."""
    x = (q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH)
    given: tuple[jax.Array, ...] = x if state is None else (*x, state)
    if odd := sorted({str(a.dtype) for a in given} - {"float32", "bfloat16"}):
        raise TypeError(f"kda: a kernel takes float32 and bfloat16, got {', '.join(odd)}")
    chunk = kernels.chunk if chunk is None else chunk
    if not kernels.smallest <= chunk <= kernels.largest:
        raise ValueError(f"kda: chunk is {chunk}; this kernel takes {kernels.smallest} to {kernels.largest}")
    C = min(chunk, max(kernels.smallest, 1 << (q_BTHK.shape[1] - 1).bit_length()))

    def recurrence(q, k, v, g, beta, state):
        K, V = q.shape[-1], v.shape[-1]
        widths = [kernels.width(a.shape[-1]) - a.shape[-1] for a in (q, k, v, g)]
        wide = [_pad(a, (0,) * (a.ndim - 1) + (more,)) for a, more in zip((q, k, v, g), widths, strict=True)]
        started = _pad(state, (0, 0, widths[0], widths[2]))
        o, final = _chunks(kernels, C, (*wide, beta.astype(jnp.float32)), started)
        return o[..., :V], final[:, :, :K, :V]

    return documents.run(recurrence, partial(kernels.length, C), x, state, segments, state_segment)


def _pad(a: jax.Array, more: tuple[int, ...]) -> jax.Array:
    return jnp.pad(a, [(0, each) for each in more]) if any(more) else a


def _chunks_primal(kernels, C, x, state_BHKV) -> tuple[jax.Array, jax.Array]:
    return kernels.forward(C, x, state_BHKV, False)[:2]


def _chunks_fwd(kernels, C, x, state_BHKV):
    o_BTHV, final_BHKV, states = kernels.forward(C, x, state_BHKV, True)
    return (o_BTHV, final_BHKV), (x, states)


def _chunks_bwd(kernels, C, residuals, cotangents):
    x, states = residuals
    return kernels.backward(C, x, states, *cotangents)


_chunks = jax.custom_vjp(_chunks_primal, nondiff_argnums=(0, 1))
_chunks.defvjp(_chunks_fwd, _chunks_bwd)
