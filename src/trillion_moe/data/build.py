"""Rows -> examples: a row is rendered, encoded and cut, and what is wrong with it is refused or dropped."""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trillion_moe.config import ModelConfig
from trillion_moe.data.chat import ChatError, ChatOptions, Segment, encode_each
from trillion_moe.data.examples import SUPERVISE, DataConfig, Example, Examples, Picture, opened_pictures
from trillion_moe.data.image_files import ImageError
from trillion_moe.data.images import preprocess
from trillion_moe.data.processor import Processor
from trillion_moe.data.rows import BadRow, DataError, Row
from trillion_moe.data.tokenizer import TokenizerError
from trillion_moe.data.xtml_messages import IMAGE_PLACEHOLDER

if TYPE_CHECKING:
    import PIL.Image


def build_examples(rows: Sequence[Row], processor: Processor, model: ModelConfig, config: DataConfig) -> Examples:
    """The examples of a file's rows. Relative paths of pictures begin at the file's own folder.

    Every picture is read and prepared here once, so that a bad one is found before anything is trained.

    Raises:
        ChatError: rows need a chat format, and the checkpoint has none.
        DataError: bad rows, all of them, if they are to be refused; no row with a supervised token is left; settings
            that this checkpoint or this file cannot follow.
    """
    if not rows:
        raise DataError("build_examples", ["rows is empty"])
    processor = dataclasses.replace(processor, folder=rows[0].path.parent)
    builder = _Builder(rows[0].path, processor, model, config)
    builder.check(rows)
    good, dropped, refused = [], [], []
    for row in rows:
        try:
            good.append((builder.example(row), row))
        except BadRow as bad:
            policy = config.too_long if bad.reason == "too long" else config.on_bad
            (refused if policy == "refuse" else dropped).append((row.line, bad))
    if refused:
        raise DataError(rows[0].path, [f"line {line}, {bad}" for line, bad in refused])
    if not good:
        reasons = ", ".join(f"{reason} {n}" for reason, n in Counter(bad.reason for _, bad in dropped).items())
        raise DataError(rows[0].path, [f"no supervised token is left: all {len(rows)} rows were dropped ({reasons})"])
    items, kept = zip(*good, strict=True)
    return Examples(rows[0].path, items, kept, tuple(dropped), processor, model.pad_id or 0)


Piece = tuple[list[int], bool, Picture | None]
"""Ids that belong together, whether they are supervised, and the picture for which the one id stands."""


