"""`trillion-moe generate`: answers on standard output; figures and, of one prompt, thinking on standard error."""

import argparse
import contextlib
import dataclasses
import json
import os
import re
import secrets
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from trillion_moe.config_json import distinct
from trillion_moe.data.chat import EFFORTS, ChatOptions
from trillion_moe.data.processor import Processor, load_processor
from trillion_moe.generate.generation import check_limits, stream
from trillion_moe.generate.output import ANSWER, TEXT, Completion, Piece
from trillion_moe.generate.session import Session
from trillion_moe.inputs import InputError
from trillion_moe.model import Model
from trillion_moe.sampling import SamplingConfig

BATCH = 8  # prompts of --input at a time
SHOWN = 20  # bad lines printed; the rest is counted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder")
    prompts = parser.add_argument_group("what to continue (one of)").add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", "-p", action="append", help="a user's message; may be repeated")
    prompts.add_argument("--ids", type=_ids, action="append", help="token ids: 1,2,3; may be repeated")
    prompts.add_argument("--chat", action="store_true", help="talk, line by line")
    prompts.add_argument(
        "--input",
        type=Path,
        metavar="FILE.jsonl",
        help='lines {"messages": [...]}, {"prompt": "..."} or {"ids": [...]}, perhaps with an "id", which is given '
        "back; relative paths of pictures in it begin at the file's own folder",
    )
    chat = parser.add_argument_group("the conversation")
    chat.add_argument("--image", action="append", default=[], metavar="FILE", help="before the prompt; may be repeated")
    chat.add_argument("--exif", action="store_true", help="turn pictures as their EXIF data says; the release does not")
    chat.add_argument("--max-image-tokens", type=int, metavar="N", help="refuse pictures of more tokens")
    chat.add_argument("--system", metavar="TEXT", help="a system message before a prompt or in --chat")
    chat.add_argument("--raw", action="store_true", help="continue a prompt as it is, without the chat format")
    chat.add_argument("--no-thinking", action="store_true", help="answer at once")
    chat.add_argument("--effort", choices=EFFORTS, default="default", help="how much to think")
    how = parser.add_argument_group("the choice of tokens")
    how.add_argument("--max-new-tokens", type=int, default=128)
    how.add_argument("--temperature", type=float, default=0.0, help="0 = greedy, the default")
    how.add_argument("--top-k", type=int, help="with a temperature, as the next three")
    how.add_argument("--top-p", type=float, default=1.0)
    how.add_argument("--min-p", type=float, default=0.0)
    how.add_argument("--seed", type=int, default=0)
    how.add_argument("--repetition-penalty", type=float, default=1.0)
    how.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends an answer; may be repeated")
    out = parser.add_argument_group("the rest")
    out.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="as stored by default")
    out.add_argument(
        "--mesh",
        metavar="NAME | FILE.py | AXIS=SIZE,...",
        help="over several devices: a machine, or sizes of mesh axes",
    )
    out.add_argument("--json", action="store_true", help="print one JSON object a prompt, as --input always does")
    out.add_argument("--output", type=Path, metavar="FILE.jsonl", help="for --input, written whole or not at all")
    out.add_argument("--batch-size", type=int, default=BATCH, help=f"prompts of --input at a time; {BATCH} by default")


def _ids(text: str) -> list[int]:
    try:
        return np.array([int(part) for part in text.split(",")], np.int64).tolist()
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a comma-separated list of token ids") from None


