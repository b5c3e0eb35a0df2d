"""Rows of a JSONL file of conversations, in three forms, checked line by line; and the error that names bad ones.

    {"messages": [...], "tools": [...]}                      OpenAI's form; tools may be left out
    {"prompt": P, "completion": C, "tools": [...]}           both texts, both messages, or messages and a text
    {"conversations": [{"from": "human", "value": "..."}], "system": "...", "images": ["a.png"]}        ShareGPT's

A message of an assistant may have `weight` 0: it is read, not learned. Everything of a prompt is read, not learned.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trillion_moe.config_json import distinct
from trillion_moe.data.chat import Message, is_tool_list

SHOWN = 20  # findings printed; the rest is counted
KEYS = {
    "messages": ("messages", "tools"),
    "prompt": ("prompt", "completion", "tools"),
    "conversations": ("conversations", "system", "images"),
}
SPEAKERS = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
IMAGE = "<image>"  # where ShareGPT's form places a picture
Reason = Literal["form", "chat", "text", "image", "unsupervised", "cut image", "too long"]


class DataError(ValueError):
    """`findings` are whole sentences about `where`, a file; all of them. The message shows the first 20."""

    def __init__(self, where: str | Path, findings: Iterable[str]):
        self.where, self.findings = str(where), tuple(findings)
        lines = [f"  - {finding}" for finding in self.findings[:SHOWN]]
        if len(self.findings) > SHOWN:
            lines.append(f"  ... and {len(self.findings) - SHOWN} more")
        super().__init__(f"{where}: {len(self.findings)} problem(s)\n" + "\n".join(lines))

    def __reduce__(self):
        return type(self), (self.where, self.findings)


class BadRow(ValueError):
    """What is wrong with one row: the field, the sentence, and the kind of fault under which it is counted."""

    def __init__(self, field: str, what: str, reason: Reason = "form"):
        self.field, self.what, self.reason = field, what, reason
        super().__init__(f"{field}: {what}")

    def __reduce__(self):
        return type(self), (self.field, self.what, self.reason)


@dataclass(frozen=True)
class Row:
    """One line of a file, counted from 1, as a conversation in OpenAI's form.

    silent: numbers of the messages that are read, not learned. text: prompt and completion, where both came as texts;
    `messages` are then a user's and an assistant's.
    """

    path: Path
    line: int
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    silent: frozenset[int] = frozenset()
    text: tuple[str, str] | None = None


def read_rows(path: str | Path, *, ignore: Collection[str] = ()) -> tuple[Row, ...]:
    """Every line that is not blank. ignore: keys of a row to pass over, as those of a data set's bookkeeping.

    Raises:
        OSError: the file cannot be read.
        DataError: lines that are none of the three forms, all of them, with field and legal values; no row at all; an
            ignored key that no row has.
    """
    path, rows, wrong, passed = Path(path), [], [], set()
    # Not splitlines: within a JSON string, line breaks other than this one may stand.
    for line, raw in enumerate(path.read_bytes().split(b"\n"), 1):
        if not raw.strip():
            continue
        try:
            value = _object(raw)
            passed |= value.keys() & {*ignore}
            rows.append(_row(path, line, {key: item for key, item in value.items() if key not in ignore}))
        except BadRow as bad:
            wrong.append(f"line {line}, {bad}")
    if wrong:
        raise DataError(path, wrong)
    if not rows:
        raise DataError(path, [f"it holds no row; a row is an object with one of {tuple(KEYS)}"])
    if unknown := sorted({*ignore} - passed):
        raise DataError(path, [f"no row has the key {key!r} that is to be ignored" for key in unknown])
    return tuple(rows)


def _object(raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=distinct, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise BadRow("the line", f"is not JSON with distinct keys: {error}") from None
    if not isinstance(value, dict):
        raise BadRow("the line", f"holds a {type(value).__name__}; legal is an object with one of {tuple(KEYS)}")
    return value


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _row(path: Path, line: int, value: dict[str, Any]) -> Row:
    forms = [form for form in KEYS if form in value]
    if len(forms) != 1:
        raise BadRow("the line", f"has the keys {[*value]}; legal is exactly one of {tuple(KEYS)}")
    if unknown := [key for key in value if key not in KEYS[forms[0]]]:
        raise BadRow(unknown[0], f"is an unknown key; legal are {KEYS[forms[0]]}")
    tools = value.get("tools") or ()
    if not is_tool_list(tools):
        raise BadRow("tools", f"must be a list of objects, not {_shown(tools)}")
    prompt, text = (), None
    match forms[0]:
        case "messages":
            messages = _messages(value["messages"], "")
        case "conversations":
            messages = _turns(value)
        case _:
            prompt, completion, text = _prompted(value)
            messages = (*prompt, *completion)
    unlearned = {i for i, message in enumerate(messages) if _weight(message, i) == 0}
    messages = tuple({key: item for key, item in message.items() if key != "weight"} for message in messages)
    return Row(path, line, messages, tuple(tools), frozenset({*range(len(prompt)), *unlearned}), text)


def _shown(value: Any) -> str:
    """A value in an error: short, with its type."""
    text = json.dumps(value, ensure_ascii=False)
    return f"{type(value).__name__} {text if len(text) <= 40 else text[:40] + '...'}"


# --- OpenAI's form ---------------------------------------------------------------------------------------------------


def _messages(value: Any, within: str) -> tuple[Message, ...]:
    """Only what every chat format needs is checked here; the rest is the format's business."""
    if not isinstance(value, list) or not value:
        raise BadRow(within.removesuffix(", ") or "messages", f"must be a list of messages, not {_shown(value)}")
    for i, message in enumerate(value):
        at = f"{within}message {i}"
        if not isinstance(message, dict):
            raise BadRow(at, f"must be an object, not {_shown(message)}")
        if not isinstance(message.get("role"), str):
            raise BadRow(f"{at}, role", f"must be a text, not {_shown(message.get('role'))}")
        content = message.get("content")
        if content is None and not (message.get("tool_calls") or message.get("tools")):
            raise BadRow(f"{at}, content", "is missing; legal is a text, or a list of parts")
        if not isinstance(content, str | list | None):
            raise BadRow(f"{at}, content", f"must be a text or a list of parts, not {_shown(content)}")
    return tuple(value)


