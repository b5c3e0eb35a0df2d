"""A checkpoint's tokenizer, chat format and image settings together: what people write becomes ids and patches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trillion_moe.config import ModelConfig
from trillion_moe.data import chat as chats
from trillion_moe.data.chat import DEFAULT_OPTIONS, ChatError, ChatFormat, ChatOptions, Message
from trillion_moe.data.image_files import ImageError, open_image
from trillion_moe.data.image_settings import ImageSettings, read_settings
from trillion_moe.data.images import PatchBatch, checked_plan, prepared, preprocess_all
from trillion_moe.data.tokenizer import Tokenizer, TokenizerError, load_tokenizer
from trillion_moe.data.xtml import MEDIA_PAD

if TYPE_CHECKING:
    import PIL.Image


@dataclass(frozen=True)
class Encoded:
    """ids: one placeholder a picture. patches: of the pictures in the order of the ids; None without."""

    ids: list[int]
    patches: PatchBatch | None = None


@dataclass(frozen=True)
class Processor:
    """tokenizer: of the checkpoint. chat: its chat format, or why there is none. images: None if it sees no pictures.
    folder: where relative paths of pictures begin; None = the working directory."""

    tokenizer: Tokenizer
    chat: ChatFormat | ChatError
    images: ImageSettings | None
    folder: Path | None = None

    def text(self, text: str, *, specials: bool) -> Encoded:
        """A text as it is. specials: names of special tokens in it become control ids."""
        return Encoded(self.tokenizer.encode(text, specials=specials))

    def messages(self, messages: Sequence[Message], options: ChatOptions = DEFAULT_OPTIONS) -> Encoded:
        """A conversation in OpenAI's form, pictures included: parts ``{"type": "image_url", "image_url": {"url": U}}``
        or ``{"type": "image", "image": I}``, U a path or data URI, I one of these, bytes, or a PIL image.

        Raises:
            ChatError: no chat format, a message that it cannot hold, pictures for a model that sees none.
            ImageError: a picture that cannot be read or prepared; both name the message.
        """
        pictures = self.pictures(messages)
        segments = self.format.render(messages, options, [picture.size for picture in pictures])
        ids = chats.encode(segments, self.tokenizer)
        if not pictures:
            return Encoded(ids)
        assert self.images is not None
        order = chats.image_order(segments)
        return Encoded(ids, preprocess_all([pictures[i] for i in order], self.images))

    @property
    def format(self) -> ChatFormat:
        if isinstance(self.chat, ChatError):
            raise self.chat
        return self.chat

    def pictures(self, messages: Sequence[Message]) -> list["PIL.Image.Image"]:
        """The pictures of a conversation in its order, decoded, and turned where the settings say so."""
        found = []
        for i, message in enumerate(messages):
            content = message.get("content") if isinstance(message, Mapping) else None  # `render` refuses those
            for n, part in enumerate(content if isinstance(content, list | tuple) else ()):
                if not isinstance(part, Mapping) or part.get("type") not in ("image", "image_url"):
                    continue
                where = f"message {i}, content[{n}]"
                if self.images is None:
                    raise ChatError(where, "is a picture, but this model has no vision tower")
                try:
                    found.append(prepared(self._picture(part, where), self.images))
                    checked_plan(found[-1], self.images)
                except ImageError as error:
                    raise ImageError(f"{where}: {error}") from error
        return found

    def _picture(self, part: Mapping[str, Any], where: str) -> "PIL.Image.Image":
        import PIL.Image

        source = part.get(str(part["type"]))
        if part["type"] == "image_url" and isinstance(source, Mapping):
            source = source.get("url")
        if isinstance(source, PIL.Image.Image):
            return source
        if isinstance(source, str) and not source.startswith(("data:", "http:", "https:", "file:")):
            source = Path(source)
        if isinstance(source, Path):
            return open_image(source if self.folder is None else self.folder / source)
        if isinstance(source, str | bytes):
            return open_image(source)
        raise ChatError(
            where, f"holds {type(source).__name__}; legal is a path, a data URI, bytes or a PIL image under 'image'"
        )


def load_processor(folder: str | Path, config: ModelConfig) -> Processor:
    """What lies beside the weights in a checkpoint's folder. config: the model's, with which it must agree.

    Raises: TokenizerError without a tokenizer, or with one that has more ids than the model; ConfigError for image
        settings that do not fit. A missing chat format is an error once messages are given.
    """
    tokenizer = load_tokenizer(folder)
    if tokenizer.vocab_size > config.vocab_size:
        raise TokenizerError(f"{folder}: the tokenizer has {tokenizer.vocab_size} ids, the model {config.vocab_size}")
    media = tokenizer.specials.get(MEDIA_PAD)
    if config.vision is not None and media is not None and media != config.media_id:
        raise TokenizerError(
            f"{folder}: {MEDIA_PAD} is token {media}, media_placeholder_token_id of config.json is {config.media_id}"
        )
    try:
        chat = chats.load_chat(folder, tokenizer.specials)
    except ChatError as error:
        chat = error
    return Processor(tokenizer, chat, None if config.vision is None else read_settings(folder, config.vision))
