"""The tokenizer of Kimi K2, K3 and Kimi Linear: byte-pair ranks in `tiktoken.model` and 256 control tokens behind them.

A text is cut into pieces (`cut`), the pieces into words (`PATTERN`), the words into tokens by the lowest rank. Every
step changes ids, the cuts too, so each follows the release's `tokenization_kimi.py`.
"""

import base64
import binascii
import codecs
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import SupportsIndex

from trillion_moe.data.tokenizer_files import (
    CONFIG_FILE,
    AddedToken,
    TokenizerConfig,
    TokenizerError,
    boundary_ids,
    checked_ids,
    names_to_ids,
    read_tokenizer_config,
)

MODEL_FILE = "tiktoken.model"
CONTROL_IDS = 256
CHUNK, RUN = 400_000, 25_000  # code points: a text in chunks, then runs of one class (white space or not) in a chunk

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_TAIL = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        f"{_LEAD}{_UPPER}*{_LOWER}+{_TAIL}",
        f"{_LEAD}{_UPPER}+{_LOWER}*{_TAIL}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)

K3_RANKS = 163_584
K3_ADDED = {
    163584: AddedToken("[BOS]", True),
    163585: AddedToken("[EOS]", True),
    163586: AddedToken("<|end_of_msg|>", True),
    163587: AddedToken("<|open|>", False),
    163588: AddedToken("<|close|>", False),
    163589: AddedToken("<|sep|>", False),
    163590: AddedToken("[start_header_id]", True),
    163591: AddedToken("[end_header_id]", True),
    163593: AddedToken("[EOT]", True),
    163602: AddedToken("<|media_begin|>", True),
    163603: AddedToken("<|media_content|>", True),
    163604: AddedToken("<|media_end|>", True),
    163605: AddedToken("<|media_pad|>", True),
    163649: AddedToken("<osagent_mode>", True),
    163838: AddedToken("[UNK]", True),
    163839: AddedToken("[PAD]", True),
}

_RUNS = re.compile(r"\s+|\S+")  # for `str`, \s is exactly `str.isspace`: U+001C..1F too, which PATTERN takes for signs


class TiktokenTokenizer:
    """Ranks 0..n-1, then 256 control ids n..n+255: those in `config.added`, the others named `<|reserved_token_ID|>`.

    Kimi Linear's code names two ids more, 163840 and 163841, for which its model has no row; they are left out here.
    """

    def __init__(self, ranks: Mapping[bytes, int], config: TokenizerConfig):
        import tiktoken

        added = config.added or {}
        self._specials = control_names(len(ranks), added, config.path)
        self._skipped = frozenset(token_id for token_id, token in added.items() if token.special)
        self._encoding = tiktoken.Encoding(
            MODEL_FILE, pat_str=PATTERN, mergeable_ranks=dict(ranks), special_tokens=self._specials
        )
        self.vocab_size, self.holes = len(ranks) + CONTROL_IDS, frozenset[int]()
        self.bos_id, self.eos_id, self.pad_id = boundary_ids(config, self._specials.get)

    @property
    def specials(self) -> Mapping[str, int]:
        """All 256 control tokens, the reserved ones too."""
        return MappingProxyType(self._specials)

    def encode(self, text: str, *, specials: bool) -> list[int]:
        """See `Tokenizer.encode`. The order is that of the release's `encode(text)` without further arguments: the
        whole text is cut first, then names are looked for, so a name that lies across a cut is ordinary text. (Called
        as a Hugging Face object the release looks for the named ones first; the ids differ only there.)

        Lone surrogates become U+FFFD, as in the tiktoken library.
        """
        allowed = "all" if specials else frozenset[str]()
        ids: list[int] = []
        for piece in cut(text):
            ids += self._encoding.encode(piece, allowed_special=allowed, disallowed_special=())
        return ids

    def decode(self, ids: Iterable[SupportsIndex], *, skip_specials: bool = False) -> str:
        """See `Tokenizer.decode`."""
        kept = self._kept(ids, skip_specials)
        return self._encoding.decode_bytes(kept).decode("utf-8", errors="replace")

    def stream(self, *, skip_specials: bool = False) -> "ByteStream":
        """See `Tokenizer.stream`."""
        return ByteStream(self, skip_specials)

    def _kept(self, ids: Iterable[SupportsIndex], skip_specials: bool) -> list[int]:
        numbers = checked_ids(ids, self.vocab_size)
        return [n for n in numbers if n not in self._skipped] if skip_specials else numbers

    def token_bytes(self, token_id: SupportsIndex, *, skip_specials: bool = False) -> bytes:
        """The bytes of one token, which may be a part of a character; none for one that is skipped."""
        return self._encoding.decode_bytes(self._kept([token_id], skip_specials))


