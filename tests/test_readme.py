"""The README's Python runs, and each of its commands is run by a test or by CI.

What needs `make quickstart` to have run is marked slow: CI runs those behind it.
"""

import re
import shlex
from pathlib import Path

import pytest

from trillion_moe import cli

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
PYTHON = [code for language, code in BLOCKS if language == "python"]
COMMANDS = [line for language, code in BLOCKS if not language for line in code.splitlines()]
QUICKSTART = "runs/quickstart/"


@pytest.fixture(autouse=True)
def _root(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture
def made():
    assert Path(QUICKSTART, "digit.png").is_file(), "run `make quickstart` first"


def run(code: str) -> None:
    exec(compile(code, "README.md", "exec"), {})


def do(command: str, capsys) -> str:
    program, *arguments = shlex.split(command)
    assert program == "trillion-moe"
    assert cli.main(arguments) == 0
    return capsys.readouterr().out


@pytest.mark.slow
def test_python(capsys):
    for code in PYTHON:
        if QUICKSTART not in code:
            run(code)
    assert "Completion(ids=" in capsys.readouterr().out


def test_commands(capsys):
    ci = (ROOT / ".ci" / "run").read_text()
    for command in COMMANDS:
        if command.startswith("make "):
            assert command in ci, f"{command} is not run by .ci/run"
        elif QUICKSTART not in command:
            assert do(command, capsys)


@pytest.mark.slow
def test_python_behind_the_quickstart(made, capsys):
    for code in PYTHON:
        if QUICKSTART in code:
            run(code)
    assert capsys.readouterr().out.strip() in {
        "zero",
        "one",
        "two",
        "three",
        "four",
        "five",
        "six",
        "seven",
        "eight",
        "nine",
    }


@pytest.mark.slow
def test_commands_behind_the_quickstart(made, capsys):
    commands = [command for command in COMMANDS if QUICKSTART in command]
    assert commands
    for command in commands:
        assert do(command, capsys).strip()
