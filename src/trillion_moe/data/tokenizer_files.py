"""What both kinds of tokenizer folder share: the error, and `tokenizer_config.json` as far as it is read."""

import json
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, SupportsIndex

from trillion_moe.config_json import distinct

CONFIG_FILE = "tokenizer_config.json"


class TokenizerError(ValueError):
    """A tokenizer folder that cannot be used, an id that is in no vocabulary, a text that has no safe encoding."""


@dataclass(frozen=True)
class AddedToken:
    """A token that is read by its name. `special`: `decode(skip_specials=True)` leaves it out."""

    name: str
    special: bool


@dataclass(frozen=True)
class TokenizerConfig:
    """`added` is None where the file has no `added_tokens_decoder`; bos, eos and pad are names of tokens."""

    path: Path
    added: dict[int, AddedToken] | None = None
    bos: str | None = None
    eos: str | None = None
    pad: str | None = None


def read_tokenizer_config(folder: Path) -> TokenizerConfig | None:
    """The folder's `tokenizer_config.json`, None if it has none.

    Only the added tokens and the names of bos, eos and pad are read: the rest (classes, lengths, chat templates) does
    not change an id.

    Raises:
        TokenizerError: not JSON (with the line), or a token that is not written as an id, a name and a flag.
    """
    path = folder / CONFIG_FILE
    if not path.is_file():
        return None
    _, raw = read_json(path)
    table = raw.get("added_tokens_decoder")
    if table is not None and not isinstance(table, dict):
        raise TokenizerError(f"{path}: added_tokens_decoder must be an object of id: token, not {type(table).__name__}")
    added = None if table is None else dict(_added_token(key, entry, path) for key, entry in table.items())
    return TokenizerConfig(path, added, *(_token_name(raw, f"{kind}_token", path) for kind in ("bos", "eos", "pad")))


def read_json(path: Path) -> tuple[str, dict[str, Any]]:
    """The text of a file and the object it holds."""
    try:
        text = path.read_text(encoding="utf-8")
        value = json.loads(text, object_pairs_hook=distinct)
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{path}: byte {error.start} is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise TokenizerError(f"{path}, line {error.lineno}: {error.msg}") from None
    except (ValueError, RecursionError) as error:  # doubled names, integers of thousands of digits, deep nesting
        raise TokenizerError(f"{path}: {error}") from None
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} must hold an object, not {type(value).__name__}")
    return text, value


def _added_token(key: str, entry: Any, path: Path) -> tuple[int, AddedToken]:
    match entry:
        case {"content": str(name)} if name and key.isascii() and key.isdigit() and len(key) < 10:
            special = entry.get("special", False)
            if isinstance(special, bool):
                return int(key), AddedToken(name, special)
    raise TokenizerError(
        f'{path}: added_tokens_decoder[{key!r}] must be an id with {{"content": a name, "special": true or false}}, '
        f"not {entry!r}"
    )


def _token_name(raw: dict[str, Any], key: str, path: Path) -> str | None:
    """Written as a name, as an object with the name as `content`, or as null."""
    match raw.get(key):
        case None:
            return None
        case str(name) | {"content": str(name)}:
            return name
        case other:
            raise TokenizerError(f"{path}: {key} must be the name of a token or null, not {other!r}")


def names_to_ids(added: dict[int, AddedToken], where: Path) -> dict[str, int]:
    ids: dict[str, int] = {}
    for token_id, token in sorted(added.items()):
        if token.name in ids:
            raise TokenizerError(f"{where}: {token.name!r} names both id {ids[token.name]} and id {token_id}")
        ids[token.name] = token_id
    return ids


def boundary_ids(config: TokenizerConfig, find: Callable[[str], int | None]) -> tuple[int | None, ...]:
    """The ids of bos, eos and pad, each None where the config names none."""
    ids = []
    for kind, name in (("bos", config.bos), ("eos", config.eos), ("pad", config.pad)):
        token_id = None if name is None else find(name)
        if name is not None and token_id is None:
            raise TokenizerError(f"{config.path}: {kind}_token {name!r} is no token of this vocabulary")
        ids.append(token_id)
    return tuple(ids)


def checked_ids(ids: Iterable[SupportsIndex], vocab_size: int, holes: frozenset[int] = frozenset()) -> list[int]:
    """The ids as Python integers.

    Raises:
        TokenizerError: an id outside 0..vocab_size - 1 or among `holes`, with its position.
    """
    numbers = [operator.index(token_id) for token_id in ids]
    for at, number in enumerate(numbers):
        if not 0 <= number < vocab_size or number in holes:
            why = "has no token" if number in holes else f"is outside 0..{vocab_size - 1}"
            raise TokenizerError(f"token id {number} at position {at} {why}")
    return numbers
