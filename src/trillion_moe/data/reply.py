"""Kimi K3's replies: pieces of text and special tokens -> thinking, answer and tool calls, as they come.

The reply begins inside the channel that the prompt opened (think, or response without thinking) and closes what it
opens. Only special tokens are markers; their names spelled in ordinary text are text. Nothing a model writes raises an
error or is lost: what does not fit the format becomes a `Finding` with the raw text, and text within a channel stays
there. A tool call is given out only when it is whole and every argument has the value that its type says.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

OPEN, CLOSE, SEP, END_OF_MSG = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"
MARKERS = re.compile("|".join(map(re.escape, (OPEN, CLOSE, SEP, END_OF_MSG))))

CHANNELS = ("think", "response")
PARENTS = {
    "message": "",
    "think": "message",
    "response": "message",
    "tools": "message",
    "call": "tools",
    "argument": "call",
    "json": "call",
}
TYPES = {
    "string": str,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
    "object": dict,
    "array": list,
}
_HEADER = re.compile(r'\s*(\w+)((?:\s+[\w.:-]+="[^"]*")*)\s*')
_ATTRIBUTE = re.compile(r'([\w.:-]+)="([^"]*)"')


@dataclass(frozen=True)
class ToolCall:
    """`index` counts from 1. The format has no ids; `id` is name:position from 0, and results may refer to it."""

    id: str
    index: int
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Finding:
    """What did not fit the format, and the text it was, marker names included."""

    what: str
    raw: str


@dataclass(frozen=True)
class Reply:
    """thinking: None if there was no think channel. complete: the model ended its turn; False if it was cut off."""

    thinking: str | None
    answer: str
    tool_calls: tuple[ToolCall, ...] = ()
    complete: bool = False
    findings: tuple[Finding, ...] = ()

    def message(self) -> dict[str, Any]:
        """The turn as a message, to go on with the conversation; a malformed call, a finding, is not in it."""
        message: dict[str, Any] = {"role": "assistant", "content": self.answer}
        if self.thinking is not None:
            message["reasoning_content"] = self.thinking
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for c in self.tool_calls
            ]
        return message


@runtime_checkable
class Decoder(Protocol):
    """What is asked of a tokenizer here: names of special tokens, and text as the ids come."""

    @property
    def specials(self) -> Mapping[str, int]: ...

    def stream(self) -> Any: ...


class PieceStream:
    """(text, whether it is a special token) as ids come; of ordinary ids, once their characters are whole."""

    def __init__(self, tokenizer: Decoder):
        self._names = {token_id: name for name, token_id in tokenizer.specials.items()}
        self._stream = tokenizer.stream()

    def push(self, token_id: int) -> list[tuple[str, bool]]:
        name = self._names.get(int(token_id))
        if name is None:
            return _texts(self._stream.push(token_id))
        return [*self.finish(), (name, True)]

    def finish(self) -> list[tuple[str, bool]]:
        return _texts(self._stream.finish())


def _texts(text: str) -> list[tuple[str, bool]]:
    return [(text, False)] if text else []


def pieces(ids: Iterable[int], tokenizer: Decoder) -> Iterator[tuple[str, bool]]:
    """The pieces of a whole sequence of ids."""
    stream = PieceStream(tokenizer)
    for token_id in ids:
        yield from stream.push(token_id)
    yield from stream.finish()


def split_markers(text: str) -> Iterator[tuple[str, bool]]:
    """The pieces of a reply that only its text is left of: every spelled marker counts as one."""
    at = 0
    for match in MARKERS.finditer(text):
        yield text[at : match.start()], False
        yield match.group(), True
        at = match.end()
    yield text[at:], False


def parse_reply(reply: str | Iterable[tuple[str, bool]], *, thinking: bool = True) -> Reply:
    """A whole reply, best as `pieces` of its ids.

    From a string, markers and text that spells them cannot be told apart. It may be decoded without the tokens flagged
    special: `<|open|>`, `<|close|>` and `<|sep|>` are not, and suffice.
    """
    parser = ReplyParser(thinking=thinking)
    for text, control in split_markers(reply) if isinstance(reply, str) else reply:
        parser.push(text, control)
    return parser.finish()


@dataclass
class _Element:
    tag: str
    attributes: dict[str, str] = field(default_factory=dict)
    start: int = 0  # index of its first piece
    text: list[str] = field(default_factory=list)
    arguments: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None  # of a call or something within it


class ReplyParser:
    """`push` pieces, show what comes back, `finish`. `thinking`: the prompt opened the think channel.

    A channel that the model forgets to close ends where the next one, or the message's end, begins.
    """

    def __init__(self, *, thinking: bool = True):
        self._stack = [_Element("message"), _Element("think" if thinking else "response")]
        self._pieces: list[str] = []
        self._header: int | None = None  # index of the piece that began a tag
        self._thinking: list[str] | None = [] if thinking else None
        self._answer: list[str] = []
        self._calls: list[ToolCall] = []
        self._findings: list[Finding] = []
        self._shown: list[tuple[str, str]] = []
        self._fresh = True  # nothing but tags of the prefix so far
        self._done = False

    @property
    def ends(self) -> frozenset[str]:
        return frozenset([END_OF_MSG])

    def push(self, text: str, control: bool = False) -> list[tuple[str, str]]:
        """-> (channel, text) of "think" and "response" to show now. `control`: the piece is a special token."""
        self._shown = []
        if text:
            self._pieces.append(text)
            if control and MARKERS.fullmatch(text):
                self._marker(text)
            elif self._header is None:
                if control:
                    self._note("special token outside the format", text)
                self._text(text)
        return self._shown

    def finish(self) -> Reply:
        """The reply as far as it came. May be called at any time, and again."""
        findings = list(self._findings)
        if self._header is not None:
            findings.append(Finding("cut off inside a tag", self._raw(self._header)))
        for element in self._stack:
            if element.tag == "call" and not self._done:
                what = f"call {len(self._calls) + 1} of {element.attributes.get('tool')!r} was cut off"
                findings.append(Finding(what, self._raw(element.start)))
        thinking = None if self._thinking is None else "".join(self._thinking)
        return Reply(thinking, "".join(self._answer), tuple(self._calls), self._done, tuple(findings))

    # --- pieces ------------------------------------------------------------------------------------------------------

    def _marker(self, marker: str) -> None:
        start = self._header
        if start is not None and marker == SEP:
            self._header = None
            self._tag(start)
            return
        if start is not None:  # a marker inside a tag: what went before is no tag
            self._header = None
            self._misplaced("unfinished tag", "".join(self._pieces[start:-1]))
        if marker in (OPEN, CLOSE):
            self._header = len(self._pieces) - 1
        elif marker == END_OF_MSG and not self._done:
            self._close_down_to(1)
            self._done = True
        elif marker == SEP:
            self._misplaced("separator without a tag", marker)

    def _text(self, text: str) -> None:
        top = self._stack[-1]
        if top.tag in ("argument", "json"):
            top.text.append(text)
        elif top.tag in CHANNELS and not self._done:
            self._show(top.tag, text)
        elif text.strip():
            self._note("text behind the end" if self._done else f"text directly in a {top.tag}", text)
            top.problem = top.problem or f"text {text[:40]!r} outside its arguments"
            if top.tag == "message" and not self._done:
                self._show("response", text)  # the model forgot to open the channel

    def _show(self, channel: str, text: str) -> None:
        self._fresh = False
        if channel == "think":
            self._thinking = self._thinking or []
            self._thinking.append(text)
        else:
            self._answer.append(text)
        self._shown.append((channel, text))

    def _raw(self, start: int) -> str:
        return "".join(self._pieces[start:])

    def _note(self, what: str, raw: str) -> None:
        self._findings.append(Finding(what, raw))

    def _misplaced(self, what: str, raw: str) -> None:
        """Structure that cannot be here is text, so that it is seen."""
        if self._stack[-1].tag in (*CHANNELS, "argument", "json"):
            self._note(what, raw)
        self._text(raw)

    # --- tags --------------------------------------------------------------------------------------------------------

    def _tag(self, start: int) -> None:
        marker, header = self._pieces[start], "".join(self._pieces[start + 1 : -1])
        match = _HEADER.fullmatch(header)
        tag = match.group(1) if match else None
        if match is None or tag not in PARENTS or (marker == CLOSE and match.group(2)):
            self._misplaced("not a tag of the format", self._raw(start))
        elif self._done:
            self._note("a tag behind the end", self._raw(start))
        elif marker == CLOSE:
            self._close(tag, start)
        else:
            attributes = {key: _unescaped(value) for key, value in _ATTRIBUTE.findall(match.group(2))}
            self._open(_Element(tag, attributes, start))

    def _open(self, element: _Element) -> None:
        tags = [e.tag for e in self._stack]
        if self._fresh and element.tag in ("message", *CHANNELS) and tags[-1] in ("message", *CHANNELS):
            # The prefix of the prompt, repeated, or another channel than the one it opened.
            del self._stack[0 if element.tag == "message" else 1 :]
        elif PARENTS[element.tag] != tags[-1]:
            if PARENTS[element.tag] != "message" or tags[-1] not in CHANNELS:
                return self._misplaced(f"{element.tag} inside {tags[-1]}", self._raw(element.start))
            self._note(f"{tags[-1]} was not closed", self._raw(element.start))
            self._stack.pop()
        if element.tag == "think" and self._thinking is None:
            self._thinking = []
        self._stack.append(element)
        return None

    def _close(self, tag: str, start: int) -> None:
        depth = max((n for n, e in enumerate(self._stack) if e.tag == tag), default=None)
        if depth is None:
            return self._misplaced(f"{tag} closed, but not open", self._raw(start))
        self._fresh = False
        self._close_down_to(depth + 1)
        if tag == "message":
            self._done = True
            return None
        element = self._stack.pop()
        if tag in ("argument", "json"):
            self._argument(element)
        elif tag == "call":
            self._call(element)
        return None

    def _close_down_to(self, depth: int) -> None:
        """Ends the elements above: they were not closed, so a call among them is not whole."""
        while len(self._stack) > depth:
            element = self._stack.pop()
            self._note(f"{element.tag} was not closed", self._raw(element.start) if element.tag == "call" else "")
            self._stack[-1].problem = element.problem or f"{element.tag} was not closed"

    def _argument(self, element: _Element) -> None:
        call, text = self._stack[-1], "".join(element.text)
        try:
            if element.tag == "json":
                _merge(call.arguments, _typed(text, "object"))
            else:
                _merge(call.arguments, {element.attributes["key"]: _typed(text, element.attributes.get("type"))})
        except KeyError:
            call.problem = call.problem or "an argument without key"
        except ValueError as error:
            call.problem = call.problem or f"argument {element.attributes.get('key', 'json')!r}: {error}"

    def _call(self, element: _Element) -> None:
        """A call that is not as the format says is a finding: a program that acts on calls must not guess."""
        name, position = element.attributes.get("tool"), len(self._calls)
        problem = element.problem or (None if name else "no tool name")
        if problem is not None:
            self._note(f"call of {name!r}: {problem}", self._raw(element.start))
            return
        if element.attributes.get("index") != str(position + 1):
            self._note(f"call {position + 1} of {name!r} has index {element.attributes.get('index')!r}", "")
        self._calls.append(ToolCall(f"{name}:{position}", position + 1, str(name), element.arguments))


def _unescaped(value: str) -> str:
    return value.replace("&quot;", '"').replace("&amp;", "&")


def _merge(arguments: dict[str, Any], more: dict[str, Any]) -> None:
    if twice := sorted(arguments.keys() & more.keys()):
        raise ValueError(f"{twice[0]!r} is there twice")
    arguments.update(more)


def _typed(text: str, kind: str | None) -> Any:
    """The value of an argument. ValueError if the text is not what its type says."""
    if kind not in TYPES:
        raise ValueError(f"type {kind!r} is none of {tuple(TYPES)}")
    if kind == "string":
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"{text[:40]!r} is no {kind}") from None
    if not isinstance(value, TYPES[kind]) or (kind == "number" and isinstance(value, bool)):
        raise ValueError(f"{text[:40]!r} is no {kind}")
    return value
