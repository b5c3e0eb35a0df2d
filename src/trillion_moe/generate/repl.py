"""Talking to a model line by line in a terminal."""

import sys
from pathlib import Path
from typing import Any

from trillion_moe.data.chat import ChatError
from trillion_moe.data.image_files import ImageError, open_image
from trillion_moe.generate.command import Clock, Settings, show
from trillion_moe.generate.session import Session
from trillion_moe.inputs import InputError
from trillion_moe.model import Model

HELP = "/image FILE puts a picture before your next message, /reset forgets everything, /exit or Ctrl-D ends."


def converse(model: Model, settings: Settings, system: str | None) -> int:
    """Answers each line of standard input until it ends. A line that cannot be answered is said, and forgotten."""
    start: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    messages, pictures, session = list(start), [], Session()
    print(HELP, file=sys.stderr)
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            print(file=sys.stderr)
            return 0
        except KeyboardInterrupt:
            print(file=sys.stderr)
            continue
        command, _, argument = line.partition(" ")
        if command == "/exit":
            return 0
        if command == "/reset":
            messages, pictures = list(start), []
            print("forgotten", file=sys.stderr)
        elif command == "/image":
            pictures += _picture(argument.strip())
        elif line.startswith("/"):
            print(f"{command} is no command. {HELP}", file=sys.stderr)
        elif line:
            parts = [*pictures, {"type": "text", "text": line}]
            asked = [*messages, {"role": "user", "content": parts if pictures else line}]
            if (reply := _turn(model, settings, session, asked)) is not None:
                messages, pictures = [*asked, reply], []


def _picture(path: str) -> list[dict[str, Any]]:
    try:
        image = open_image(Path(path))
    except ImageError as error:
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
    except (ChatError, ImageError, InputError) as error:
        print(error, file=sys.stderr)
        return None
    print()
    if completion.error:
        print(completion.error, file=sys.stderr)
        return None
    reused = f"; {session.reused} tokens were in the cache" if session.reused else ""
    print(f"{clock}{reused}", file=sys.stderr)
    return completion.reply.message() if completion.reply else {"role": "assistant", "content": completion.text}
