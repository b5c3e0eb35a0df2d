"""Balanced experts: what a run may ask for, and the next biases of routers from what they did.

Quantile balancing (Kimi K3 report, section 2.3.3): the bias with which every expert would have been given its share of
this step's tokens, were the others' thresholds what they were. Loss-free balancing (DeepSeek-V3, arXiv 2412.19437,
section 2.1.2): a small step up for who got too little, down for who got too much. Both count in int32, so that any
order of devices and passes gives the same bits.
"""

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

BINS = 1000
_STRICT: dict[str, Any] = {"extra": "forbid", "strict": True, "allow_inf_nan": False}
_CHUNK = 256  # tokens whose bins are counted in one product


@dataclasses.dataclass(frozen=True)
class BalanceConfig:
    """method: how biases of routers follow the load, once an update, from the next one on; None = they stay.

    rate: the step of "sign". ema: share of the old bias that "quantile" keeps.
    sequence_loss: coefficient of the balance loss of every document (DeepSeek-V3, eq. 17), which trains the routers'
    weights; each supervised token has its document's, so the loss is a mean over them as cross-entropy is.
    """

    __pydantic_config__ = _STRICT

    method: Literal["quantile", "sign"] | None = None
    rate: float | None = None
    ema: float = 0.0
    sequence_loss: float = 0.0

    def __post_init__(self):
        found = []
        if (self.method == "sign") != (self.rate is not None) or (self.rate is not None and self.rate <= 0):
            found.append(f"rate = {self.rate}: legal is above 0 with method 'sign', null without")
        if not 0 <= self.ema < 1 or (self.ema and self.method != "quantile"):
            found.append(f"ema = {self.ema}: legal is at least 0 and below 1 with method 'quantile', 0 without")
        if self.sequence_loss < 0:
            found.append(f"sequence_loss = {self.sequence_loss}: legal is at least 0")
        if self.method is None and not self.sequence_loss:
            found.append("neither method nor sequence_loss is given: balance = null says that")
        if found:
            raise ValueError("; ".join(found))


# --- quantile balancing -----------------------------------------------------------------------------------------------


def shortfalls(scores_NE: jax.Array, bias_E: jax.Array, k: int) -> jax.Array:
    """``r[i, j] = alpha[i] - s[i, j]``: the bias from which on token i has expert j; alpha: (k+1)-th biased score."""
    return lax.top_k(scores_NE + bias_E, k + 1)[0][:, k:] - scores_NE


def exact_quantile(scores_NE: jax.Array, bias_E: jax.Array, k: int) -> jax.Array:
    """The definition: the next bias [E] from all scores of a step, ``-quantile(s - alpha, 1 - k / E)``, centred."""
    n, e = scores_NE.shape
    wanted_E = jnp.sort(shortfalls(scores_NE, bias_E, k), axis=0)[n * k // e]  # the (q + 1)-th, q = n k / E
    return wanted_E - jnp.mean(wanted_E)


def span(bias_E: jax.Array, bins: int = BINS) -> tuple[jax.Array, jax.Array]:
    """Where the first bin begins and how wide each is: scores are in 0..1, so shortfalls in min b - 1 .. max b + 1."""
    low = jnp.min(bias_E, axis=-1, keepdims=True) - 1
    return low, (jnp.max(bias_E, axis=-1, keepdims=True) + 1 - low) / bins


def histogram(r_NE: jax.Array, bias_E: jax.Array, real_N: jax.Array, bins: int = BINS) -> jax.Array:
    """int32 [E, bins]: how many real tokens have their shortfall in each bin of `span`.

    By products of one-hots, a bin as two digits: adding one at a time, accelerators are slow. Exact: 0 and 1 are in any
    dtype, and float32 counts the tokens of a chunk.
    """
    n, e = r_NE.shape
    low, width = span(bias_E, bins)
    side = math.isqrt(bins) + 1  # side * side > bins: a number is left for tokens that do not count
    bin_NE = jnp.clip(jnp.floor((r_NE - low) / width), 0, bins - 1).astype(jnp.int32)
    bin_NE = jnp.where(real_N[:, None], bin_NE, bins)
    chunk = min(_CHUNK, n)
    bin_CNE = jnp.pad(bin_NE, ((0, -n % chunk), (0, 0)), constant_values=bins).reshape(-1, chunk, e)

    def add(counts_E, bin_NE):
        high, digit = (jax.nn.one_hot(a, side, dtype=jnp.bfloat16) for a in jnp.divmod(bin_NE, side))
        pairs = jnp.einsum("nea,neb->eab", high, digit, preferred_element_type=jnp.float32)
        return counts_E + pairs.astype(jnp.int32), None

    counts, _ = lax.scan(add, jnp.zeros((e, side, side), jnp.int32), bin_CNE)
    return counts.reshape(e, side * side)[:, :bins]


def next_by_quantile(histogram_EB: jax.Array, bias_E: jax.Array, k: int, ema: float = 0.0) -> jax.Array:
    """The next bias ``[*b, E]`` from the histogram ``[*b, E, bins]`` of a step: its quantile, interpolated in its bin.

    Centred; with `ema` this share of the old bias stays. As it was where nothing was counted.
    """
    e, bins = histogram_EB.shape[-2:]
    low, width = span(bias_E, bins)
    tokens = jnp.sum(histogram_EB[..., :1, :], axis=-1)
    rest = tokens % e * k
    whole, part = tokens // e * k + rest // e, rest % e  # q = tokens k / E is whole + part / E: exact, and never large
    upto_EB = jnp.cumsum(histogram_EB, axis=-1)
    at_E = jnp.argmax(upto_EB >= (whole + (part > 0))[..., None], axis=-1)
    here_E, upto_E = (jnp.take_along_axis(a, at_E[..., None], axis=-1)[..., 0] for a in (histogram_EB, upto_EB))
    inside_E = (whole - (upto_E - here_E) + part / e) / jnp.maximum(here_E, 1)
    wanted_E = low + (at_E + jnp.clip(inside_E, 0, 1)) * width
    wanted_E = ema * bias_E + (1 - ema) * (wanted_E - jnp.mean(wanted_E, axis=-1, keepdims=True))
    return jnp.where(tokens > 0, wanted_E, bias_E).astype(bias_E.dtype)


# --- loss-free balancing ----------------------------------------------------------------------------------------------


def next_by_sign(counts_E: jax.Array, bias_E: jax.Array, rate: float) -> jax.Array:
    """``b + rate * sign(mean load - load)`` from int32 counts ``[*b, E]``; the mean is compared, never rounded."""
    e = counts_E.shape[-1]
    rest = jnp.sum(counts_E % e, axis=-1, keepdims=True)
    below = jnp.sum(counts_E // e, axis=-1, keepdims=True) + rest // e  # the mean, rounded down
    direction_E = (counts_E < below + (rest % e > 0)).astype(jnp.int32) - (counts_E > below)
    return bias_E + rate * direction_E.astype(bias_E.dtype)
