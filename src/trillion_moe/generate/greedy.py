"""Greedy generation of token ids for a batch of unequal prompts."""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from trillion_moe.inputs import Images, InputError, check_inputs, check_tokens
from trillion_moe.model import Model, bucket, init_caches
from trillion_moe.steps import greedy_steps, prefill_step


@dataclasses.dataclass(frozen=True)
class Completion:
    """ids: the new tokens, the end token included. text: None without a tokenizer. finish: why it ended."""

    ids: tuple[int, ...]
    text: str | None
    finish: Literal["eos", "length"]


def generate(
    model: Model,
    prompts: Any,
    *,
    images: Images = None,
    max_new_tokens: int = 128,
    eos_ids: Sequence[int] | None = None,
) -> list[Completion]:
    """Continue every prompt greedily until an end token or `max_new_tokens`.

    prompts: lists of token ids, of any lengths. images: their pictures as patches, in the order of the prompts, one
    placeholder each. eos_ids: the tokens that end a row; None = the config's, () = none.

    Raises:
        InputError: an empty prompt list, an empty prompt, an id outside the vocabulary, max_new_tokens < 1.
        FloatingPointError: logits that are not finite; names the row and the step.
    """
    cfg = model.config
    if max_new_tokens < 1:
        raise InputError(f"max_new_tokens is {max_new_tokens}; it must be at least 1")
    eos = cfg.eos_ids if eos_ids is None else tuple(eos_ids)
    tokens, segments = _pad(model, prompts)
    tokens, segments, batch_images = check_inputs(cfg, tokens, segments, images)
    assert segments is not None
    tokens, segments = _to_bucket(tokens, segments)
    capacity = bucket(int((segments > 0).sum(1).max()) + max_new_tokens)
    logits, caches = _prefill(model, tokens, segments, batch_images, capacity=capacity)
    new, bad, _ = _decode(model, logits, caches, jnp.asarray(eos, jnp.int32), steps=max_new_tokens)
    new, bad = np.asarray(new), np.asarray(bad)
    if (bad >= 0).any():
        row = int(np.argmax(bad >= 0))
        raise FloatingPointError(f"prompt {row}: logits are not finite at new token {bad[row]} (of {max_new_tokens})")
    return [_completion(row[row >= 0], eos) for row in new]


@partial(jax.jit, static_argnames="capacity")
def _prefill(model: Model, tokens, segments, images, *, capacity: int):
    return prefill_step(model, tokens, segments, init_caches(model, tokens.shape[0], capacity), images)


_decode = partial(jax.jit, static_argnames="steps", donate_argnums=2)(greedy_steps)


def _completion(ids: np.ndarray, eos: Sequence[int]) -> Completion:
    ended = len(ids) > 0 and int(ids[-1]) in eos
    return Completion(tuple(int(i) for i in ids), None, "eos" if ended else "length")


def _pad(model: Model, prompts: Any) -> tuple[np.ndarray, np.ndarray]:
    """Prompts as rows padded at the end, with their segments."""
    if isinstance(prompts, str) or not len(prompts) or any(isinstance(p, int | str) for p in prompts):
        raise InputError("prompts must be a non-empty list of token-id lists")
    for row, prompt in enumerate(prompts):
        if not len(prompt):
            raise InputError(f"prompt {row} is empty: there is no token to continue from")
        check_tokens(model.config, np.asarray(prompt)[None], first_row=row)
    width = max(len(p) for p in prompts)
    tokens = np.zeros((len(prompts), width), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    lengths = np.asarray([len(p) for p in prompts])
    return tokens, (np.arange(width) < lengths[:, None]).astype(np.int32)


def _to_bucket(tokens: np.ndarray, segments: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    extra = ((0, 0), (0, bucket(tokens.shape[1]) - tokens.shape[1]))
    return np.pad(tokens, extra), np.pad(segments, extra)
