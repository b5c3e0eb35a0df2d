"""What a data set holds, in figures and as text with the supervised spans marked."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from trillion_moe.data.examples import Example, Examples
from trillion_moe.data.tokenizer import Tokenizer

BEGIN, END = "⟦", "⟧"


@dataclass(frozen=True)
class Statistics:
    """rows: read. dropped: rows by reason. lengths: least, median, greatest, of the examples as they are trained.
    messages: of the examples, by role; reasoning: how many of the assistant's bring some."""

    rows: int
    dropped: dict[str, int]
    examples: int
    truncated: int
    tokens: int
    supervised: int
    lengths: tuple[int, float, int]
    images: int
    image_tokens: int
    messages: dict[str, int]
    reasoning: int

    def __str__(self) -> str:
        dropped = "; ".join(f"{reason}: {n:,}" for reason, n in self.dropped.items())
        least, median, greatest = self.lengths
        lines = {
            "rows": f"{self.rows:,}",
            "dropped": f"{sum(self.dropped.values()):,}" + (f" ({dropped})" if dropped else ""),
            "examples": f"{self.examples:,}, of them truncated {self.truncated:,}",
            "supervised tokens": f"{self.supervised:,} of {self.tokens:,} ({self.supervised / self.tokens:.1%})",
            "lengths": f"{least:,} to {greatest:,} tokens, median {median:,.1f}",
            "images": f"{self.images:,}, {self.image_tokens:,} tokens",
            "messages": "; ".join(f"{role}: {n:,}" for role, n in self.messages.items()),
            "with reasoning": f"{self.reasoning:,} of {self.messages.get('assistant', 0):,} assistant messages",
        }
        return "\n".join(f"{name:18} {value}" for name, value in lines.items())


def statistics(examples: Examples) -> Statistics:
    items = examples.items
    lengths = [len(item.ids) for item in items]
    pictures = [picture for item in items for picture in item.pictures]
    messages = [message for row in examples.rows for message in row.messages]
    return Statistics(
        rows=len(items) + len(examples.dropped),
        dropped=dict(Counter(bad.reason for _, bad in examples.dropped)),
        examples=len(items),
        truncated=sum(item.full_length > len(item.ids) for item in items),
        tokens=sum(lengths),
        supervised=sum(int(item.mask.sum()) for item in items),
        lengths=(min(lengths), float(np.median(lengths)), max(lengths)),
        images=len(pictures),
        image_tokens=sum(picture.tokens for picture in pictures),
        messages=dict(Counter(message["role"] for message in messages)),
        reasoning=sum(_reasons(message) for message in messages),
    )


def _reasons(message: Mapping[str, Any]) -> bool:
    return bool(str(message.get("reasoning_content") or message.get("reasoning") or "").strip())


def decode_marked(example: Example, tokenizer: Tokenizer) -> str:
    """The text of an example for people: supervised spans between ⟦ and ⟧, special tokens by name, a picture as
    ``<image 640x480: 391 tokens>``."""
    pictures = {picture.start: picture for picture in example.pictures}
    text, at, inside = [], 0, False
    for counts, run in groupby(example.mask.tolist()):
        end = at + len(list(run))
        text += [BEGIN if counts else END] if counts != inside else []
        inside = counts
        while at < end:
            stop = min([start for start in pictures if at < start < end], default=end)
            if at in pictures:
                picture = pictures[at]
                text.append("<image {}x{}: {} tokens>".format(*picture.size, picture.tokens))
                at += picture.tokens
            else:
                text.append(tokenizer.decode(example.ids[at:stop].tolist()))
                at = stop
    return "".join([*text, END] if inside else text)