def _weight(message: Message, i: int) -> int:
    weight = message.get("weight", 1)
    if "weight" in message and (message["role"] != "assistant" or type(weight) is not int or weight not in (0, 1)):
        raise BadRow(f"message {i}, weight", f"is {_shown(weight)}; legal is 0 or 1, of an assistant's message")
    return weight


# --- prompt and completion -------------------------------------------------------------------------------------------


def _prompted(value: dict[str, Any]) -> tuple[tuple[Message, ...], tuple[Message, ...], tuple[str, str] | None]:
    """-> messages of the prompt, of the completion, and both as texts if they came so."""
    prompt, completion = value["prompt"], value.get("completion")
    if not isinstance(completion, str | list):
        raise BadRow("completion", f"must be a text or a list of messages, not {_shown(completion)}")
    answer = ({"role": "assistant", "content": completion},)
    if isinstance(prompt, str):
        if not isinstance(completion, str):
            raise BadRow("completion", "holds messages, but prompt is a text; legal is a text, or messages in both")
        return ({"role": "user", "content": prompt},), answer, (prompt, completion)
    first = _messages(prompt, "prompt, ")
    return first, answer if isinstance(completion, str) else _messages(completion, "completion, "), None


# --- ShareGPT's form -------------------------------------------------------------------------------------------------


def _turns(value: dict[str, Any]) -> tuple[Message, ...]:
    """Messages, the system's among them. Pictures go where the turns say <image>, in order."""
    turns = value["conversations"]
    if not isinstance(turns, list) or not turns:
        raise BadRow("conversations", f"must be a list of turns, not {_shown(turns)}")
    messages: list[Message] = []
    if value.get("system") is not None:
        if not isinstance(value["system"], str):
            raise BadRow("system", f"must be a text, not {_shown(value['system'])}")
        messages.append({"role": "system", "content": value["system"]})
    images = _image_list(value.get("images"))
    rest = iter(images)
    turns = [_turn(turn, i) for i, turn in enumerate(turns)]
    if (found := sum(text.count(IMAGE) for _, text in turns)) != len(images):
        raise BadRow("images", f"names {len(images)} picture(s), but the turns hold {found} {IMAGE}")
    return (*messages, *({"role": role, "content": _parts(text, rest)} for role, text in turns))


def _image_list(images: Any) -> list[str]:
    images = [] if images is None else images
    if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
        raise BadRow("images", f"must be a list of paths or data URIs, not {_shown(images)}")
    return images


def _turn(turn: Any, i: int) -> tuple[str, str]:
    at = f"conversations, turn {i}"
    if not isinstance(turn, dict) or turn.keys() != {"from", "value"}:
        raise BadRow(at, f"must be an object with from and value, not {_shown(turn)}")
    if not isinstance(turn["from"], str) or turn["from"] not in SPEAKERS:
        raise BadRow(f"{at}, from", f"is {_shown(turn['from'])}; legal is one of {tuple(SPEAKERS)}")
    if not isinstance(turn["value"], str):
        raise BadRow(f"{at}, value", f"must be a text, not {_shown(turn['value'])}")
    return SPEAKERS[turn["from"]], turn["value"]


def _parts(text: str, images: Iterator[str]) -> str | list[dict[str, Any]]:
    """The text of a turn, or parts of it with the next pictures in between."""
    first, *others = text.split(IMAGE)
    if not others:
        return text
    parts: list[dict[str, Any]] = [{"type": "text", "text": first}]
    for piece in others:
        parts.append({"type": "image_url", "image_url": {"url": next(images)}})
        parts.append({"type": "text", "text": piece})
    return [part for part in parts if part.get("text") != ""]
