"""`trillion-moe generate`: answers on standard output; thinking and figures on standard error."""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from trillion_moe.data.chat import EFFORTS, ChatOptions
from trillion_moe.data.processor import Processor, load_processor
from trillion_moe.generate.generation import stream
from trillion_moe.generate.output import ANSWER, TEXT, Completion, Piece
from trillion_moe.generate.session import Session
from trillion_moe.inputs import InputError
from trillion_moe.model import Model


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
        help='lines {"messages": [...]}, {"prompt": "..."} or {"ids": [...]}',
    )
    chat = parser.add_argument_group("the conversation")
    chat.add_argument("--image", action="append", default=[], metavar="FILE", help="before the prompt; may be repeated")
    chat.add_argument("--system", metavar="TEXT", help="a system message")
    chat.add_argument("--raw", action="store_true", help="continue --prompt as it is, without the chat format")
    chat.add_argument("--no-thinking", action="store_true", help="answer at once")
    chat.add_argument("--effort", choices=EFFORTS, default="default", help="how much to think")
    how = parser.add_argument_group("the choice of tokens")
    how.add_argument("--max-new-tokens", type=int, default=128)
    how.add_argument("--temperature", type=float, default=0.0, help="0 = greedy, the default")
    how.add_argument("--top-k", type=int)
    how.add_argument("--top-p", type=float, default=1.0)
    how.add_argument("--min-p", type=float, default=0.0)
    how.add_argument("--repetition-penalty", type=float, default=1.0)
    how.add_argument("--seed", type=int, default=0)
    how.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends an answer; may be repeated")
    out = parser.add_argument_group("the rest")
    out.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="as stored by default")
    out.add_argument("--json", action="store_true", help="print one JSON object a prompt")
    out.add_argument("--output", type=Path, metavar="FILE.jsonl", help="for --input; standard output by default")
    out.add_argument("--batch-size", type=int, default=8, help="prompts of --input at a time")


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a comma-separated list of token ids") from None


def check(args: argparse.Namespace) -> None:
    """InputError for flags that would have no effect together, before anything is loaded."""
    one = args.prompt is not None and len(args.prompt) == 1
    for flag, given, fits, where in (
        ("--image", args.image, one and not args.raw, "with one --prompt, without --raw (with --chat: /image)"),
        ("--system", args.system, not args.ids and not args.raw, "in a chat: not with --ids, not with --raw"),
        ("--raw", args.raw, args.prompt or args.input, "with --prompt or --input"),
        ("--output", args.output, args.input, "with --input"),
        ("--json", args.json, not args.chat, "without --chat"),
        ("--stop", args.stop, not args.ids, "with text, not with --ids"),
    ):
        if given and not fits:
            raise InputError(f"{flag} is legal {where}")
    if args.batch_size < 1:
        raise InputError(f"--batch-size is {args.batch_size}; it must be at least 1")
    if args.output is not None and not args.output.parent.is_dir():
        raise InputError(f"--output: the folder {args.output.parent} does not exist")


def run(args: argparse.Namespace, model: Model) -> int:
    """-> 1 if an answer failed, else 0."""
    processor = None if args.ids else load_processor(args.folder, model.config)
    settings = Settings.of(args, processor)
    if args.chat:
        from trillion_moe.generate.repl import converse

        return converse(model, settings, args.system)
    if args.input is not None:
        return _file(model, settings, args)
    prompts = args.ids or [_prompt(args, text) for text in args.prompt]
    return _answer(model, prompts, settings, as_json=args.json)


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
            print(json.dumps(as_dict(i, completion), ensure_ascii=False) if as_json else _line(completion))
    print(clock, file=sys.stderr)
    return _failures(done)


def _line(completion: Completion) -> str:
    return ",".join(map(str, completion.ids)) if completion.text is None else completion.text


def as_dict(index: int, completion: Completion) -> dict[str, Any]:
    """A completion for JSON, without what it has not."""
    one: dict[str, Any] = {"prompt": index, "finish": completion.finish, "text": completion.text}
    if completion.reply is not None:
        message = completion.reply.message()
        one |= {"thinking": completion.reply.thinking, "tool_calls": message.get("tool_calls")}
    one |= {"error": completion.error}
    return {key: value for key, value in one.items() if value is not None} | {"ids": list(completion.ids)}


def _failures(done: Iterable[Completion]) -> int:
    failed = [completion.error for completion in done if completion.error]
    for error in failed:
        print(f"trillion-moe generate: {error}", file=sys.stderr)
    return 1 if failed else 0


# --- JSON lines -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of --input: its number from 1, the prompt, and the id to give back."""

    number: int
    prompt: Any
    id: Any = None


def _file(model: Model, settings: Settings, args: argparse.Namespace) -> int:
    """Every line is read and checked before the first answer; the output appears whole, or not at all."""
    lines = list(_read_lines(args))
    for line in lines:
        try:
            settings.stream(model, [line.prompt])  # checks, and generates nothing until it is asked for a piece
        except (ValueError, TypeError) as error:
            raise InputError(f"{args.input}, line {line.number}: {str(error).removeprefix('prompt 0: ')}") from error
    clock, done = Clock(), []
    for start in range(0, len(lines), args.batch_size):
        prompts = [line.prompt for line in lines[start : start + args.batch_size]]
        found = {p.prompt: p.completion for p in clock.watch(settings.stream(model, prompts)) if p.completion}
        done += [found[i] for i in range(len(prompts))]
    rows = [as_dict(i, c) | ({} if (given := lines[i].id) is None else {"id": given}) for i, c in enumerate(done)]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    if args.output is None:
        print(text, end="")
    else:
        part = args.output.with_name(f".{args.output.name}.part")
        part.write_text(text, encoding="utf-8")
        part.replace(args.output)
    print(clock, file=sys.stderr)
    return _failures(done)


def _read_lines(args: argparse.Namespace) -> Iterator[Line]:
    """Blank lines are passed over. InputError names the file, the line and what is legal."""
    legal = "an object with one of messages (a list), prompt (a string), ids (a list of integers), and perhaps an id"
    count = 0
    for number, text in enumerate(args.input.read_text(encoding="utf-8").splitlines(), 1):
        if not text.strip():
            continue
        where = f"{args.input}, line {number}"
        try:
            row = json.loads(text)
        except ValueError as error:
            raise InputError(f"{where}: not JSON: {error}") from None
        forms = {"messages": list, "prompt": str, "ids": list}
        given = [name for name in forms if isinstance(row, dict) and name in row]
        if len(given) != 1 or row.keys() - {*forms, "id"} or not isinstance(row[given[0]], forms[given[0]]):
            raise InputError(f"{where}: {text.strip()[:60]!r} is not {legal}")
        content = row[given[0]]
        yield Line(number, _prompt(args, content) if isinstance(content, str) else content, row.get("id"))
        count += 1
    if not count:
        raise InputError(f"{args.input} holds no prompt; every line is {legal}")
