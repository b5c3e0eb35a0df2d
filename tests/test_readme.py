"""The Python of the README and of the guide runs, and each of their commands is run by a test or by CI.

What needs `make quickstart` to have run is marked slow: CI runs those behind it.
"""

import re
import shlex
import shutil
from pathlib import Path

import pytest

from trillion_moe import cli
from trillion_moe.data.rows import read_rows

ROOT = Path(__file__).parent.parent


def blocks(file: str) -> list[tuple[str, str]]:
    """Language and text of the fenced blocks of a document."""
    return re.findall(r"```(\w*)\n(.*?)```", (ROOT / file).read_text(), re.DOTALL)


BLOCKS = blocks("README.md")
PYTHON = [code for language, code in BLOCKS if language == "python"]
COMMANDS = [line for language, code in BLOCKS if not language for line in code.splitlines()]
QUICKSTART, GUIDE = "runs/quickstart/", "docs/finetuning.md"


@pytest.fixture(autouse=True)
def _root(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture
def made():
    assert Path(QUICKSTART, "digit.png").is_file(), "run `make quickstart` first"


def run(code: str) -> None:
    exec(compile(code, "README.md", "exec"), {})


def do(command: str, capsys) -> str:
    program, *arguments = shlex.split(command.removeprefix("JAX_NUM_CPU_DEVICES=8 "))  # which tests have
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
        elif command.startswith("trillion-moe plan "):  # minutes, and compilers: tests/plan has a small one
            assert command.partition(" --json")[0] in (ROOT / "Makefile").read_text()
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


@pytest.mark.slow
def test_the_guide(made, capsys):
    """All of it, in order: each command goes on with what those before it have made."""
    pytest.importorskip("peft")
    for old in Path("runs").glob("guide*"):
        shutil.rmtree(old)
    commands = [line for language, code in blocks(GUIDE) if not language for line in code.splitlines()]
    said = [do(command, capsys).strip() for command in commands]
    assert said[-3] in {"null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun"}
    assert said[-2:] == ["runs/guide-release", "runs/guide-merged"]
    (code,) = (code for language, code in blocks(GUIDE) if language == "python")
    run(code)
    assert float(capsys.readouterr().out) < 1e-4


def test_the_guide_s_row_is_legal(tmp_path):
    (row,) = (code for language, code in blocks(GUIDE) if language == "json")
    (tmp_path / "chat.jsonl").write_text(row)
    assert len(read_rows(tmp_path / "chat.jsonl")) == 1
