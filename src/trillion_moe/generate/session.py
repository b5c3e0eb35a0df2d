"""A conversation that goes on: the caches of what was said, used again only by a prompt that begins with all of it."""

import hashlib
from typing import Any

import jax
import numpy as np

from trillion_moe.generate.engine import Prompts
from trillion_moe.layers.vision import ImageBatch
from trillion_moe.model import Caches, Model


class Session:
    """Holds what one prompt and its answer left in the caches. Hand it to `stream` again with the next prompt.

    The next prompt goes on from the caches if it begins with every token and every picture that they hold; one that
    differs anywhere starts cold, since the state of linear attention cannot be taken back. reused: how many tokens of
    the latest prompt were found in the caches.
    """

    def __init__(self) -> None:
        self.reused = 0
        self._weights: list[Any] = []
        self._caches: Caches | None = None
        self._ids: list[int] = []
        self._pictures: list[bytes] = []

    def take(self, model: Model, prompts: Prompts) -> tuple[Prompts, Caches | None, list[int]]:
        """-> what is left to enter, and the caches to enter it into with the tokens they hold; None to start cold.

        The caches are the caller's from here on; `keep` gives new ones back.
        """
        caches, self._caches = self._caches, None
        held, seen = len(self._ids), len(self._pictures)
        if caches is None or not self._begins(model, prompts):
            self.reused = 0
            return prompts, None, []
        self.reused = held
        rest = Prompts(prompts.tokens[:, held:], prompts.segments[:, held:], _without(prompts.images, seen))
        return rest, caches, self._ids

    def _begins(self, model: Model, prompts: Prompts) -> bool:
        """Whether the prompt begins with what is held, under the same arrays of weights.

        A placeholder that the model wrote itself stands for no picture: then the pictures left do not fit what is left.
        """
        ids, pictures = prompts.row(0), _digests(prompts.images)
        held, seen, media = len(self._ids), len(self._pictures), model.config.media_id
        weights = jax.tree.leaves(model)
        if len(weights) != len(self._weights) or any(a is not b for a, b in zip(weights, self._weights, strict=True)):
            return False
        rest = _without(prompts.images, seen)
        vision = model.config.vision
        wanted = sum(rest.tokens_per_item(vision)) if rest is not None and vision is not None else 0
        return (
            len(ids) > held
            and ids[:held] == self._ids
            and pictures[:seen] == self._pictures
            and (media is None or ids[held:].count(media) == wanted)
        )

    def keep(self, model: Model, caches: Caches, ids: list[int], images: ImageBatch | None) -> None:
        """The caches hold exactly these tokens and pictures, in row 0."""
        self._weights, self._caches = jax.tree.leaves(model), caches
        self._ids, self._pictures = ids, _digests(images)


def _digests(images: ImageBatch | None) -> list[bytes]:
    items = [] if images is None else _items(images)
    return [hashlib.sha256(patches.tobytes() + repr(grid).encode()).digest() for patches, grid in items]


def _items(images: ImageBatch) -> list[tuple[np.ndarray, tuple[int, int, int]]]:
    ends = np.cumsum([np.prod(grid) for grid in images.grid_thw])
    return list(zip(np.split(np.asarray(images.patches), ends[:-1]), images.grid_thw, strict=True))


def _without(images: ImageBatch | None, first: int) -> ImageBatch | None:
    items = [] if images is None else _items(images)[first:]
    return ImageBatch(np.concatenate([p for p, _ in items]), tuple(grid for _, grid in items)) if items else None
