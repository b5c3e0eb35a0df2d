"""Text to token ids and back: one interface over `tiktoken.model` and Hugging Face's `tokenizer.json`."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, SupportsIndex, runtime_checkable

from trillion_moe.data.tiktoken_model import MODEL_FILE, load_tiktoken
from trillion_moe.data.tokenizer_files import (
    AddedToken,
    TokenizerConfig,
    TokenizerError,
    boundary_ids,
    checked_ids,
    names_to_ids,
    read_json,
    read_tokenizer_config,
)

__all__ = ["HuggingFaceTokenizer", "StreamDecoder", "Tokenizer", "TokenizerError", "load_tokenizer"]

JSON_FILE = "tokenizer.json"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


@runtime_checkable
class StreamDecoder(Protocol):
    """Text as the ids come. What `push` and `finish` returned, joined, is what `decode` gives for all ids at once."""

    def push(self, token_id: SupportsIndex) -> str:
        """The text that is now certain, perhaps none: a character goes out only when all its bytes are there."""
        ...

    def finish(self) -> str:
        """The rest: U+FFFD for a character that stayed incomplete. Afterwards the decoder is as new."""
        ...


@runtime_checkable
class Tokenizer(Protocol):
    """Nothing is ever added: no bos in front, no eos behind. `vocab_size` is the greatest id plus one."""

    @property
    def specials(self) -> Mapping[str, int]:
        """Every token that is read by its name -> its id."""
        ...

    @property
    def vocab_size(self) -> int: ...
    @property
    def holes(self) -> frozenset[int]:
        """Ids below vocab_size that are no token."""
        ...

    @property
    def bos_id(self) -> int | None: ...
    @property
    def eos_id(self) -> int | None:
        """`eos_token` of tokenizer_config.json. The model's config may end a turn with another id: Kimi K3 has [EOS]
        here, `<|end_of_msg|>` there."""
        ...

    @property
    def pad_id(self) -> int | None: ...

    def encode(self, text: str, *, specials: bool) -> list[int]:
        """The ids of a text. With `specials`, names of special tokens become their control ids; without, they are
        ordinary text, so that nothing a user writes can be taken for structure.

        Raises:
            TokenizerError: a text that has no such encoding.
        """
        ...

    def decode(self, ids: Iterable[SupportsIndex], *, skip_specials: bool = False) -> str:
        """The text of these ids; bytes that are not UTF-8 become U+FFFD. `skip_specials` leaves out the tokens that
        `added_tokens_decoder` flags special: in Kimi K3 not `<|open|>`, `<|close|>`, `<|sep|>` and the reserved ones.

        Raises:
            TokenizerError: an id outside the vocabulary.
        """
        ...

    def stream(self, *, skip_specials: bool = False) -> StreamDecoder:
        """A new decoder for one sequence of ids."""
        ...


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer of a model folder.

    `tiktoken.model` wins over a `tokenizer.json` beside it: it is what Kimi K3 and Kimi Linear are released with, so
    the other is somebody's conversion.

    Raises:
        TokenizerError: neither file is there, or one cannot be used; with its name and, where there is one, the line.
    """
    folder = Path(folder)
    if (folder / MODEL_FILE).is_file():
        return load_tiktoken(folder)
    if (folder / JSON_FILE).is_file():
        return HuggingFaceTokenizer(folder / JSON_FILE, read_tokenizer_config(folder))
    raise TokenizerError(f"{folder} has neither {MODEL_FILE} nor {JSON_FILE}")


