"""What has a row or a column for every token of the vocabulary: the table of embeddings, the loss under the head."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from trillion_moe.ops import accumulator, dot
from trillion_moe.sharding import Layout, dims, island
from trillion_moe.weights import Weight, weight_axes


def look_up(embed_VD: jax.Array, tokens_BT: jax.Array, layout: Layout | None) -> jax.Array:
    """Rows of the table -> ``[B, T, D]``."""
    if layout is None:
        return embed_VD[tokens_BT]
    rows = partial(_rows, apart=layout.over("embed"))
    found = island(layout, rows, (dims("vocab", "embed"), dims("batch", "time")), dims("batch", "time", None))
    return found(embed_VD, tokens_BT)


def _rows(embed_VD: jax.Array, tokens_BT: jax.Array, *, apart: tuple[str, ...]) -> jax.Array:
    """Every device looks up in its part the tokens of all that have other columns, and gives each what it found."""
    v = embed_VD.shape[0]
    at_BT = lax.all_gather(tokens_BT, apart, axis=0, tiled=True) - lax.axis_index("tp") * v
    own_BT1 = ((at_BT >= 0) & (at_BT < v))[..., None]
    x_BTd = lax.psum(jnp.where(own_BT1, embed_VD[jnp.clip(at_BT, 0, v - 1)], 0), "tp")
    return lax.all_to_all(x_BTd, apart, split_axis=0, concat_axis=2, tiled=True)


def cross_entropy(
    head: Weight, hidden_BTD, targets_BT, counted_BT, layout: Layout | None = None
) -> tuple[jax.Array, jax.Array]:
    """Sum over counted targets of ``logsumexp(logits) - logits[target]``, and how many were the argmax; both float32.

    A chunk of tokens at a time, each recomputed in the backward pass: ``[B, T, V]`` logits never exist.
    """
    tokens = dims("batch", "time")
    summed = island(
        layout,
        partial(_nll, over=None if layout is None else layout.tokens),
        (weight_axes(head, ("embed", "vocab")), dims("batch", "time", None), tokens, tokens),
        (dims(), dims()),
        whole=("embed",),
    )
    total, correct = summed(head, hidden_BTD, targets_BT, counted_BT)
    return total, correct.astype(jnp.float32)


def _nll(head, hidden_BTD, targets_BT, counted_BT, *, over: tuple[str, ...] | None) -> tuple[jax.Array, jax.Array]:
    """The sums of `cross_entropy`. over: mesh axes, of whose devices each has other tokens; along "tp" each has a part
    of the vocabulary. None without a mesh."""
    n, d = targets_BT.size, hidden_BTD.shape[-1]
    chunk = min(512, -(-n // 4))
    pad = -n % chunk
    scores = _scores if over is None else _scores_of_parts

    def chunks(a, *tail):
        return jnp.pad(a.reshape(n, *tail), [(0, pad)] + [(0, 0)] * len(tail)).reshape(-1, chunk, *tail)

    @jax.checkpoint
    def step(sums, xs):
        hidden_ND, targets_N, counted_N = xs
        nll_N, hit_N = scores(dot(hidden_ND, head, dtype=accumulator(hidden_ND.dtype)), targets_N)
        return (
            sums[0] + jnp.sum(jnp.where(counted_N, nll_N, 0)),
            sums[1] + jnp.sum(hit_N & counted_N, dtype=jnp.int32),
        ), None

    zero = jnp.zeros((), accumulator(hidden_BTD.dtype))
    xs = chunks(hidden_BTD, d), chunks(targets_BT), chunks(counted_BT)
    sums, _ = lax.scan(step, (zero, jnp.zeros((), jnp.int32)), xs)
    return sums if over is None else lax.psum(sums, over)


def _scores(logits_NV: jax.Array, targets_N: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cross-entropies, and whether the target is the argmax."""
    picked_N = jnp.take_along_axis(logits_NV, targets_N[:, None], axis=1)[:, 0]
    return jax.nn.logsumexp(logits_NV, axis=1) - picked_N, jnp.argmax(logits_NV, axis=1) == targets_N


def _scores_of_parts(logits_NV: jax.Array, targets_N: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`_scores` where every device along "tp" has the logits of its part of the vocabulary."""
    v, parts = logits_NV.shape[1], lax.axis_size("tp")
    at_N = targets_N - lax.axis_index("tp") * v
    own_N = (at_N >= 0) & (at_N < v)
    picked_N = jnp.take_along_axis(logits_NV, jnp.clip(at_N, 0, v - 1)[:, None], axis=1)[:, 0]
    best_N = lax.stop_gradient(jnp.max(logits_NV, axis=1))
    top_N = lax.pmax(best_N, "tp")
    total_N = lax.psum(jnp.sum(jnp.exp(logits_NV - top_N[:, None]), axis=1), "tp")
    first_N = jnp.where(best_N == top_N, jnp.argmax(logits_NV, axis=1) + lax.axis_index("tp") * v, v * parts)
    nll_N = top_N + jnp.log(total_N) - lax.psum(jnp.where(own_N, picked_N, 0), "tp")
    return nll_N, lax.pmin(first_N, "tp") == targets_N
