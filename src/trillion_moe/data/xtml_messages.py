"""What Kimi K3's format takes in: OpenAI messages, checked; tool calls and results, paired; the sizes of images."""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trillion_moe.data.chat import ChatError, ImageSizes, Message, Size, is_tool_list

IMAGE_PLACEHOLDER = "<|kimi_image_placeholder|>"  # plain text: no token has this name

# What each role may hold. The release passes over everything else.
FIELDS = {
    "system": ("content", "name", "tools"),
    "user": ("content", "name"),
    "assistant": ("content", "name", "reasoning_content", "reasoning", "tool_calls"),
    "tool": ("content", "name", "tool", "tool_call_id", "id"),
}


@dataclass(frozen=True)
class Dialect:
    """Where servers differ from the release, and where we refuse what the release does in silence.

    attributes: "four" segments each, or "one" (vLLM). assistant_name: "written" or "dropped" (vLLM). argument_json:
    objects and arrays in arguments "spaced" or "compact" (SMG). response_schema: "overrides" the schema within
    response_format, or is "ignored" (vLLM).
    developer: that role is "unknown", or "system" (vLLM). unknown: roles and fields that the format has no place for:
    "refuse", or "skip" (release). placeholder_text: the image placeholder spelled in a text is "plain" text, or takes
    the next "image" (release). unsized: images without sizes: "refuse", or leave a "placeholder" as text (release).

    VLLM is vLLM's encoder; what its server does to messages before (text parts joined by line breaks, `name:0` as an id
    of a call) is not here.
    """

    attributes: str = "four"
    assistant_name: str = "written"
    argument_json: str = "spaced"
    response_schema: str = "overrides"
    developer: str = "unknown"
    unknown: str = "refuse"
    placeholder_text: str = "plain"
    unsized: str = "refuse"

    def __post_init__(self):
        for field, legal in _DIALECTS.items():
            if getattr(self, field) not in legal:
                raise ChatError(f"dialect {field}", f"{getattr(self, field)!r} is none of {legal}")


_DIALECTS = {
    "attributes": ("four", "one"),
    "assistant_name": ("written", "dropped"),
    "argument_json": ("spaced", "compact"),
    "response_schema": ("overrides", "ignored"),
    "developer": ("unknown", "system"),
    "unknown": ("refuse", "skip"),
    "placeholder_text": ("plain", "image"),
    "unsized": ("refuse", "placeholder"),
}
STRICT = Dialect()
RELEASE = Dialect(unknown="skip", placeholder_text="image", unsized="placeholder")
VLLM = Dialect(
    attributes="one",
    assistant_name="dropped",
    response_schema="ignored",
    developer="system",
    unknown="skip",
    placeholder_text="image",
    unsized="placeholder",
)


@dataclass(frozen=True)
class Call:
    id: str | None
    name: str
    arguments: dict[str, Any] | str  # a text that is no JSON, kept verbatim


def checked(messages: Sequence[Message], dialect: Dialect) -> dict[int, Message]:
    """number -> message, without those of unknown roles where the dialect skips them."""
    kept = {}
    for i, message in enumerate(messages):
        where = f"message {i}"
        if not isinstance(message, Mapping):
            raise ChatError(where, f"is a {type(message).__name__}, not a dict with role and content")
        if message.get("role") == "developer" and dialect.developer == "system":
            message = {**message, "role": "system"}
        role = message.get("role")
        if isinstance(role, str) and role in FIELDS:
            _check_fields(message, where, dialect)
            kept[i] = message
        elif dialect.unknown == "refuse":
            hint = "; Kimi K3 has no developer role, write 'system'" if role == "developer" else ""
            raise ChatError(f"{where}, role", f"{role!r} is none of {tuple(FIELDS)}{hint}")
    return kept


def _check_fields(message: Message, where: str, dialect: Dialect) -> None:
    role = message["role"]
    for field, value in message.items():
        if field not in ("role", *FIELDS[role]):
            # SDKs fill their messages with empty fields; those say nothing that could be lost.
            if dialect.unknown == "refuse" and value not in (None, "", [], {}):
                raise ChatError(f"{where}, {field}", f"a {role} message holds only {FIELDS[role]}")
        elif field in ("name", "tool", "reasoning_content", "reasoning") and not isinstance(value, str | None):
            raise ChatError(f"{where}, {field}", f"must be a text, not {type(value).__name__}")
    if role == "system" and not is_tool_list(message.get("tools") or []):
        raise ChatError(f"{where}, tools", "must be a list of dicts")
    lost = [f for f in ("content", "name") if role == "system" and message.get("tools") and message.get(f)]
    if lost and dialect.unknown == "refuse":
        raise ChatError(f"{where}, {lost[0]}", "has no place in a system message that declares tools")
    _check_content(message.get("content"), f"{where}, content")


def _check_content(content: Any, where: str) -> None:
    if isinstance(content, str | None):
        return
    if not isinstance(content, list | tuple):
        raise ChatError(where, f"must be a text, None or a list of parts, not {type(content).__name__}")
    for n, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind not in ("text", "image", "image_url"):
            raise ChatError(f"{where}[{n}]", f"type {kind!r} is none of 'text', 'image', 'image_url'")
        if kind == "text" and not isinstance(part.get("text"), str):
            raise ChatError(f"{where}[{n}]", f"text must be a text, not {type(part.get('text')).__name__}")


