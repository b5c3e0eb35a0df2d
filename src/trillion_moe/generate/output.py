"""What generation gives back: text as it comes, ends at stop strings, and completions."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Literal, Protocol, runtime_checkable

from trillion_moe.data.chat import StreamParser
from trillion_moe.data.reply import PieceStream, Reply
from trillion_moe.data.tokenizer import Tokenizer

Finish = Literal["eos", "stop", "length", "error"]
Shown = list[tuple[str, str]]  # (channel, text)
TEXT, ANSWER = "text", "response"


@dataclasses.dataclass(frozen=True)
class Completion:
    """What one prompt was continued with.

    ids: the new tokens, the end token included. text: what they say without special tokens, up to a stop string; of a
    chat, the answer; None without a processor. finish: "eos" an end token, "stop" a stop string, "length"
    max_new_tokens, "error" logits that are not finite (`error` then says where). reply: of a chat, the whole of it.
    """

    ids: tuple[int, ...]
    text: str | None
    finish: Finish
    reply: Reply | None = None
    error: str | None = None


@dataclasses.dataclass(frozen=True)
class Piece:
    """What is new of one prompt. text: perhaps none yet. channel: "text"; in a chat "think" or "response". ids: the
    tokens that came with it. The last piece of a prompt holds its completion."""

    prompt: int
    text: str
    channel: str = TEXT
    ids: tuple[int, ...] = ()
    completion: Completion | None = None


@runtime_checkable
class Reader(Protocol):
    """Turns tokens into text."""

    def push(self, token_id: int) -> Shown: ...

    def finish(self) -> Shown: ...

    def reply(self) -> Reply | None: ...


class IdsOnly:
    """Without a tokenizer there is no text."""

    def push(self, token_id: int) -> Shown:
        return []

    def finish(self) -> Shown:
        return []

    def reply(self) -> None:
        return None


class PlainText:
    """Text without special tokens and end tokens."""

    def __init__(self, tokenizer: Tokenizer, eos_ids: Iterable[int]):
        self._stream, self._eos = tokenizer.stream(skip_specials=True), frozenset(eos_ids)

    def push(self, token_id: int) -> Shown:
        return [] if token_id in self._eos else [(TEXT, self._stream.push(token_id))]

    def finish(self) -> Shown:
        return [(TEXT, self._stream.finish())]

    def reply(self) -> None:
        return None


class ChatText:
    """The channels of a reply in a chat. An end token that the format itself does not know is no text of it."""

    def __init__(self, tokenizer: Tokenizer, parser: StreamParser, eos_ids: Iterable[int]):
        self._pieces, self._parser = PieceStream(tokenizer), parser
        own = {tokenizer.specials[name] for name in parser.ends if name in tokenizer.specials}
        self._foreign_ends = frozenset(eos_ids) - own

    def push(self, token_id: int) -> Shown:
        if token_id in self._foreign_ends:
            return self.finish()
        return [shown for piece in self._pieces.push(token_id) for shown in self._parser.push(*piece)]

    def finish(self) -> Shown:
        return [shown for piece in self._pieces.finish() for shown in self._parser.push(*piece)]

    def reply(self) -> Reply:
        return self._parser.finish()


class StopStrings:
    """Lets text through up to the first of the strings; what may be the beginning of one waits. One channel's text does
    not go on in another's."""

    def __init__(self, strings: Sequence[str]):
        self._strings = tuple(strings)
        self._channel, self._waiting = "", ""
        self.met = False

    def push(self, shown: Shown) -> Shown:
        out: Shown = []
        for channel, text in shown:
            if self.met or not text:
                continue
            if channel != self._channel:
                out += self.flush()
                self._channel = channel
            out.append((channel, self._through(self._waiting + text)))
        return [(channel, text) for channel, text in out if text]

    def _through(self, text: str) -> str:
        ends = [at for at in map(text.find, self._strings) if at >= 0]
        if ends:
            self.met, self._waiting = True, ""
            return text[: min(ends)]
        begun = max((_overlap(text, stop) for stop in self._strings), default=0)
        self._waiting = text[len(text) - begun :]
        return text[: len(text) - begun]

    def flush(self) -> Shown:
        """What still waited: no stop string came of it."""
        waiting, self._waiting = self._waiting, ""
        return [(self._channel, waiting)] if waiting else []


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)


class Row:
    """The new tokens of one prompt on their way to a completion."""

    def __init__(self, reader: Reader, eos_ids: Iterable[int], stop: Sequence[str]):
        self.ids: list[int] = []
        self.finish: Finish | None = None  # once the row has ended
        self._reader, self._eos, self._stop = reader, frozenset(eos_ids), StopStrings(stop)
        self.channel = TEXT  # of the latest text
        self._text: dict[str, str] = {}

    def push(self, token_id: int) -> Shown:
        """Takes the next token -> what can be shown now."""
        self.ids.append(token_id)
        shown = self._keep(self._stop.push(self._reader.push(token_id)))
        if self._stop.met:
            self.finish = "stop"
        elif token_id in self._eos:
            self.finish = "eos"
        return shown

    def end(self, otherwise: Finish, error: str | None = None) -> tuple[Shown, Completion]:
        """No more tokens come -> what had to wait, and the completion. otherwise: why, if no token ended the row."""
        shown: Shown = []
        if self.finish != "stop":
            shown = self._keep([*self._stop.push(self._reader.finish()), *self._stop.flush()])
        finish: Finish = "stop" if self._stop.met else self.finish or otherwise
        reply = self._reader.reply()
        if reply is not None and finish == "stop":
            thinking = None if reply.thinking is None else self._text.get("think", "")
            reply = dataclasses.replace(reply, thinking=thinking, answer=self._text.get(ANSWER, ""))
        if reply is not None and finish == "eos":
            reply = dataclasses.replace(reply, complete=True)
        text = None if isinstance(self._reader, IdsOnly) else self._text.get(TEXT if reply is None else ANSWER, "")
        return shown, Completion(tuple(self.ids), text, finish, reply, error)

    def _keep(self, shown: Shown) -> Shown:
        for channel, text in shown:
            self.channel = channel
            self._text[channel] = self._text.get(channel, "") + text
        return shown
