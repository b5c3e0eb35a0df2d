"""Kimi Delta Attention (KDA): linear attention by the gated delta rule with a decay per key channel.

Source: Kimi Linear, arXiv 2510.26692. `reference.py` is the definition.
"""

from functools import partial

import jax
import jax.numpy as jnp

from . import gpu, pallas, ranges, reference, tpu, xla
from .cases import CASES, Case
from .conv import short_conv
from .gate import kda_gate, l2norm
from .ranges import kda_join

IMPLS = {
    "reference": reference.kda,
    "xla": xla.kda,
    "tpu": partial(pallas.kda, tpu.KERNELS),
    "gpu": partial(pallas.kda, gpu.KERNELS),
}

__all__ = ["CASES", "IMPLS", "Case", "kda", "kda_gate", "kda_join", "kda_range", "l2norm", "short_conv"]


def kda(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    *,
    state: jax.Array | None = None,
    segments: jax.Array | None = None,
    state_segment: jax.Array | None = None,
    impl: str = "xla",
    chunk: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Outputs [B,T,H,V] in v.dtype and final state [B,H,K,V] in float32 of the recurrence, per token and head

        S <- diag(exp g) S;   S <- S + beta k (v - S^T k)^T;   o = S^T q.

    q, k [B,T,H,K], neither scaled nor normalised here; v [B,T,H,V]; g [B,T,H,K] log decay, natural log, <= 0, any depth
    (no exponent is ever positive); beta [B,T,H]; state [B,H,K,V] or None for zeros. T >= 1. Arithmetic and state are
    float32, or float64 when an input, `state` included, is; where q, k and v are bfloat16, "gpu" rounds most of what it
    multiplies to bfloat16 or TF32. A token or state that is not finite may reach all of its row, unless it is padding.
    Derivatives are in reverse mode, of kernels once, of "xla" as often as asked; forward mode is of "reference" alone.

    segments int32 [B,T] (other integers are cast): 0 = padding, anywhere in the row: the token changes nothing, gives 0
    and takes no gradient, even if it is NaN. The state restarts at 0 where a real token's segment differs from the
    previous real token's.
    state_segment int32 [B]: document of `state` (None: the row's first real token continues it); a state of another
    document is dropped. A row of only padding returns its state.

    impl: "xla", "tpu", "gpu" (chunks of `chunk` tokens, a power of two; None: what suits the implementation; one token
    is one step of the recurrence) or "reference" (token by token). "tpu" and "gpu" are kernels that run on those alone;
    a prompt shorter than a chunk takes the next power of two.
    Raises ValueError: unknown impl, chunk not a power of two or none of the kernel's, shapes that do not fit,
    state_segment without segments; TypeError: a dtype that an implementation has not.
    """
    if impl not in IMPLS:
        raise ValueError(f"kda: unknown impl {impl!r}; legal: {sorted(IMPLS)}")
    if chunk is not None and (chunk < 1 or chunk & (chunk - 1)):
        raise ValueError(f"kda: chunk is {chunk}; it must be a power of two")
    _check(q, k, v, g, beta, state, segments, state_segment)
    segments, state_segment = (None if a is None else jnp.asarray(a, jnp.int32) for a in (segments, state_segment))
    return IMPLS[impl](q, k, v, g, beta, state=state, segments=segments, state_segment=state_segment, chunk=chunk)


def kda_range(
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    *,
    segments: jax.Array | None = None,
    state_segment: jax.Array | None = None,
    impl: str = "xla",
    chunk: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(M [B,H,K,K], C [B,H,K,V]): whatever the state S before these tokens, it is M S + C after them.

    Arguments and errors as in `kda`; differentiable. A sequence that is cut into shards, one on each device:

        m, c = kda_range(k, v, g, beta, segments=mine, state_segment=before)       # of each shard, at once
        entering = state for the first shard, m0 @ state + c0 for the second, and so on (`kda_join`)
        o, _ = kda(q, k, v, g, beta, state=entering, segments=mine, state_segment=before)

    before int32 [B]: the document in which the tokens before the shard end: the segment of the last token that is no
    padding, in whichever shard that is, and for the first shard the document of `state`. With segments it has to be
    given: without, each shard's first document counts as one that continues.
    """
    _check(None, k, v, g, beta, None, segments, state_segment, name="kda_range")
    run = partial(kda, segments=segments, state_segment=state_segment, impl=impl, chunk=chunk)
    return ranges.transition(run, k, v, g, beta)


def _check(q, k, v, g, beta, state, segments, state_segment, name="kda"):
    """q is None where there is none."""
    first, a = ("k", k) if q is None else ("q", q)
    if a.ndim != 4 or v.ndim != 4:
        raise ValueError(f"{name}: {first} has shape {a.shape} and v {v.shape}; want [B,T,H,K] and [B,T,H,V]")
    B, T, H, K = a.shape
    V = v.shape[3]
    if T < 1:
        raise ValueError(f"{name}: T is {T}, want at least 1 token")
    if not a.size or not v.size:
        raise ValueError(f"{name}: {first} has shape {a.shape} and v {v.shape}; no dim may be 0")
    for what, array in {"q": q, "k": k, "v": v, "g": g, "beta": beta, "state": state}.items():
        if array is not None and not jnp.issubdtype(array.dtype, jnp.floating):
            raise TypeError(f"{name}: {what} has dtype {array.dtype}, want a floating one")
    want = {"k": (k, a.shape), "v": (v, (B, T, H, V)), "g": (g, a.shape), "beta": (beta, (B, T, H))}
    want |= {"state": (state, (B, H, K, V)), "segments": (segments, (B, T)), "state_segment": (state_segment, (B,))}
    for what, (array, shape) in want.items():
        if array is not None and array.shape != shape:
            raise ValueError(
                f"{name}: {what} has shape {array.shape}, want {shape} (B={B}, T={T}, H={H}, K={K}, V={V}); "
                "heads are never repeated here: q, k, v, g, beta and state have the same number"
            )
    for what in ("segments", "state_segment"):
        array = want[what][0]
        if array is not None and not jnp.issubdtype(array.dtype, jnp.integer):
            raise ValueError(f"{name}: {what} has dtype {array.dtype}, want int32")
    if state_segment is not None and segments is None:
        raise ValueError(f"{name}: state_segment without segments has no effect; give both or neither")