def read_calls(message: Message, where: str) -> list[Call]:
    calls = message.get("tool_calls") or ()
    if not isinstance(calls, list | tuple):
        raise ChatError(f"{where}, tool_calls", f"must be a list, not {type(calls).__name__}")
    found = []
    for n, call in enumerate(calls):
        at = f"{where}, tool_calls[{n}]"
        call = call if isinstance(call, Mapping) else {}
        function = call.get("function", call)
        function = function if isinstance(function, Mapping) else {}
        name, key = function.get("name"), call.get("id")
        if not isinstance(name, str) or not name:
            raise ChatError(at, "needs function.name, a text that is not empty")
        found.append(Call(None if key is None else str(key), name, _arguments(function.get("arguments"), at)))
    return found


def _arguments(arguments: Any, where: str) -> dict[str, Any] | str:
    """A dict; a JSON text is read, so its numbers are printed anew; a text that is no JSON stays as it is."""
    where = f"{where}, arguments"
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except ValueError:
            return arguments
        if not isinstance(parsed, dict):
            raise ChatError(where, f"JSON {type(parsed).__name__} {arguments[:40]!r}; it must be an object")
        return parsed
    if not isinstance(arguments, dict):
        raise ChatError(where, f"must be a dict or a JSON text, not {type(arguments).__name__}")
    for key in arguments:
        if not isinstance(key, str):
            raise ChatError(where, f"key {key!r} is a {type(key).__name__}, not a text")
    return arguments


def tool_results(
    messages: dict[int, Message], calls: dict[int, list[Call]]
) -> tuple[list[int], dict[int, tuple[str, int]]]:
    """-> numbers of the messages in the order of the prompt; (tool name, index) of each tool result.

    A run of results whose ids all belong to the latest calls is sorted like those, and the calls give the names. The
    index counts results since the latest assistant message.
    """
    order: list[int] = []
    results: dict[int, tuple[str, int]] = {}
    latest: list[Call] = []
    count = 0
    numbers = range(max(messages, default=-1) + 1)
    for role, group in itertools.groupby(numbers, key=lambda i: messages[i]["role"] if i in messages else None):
        run = list(group)
        if role == "assistant":
            latest, count = calls[run[-1]], 0
        elif role == "tool":
            ids = [call.id for call in latest]
            places = {i: place for i in run if (place := _place(messages[i], ids)) is not None}
            sure = len(places) == len(run)
            run = sorted(run, key=places.__getitem__) if sure else run
            for n, i in enumerate(run, start=count + 1):
                results[i] = (latest[places[i]].name if sure else _tool_name(messages[i], i, latest, n), n)
            count += len(run)
        order += run if role else ()
    return order, results


def _place(message: Message, ids: list[str | None]) -> int | None:
    key = message.get("tool_call_id", message.get("id"))
    return ids.index(str(key)) if key is not None and str(key) in ids else None


def _tool_name(message: Message, i: int, latest: list[Call], count: int) -> str:
    name = message.get("tool") or message.get("name")
    if not name and count <= len(latest):
        name = latest[count - 1].name
    if not name:
        raise ChatError(
            f"message {i}",
            f"result {count} has no tool name: give tool_call_id, tool or name; the latest calls are "
            f"{[(call.id, call.name) for call in latest]}",
        )
    return name


class Images:
    """Hands out image sizes in the order of the messages."""

    def __init__(self, sizes: ImageSizes, dialect: Dialect):
        self.sizes = sizes if callable(sizes) else list(sizes)
        self.unsized = not callable(sizes) and not len(sizes) and dialect.unsized == "placeholder"
        self.in_text = dialect.placeholder_text == "image" and not self.unsized
        self.taken = 0

    def take(self, part: Mapping[str, Any] | None, where: str) -> Size | None:
        """The next image's (width, height); None if it stays a placeholder."""
        if self.unsized:
            return None
        if callable(self.sizes):
            if part is None:
                raise ChatError(where, f"{IMAGE_PLACEHOLDER} in a text: image_sizes must be a list, not a function")
            size = self.sizes(part)
        elif self.taken < len(self.sizes):
            size = self.sizes[self.taken]
        else:
            raise ChatError(where, f"image {self.taken + 1}, but image_sizes holds {len(self.sizes)} size(s)")
        if len(size) != 2 or not all(isinstance(n, int) and n > 0 for n in size):
            raise ChatError(where, f"image size {size!r} must be (width, height), two integers of 1 or more")
        self.taken += 1
        return size

    def check_all_used(self, messages: dict[int, Message]) -> None:
        if callable(self.sizes) or self.unsized or self.taken == len(self.sizes):
            return
        spelled = [i for i, m in messages.items() if IMAGE_PLACEHOLDER in str(m.get("content"))]
        hint = f"; the text of message {spelled[0]} spells {IMAGE_PLACEHOLDER}, which is plain text" if spelled else ""
        raise ChatError(
            "image_sizes", f"{len(self.sizes)} size(s), but the messages hold {self.taken} image part(s){hint}"
        )
