"""Batches of prompts through prefill and decoding, compiled for few shapes.

Shapes are rounded up, so that few are compiled: prompts, caches and image rows to a power of two of at least 64, the
number of rows and of end tokens to a power of two, rows over a mesh to a multiple of what it cuts them into. Rows,
positions and image rows that are added hold nothing and are never dispatched.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from trillion_moe.compiler import jitted
from trillion_moe.inputs import Images, InputError, check_inputs, check_tokens
from trillion_moe.layers.vision import Features, ImageBatch
from trillion_moe.model import Caches, Model, bucket, grow, image_features, init_caches
from trillion_moe.sampling import Sampler, SamplingConfig
from trillion_moe.sharding import BATCH
from trillion_moe.steps import Decoding, decode_steps, prefill_step

STEPS = 16  # tokens decoded at most between two looks at them
MOST = 1 << 20  # positions of a row, prompt and new tokens together: the context of Kimi K3


@dataclasses.dataclass(frozen=True)
class Prompts:
    """Checked prompts, a row each. tokens: int32 [B, T], placeholders expanded; segments: int32 [B, T], 1, then 0 for
    the padding at the end."""

    tokens: np.ndarray
    segments: np.ndarray
    images: ImageBatch | None

    @classmethod
    def of(cls, model: Model, rows: Sequence[Sequence[Any]], images: Images) -> "Prompts":
        """InputError, which names the row: a prompt without tokens, an unknown id, images that do not fit."""
        for row, ids in enumerate(rows):
            if not len(ids):
                raise InputError(f"prompt {row} is empty: there is no token to continue from")
            try:
                check_tokens(model.config, np.asarray(ids)[None], first_row=row)
            except TypeError as error:
                raise TypeError(f"prompt {row}: {error}") from None
        lengths = np.asarray([len(ids) for ids in rows])
        segments = (np.arange(lengths.max()) < lengths[:, None]).astype(np.int32)
        tokens = np.zeros(segments.shape, np.int32)
        tokens[segments > 0] = np.concatenate([np.asarray(ids, np.int32) for ids in rows])
        tokens, segments, batch = check_inputs(model.config, tokens, segments, images)
        assert segments is not None
        return cls(tokens, segments, batch)

    def __len__(self) -> int:
        return len(self.tokens)

    def row(self, index: int) -> list[int]:
        return self.tokens[index, self.segments[index] > 0].tolist()

    @property
    def longest(self) -> int:
        return int((self.segments > 0).sum(1).max())


def check_room(prompts: Prompts, max_new_tokens: int) -> None:
    """InputError if a prompt and its new tokens are more than MOST; names the lengths."""
    if prompts.longest + max_new_tokens > MOST:
        raise InputError(
            f"the longest prompt has {prompts.longest} tokens, max_new_tokens is {max_new_tokens}: legal are {MOST}"
            " together"
        )


def start(
    model: Model,
    prompts: Prompts,
    sampling: Sequence[SamplingConfig],
    max_new_tokens: Sequence[int],
    *,
    caches: Caches | None = None,
    before: Sequence[Sequence[int]] | None = None,
    barred: Iterable[int] = (),
) -> Decoding:
    """Prefill -> where decoding begins, rows rounded up. caches: of the tokens `before`, if prompts go on from some.

    barred: ids that are never chosen.
    """
    rows = _rows(model, len(prompts))
    held = max((len(ids) for ids in before or ()), default=0)
    needed = held + prompts.longest + max(max_new_tokens) - 1  # the last new token is never entered
    if caches is None:
        caches = init_caches(model, rows, bucket(needed))
    elif needed > caches.capacity:
        caches = grow(caches, bucket(needed))
    tokens, segments = (_widened(a, rows, bucket(a.shape[1])) for a in (prompts.tokens, prompts.segments))
    logits, filled = _prefill(model, tokens, segments, caches, _features(model, prompts.images))
    idle = rows - len(prompts)
    known = [[*(before[i] if before else ()), *prompts.row(i)] for i in range(len(prompts))]
    sampler = Sampler.of(
        [*sampling, *[SamplingConfig()] * idle], [*known, *[[]] * idle], model.config.vocab_size, barred
    )
    left = jnp.asarray([*max_new_tokens, *[0] * idle], jnp.int32)
    return Decoding(logits, filled, sampler, left, jnp.zeros(rows, bool))


def decode(model: Model, now: Decoding, eos_ids: Sequence[int], steps: int = STEPS) -> tuple[np.ndarray, Decoding]:
    """-> up to `steps` (at most STEPS) new tokens a row, int32 [B, STEPS], -1 where it made none, and what follows.

    `now` is used up: its arrays become those of the result.
    """
    ends = np.full(_round(max(len(eos_ids), 4)), -1, np.int32)
    ends[: len(eos_ids)] = list(eos_ids)
    tokens, now = _decode(model, now, ends, jnp.int32(steps), room=STEPS)
    return np.asarray(tokens), now


_decode = partial(jitted, static_argnames="room", donate_argnums=1)(decode_steps)
_prefill = partial(jitted, donate_argnums=3)(prefill_step)
_image_features = jitted(image_features)


def _features(model: Model, images: ImageBatch | None) -> Features | None:
    """Compiled for every set of picture sizes; what follows is compiled for the rounded number of their rows alone."""
    found = _image_features(model, images)
    if found is None:
        return None
    count = len(found.rows)
    return Features(jnp.pad(found.rows, ((0, bucket(count) - count), (0, 0))), jnp.int32(count))


def _rows(model: Model, count: int) -> int:
    """How many are computed for so many prompts: over a mesh as many on every device."""
    parts = 1 if model.layout is None else model.layout.size(*BATCH)
    return -(-_round(count) // parts) * parts


def _round(count: int) -> int:
    return 1 << (count - 1).bit_length()


def _widened(array: np.ndarray, rows: int, width: int) -> np.ndarray:
    return np.pad(array, ((0, rows - array.shape[0]), (0, width - array.shape[1])))