@dataclass(frozen=True)
class _Builder:
    """What all rows of a file share."""

    path: Path
    processor: Processor
    model: ModelConfig
    config: DataConfig

    def check(self, rows: Sequence[Row]) -> None:
        """Whether settings and checkpoint fit these rows at all."""
        texts = sum(row.text is not None for row in rows)
        if self.config.raw and not texts:
            raise DataError(self.path, ["raw has no effect: no row has a prompt and a completion that are texts"])
        if self.config.raw and not self.model.eos_ids:
            raise DataError(self.path, ["raw needs an end id behind completions, and the model's config has none"])
        if not self.config.raw or texts < len(rows):
            _ = self.processor.format

    def example(self, row: Row) -> Example:
        """BadRow for what is wrong with it."""
        try:
            pieces = self._raw(*row.text) if self.config.raw and row.text else self._conversation(row)
        except ChatError as error:
            raise BadRow(error.where, error.what, "chat") from error
        except TokenizerError as error:
            raise BadRow("text", str(error), "text") from error
        return self._limited(_joined(row.line, pieces))

    def _raw(self, prompt: str, completion: str) -> list[Piece]:
        if not completion:
            raise BadRow("completion", "is empty: there is nothing to learn", "unsupervised")
        first, last = (self.processor.text(text, specials=False).ids for text in (prompt, completion))
        return [(first, False, None), ([*last, self.model.eos_ids[0]], True, None)]

    def _conversation(self, row: Row) -> list[Piece]:
        turns = _learned_turns(row, last=self.config.supervise == "last")
        opened = opened_pictures(row, self.processor)
        options = ChatOptions(
            tools=row.tools, thinking=self.config.thinking, effort=self.config.effort, add_generation_prompt=False
        )
        segments = self.processor.format.render(row.messages, options, [picture.size for picture in opened])
        self._check_segments(segments)
        pictures = [self._picture(picture, number) for number, picture in enumerate(opened)]
        pieces: list[Piece] = []
        for segment, ids in zip(segments, encode_each(segments, self.processor.tokenizer), strict=True):
            learned = segment.generated and segment.message in turns
            learned = learned and (self.config.supervise != "answers" or segment.channel != "think")
            pieces.append((ids, learned, None if segment.image is None else pictures[segment.image]))
            if segment.image is not None and ids != [self.model.media_id]:
                what = f"placeholders of pictures have id {ids[0]} in the tokenizer, {self.model.media_id} in the model"
                raise DataError(self.path, [what])
        return pieces

    def _check_segments(self, segments: Sequence[Segment]) -> None:
        for s in segments:
            if not s.control and IMAGE_PLACEHOLDER in s.text:
                what = f"spells {IMAGE_PLACEHOLDER}, which is plain text: give pictures as parts of type image_url"
                raise BadRow(f"message {s.message}", what, "image")
        generated = [s for s in segments if s.generated]
        if self.config.supervise == "answers" and generated and not any(s.channel for s in generated):
            legal = [name for name in SUPERVISE if name != "answers"]
            what = f"supervise = 'answers': this chat template does not tell thinking from answers; legal is {legal}"
            raise DataError(self.path, [what])

    def _picture(self, picture: "PIL.Image.Image", number: int) -> Picture:
        """What is to be known of a picture; its patches are let go."""
        assert self.processor.images is not None
        try:
            made = preprocess(picture, self.processor.images)
        except ImageError as error:
            raise BadRow(f"picture {number}", str(error), "image") from error
        return Picture(number, picture.size, made.grid_thw, made.tokens, 0)

    def _limited(self, example: Example) -> Example:
        limit, length = self.config.max_length, len(example.ids)
        if limit is not None and length > limit:
            if self.config.too_long != "truncate":
                raise BadRow("length", f"{length} tokens, max_length is {limit}", "too long")
            example = _cut(example, limit)
        if not example.mask.any():
            where = "messages" if len(example.ids) == length else f"the first {limit} of {length} tokens"
            raise BadRow(where, "no token is supervised", "unsupervised")
        return example


def _learned_turns(row: Row, *, last: bool) -> set[int]:
    """Numbers of the messages that are learned. BadRow if none of them says anything."""
    turns = [i for i, message in enumerate(row.messages) if message["role"] == "assistant"]
    turns = {*(turns[-1:] if last else turns)} - row.silent
    if not any(_says_something(row.messages[i]) for i in turns):
        what = f"no token is supervised: {len(turns)} assistant message(s) to learn, and none says anything"
        raise BadRow("messages", what, "unsupervised")
    return turns


def _says_something(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    texts = [content] if isinstance(content, str) else [part.get("text") for part in content or () if part]
    texts += [message.get("reasoning_content"), message.get("reasoning")]
    return bool(message.get("tool_calls")) or any(isinstance(text, str) and text.strip() for text in texts)


def _joined(line: int, pieces: Sequence[Piece]) -> Example:
    """One example, every picture's placeholder repeated for its tokens."""
    pictures, ids, mask = [], [], []
    for piece, learned, picture in pieces:
        if picture is not None:
            pictures.append(dataclasses.replace(picture, start=len(ids)))
            piece = piece * picture.tokens
        ids += piece
        mask += [learned] * len(piece)
    mask[:1] = [False]
    return Example(line, np.array(ids, np.int32), np.array(mask, bool), tuple(pictures), len(ids))


def _cut(example: Example, limit: int) -> Example:
    """The first `limit` tokens, and the pictures within."""
    for picture in example.pictures:
        end = picture.start + picture.tokens
        if picture.start < limit < end:
            what = f"max_length {limit} would cut its placeholders, tokens {picture.start}..{end - 1}"
            raise BadRow(f"picture {picture.number}", what, "cut image")
    pictures = tuple(p for p in example.pictures if p.start < limit)
    ids, mask = example.ids[:limit].copy(), example.mask[:limit].copy()
    return dataclasses.replace(example, ids=ids, mask=mask, pictures=pictures)