class HuggingFaceTokenizer:
    """A `tokenizer.json`, with names and flags from `tokenizer_config.json` where there is one."""

    def __init__(self, path: Path, config: TokenizerConfig | None):
        text, content = read_json(path)
        self._by_name, self._plain = _pair(text, path)
        config = config or TokenizerConfig(path)
        added = _added_tokens(self._by_name, config, path)
        self._specials = names_to_ids(added, path)
        self._skipped = frozenset(token_id for token_id, token in added.items() if token.special)
        self._control = frozenset(added) - {_unknown_id(content["model"], self._by_name)}
        vocabulary = self._by_name.get_vocab(with_added_tokens=True)
        self._byte_tokens = frozenset(n for name, n in vocabulary.items() if _BYTE_TOKEN.fullmatch(name))
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.holes = frozenset(range(self.vocab_size)).difference(vocabulary.values())
        self.bos_id, self.eos_id, self.pad_id = boundary_ids(config, self._by_name.token_to_id)

    @property
    def specials(self) -> Mapping[str, int]:
        """All added tokens, those not flagged special too."""
        return MappingProxyType(self._specials)

    def encode(self, text: str, *, specials: bool) -> list[int]:
        """See `Tokenizer.encode`. Lone surrogates are an error here."""
        try:
            ids = (self._by_name if specials else self._plain).encode(text, add_special_tokens=False).ids
        except TypeError:
            at = next((i for i, c in enumerate(text) if "\ud800" <= c <= "\udfff"), None)
            if at is None:
                raise
            raise TokenizerError(f"position {at} of the text is the lone surrogate U+{ord(text[at]):04X}") from None
        if not specials and not self._control.isdisjoint(ids):
            control = next(n for n in ids if n in self._control)
            name = self._by_name.id_to_token(control)
            raise TokenizerError(
                f"the text cannot be encoded without special tokens: the model of {JSON_FILE} itself puts {name!r} "
                f"together (id {control})"
            )
        return ids

    def decode(self, ids: Iterable[SupportsIndex], *, skip_specials: bool = False) -> str:
        """See `Tokenizer.decode`."""
        return self._by_name.decode(self.kept(ids, skip_specials), skip_special_tokens=False)

    def stream(self, *, skip_specials: bool = False) -> "PrefixStream":
        """See `Tokenizer.stream`."""
        return PrefixStream(self, skip_specials)

    def kept(self, ids: Iterable[SupportsIndex], skip_specials: bool) -> list[int]:
        numbers = checked_ids(ids, self.vocab_size, self.holes)
        return [n for n in numbers if n not in self._skipped] if skip_specials else numbers

    def is_byte_token(self, token_id: int) -> bool:
        return token_id in self._byte_tokens


class PrefixStream:
    """`StreamDecoder` for any decoder of the library: decodes the last ids with some before them, returns what is new.

    A decoder may strip or add a blank at the start and put bytes of several tokens together, so a token has no text of
    its own. The window begins with the ids that last completed a text (context for the blank) and ends with the new
    ones. Not certain yet are the last U+FFFD, which may be a character's first bytes, and a run of byte tokens
    (`<0x0A>`), which the library turns into characters or U+FFFD as a whole.
    """

    def __init__(self, tokenizer: HuggingFaceTokenizer, skip_specials: bool):
        self._tokenizer, self._skip = tokenizer, skip_specials
        self._clear()

    def _clear(self) -> None:
        self._window: list[int] = []
        self._context = 0  # ids of the window whose text went out before
        self._sent = 0  # characters of the window's text that went out

    def push(self, token_id: SupportsIndex) -> str:
        kept = self._tokenizer.kept([token_id], self._skip)
        self._window += kept
        if not kept or self._tokenizer.is_byte_token(kept[0]):
            return ""
        text = self._tokenizer.decode(self._window)
        certain = text.removesuffix("\ufffd")
        new = certain[self._sent :]
        self._sent += len(new)
        if new and certain == text:
            del self._window[: self._context]
            self._context, self._sent = len(self._window), len(self._tokenizer.decode(self._window))
        return new

    def finish(self) -> str:
        rest = self._tokenizer.decode(self._window)[self._sent :]
        self._clear()
        return rest


def _pair(text: str, path: Path) -> tuple[Any, Any]:
    """The library's tokenizer, and one with the same model that knows no added token.

    The library's own switch, `encode_special_tokens`, leaves added tokens that are not flagged special in force.
    """
    from tokenizers import Tokenizer as Library

    try:
        by_name = Library.from_str(text)
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(f"{path}: {error}") from None
    by_name.no_truncation()
    by_name.no_padding()
    plain = Library(by_name.model)
    if by_name.normalizer is not None:
        plain.normalizer = by_name.normalizer
    if by_name.pre_tokenizer is not None:
        plain.pre_tokenizer = by_name.pre_tokenizer
    return by_name, plain


def _added_tokens(library: Any, config: TokenizerConfig, path: Path) -> dict[int, AddedToken]:
    """Those of `tokenizer.json`; where both files have a token, the config's flag holds, as in transformers."""
    added = {n: AddedToken(token.content, token.special) for n, token in library.get_added_tokens_decoder().items()}
    for token_id, token in (config.added or {}).items():
        if token_id not in added or added[token_id].name != token.name:
            own = repr(added[token_id].name) if token_id in added else "no added token"
            raise TokenizerError(f"{config.path}: id {token_id} is {token.name!r}, but {own} in {path.name}")
    return added | (config.added or {})


def _unknown_id(model: dict[str, Any], library: Any) -> int | None:
    """What the model answers for an unknown character: the one added token that ordinary text may give."""
    if model.get("unk_id") is not None:
        return model["unk_id"]
    name = model.get("unk_token")
    return None if name is None else library.token_to_id(name)