def check(args: argparse.Namespace) -> None:
    """InputError, before anything is loaded, for a flag that would have no effect, a value that is not legal, a file
    that is not there or cannot be written."""
    one, chat = args.prompt is not None and len(args.prompt) == 1, not args.ids and not args.raw
    pictures = args.image or args.chat or args.input
    draws = args.temperature > 0, "with a --temperature above 0: without, the likeliest token is taken"
    for flag, given, fits, where in (
        ("--image", args.image, one and not args.raw, "with one --prompt, without --raw (with --chat: /image)"),
        ("--system", args.system is not None, chat, "in a chat: not with --ids, not with --raw"),
        ("--no-thinking", args.no_thinking, chat, "in a chat: not with --ids, not with --raw"),
        ("--effort", args.effort != "default", chat and not args.no_thinking, "in a chat, without --no-thinking"),
        ("--exif", args.exif, pictures, "with pictures: --image, --chat or --input"),
        ("--max-image-tokens", args.max_image_tokens is not None, pictures, "with pictures, as --exif"),
        ("--raw", args.raw, args.prompt or args.input, "with --prompt or --input"),
        ("--top-k", args.top_k is not None, *draws),
        ("--top-p", args.top_p != 1, *draws),
        ("--min-p", args.min_p != 0, *draws),
        ("--seed", args.seed != 0, *draws),
        ("--stop", args.stop, not args.ids, "with text, not with --ids"),
        ("--json", args.json, not args.chat, "without --chat"),
        ("--output", args.output, args.input, "with --input"),
        ("--batch-size", args.batch_size != BATCH, args.input, "with --input"),
    ):
        if given and not fits:
            raise InputError(f"{flag} is legal {where}")
    SamplingConfig(args.temperature, args.top_k, args.top_p, args.min_p, args.repetition_penalty, args.seed)
    check_limits(args.max_new_tokens, args.stop)
    if args.max_image_tokens is not None and args.max_image_tokens < 1:
        raise InputError(f"--max-image-tokens is {args.max_image_tokens}; it must be at least 1")
    if args.batch_size < 1:
        raise InputError(f"--batch-size is {args.batch_size}; it must be at least 1")
    for flag, file in [("--image", path) for path in args.image] + ([("--input", args.input)] if args.input else []):
        if not Path(file).exists():
            raise InputError(f"{flag}: {file} does not exist")
    if args.input is not None and args.output is not None:
        _check_output(args.input, args.output)


def _check_output(source: Path, output: Path) -> None:
    if not output.parent.is_dir():
        raise InputError(f"--output: the folder {output.parent} does not exist")
    if output.exists() and not output.is_file():
        raise InputError(f"--output: {output} is there and is no file; a file that is there would be replaced")
    if output.exists() and output.samefile(source):
        raise InputError(f"--output: {output} is the file of --input, whose prompts it would replace")


def run(args: argparse.Namespace, model: Model) -> int:
    """-> 1 if an answer failed, else 0."""
    processor = None if args.ids else _processor(args, model)
    settings = Settings.of(args, processor)
    if args.chat:
        from trillion_moe.generate.repl import converse

        return converse(model, settings, args.system)
    if args.input is not None:
        return _file(model, settings, args)
    prompts = args.ids or [_prompt(args, text) for text in args.prompt]
    return _answer(model, prompts, settings, as_json=args.json)


def _processor(args: argparse.Namespace, model: Model) -> Processor:
    processor, given = load_processor(args.folder, model.config), {}
    if args.exif:
        given["apply_exif"] = True
    if args.max_image_tokens is not None:
        given["max_tokens"] = args.max_image_tokens
    if not given:
        return processor
    if processor.images is None:
        raise InputError(f"--exif and --max-image-tokens are for pictures, which {args.folder} has no vision tower for")
    return dataclasses.replace(processor, images=dataclasses.replace(processor.images, **given))


@dataclasses.dataclass(frozen=True)
class Settings:
    """What all prompts of a command share."""

    processor: Processor | None
    sampling: dict[str, Any]
    chat: ChatOptions

    @classmethod
    def of(cls, args: argparse.Namespace, processor: Processor | None) -> "Settings":
        names = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "stop")
        chat = ChatOptions(thinking=not args.no_thinking, effort=args.effort)
        return cls(processor, {name: getattr(args, name) for name in names}, chat)

    def stream(self, model: Model, prompts: Sequence[Any], session: Session | None = None) -> Iterator[Piece]:
        return stream(
            model, prompts, tokenizer=self.processor, chat=self.chat, session=session, specials=False, **self.sampling
        )


def _prompt(args: argparse.Namespace, text: str) -> Any:
    if args.raw:
        return text
    pictures = [{"type": "image", "image": Path(path)} for path in args.image]
    system = [{"role": "system", "content": args.system}] if args.system else []
    return [*system, {"role": "user", "content": [*pictures, {"type": "text", "text": text}] if pictures else text}]


