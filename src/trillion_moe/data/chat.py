"""Chat: messages -> segments -> token ids, and which of the formats a checkpoint folder speaks.

A prompt is a list of segments, never one string: only a segment with `control=True` may become special tokens, and
those come from the format alone. What a user, a tool or a document wrote stays plain text, whatever it spells.
Formats: `xtml.XtmlChat` (Kimi K3) and `jinja_chat.JinjaChat` (a template beside the weights).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from trillion_moe.data.reply import Reply
from trillion_moe.data.tokenizer_files import CONFIG_FILE, read_json

Message = Mapping[str, Any]
Size = tuple[int, int]  # width, height of the picture as it came, before any resizing
ImageSizes = Sequence[Size] | Callable[[Mapping[str, Any]], Size]

EFFORTS = ("low", "high", "max")
TOOL_CHOICES = (None, "auto", "none", "required")


class ChatError(ValueError):
    """A conversation that cannot be rendered: `where` (message, field) and `what` is wrong there, with legal values."""

    def __init__(self, where: str, what: str):
        self.where, self.what = where, what
        super().__init__(f"{where}: {what}")

    def __reduce__(self):
        return type(self), (self.where, self.what)


@dataclass(frozen=True)
class Segment:
    """A run of the prompt that is encoded by itself; neighbours are not joined, since ids depend on the borders.

    control: the text is the name of one special token. `role` and `channel` ("think", "response", "tools"; None for the
    frame of a message) and `message` (its number in the conversation; None for what the format adds) say where it is.
    generated: the model itself writes this, so a trainer may put loss on it: an assistant's turn behind the generation
    prefix, closing markers and end of message included, images not. image: number of the picture, in the order of the
    messages, on the one placeholder that stands for it.
    """

    text: str
    control: bool = False
    role: str | None = None
    channel: str | None = None
    generated: bool = False
    message: int | None = None
    image: int | None = None


@dataclass(frozen=True)
class ChatOptions:
    """What a request says beside its messages.

    tools: declarations as in OpenAI's API. tool_choice: None, "auto", "none", "required". response_format: None,
    "text", "json_object", "json_schema", or a dict with that `type`; response_schema wins over the schema within it.
    effort: "low", "high", "max"; "default" is the format's own (Kimi K3: max, as its `apply_chat_template` does); None
    says nothing about effort (as its `build_chat_segments` does). Without thinking it has no effect.

    Raises: ChatError for a value outside these.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str | None = None
    response_format: str | Mapping[str, Any] | None = None
    response_schema: Any = None
    thinking: bool = True
    effort: str | None = "default"
    add_generation_prompt: bool = True

    def __post_init__(self):
        if self.effort not in (None, "default", *EFFORTS):
            raise ChatError("option effort", f"{self.effort!r} is none of {EFFORTS}, 'default', None")
        if self.tool_choice not in TOOL_CHOICES:
            raise ChatError("option tool_choice", f"{self.tool_choice!r} is none of {TOOL_CHOICES}")
        if not is_tool_list(self.tools):
            raise ChatError("option tools", "must be a list of dicts")


def is_tool_list(tools: Any) -> bool:
    return isinstance(tools, list | tuple) and all(isinstance(tool, Mapping) for tool in tools)


DEFAULT_OPTIONS = ChatOptions()


@runtime_checkable
class StreamParser(Protocol):
    """Takes a reply piece by piece: gives (channel, text) to show, and the whole reply at the end. ends: names of the
    special tokens with which the format ends a turn."""

    @property
    def ends(self) -> frozenset[str]: ...

    def push(self, text: str, control: bool = False) -> list[tuple[str, str]]: ...

    def finish(self) -> Reply: ...


@runtime_checkable
class ChatFormat(Protocol):
    """How one family of models writes conversations."""

    def render(
        self, messages: Sequence[Message], options: ChatOptions = DEFAULT_OPTIONS, image_sizes: ImageSizes = ()
    ) -> list[Segment]: ...

    def parser(self, options: ChatOptions = DEFAULT_OPTIONS) -> StreamParser: ...


@runtime_checkable
class Encoder(Protocol):
    """The one thing that is asked of a tokenizer here: `specials` says whether special names in the text are read."""

    def encode(self, text: str, *, specials: bool) -> list[int]: ...


def encode_each(segments: Iterable[Segment], tokenizer: Encoder) -> list[list[int]]:
    """Token ids of every segment, segment by segment.

    Raises: ChatError where a control segment is not exactly one token: the tokenizer is another model's.
    """
    rows = []
    for segment in segments:
        ids = tokenizer.encode(segment.text, specials=segment.control)
        if segment.control and len(ids) != 1:
            raise ChatError(
                f"special token {segment.text!r}",
                f"this tokenizer makes {len(ids)} tokens of it, not 1; it does not belong to the chat format",
            )
        rows.append(ids)
    return rows


def encode(segments: Iterable[Segment], tokenizer: Encoder) -> list[int]:
    """Token ids of a prompt."""
    return [i for ids in encode_each(segments, tokenizer) for i in ids]


def prompt_text(segments: Iterable[Segment]) -> str:
    """The prompt for people to read. Encoding this string would let text turn into special tokens."""
    return "".join(segment.text for segment in segments)


def image_order(segments: Iterable[Segment]) -> tuple[int, ...]:
    """Numbers of the images in the order in which the prompt holds them: pictures must be handed over in this order.

    It differs from 0, 1, 2, ... where tool results with images are sorted into the order of their calls.
    """
    return tuple(segment.image for segment in segments if segment.image is not None)


def load_chat(folder: str | Path, specials: Iterable[str]) -> ChatFormat:
    """The chat format of a checkpoint folder: Kimi K3's XTML, or the Jinja template that lies there.

    specials: the names that its tokenizer reads. XTML: `config.json` says model_type kimi_k3, or `<|open|>` is among
    them.

    Raises: ChatError if neither is found. TokenizerError for a file that is not JSON.
    """
    from trillion_moe.data import jinja_chat, xtml

    folder = Path(folder)
    config, tokenizer = (_read(folder / name) for name in ("config.json", CONFIG_FILE))
    if config.get("model_type") == "kimi_k3" or xtml.OPEN in (names := frozenset(specials)):
        return xtml.XtmlChat()
    template = jinja_chat.find_template(folder, tokenizer)
    if template is None:
        raise ChatError(
            str(folder),
            f"no chat format: config.json does not say model_type 'kimi_k3', its tokenizer has no {xtml.OPEN!r}, "
            f"{CONFIG_FILE} has no chat_template, and there is none of {', '.join(jinja_chat.TEMPLATE_FILES)}",
        )
    return jinja_chat.JinjaChat(template, names, jinja_chat.named_tokens(tokenizer))


def _read(path: Path) -> dict[str, Any]:
    return read_json(path)[1] if path.is_file() else {}
