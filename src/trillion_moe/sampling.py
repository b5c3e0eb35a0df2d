"""The choice of the next token from logits: greedy, or a draw from what temperature, penalties and cuts leave.

A setting that no row uses is None, and costs nothing: the settings are a pytree, so that leaves nothing to compile.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trillion_moe.inputs import InputError


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """How one prompt's tokens are chosen. Applied in this order, as transformers does:

    repetition_penalty: logits of tokens that stand in the prompt or the answer so far are divided by it where positive
        and multiplied by it where negative (Keskar et al., arXiv 1909.05858); 1 = off.
    temperature: logits are divided by it; 0 = greedy: the largest logit left, the cuts below then change nothing.
    top_k: only the k largest are kept (with those equal to the k-th); None = off.
    top_p: only the most probable whose probabilities reach p together (Holtzman et al., arXiv 1904.09751); 1 = off.
    min_p: only those at least min_p times as probable as the most probable (arXiv 2407.01082); 0 = off.
    seed: the same seed, prompt and model give the same tokens, whatever else is in the batch.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self):
        legal = {
            "temperature": (self.temperature >= 0 and np.isfinite(self.temperature), "a finite number >= 0"),
            "top_k": (self.top_k is None or self.top_k >= 1, "an integer >= 1, or None for off"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "min_p": (0 <= self.min_p <= 1, "from 0 to 1"),
            "repetition_penalty": (
                self.repetition_penalty > 0 and np.isfinite(self.repetition_penalty),
                "a finite number > 0",
            ),
            "seed": (0 <= self.seed < 2**32, "an integer from 0 to 2^32 - 1"),
        }
        for name, (fine, says) in legal.items():
            if not fine:
                raise InputError(f"{name} is {getattr(self, name)}; legal is {says}")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampler:
    """The settings of a batch, a row each, and what the choice needs to know of the tokens so far.

    temperature, top_k, top_p, min_p, penalty: float32 or int32 [B], None where no row uses it (temperature None: all
    rows are greedy). seed: uint32 [B]. seen: bool [B, V], None without a penalty. drawn: int32 [B], new tokens so far.
    """

    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    penalty: Any
    seed: Any
    seen: Any
    drawn: Any

    @classmethod
    def of(cls, configs: Sequence[SamplingConfig], prompts: Sequence[Sequence[int]], vocab_size: int) -> "Sampler":
        """prompts: the token ids before the first new one, for the penalty."""

        def column(name: str, off: Any, dtype: str):
            values = [getattr(c, name) for c in configs]
            if all(value == off for value in values):
                return None
            return jnp.asarray([vocab_size if value is None else value for value in values], dtype)

        penalty = column("repetition_penalty", 1.0, "float32")
        drawing = column("temperature", 0.0, "float32")
        seen = None
        if penalty is not None:
            table = np.zeros((len(prompts), vocab_size), bool)
            for row, ids in zip(table, prompts, strict=True):
                row[np.asarray(ids, int)] = True
            seen = jnp.asarray(table)
        return cls(
            temperature=drawing,
            top_k=None if drawing is None else column("top_k", None, "int32"),
            top_p=None if drawing is None else column("top_p", 1.0, "float32"),
            min_p=None if drawing is None else column("min_p", 0.0, "float32"),
            penalty=penalty,
            seed=None if drawing is None else jnp.asarray([c.seed for c in configs], jnp.uint32),
            seen=seen,
            drawn=jnp.zeros(len(configs), jnp.int32),
        )


def choose(logits_BV: jax.Array, sampler: Sampler) -> tuple[jax.Array, Sampler]:
    """-> the next token of every row, int32 [B], and the sampler that knows of it."""
    logits_BV = logits_BV.astype(jnp.float32)
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
    if sampler.top_k is not None or sampler.top_p is not None:
        sorted_BV = -jnp.sort(-logits_BV, axis=-1)
        rank_V = jnp.arange(logits_BV.shape[1])
        live_BV = rank_V < sampler.top_k[:, None] if sampler.top_k is not None else jnp.ones_like(sorted_BV, bool)
        if sampler.top_p is not None:
            # Of what top-k left: a token stays while those before it have not reached p.
            p_BV = jax.nn.softmax(jnp.where(live_BV, sorted_BV, -jnp.inf), axis=-1)
            reach_B = jnp.where(sampler.top_p < 1, sampler.top_p, 2.0)  # sums round to 1 too early: 1 must mean all
            live_BV &= jnp.cumsum(p_BV, axis=-1) - p_BV < reach_B[:, None]
        least_B1 = jnp.min(jnp.where(live_BV, sorted_BV, jnp.inf), axis=-1, keepdims=True)
        logits_BV = jnp.where(logits_BV >= least_B1, logits_BV, -jnp.inf)
    if sampler.min_p is not None:
        floor_B1 = jnp.max(logits_BV, axis=-1, keepdims=True) + jnp.log(sampler.min_p)[:, None]
        logits_BV = jnp.where(logits_BV >= floor_B1, logits_BV, -jnp.inf)
    return logits_BV
