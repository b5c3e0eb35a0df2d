"""`--chat`: a conversation through a pseudo-terminal, answer by answer against `tm.generate`, and through a pipe."""

import dataclasses
import io
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time

import jax.numpy as jnp
import numpy as np
import PIL.Image
import pytest

import trillion_moe as tm
from trillion_moe.cli import main
from trillion_moe.generate.command import Settings
from trillion_moe.generate.repl import HELP, converse

SYSTEM = "Answer with letters. " * 15  # more than 256 tokens: the shapes that other tests compile too
QUIET = tm.ChatOptions(thinking=False)
LETTERS = np.arange(ord("a"), ord("z"))
FOREVER = ord("z")
NEW = 48
PATIENCE = 300  # seconds; a process compiles for about 20


@pytest.fixture(scope="module")
def letters_folder(text_folder, tmp_path_factory):
    """A model that answers with letters up to its end token; once it says z, it says nothing else; it chokes on ~.

    The embedding of z outweighs all that layers add to it, and points where z's logit grows.
    """
    model = tm.load(text_folder)
    rng = np.random.default_rng(0)
    head = np.zeros(model.head.shape, np.float32)
    head[:, LETTERS] = rng.normal(size=(len(head), len(LETTERS)))
    head[:, model.config.eos_ids[0]] = 1.2 * rng.normal(size=len(head))
    head[:, FOREVER] = rng.normal(size=len(head))
    model.head = jnp.asarray(head)
    model.embed = model.embed.at[FOREVER].set(1e3 * head[:, FOREVER]).at[ord("~")].set(jnp.nan)
    folder = tmp_path_factory.mktemp("letters") / "tiny"
    tm.save(folder, model)
    for name in ("tiktoken.model", "tokenizer_config.json"):
        shutil.copy(text_folder / name, folder)
    return folder


@pytest.fixture(scope="module")
def letters(letters_folder):
    model = tm.load(letters_folder)
    return model, tm.load_processor(letters_folder, model.config)


def asks(text) -> dict:
    return {"role": "user", "content": text}


START = [{"role": "system", "content": SYSTEM}]


def answer(letters, messages, new=NEW):
    model, processor = letters
    return tm.generate(model, [messages], tokenizer=processor, chat=QUIET, max_new_tokens=new)[0]


def find(letters, messages, wanted):
    """A question, and its answer, which is as wanted."""
    for question in "abcdefghijklmnopqrstuvwxyABCDEFGHIJKLMNOPQRSTUVWXYZ":
        completion = answer(letters, [*messages, asks(question)])
        if wanted(completion):
            return question, completion
    raise AssertionError("no question has such an answer")


def ends(completion) -> bool:
    return completion.finish == "eos" and len(completion.text) > 6


def goes_on(completion) -> bool:
    return completion.text.endswith("z" * 9)


def stats(completion, cached=0) -> str:
    """A regular expression of the line behind an answer."""
    reused = f"; {cached} tokens were in the cache" if cached else ""
    rate = r"the first after \d+\.\d\d s, then \d+\.\d tokens/s \(compilation included\)"
    return f"{len(completion.ids)} tokens; {rate}{reused}"


# --- a terminal -------------------------------------------------------------------------------------------------------

