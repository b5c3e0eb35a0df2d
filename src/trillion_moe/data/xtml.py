"""Kimi K3's chat format (XTML): a conversation as segments, as the release's `encoding_k3.py` builds them.

Elements are `<|open|>tag key="value"<|sep|>` … `<|close|>tag<|sep|>`, a message ends with `<|end_of_msg|>`, and nothing
stands between messages. Order: tool declarations, effort, messages, tool choice, response format, generation prefix.
Only the markers and image blocks are control segments. Every attribute is four plain segments, because the release
encodes them one by one and byte-pair merges must not cross.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trillion_moe.data.chat import DEFAULT_OPTIONS, ChatError, ChatOptions, ImageSizes, Message, Segment
from trillion_moe.data.reply import CLOSE, END_OF_MSG, OPEN, SEP, ReplyParser
from trillion_moe.data.xtml_messages import (
    IMAGE_PLACEHOLDER,
    STRICT,
    Call,
    Dialect,
    Images,
    checked,
    read_calls,
    tool_results,
)

MEDIA_BEGIN, MEDIA_CONTENT, MEDIA_PAD, MEDIA_END = (
    "<|media_begin|>",
    "<|media_content|>",
    "<|media_pad|>",
    "<|media_end|>",
)

# The format's own sentences; the model was trained on these bytes.
DECLARED = "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n{}\n```"
DECLARED_LATER = (
    "## New Tools Available\nThe system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\nHere are the specs for the extended tools.\n\n"
    "```json\n{}\n```"
)
EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\nNow the system is invoked with `thinking_effort={}`."
)
CHOICE = "The system is invoked with `tool_choice={}`.\nYou {} in the next message."
CHOSEN = {"required": "MUST call tools", "none": "MUST NOT call any tools"}
FORMAT = (
    "The system is invoked with `response_format={}`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting."
)
SCHEMA = "\nThe JSON data must match the following schema:\n```json\n{}\n```"


@dataclass(frozen=True)
class XtmlChat:
    """Kimi K3's `ChatFormat`. Where STRICT does not refuse, it renders what RELEASE renders."""

    dialect: Dialect = STRICT

    def render(
        self, messages: Sequence[Message], options: ChatOptions = DEFAULT_OPTIONS, image_sizes: ImageSizes = ()
    ) -> list[Segment]:
        """Segments of a conversation in OpenAI's form.

        messages: dicts with role, content (text, or parts of type text, image, image_url), and name, tool_calls,
        tool_call_id, reasoning_content (or reasoning); a system message with `tools` declares further tools.
        image_sizes: (width, height) per image, in the order of the messages, or a function of the content part. Results
        of one round of calls are sorted into the order of the calls: `image_order` says where the images went.

        Raises: ChatError, with message and field, for roles, fields, parts, arguments that the format cannot hold, a
            tool result without a name, and images and sizes that do not pair up.
        """
        numbered = checked(messages, self.dialect)
        calls = {i: read_calls(m, f"message {i}") for i, m in numbered.items() if m["role"] == "assistant"}
        order, results = tool_results(numbered, calls)
        images = Images(image_sizes, self.dialect)
        # In the order of the messages, because images are counted there; put into the order of the prompt below.
        bodies = {}
        for i, message in numbered.items():
            w = _Writer(self.dialect, message["role"], i, images)
            if message["role"] == "assistant":
                _assistant(w, message, calls[i], options.thinking)
            elif message["role"] == "tool":
                _tool(w, message, *results[i])
            else:
                _plain(w, message)
            bodies[i] = w.segments
        images.check_all_used(numbered)
        head, tail = _before(self.dialect, options), _behind(self.dialect, options)
        return [*head, *itertools.chain.from_iterable(bodies[i] for i in order), *tail]

    def parser(self, options: ChatOptions = DEFAULT_OPTIONS) -> ReplyParser:
        """For the reply to a prompt that was rendered with these options."""
        return ReplyParser(thinking=options.thinking)


def render(
    messages: Sequence[Message], options: ChatOptions = DEFAULT_OPTIONS, image_sizes: ImageSizes = ()
) -> list[Segment]:
    """`XtmlChat.render` in the strict dialect."""
    return XtmlChat().render(messages, options, image_sizes)


