"""What a caller hands in, checked on the host before anything is compiled: ids, segments, images and placeholders."""

from collections.abc import Sequence
from typing import Any

import jax.core
import numpy as np

from trillion_moe.config import ModelConfig
from trillion_moe.layers.vision import ImageBatch
from trillion_moe.layers.vision_positions import expand_placeholders

Images = ImageBatch | Sequence[ImageBatch | None] | None


class InputError(ValueError):
    """Tokens, segments, images or caches that do not fit the model or each other."""


def check_inputs(cfg: ModelConfig, tokens_BT: Any, segments: Any = None, images: Images = None):
    """-> int32 tokens with image placeholders expanded, segments (None if none are needed), one ImageBatch or None.

    Arrays under a JAX transformation cannot be looked at: they pass as they are, placeholders expanded already.

    Raises:
        TypeError: tokens that are not integers, images of another type.
        InputError: a shape other than [B, T], an id outside the vocabulary, negative or returning segments, images
            without placeholder or the reverse; with row, position and the legal values.
    """
    per_row = None if images is None or isinstance(images, ImageBatch) else [_items(image) for image in images]
    images = one_batch(cfg, images)
    if traced(tokens_BT, segments):
        return tokens_BT, segments, images
    tokens = check_tokens(cfg, tokens_BT)
    if segments is not None:
        segments = _check_segments(np.asarray(segments), tokens.shape)
    if cfg.media_id is not None:
        tokens, segments = _place_images(cfg, tokens, segments, images, per_row)
    return tokens, segments, images


def traced(*arrays: Any) -> bool:
    """Whether any of these is under a JAX transformation, so that its values cannot be looked at."""
    return any(isinstance(a, jax.core.Tracer) for a in arrays)


def _items(images: ImageBatch | None) -> int:
    return 0 if images is None else len(images.grid_thw) if isinstance(images, ImageBatch) else -1


def check_tokens(cfg: ModelConfig, tokens_BT: Any, *, first_row: int = 0) -> np.ndarray:
    tokens = np.asarray(tokens_BT)
    if not np.issubdtype(tokens.dtype, np.integer):
        raise TypeError(f"tokens must be integers, not {tokens.dtype}")
    if tokens.ndim != 2 or 0 in tokens.shape:
        raise InputError(
            f"tokens must have shape [batch, time] with at least one row and one token, not {tokens.shape}"
        )
    bad = (tokens < 0) | (tokens >= cfg.vocab_size)
    if bad.any():
        row, at = (int(i) for i in np.argwhere(bad)[0])
        where = f"at row {first_row + row}, position {at}"
        raise InputError(f"token id {tokens[row, at]} {where} is outside 0..{cfg.vocab_size - 1}")
    return tokens.astype(np.int32)


def _check_segments(segments: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    if segments.shape != shape:
        raise InputError(f"segments have shape {segments.shape}, tokens {shape}; they must be equal")
    if segments.dtype != bool and not np.issubdtype(segments.dtype, np.integer):
        raise TypeError(f"segments must be integers (0 = padding, 1, 2, ... = documents), not {segments.dtype}")
    if (segments < 0).any():
        row, at = (int(i) for i in np.argwhere(segments < 0)[0])
        raise InputError(
            f"segment {segments[row, at]} at row {row}, position {at}: 0 is padding, documents are 1, 2, ..."
        )
    for row, ids in enumerate(segments.astype(np.int32)):
        real = ids[ids > 0]
        starts = real[np.flatnonzero(np.diff(real, prepend=0))]
        if len(set(starts.tolist())) < len(starts):
            again = next(int(i) for n, i in enumerate(starts) if i in starts[:n])
            raise InputError(f"row {row}: document {again} comes again after another; every document is one run")
    return segments.astype(np.int32)


def one_batch(cfg: ModelConfig, images: Images) -> ImageBatch | None:
    """The images of all rows as one batch, rows in order."""
    if images is None:
        return None
    if cfg.vision is None:
        raise InputError(f"images were given, but this {cfg.model_type} model has no vision tower")
    if isinstance(images, ImageBatch):
        return images
    batches = [b for b in images if b is not None]
    for row, batch in enumerate(images):
        if batch is not None and not isinstance(batch, ImageBatch):
            raise TypeError(f"images of row {row} must be an ImageBatch of patches or None, not {type(batch).__name__}")
    if not batches:
        return None
    patches = np.concatenate([np.asarray(b.patches) for b in batches])
    return ImageBatch(patches, tuple(grid for b in batches for grid in b.grid_thw))


def _place_images(cfg: ModelConfig, tokens, segments, images: ImageBatch | None, per_row: list[int] | None):
    assert cfg.media_id is not None
    if images is None:
        found = np.argwhere((tokens == cfg.media_id) & (True if segments is None else segments > 0))
        if len(found):
            row, at = (int(i) for i in found[0])
            raise InputError(f"row {row}, position {at}: image placeholder {cfg.media_id}, but no images were given")
        return tokens, segments
    assert cfg.vision is not None
    if per_row is not None and len(per_row) != len(tokens):
        raise InputError(f"images are given for {len(per_row)} rows, tokens have {len(tokens)}")
    try:
        counts = images.tokens_per_item(cfg.vision)
        return expand_placeholders(tokens, segments, counts, cfg.media_id, cfg.pad_id or 0, items_per_row=per_row)
    except ValueError as error:
        raise InputError(str(error)) from None
