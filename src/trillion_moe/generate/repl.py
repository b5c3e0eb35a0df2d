"""Talking to a model line by line in a terminal."""

import contextlib
import sys
from pathlib import Path
from typing import Any

from trillion_moe.data.chat import ChatError
from trillion_moe.data.image_files import ImageError, open_image
from trillion_moe.data.processor import Processor
from trillion_moe.data.tokenizer import TokenizerError
from trillion_moe.generate.command import Clock, Settings, alone, show
from trillion_moe.generate.session import Session
from trillion_moe.inputs import InputError
from trillion_moe.model import Model

HELP = "/image FILE puts a picture before your next message, /reset forgets everything, /exit or Ctrl-D ends."


def converse(model: Model, settings: Settings, system: str | None) -> int:
    """Answers each line of standard input until it ends. A line that cannot be answered is said, and forgotten."""
    start: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    messages, pictures, session = list(start), [], Session()
    if _in_terminal():
        _edit_lines()
    print(HELP, file=sys.stderr)
    while (line := _read()) is not None:
        command, _, argument = line.partition(" ")
        if command == "/exit":
            return 0
        if command == "/reset":
            messages, pictures = list(start), []
            print("forgotten", file=sys.stderr)
        elif command == "/image":
            pictures += _picture(settings.processor, argument.strip())
        elif line.startswith("/"):
            print(f"{command} is no command. {HELP}", file=sys.stderr)
        elif line:
            parts = [*pictures, {"type": "text", "text": line}]
            asked = [*messages, {"role": "user", "content": parts if pictures else line}]
            reply, pictures = _turn(model, settings, session, asked), []
            messages = messages if reply is None else [*asked, reply]
    return 0


def _in_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _edit_lines() -> None:
    """`input` then knows the arrow keys and earlier lines, and takes lines of any length: of one over 4095 bytes, Linux
    hands a program that leaves the editing to it the beginning alone."""
    with contextlib.suppress(ImportError):  # Python can be built without
        import readline  # noqa: F401


def _read() -> str | None:
    """The next line; None at the end. Standard output holds answers alone, unless it is the terminal itself."""
    try:
        if _in_terminal():
            return input("> ").strip()
        print("> ", end="", flush=True, file=sys.stderr)
        return input().strip()
    except EOFError:
        print(file=sys.stderr)
        return None
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return ""


def _picture(processor: Processor | None, path: str) -> list[dict[str, Any]]:
    if processor is None or processor.images is None:
        print("this model sees no pictures", file=sys.stderr)
        return []
    try:
        image = open_image(Path(path).expanduser())
    except (ImageError, RuntimeError) as error:  # RuntimeError: ~ of an unknown user
        print(error, file=sys.stderr)
        return []
    print(f"{path}: {image.size[0]} x {image.size[1]} pixels", file=sys.stderr)
    return [{"type": "image", "image": image}]


def _turn(model: Model, settings: Settings, session: Session, messages: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The answer as a message; None if there is none to go on from."""
    clock = Clock()
    try:
        (completion,) = show(clock.watch(settings.stream(model, [messages], session)))
    except KeyboardInterrupt:
        print("\nstopped; this question is forgotten", file=sys.stderr)
        return None
    except (ChatError, ImageError, InputError, TokenizerError) as error:
        print(alone(str(error)), file=sys.stderr)
        return None
    print()
    if completion.error:
        print(alone(completion.error), file=sys.stderr)
        return None
    reused = f"; {session.reused} tokens were in the cache" if session.reused else ""
    print(f"{clock}{reused}", file=sys.stderr)
    return completion.reply.message() if completion.reply else {"role": "assistant", "content": completion.text}