# --- what is written -------------------------------------------------------------------------------------------------


class _Writer:
    """The segments of one message so far; `channel` and `generated` are stamped on what follows. "" makes none."""

    def __init__(self, dialect: Dialect, role: str, message: int | None = None, images: Images | None = None):
        self.dialect, self.role, self.message, self.images = dialect, role, message, images
        self.segments: list[Segment] = []
        self.channel: str | None = None
        self.generated = False

    def put(self, text: str, control: bool = False) -> None:
        if text:
            self.segments.append(Segment(text, control, self.role, self.channel, self.generated, self.message))

    def open(self, tag: str, attributes: Mapping[str, Any] | None = None) -> None:
        self.put(OPEN, True)
        self.put(tag)
        for key, value in (attributes or {}).items():
            pieces = (f" {key}", '="', str(value).replace("&", "&amp;").replace('"', "&quot;"), '"')
            for piece in pieces if self.dialect.attributes == "four" else ("".join(pieces),):
                self.put(piece)
        self.put(SEP, True)

    def close(self, tag: str) -> None:
        self.put(CLOSE, True)
        self.put(tag)
        self.put(SEP, True)

    def end(self) -> None:
        self.channel = None
        self.close("message")
        self.put(END_OF_MSG, True)

    def text(self, text: str, where: str) -> None:
        """A caller's text: always plain, unless the dialect lets it name a place for an image."""
        in_text = self.images is not None and self.images.in_text
        for n, piece in enumerate(text.split(IMAGE_PLACEHOLDER) if in_text else [text]):
            if n:
                self.image(None, where)
            self.put(piece)

    def image(self, part: Mapping[str, Any] | None, where: str) -> None:
        """An image block; `part` is None for a place within a text."""
        assert self.images is not None
        size = self.images.take(part, where)
        if size is None:
            self.put(IMAGE_PLACEHOLDER)
            return
        generated, self.generated = self.generated, False  # the model reads images and writes none
        self.put(MEDIA_BEGIN, True)
        self.put(f"image {size[0]}x{size[1]}")
        self.put(MEDIA_CONTENT, True)
        number = self.images.taken - 1
        self.segments.append(Segment(MEDIA_PAD, True, self.role, self.channel, False, self.message, number))
        self.put(MEDIA_END, True)
        self.generated = generated

    def content(self, message: Message) -> None:
        content = message.get("content")
        for n, part in enumerate([{"type": "text", "text": content}] if isinstance(content, str) else content or ()):
            where = f"message {self.message}, content[{n}]"
            if part["type"] == "text":
                self.text(part["text"], where)
            else:
                self.image(part, where)


def _plain(w: _Writer, message: Message) -> None:
    """A system or user message."""
    if message.get("tools"):
        _internal(w, "tool-declare", DECLARED_LATER.format(_sorted_json(message["tools"], f"message {w.message}")))
        return
    w.open("message", {"role": w.role} | _named(message))
    w.content(message)
    w.end()


def _tool(w: _Writer, message: Message, name: str, index: int) -> None:
    w.open("message", {"role": "tool", "tool": name, "index": index})
    w.content(message)
    w.end()


def _assistant(w: _Writer, message: Message, calls: list[Call], thinking: bool) -> None:
    w.open("message", {"role": "assistant"} | (_named(message) if w.dialect.assistant_name == "written" else {}))
    where = f"message {w.message}"
    if thinking:
        w.channel = "think"
        w.open("think")
        w.generated = True  # the generation prefix ends here
        reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
        w.text(reasoning if reasoning.strip() else "", f"{where}, reasoning")
        w.close("think")
    w.channel = "response"
    w.open("response")
    w.generated = True  # and here without thinking
    w.content(message)
    w.close("response")
    if calls:
        w.channel = "tools"
        w.open("tools")
        for n, call in enumerate(calls):
            _call(w, call, n, f"{where}, tool_calls[{n}]")
        w.close("tools")
    w.end()