class ByteStream:
    """`StreamDecoder` over bytes: a character goes out with its last byte."""

    def __init__(self, tokenizer: TiktokenTokenizer, skip_specials: bool):
        self._tokenizer, self._skip = tokenizer, skip_specials
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: SupportsIndex) -> str:
        return self._decoder.decode(self._tokenizer.token_bytes(token_id, skip_specials=self._skip))

    def finish(self) -> str:
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


def cut(text: str, chunk: int = CHUNK, run: int = RUN) -> Iterator[str]:
    """The pieces of a text that are encoded by themselves, in code points.

    Chunks of `chunk`; within one, a run of white space (`str.isspace`) or of anything else is cut behind every `run`.
    Runs are counted anew in every chunk.
    """
    for start in range(0, len(text), chunk):
        part, done = text[start : start + chunk], 0
        if len(part) > run:
            for match in _RUNS.finditer(part):
                for end in range(match.start() + run, match.end(), run):
                    yield part[done:end]
                    done = end
        yield part[done:]


def load_tiktoken(folder: Path) -> TiktokenTokenizer:
    """`tiktoken.model` and, for the names of the control tokens, `tokenizer_config.json`.

    Without `added_tokens_decoder` a vocabulary of 163,584 ranks gets Kimi K3's names (163,584 is also the size of
    Kimi K2's and Kimi Linear's, which have other names: keep their tokenizer_config.json); without the whole file also
    its [BOS], [EOS] and [PAD].

    Raises:
        TokenizerError: a malformed line, ranks that are not 0..n-1, a control id outside n..n+255, two equal names, or
            a vocabulary of another size without names; with file and line.
    """
    path = folder / MODEL_FILE
    ranks = read_ranks(path)
    config = read_tokenizer_config(folder)
    if config is not None and config.added is not None:
        return TiktokenTokenizer(ranks, config)
    if len(ranks) != K3_RANKS:
        missing = f"{folder} has no {CONFIG_FILE}" if config is None else f"{config.path} has no added_tokens_decoder"
        raise TokenizerError(
            f"{path} has {len(ranks)} ranks and {missing}; the names of the control tokens are known without it "
            f"only for Kimi K3's {K3_RANKS} ranks"
        )
    if config is None:
        return TiktokenTokenizer(ranks, TokenizerConfig(path, K3_ADDED, "[BOS]", "[EOS]", "[PAD]"))
    return TiktokenTokenizer(ranks, replace(config, added=K3_ADDED))


