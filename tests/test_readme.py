"""The README's Python runs, and each of its commands is run by a test or by CI."""

import re
import shlex
from pathlib import Path

import pytest

from trillion_moe import cli

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


@pytest.mark.slow
def test_python(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    for language, code in BLOCKS:
        if language == "python":
            exec(compile(code, "README.md", "exec"), {})
    assert "Completion(ids=" in capsys.readouterr().out


def test_commands(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    ci = (ROOT / ".ci" / "run").read_text()
    for command in [line for language, code in BLOCKS if not language for line in code.splitlines()]:
        program, *arguments = shlex.split(command)
        if program == "trillion-moe":
            assert cli.main(arguments) == 0
            assert capsys.readouterr().out
        else:
            assert command in ci, f"{command} is not run by .ci/run"
