"""The choice of the next token from logits: greedy, or a draw from what temperature, penalties and cuts leave.

A setting that no row uses is None, and costs nothing: the settings are a pytree, so that leaves nothing to compile.
"""

import dataclasses
import numbers
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int32

from trillion_moe.inputs import InputError


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """How one prompt's tokens are chosen. Applied in this order, as transformers does:

    repetition_penalty: logits of tokens that stand in the prompt or the answer so far are divided by it where positive
        and multiplied by it where negative (Keskar et al., arXiv 1909.05858); 1 = off.
    temperature: logits are divided by it; 0 = greedy: the largest logit left, the cuts below then change nothing.
    top_k: only the k largest are kept (with those equal to the k-th); None = off.
    top_p: of these, only the most probable whose probabilities reach p together (Holtzman et al., arXiv 1904.09751);
        1 = off.
    min_p: only those at least min_p times as probable as the most probable (arXiv 2407.01082); 0 = off.
    seed: the same seed, prompt and model give the same draws, whatever else is in the batch (logits may differ by
        rounding, as everywhere).
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self):
        whole = numbers.Integral
        legal = {
            "temperature": (self.temperature == 0 or 1e-3 <= self.temperature <= 1e3, "0 for greedy, or 0.001 to 1000"),
            "top_k": (
                self.top_k is None or (isinstance(self.top_k, whole) and self.top_k >= 1),
                "an integer >= 1, or None for off",
            ),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "min_p": (0 <= self.min_p <= 1, "from 0 to 1"),
            "repetition_penalty": (0.01 <= self.repetition_penalty <= 100, "0.01 to 100, 1 for off"),
            "seed": (isinstance(self.seed, whole) and 0 <= self.seed < 2**32, "an integer from 0 to 2^32 - 1"),
        }
        for name, (fine, says) in legal.items():
            if not fine:
                raise InputError(f"{name} is {getattr(self, name)}; legal is {says}")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampler:
    """The settings of a batch, a row each, and what the choice needs to know of the tokens so far.

    temperature, top_k, top_p, min_p, penalty: float32 or int32 [B], None where no row uses it (temperature None: all
    rows are greedy). seed: uint32 [B]. seen: bool [B, V], None without a penalty. barred: bool [V], tokens that are
    never chosen; None = none. drawn: int32 [B], new tokens so far.
    """

    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    penalty: Any
    seed: Any
    seen: Any
    barred: Any
    drawn: Any

    @classmethod
    def of(
        cls,
        configs: Sequence[SamplingConfig],
        prompts: Sequence[Sequence[int]],
        vocab_size: int,
        barred: Iterable[int] = (),
    ) -> "Sampler":
        """prompts: the token ids before the first new one, for the penalty. barred: ids that are never chosen."""

        def column(name: str, off: Any, dtype: str):
            values = [getattr(c, name) for c in configs]
            if all(value == off for value in values):
                return None
            return jnp.asarray([vocab_size if value is None else min(value, vocab_size) for value in values], dtype)

        penalty = column("repetition_penalty", 1.0, "float32")
        drawing = column("temperature", 0.0, "float32")
        seen = None
        if penalty is not None:
            table = np.zeros((len(prompts), vocab_size), bool)
            for row, ids in zip(table, prompts, strict=True):
                row[np.asarray(ids, int)] = True
            seen = jnp.asarray(table)
        never = np.isin(np.arange(vocab_size), list(barred))
        return cls(
            temperature=drawing,
            top_k=None if drawing is None else column("top_k", None, "int32"),
            top_p=None if drawing is None else column("top_p", 1.0, "float32"),
            min_p=None if drawing is None else column("min_p", 0.0, "float32"),
            penalty=penalty,
            seed=None if drawing is None else jnp.asarray([c.seed for c in configs], jnp.uint32),
            seen=seen,
            barred=None if not never.any() else jnp.asarray(never),
            drawn=jnp.zeros(len(configs), jnp.int32),
        )


def choose(logits_BV: Float[jax.Array, "B V"], sampler: Sampler) -> tuple[Int32[jax.Array, "B"], Sampler]:
    """-> the next token of every row, int32 [B], and the sampler that knows of it."""
    logits_BV = logits_BV.astype(jnp.float32)
    if sampler.barred is not None:
        logits_BV = jnp.where(sampler.barred, -jnp.inf, logits_BV)
    if sampler.penalty is not None:
        factor_B1 = sampler.penalty[:, None]
        changed_BV = jnp.where(logits_BV > 0, logits_BV / factor_B1, logits_BV * factor_B1)
        logits_BV = jnp.where(sampler.seen, changed_BV, logits_BV)
    token_B = jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    if sampler.temperature is not None:
        greedy_B = sampler.temperature == 0
        kept_BV = _cut(logits_BV / jnp.where(greedy_B, 1.0, sampler.temperature)[:, None], sampler)
        token_B = jnp.where(greedy_B, token_B, jnp.argmax(kept_BV + _noise(sampler, kept_BV.shape[1]), axis=-1))
    seen = sampler.seen
    if seen is not None:
        seen = seen.at[jnp.arange(seen.shape[0]), token_B].set(True)
    return token_B.astype(jnp.int32), dataclasses.replace(sampler, seen=seen, drawn=sampler.drawn + 1)


def _noise(sampler: Sampler, vocab: int) -> jax.Array:
    """Gumbel noise [B, V]: the argmax of logits + noise is a draw from softmax(logits). A row's depends on its seed and
    its number of new tokens alone."""

    def row(seed, drawn):
        return jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), drawn), (vocab,), jnp.float32)

    return jax.vmap(row)(sampler.seed, sampler.drawn)


def _cut(logits_BV: jax.Array, sampler: Sampler) -> jax.Array:
    """Logits with -inf where top-k, top-p or min-p rule a token out; the largest always stays."""
    logits_BV -= jnp.max(logits_BV, axis=-1, keepdims=True)
    if sampler.top_k is not None:
        kth_B1 = jnp.take_along_axis(-jnp.sort(-logits_BV, axis=-1), sampler.top_k[:, None] - 1, axis=-1)
        logits_BV = jnp.where(logits_BV >= kth_B1, logits_BV, -jnp.inf)
    if sampler.top_p is not None:
        order_BV = jnp.argsort(-logits_BV, axis=-1)
        p_BV = jax.nn.softmax(jnp.take_along_axis(logits_BV, order_BV, axis=-1), axis=-1)
        reach_B = jnp.where(sampler.top_p < 1, sampler.top_p, 2.0)  # sums round to 1 too early: 1 must mean all
        live_BV = jnp.cumsum(p_BV, axis=-1) - p_BV < reach_B[:, None]  # those before it have not reached p
        live_BV = jnp.take_along_axis(live_BV, jnp.argsort(order_BV, axis=-1), axis=-1)
        logits_BV = jnp.where(live_BV, logits_BV, -jnp.inf)
    if sampler.min_p is not None:
        floor_B1 = jnp.max(logits_BV, axis=-1, keepdims=True) + jnp.log(sampler.min_p)[:, None]
        logits_BV = jnp.where(logits_BV >= floor_B1, logits_BV, -jnp.inf)
    return logits_BV