def read_ranks(path: Path) -> dict[bytes, int]:
    """token -> rank, from lines `BASE64 RANK`. Raises TokenizerError as `load_tiktoken` says."""
    ranks: dict[bytes, int] = {}
    lines: dict[int, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line:
            continue
        token, rank = _parse_line(line, f"{path}, line {number}")
        if token in ranks:
            raise TokenizerError(f"{path}, line {number}: {token!r} is already on line {lines[ranks[token]]}")
        if rank in lines:
            raise TokenizerError(f"{path}, line {number}: rank {rank} is already on line {lines[rank]}")
        ranks[token], lines[rank] = rank, number
    top = max(lines, default=-1)
    if top >= len(ranks):
        raise TokenizerError(f"{path}, line {lines[top]}: rank {top}, but {len(ranks)} tokens have 0..{len(ranks) - 1}")
    _check_bytes(ranks, path)
    return ranks


def _parse_line(line: bytes, where: str) -> tuple[bytes, int]:
    match line.split():
        case [token, rank] if rank.isdigit() and len(rank) < 10:
            try:
                return base64.b64decode(token, validate=True), int(rank)
            except binascii.Error as error:
                raise TokenizerError(f"{where}: {token!r} is not base64 ({error})") from None
    raise TokenizerError(f"{where} must be a token in base64, a blank and its rank, not {line!r}")


def _check_bytes(ranks: Mapping[bytes, int], path: Path) -> None:
    """Without each single byte a text may have no tokens; the library would panic at that text."""
    missing = [value for value in range(256) if bytes([value]) not in ranks]
    if missing:
        raise TokenizerError(f"{path}: {len(missing)} of the 256 single bytes have no rank, first 0x{missing[0]:02x}")


def control_names(ranks: int, added: dict[int, AddedToken], where: Path) -> dict[str, int]:
    """name -> id of all control ids, those not in `added` under their reserved names.

    Raises:
        TokenizerError: an id of an ordinary token or behind the last control id; two equal names; a name that begins
            another name (which of them is read would be left to the library's hash order).
    """
    end = ranks + CONTROL_IDS
    for token_id, token in added.items():
        if token_id < ranks:
            raise TokenizerError(f"{where}: {token.name!r} has id {token_id}, the rank of an ordinary token")
        if token_id >= end:
            raise TokenizerError(f"{where}: {token.name!r} has id {token_id}; control ids are {ranks}..{end - 1}")
    reserved = {n: AddedToken(f"<|reserved_token_{n}|>", False) for n in range(ranks, end)}
    names = names_to_ids(reserved | added, where)
    ordered = sorted(names)
    for short, long in pairwise(ordered):
        if long.startswith(short):
            raise TokenizerError(f"{where}: the name {short!r} begins the name {long!r}")
    return names


def write_tiktoken(
    folder: str | Path,
    ranks: Sequence[bytes],
    specials: Mapping[str, tuple[int, bool]],
    *,
    bos: str | None = None,
    eos: str | None = None,
    pad: str | None = None,
    unk: str | None = None,
) -> None:
    """Writes `tiktoken.model` and `tokenizer_config.json` into a folder, for `load_tokenizer`.

    Args:
        ranks: The tokens, the most eager first; all single bytes among them.
        specials: name -> (id, whether decoding may skip it). Ids are len(ranks)..len(ranks) + 255; those not named
            here are reserved.
        bos, eos, pad, unk: Names among `specials`.

    Raises:
        TokenizerError: what `load_tokenizer` would not read.
    """
    folder = Path(folder)
    model, path = folder / MODEL_FILE, folder / CONFIG_FILE
    numbers = {token: rank for rank, token in enumerate(ranks)}
    if len(numbers) < len(ranks) or b"" in numbers:
        raise TokenizerError(f"{model}: {len(ranks)} tokens must be different and not empty")
    _check_bytes(numbers, model)
    added = {token_id: AddedToken(name, special) for name, (token_id, special) in specials.items()}
    if len(added) < len(specials):
        raise TokenizerError(f"{path}: {len(specials)} control tokens share {len(added)} ids")
    control_names(len(ranks), added, path)
    tokens = {"bos_token": bos, "eos_token": eos, "pad_token": pad, "unk_token": unk}
    for kind, name in tokens.items():
        if name is not None and name not in specials:
            raise TokenizerError(f"{path}: {kind} {name!r} is not among the control tokens {sorted(specials)}")
    folder.mkdir(parents=True, exist_ok=True)
    config = {"added_tokens_decoder": {str(i): _entry(token) for i, token in sorted(added.items())}, **tokens}
    _replace(path, json.dumps(config, ensure_ascii=False, indent=2) + "\n")
    _replace(model, "".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(ranks)))


def _entry(token: AddedToken) -> dict[str, str | bool]:
    flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    return {"content": token.name, **flags, "special": token.special}


def _replace(path: Path, text: str) -> None:
    """A reader, and a run that is cut off, sees the old file or the new one, never a part."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8", newline="\n")
    part.replace(path)