class Clock:
    """Time to the first token and tokens per second after it, compilation included."""

    def __init__(self) -> None:
        self.start = time.perf_counter()
        self.first: float | None = None
        self.tokens = 0

    def watch(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        for piece in pieces:
            if piece.ids and self.first is None:
                self.first = time.perf_counter()
            self.tokens += len(piece.ids)
            yield piece
        self.end = time.perf_counter()

    def __str__(self) -> str:
        if self.first is None:
            return "0 tokens"
        rate = f", then {(self.tokens - 1) / (self.end - self.first):.1f} tokens/s" if self.tokens > 1 else ""
        return f"{self.tokens} tokens; the first after {self.first - self.start:.2f} s{rate} (compilation included)"


def show(pieces: Iterable[Piece]) -> list[Completion]:
    """Print one prompt's answer on standard output as it comes, its thinking on standard error."""
    done, channel = [], ""
    for piece in pieces:
        if piece.text:
            where = sys.stdout if piece.channel in (TEXT, ANSWER) else sys.stderr
            if where is sys.stdout and channel not in (TEXT, ANSWER, ""):
                print(file=sys.stderr)
            channel = piece.channel
            print(piece.text, end="", flush=True, file=where)
        if piece.completion:
            done.append(piece.completion)
    if channel not in (TEXT, ANSWER, ""):
        print(file=sys.stderr)
    return done


def _answer(model: Model, prompts: list[Any], settings: Settings, *, as_json: bool) -> int:
    clock = Clock()
    pieces = clock.watch(settings.stream(model, prompts))
    if len(prompts) == 1 and settings.processor is not None and not as_json:
        done = show(pieces)
        print()
    else:
        found = {piece.prompt: piece.completion for piece in pieces if piece.completion}
        done = [found[i] for i in range(len(prompts))]
        for i, completion in enumerate(done):
            print(_json(as_dict(i, completion)) if as_json else _line(completion))
    print(clock, file=sys.stderr)
    return _failures(done)


def _line(completion: Completion) -> str:
    return ",".join(map(str, completion.ids)) if completion.text is None else completion.text


def as_dict(index: int, completion: Completion) -> dict[str, Any]:
    """A completion for JSON, without what it has not."""
    one: dict[str, Any] = {"prompt": index, "finish": completion.finish, "text": completion.text}
    if completion.reply is not None:
        message = completion.reply.message()
        findings = [dataclasses.asdict(finding) for finding in completion.reply.findings]
        one |= {"thinking": completion.reply.thinking, "tool_calls": message.get("tool_calls")}
        one |= {"complete": completion.reply.complete, "findings": findings or None}
    one |= {"error": completion.error}
    return {key: value for key, value in one.items() if value is not None} | {"ids": list(completion.ids)}


def _failures(done: Iterable[Completion]) -> int:
    failed = [completion.error for completion in done if completion.error]
    for error in failed:
        print(f"trillion-moe generate: {error}", file=sys.stderr)
    return 1 if failed else 0


# --- JSON lines -------------------------------------------------------------------------------------------------------

FORMS = {"messages": dict, "prompt": str, "ids": int}
LEGAL = (
    "an object with one of messages (a list of objects), prompt (a string), ids (a list of integers), and perhaps an id"
)


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of --input: its number from 1, which of FORMS it has, the prompt, and the id to give back."""

    number: int
    form: str
    prompt: Any
    id: Any = None


def _file(model: Model, settings: Settings, args: argparse.Namespace) -> int:
    """Every line is read and checked before the first answer; --output appears whole, or not at all."""
    assert settings.processor is not None
    beside = dataclasses.replace(settings.processor, folder=args.input.parent)
    settings = dataclasses.replace(settings, processor=beside)
    lines = _lines(model, settings, args)
    clock, done = Clock(), []
    with contextlib.nullcontext(sys.stdout) if args.output is None else _whole(args.output) as file:
        for start in range(0, len(lines), args.batch_size):
            batch = lines[start : start + args.batch_size]
            pieces = clock.watch(settings.stream(model, [line.prompt for line in batch]))
            found = {piece.prompt: piece.completion for piece in pieces if piece.completion}
            for i, line in enumerate(batch):
                done.append(_named(found[i], args.input, line))
                given = {} if line.id is None else {"id": line.id}
                print(_json(as_dict(start + i, done[-1]) | given), file=file)
            file.flush()
    print(clock, file=sys.stderr)
    return _failures(done)


def _named(completion: Completion, source: Path, line: Line) -> Completion:
    """Its error names the line, not the place in a batch."""
    if completion.error is None:
        return completion
    return dataclasses.replace(completion, error=f"{source}, line {line.number}: {alone(completion.error)}")


@contextlib.contextmanager
def _whole(path: Path) -> Iterator[TextIO]:
    """A file to write, which gets its name once the block has ended well; else nothing of it stays."""
    path = path.resolve()
    part = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
    try:
        with part.open("x", encoding="utf-8") as file:
            yield file
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _lines(model: Model, settings: Settings, args: argparse.Namespace) -> list[Line]:
    """All lines that are not blank. InputError names every bad one, or a flag that concerns none of them."""
    lines, wrong = [], []
    # Not splitlines: within a JSON string, line breaks other than this one may stand.
    for number, raw in enumerate(args.input.read_bytes().split(b"\n"), 1):
        if not raw.strip():
            continue
        try:
            line = _line_of(number, raw, args)
            settings.stream(model, [line.prompt])  # checks, and generates nothing until it is asked for a piece
            lines.append(line)
        except (ValueError, TypeError) as error:
            wrong.append(f"{args.input}, line {number}: {alone(str(error))}")
    if wrong:
        more = [f"... and {len(wrong) - SHOWN} more"] if len(wrong) > SHOWN else []
        raise InputError("\n".join([*wrong[:SHOWN], *more]))
    if not lines:
        raise InputError(f"{args.input} holds no prompt; every line is {LEGAL}")
    _check_flags(args, {line.form for line in lines})
    return lines


def _check_flags(args: argparse.Namespace, forms: set[str]) -> None:
    for flag, given, concerned in (
        ("--system", args.system, ["prompt"]),
        ("--raw", args.raw, ["prompt"]),
        ("--no-thinking", args.no_thinking, ["prompt", "messages"]),
        ("--effort", args.effort != "default", ["prompt", "messages"]),
        ("--exif", args.exif, ["messages"]),
        ("--max-image-tokens", args.max_image_tokens is not None, ["messages"]),
    ):
        if given and not forms & {*concerned}:
            raise InputError(f"{flag} has no effect: no line of {args.input} holds {' or '.join(concerned)}")


def _line_of(number: int, raw: bytes, args: argparse.Namespace) -> Line:
    """ValueError for what is not JSON, or not LEGAL."""
    try:
        row = json.loads(raw.decode("utf-8"), object_pairs_hook=distinct, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON with distinct keys: {error}") from None
    given = [form for form in FORMS if isinstance(row, dict) and form in row]
    if len(given) != 1 or row.keys() - {*FORMS, "id"} or not _is(given[0], row[given[0]]):
        raise ValueError(f"{raw.decode().strip()[:60]!r} is not {LEGAL}")
    (form,) = given
    return Line(number, form, _prompt(args, row[form]) if form == "prompt" else row[form], row.get("id"))


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _is(form: str, content: Any) -> bool:
    if form == "prompt":
        return isinstance(content, str)
    return isinstance(content, list) and all(type(item) is FORMS[form] for item in content)


def alone(error: str) -> str:
    """What is said of one prompt of a batch, without its number there."""
    return re.sub(r"^prompt \d+:? |\brow \d+, (?=position)", "", error)


def _json(row: dict[str, Any]) -> str:
    """Legible, unless it holds half of a surrogate pair: no file can hold that, only an escape."""
    text = json.dumps(row, ensure_ascii=False, allow_nan=False)
    return json.dumps(row) if re.search("[\ud800-\udfff]", text) else text
