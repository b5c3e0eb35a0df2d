"""Examples: token ids, which of them the loss counts, where pictures stand; and how rows are to become such."""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trillion_moe.data.chat import EFFORTS
from trillion_moe.data.image_files import ImageError
from trillion_moe.data.images import Grid, Size, preprocess_all
from trillion_moe.data.processor import Processor
from trillion_moe.data.rows import BadRow, DataError, Row

if TYPE_CHECKING:
    import PIL.Image

SUPERVISE = ("assistant", "last", "answers")
TOO_LONG = ("refuse", "drop", "truncate")
ON_BAD = ("refuse", "drop")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """How rows become examples; plain values, so that a recipe can hold them.

    supervise: what the loss counts of what the model itself writes (thinking, answers, calls, the end of a turn):
        "assistant" = every turn, "last" = only if it is of the last assistant message, "answers" = every turn without
        its thinking.
    max_length: tokens, pictures expanded; None = no limit. too_long: rows above it are refused, dropped or cut at the
        end ("truncate"). A cut never splits a picture's placeholders: such a row is a bad one.
    on_bad: the whole file is refused, or bad rows are dropped and counted. Bad is a row that the chat format or the
        tokenizer cannot hold, with an unreadable picture, without a supervised token, or with a split picture.
    raw: a prompt and a completion that are texts stand one behind the other as they are, then the model's first end
        id. Without, they are a user's message and its answer, as in `generate`.
    thinking, effort: as in `ChatOptions`. With thinking, a turn without reasoning teaches an empty thinking channel.

    Raises: DataError with all findings.
    """

    supervise: str = "assistant"
    max_length: int | None = None
    too_long: str = "refuse"
    on_bad: str = "refuse"
    raw: bool = False
    thinking: bool = True
    effort: str | None = "default"

    def __post_init__(self) -> None:
        efforts = (*EFFORTS, "default", None)
        legal = {"supervise": SUPERVISE, "too_long": TOO_LONG, "on_bad": ON_BAD, "effort": efforts}
        values = {name: getattr(self, name) for name in legal}
        found = [f"{k} = {v!r}: legal is one of {legal[k]}" for k, v in values.items() if v not in legal[k]]
        if self.max_length is not None and (type(self.max_length) is not int or self.max_length < 2):
            found.append(f"max_length = {self.max_length!r}: legal is None or an integer of at least 2")
        if self.max_length is None and self.too_long != "refuse":
            found.append(f"too_long = {self.too_long!r} has no effect while max_length is None")
        if found:
            raise DataError("DataConfig", found)


@dataclass(frozen=True)
class Picture:
    """Its placeholders are ids[start : start + tokens]. size: (width, height) as it came; number: in the order of the
    messages, which is not always that of the ids."""

    number: int
    size: Size
    grid_thw: Grid
    tokens: int
    start: int


@dataclass(frozen=True, eq=False)
class Example:
    """A row as the model sees it. line: of the file. ids: int32 [T], one placeholder for every token of a picture.
    mask: bool [T], true where the token is supervised; never the first, which nothing comes before. pictures: in the
    order of the ids. full_length: tokens before a cut."""

    line: int
    ids: np.ndarray
    mask: np.ndarray
    pictures: tuple[Picture, ...]
    full_length: int


@dataclass(frozen=True, eq=False)
class Examples:
    """The good rows of a file, in its order; `rows` and `items` go together. dropped: (line, why).

    Ids and masks are held, five bytes a token. Patches are not (a picture of 3600 x 3600 pixels has 158 MB of them):
    `patches` makes them again from the row.
    """

    path: Path
    items: tuple[Example, ...]
    rows: tuple[Row, ...]
    dropped: tuple[tuple[int, BadRow], ...]
    processor: Processor
    pad_id: int

    def patches(self, index: int) -> np.ndarray | None:
        """float32 [N, 3, p, p] of the pictures of an item; None without any. May be called from several threads.

        Raises: DataError for a picture that is not what it was when the rows were checked.
        """
        example, row = self.items[index], self.rows[index]
        if not example.pictures:
            return None
        assert self.processor.images is not None
        try:
            pictures = opened_pictures(row, self.processor)
            made = preprocess_all([pictures[p.number] for p in example.pictures], self.processor.images)
        except (BadRow, ImageError) as error:
            raise DataError(self.path, [f"line {row.line}, {error}; it could be read before"]) from error
        if made.grid_thw != tuple(p.grid_thw for p in example.pictures):
            raise DataError(self.path, [f"line {row.line}: a picture has another size than when it was checked"])
        return made.patches

    @cached_property
    def digest(self) -> str:
        """Of the ids and masks: sets that differ in it give different batches."""
        digest = hashlib.sha256()
        for example in self.items:
            for array in (np.int64(len(example.ids)), example.ids, example.mask):
                digest.update(array.tobytes())
        return digest.hexdigest()[:16]


def opened_pictures(row: Row, processor: Processor) -> list["PIL.Image.Image"]:
    """The pictures of a row, in the order of its messages. BadRow for one that cannot be read."""
    try:
        return processor.pictures(row.messages)
    except ImageError as error:
        where, _, what = str(error).partition(": ")
        raise BadRow(where, what, "image") from error