# The terminal becomes the process's own, so that Ctrl-C typed there reaches it.
LAUNCH = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, "-m", "trillion_moe.cli", *sys.argv[1:]])
"""


class Terminal:
    """A process in a terminal of its own: what it shows, and what is typed."""

    def __init__(self, *arguments, folder):
        self.screen, there = pty.openpty()
        self.shown = ""
        command = [sys.executable, "-c", LAUNCH, *map(str, arguments)]
        plain = {**os.environ, "TERM": "dumb"}  # a terminal that is sent no control sequences
        self.process = subprocess.Popen(
            command, stdin=there, stdout=there, stderr=there, start_new_session=True, cwd=folder, env=plain
        )
        os.close(there)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.process.kill()
        self.process.wait()
        os.close(self.screen)

    def type(self, keys: str) -> None:
        os.write(self.screen, keys.encode())

    def until(self, text: str) -> str:
        """What is shown up to `text`."""
        end = time.monotonic() + PATIENCE
        while text not in self.shown:
            ready, _, _ = select.select([self.screen], [], [], max(0, end - time.monotonic()))
            assert ready, f"{text!r} was not shown within {PATIENCE} s: {self.shown!r}"
            try:
                self.shown += os.read(self.screen, 4096).decode().replace("\r\n", "\n")
            except OSError:  # Linux says so once no process has the terminal any more
                raise AssertionError(f"the process ended before it showed {text!r}: {self.shown!r}") from None
        before, _, self.shown = self.shown.partition(text)
        return before

    def ask(self, line: str) -> list[str]:
        """Types a line, which the terminal shows -> the lines shown up to the next prompt."""
        self.type(f"{line}\n")
        echo, *shown = self.until("\n> ").split("\n")
        assert echo == line
        return shown


def test_a_conversation_in_a_terminal(letters_folder, letters, tmp_path) -> None:
    """The answers are those of cold runs. Ctrl-C ends an answer and not the conversation, Ctrl-D ends that."""
    _, processor = letters
    first, said = find(letters, START, ends)
    history = [*START, asks(first), said.reply.message()]
    second, more = find(letters, history, ends)
    endless, begun = find(letters, START, goes_on)
    held = len(processor.messages(history[:2], QUIET).ids) + len(said.ids) - 1  # the end token is not entered
    PIL.Image.new("RGB", (30, 20)).save(tmp_path / "picture.png")
    flags = ("--chat", "--system", SYSTEM, "--no-thinking", "--max-new-tokens", 3500)
    with Terminal("generate", letters_folder, *flags, folder=tmp_path) as terminal:
        assert terminal.until("\n> ") == HELP
        text, figures = terminal.ask(first)
        assert text == said.text
        assert re.fullmatch(stats(said), figures)
        text, figures = terminal.ask(second)
        assert text == more.text
        assert re.fullmatch(stats(more, cached=held), figures)
        assert terminal.ask("/image nowhere.png") == ["nowhere.png cannot be read: No such file or directory"]
        assert terminal.ask("/image picture.png") == ["picture.png: 30 x 20 pixels"]
        assert terminal.ask("/picture") == [f"/picture is no command. {HELP}"]
        assert terminal.ask("/reset") == ["forgotten"]
        terminal.type(f"{endless}\n")
        start = terminal.until("z" * 9)
        assert start == f"{endless}\n{begun.text.partition('z' * 9)[0]}"
        terminal.type("\x03")
        assert terminal.until("\n> ").endswith("\nstopped; this question is forgotten")
        terminal.type("not sent\x03\n")  # the end of line, since Python may hear of Ctrl-C at the next key only
        terminal.type(f"/{'long' * 1500}\n")  # more than the 4095 bytes of a terminal that edits lines by itself
        terminal.until(f"\n/{'long' * 1500} is no command. {HELP}\n> ")
        text, figures = terminal.ask(first)  # without picture, without what was said before
        assert text == said.text
        assert re.fullmatch(stats(said), figures)
        terminal.type("\x04")
        assert terminal.process.wait(PATIENCE) == 0


# --- a pipe -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def talk(letters_folder, monkeypatch, capsys):
    """Lines on standard input -> exit code, standard output, lines on standard error less the prompts and the help."""

    def call(*lines, folder=letters_folder):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        flags = ["--chat", "--system", SYSTEM, "--no-thinking", "--max-new-tokens", str(NEW)]
        code = main(["generate", str(folder), *flags])
        out, err = capsys.readouterr()
        assert err.startswith(f"{HELP}\n> ")
        return code, out, err.removeprefix(f"{HELP}\n> ").split("\n> ")

    return call


def test_pictures_go_before_the_next_message(talk, letters, tmp_path, monkeypatch) -> None:
    """Standard output holds the answers alone; nothing is read behind /exit."""
    pictures = []
    for name in ("a.png", "b.png"):
        pixels = np.random.default_rng(len(pictures)).integers(0, 256, (20, 30, 3), np.uint8)
        pictures.append(PIL.Image.fromarray(pixels))
        pictures[-1].save(tmp_path / name)
    parts = [{"type": "image", "image": picture} for picture in pictures]
    expected = answer(letters, [*START, {"role": "user", "content": [*parts, {"type": "text", "text": "Alike?"}]}])
    assert expected.ids != answer(letters, [*START, asks("Alike?")]).ids
    monkeypatch.setenv("HOME", str(tmp_path))
    code, out, err = talk(f"/image {tmp_path / 'a.png'}", "/image ~/b.png", "", " Alike? ", "/exit", "more")
    assert (code, out) == (0, f"{expected.text}\n")
    assert err[:2] == [f"{tmp_path / 'a.png'}: 30 x 20 pixels", "~/b.png: 30 x 20 pixels"]
    assert err[2].endswith("(compilation included)")
    assert err[3:] == [""]


def test_what_cannot_be_answered_is_forgotten(talk, letters, tmp_path) -> None:
    """A picture that the model cannot see, and logits that are not finite; what comes next begins anew."""
    PIL.Image.new("F", (30, 20)).save(tmp_path / "heights.tiff")
    expected = answer(letters, [*START, asks("b")])
    code, out, err = talk(
        f"/image {tmp_path / 'heights.tiff'}", "What is it?", "~", "b", "/image", "/image ~no-such-user/x"
    )
    assert (code, out) == (0, f"\n{expected.text}\n")
    assert err[1].startswith("message 1, content[0]: mode 'F': ")
    assert err[2] == f"logits are not finite at new token 0 (of {NEW})"
    assert re.fullmatch(stats(expected), err[3])
    assert err[4].startswith(". cannot be read: ")
    assert "home" in err[5]
    assert err[6:] == ["\n"]


def test_a_model_that_sees_nothing(monkeypatch, capsys, letters) -> None:
    model, processor = letters
    monkeypatch.setattr(sys, "stdin", io.StringIO("/image a.png\n"))
    blind = Settings(dataclasses.replace(processor, images=None), {}, QUIET)
    assert converse(model, blind, None) == 0
    assert capsys.readouterr().err == f"{HELP}\n> this model sees no pictures\n> \n"