def _call(w: _Writer, call: Call, n: int, where: str) -> None:
    w.open("call", {"tool": call.name, "index": n + 1})
    if isinstance(call.arguments, str):
        w.open("json", {"type": "object"})
        w.text(call.arguments, where)
        w.close("json")
    else:
        for key, value in call.arguments.items():
            w.open("argument", {"key": key, "type": _type_name(value, f"{where}, argument {key!r}")})
            w.text(value if isinstance(value, str) else _argument_json(w.dialect, value, where), where)
            w.close("argument")
    w.close("call")


def _named(message: Message) -> dict[str, str]:
    return {"name": message["name"]} if message.get("name") else {}


def _internal(w: _Writer, kind: str, body: str) -> None:
    w.open("message", {"role": "system", "type": kind})
    w.put(body.strip())
    w.end()


def _before(dialect: Dialect, options: ChatOptions) -> list[Segment]:
    """Tool declarations and effort."""
    w = _Writer(dialect, "system")
    if options.tools:
        _internal(w, "tool-declare", DECLARED.format(_sorted_json(list(options.tools), "option tools")))
    effort = "max" if options.effort == "default" else options.effort
    if options.thinking and effort is not None:
        _internal(w, "thinking-effort", EFFORT.format(effort))
    return w.segments


def _behind(dialect: Dialect, options: ChatOptions) -> list[Segment]:
    """Tool choice, response format and the generation prefix."""
    w = _Writer(dialect, "system")
    if options.tool_choice in CHOSEN:
        _internal(w, "tool-choice", CHOICE.format(options.tool_choice, CHOSEN[options.tool_choice]))
    _response_format(w, options)
    prefix = _Writer(dialect, "assistant")
    if options.add_generation_prompt:
        prefix.open("message", {"role": "assistant"})
        prefix.channel = "think" if options.thinking else "response"
        prefix.open(prefix.channel)
    return w.segments + prefix.segments


def _response_format(w: _Writer, options: ChatOptions) -> None:
    given = options.response_format
    kind = given.get("type") if isinstance(given, Mapping) else given
    if kind not in (None, "text", "json_object", "json_schema") or (kind is None and given is not None):
        raise ChatError("option response_format", f"type {kind!r} is none of 'text', 'json_object', 'json_schema'")
    if kind != "json_schema" and options.response_schema is not None:
        raise ChatError("option response_schema", f"needs response_format 'json_schema', which is {kind!r}")
    if kind == "json_object":
        _internal(w, "response-format", FORMAT.format(kind))
    elif kind == "json_schema":
        schema = None if w.dialect.response_schema == "ignored" else options.response_schema
        if schema is None:
            schema = _schema_within(given)
        if schema is None:
            raise ChatError("option response_format", "'json_schema' without a schema, here or in response_schema")
        body = FORMAT.format(kind) + SCHEMA.format(_sorted_json(schema, "option response_format"))
        _internal(w, "response-format", body)


def _schema_within(response_format: Any) -> Any:
    """The schema in a `response_format`: under json_schema.schema, json_schema.json_schema, or json_schema itself."""
    found = response_format.get("json_schema") if isinstance(response_format, Mapping) else None
    return found.get("schema", found.get("json_schema", found)) if isinstance(found, Mapping) else found


# --- JSON ------------------------------------------------------------------------------------------------------------


def _sorted_json(value: Any, where: str) -> str:
    """Declarations and schemas: compact, keys sorted at every depth, so that equal ones give equal prompts."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    except (TypeError, ValueError) as error:
        raise ChatError(where, f"cannot be written as JSON: {error}") from None


def _argument_json(dialect: Dialect, value: Any, where: str) -> str:
    separators = (", ", ": ") if dialect.argument_json == "spaced" else (",", ":")
    try:
        return json.dumps(value, ensure_ascii=False, separators=separators)
    except (TypeError, ValueError) as error:
        raise ChatError(where, f"argument cannot be written as JSON: {error}") from None


def _type_name(value: Any, where: str) -> str:
    match value:
        case None:
            return "null"
        case bool():  # before int, of which it is one
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case dict():
            return "object"
        case list() | tuple():
            return "array"
    raise ChatError(
        where, f"{type(value).__name__} has no JSON type; legal are None, bool, int, float, str, dict, list"
    )
