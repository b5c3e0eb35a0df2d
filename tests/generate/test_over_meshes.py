"""Generation over several devices: as on one, whatever the number of prompts."""

import json

import numpy as np
import PIL.Image
import pytest

import trillion_moe as tm
from trillion_moe.cli import main


@pytest.fixture
def run(text_folder, capsys):
    def call(*flags):
        code = main(["generate", str(text_folder), "--max-new-tokens", "4", "--json", *map(str, flags)])
        return code, *capsys.readouterr()

    return call


def ids(out: str) -> list[list[int]]:
    return [json.loads(line)["ids"] for line in out.splitlines()]


def test_a_number_of_prompts_that_does_not_divide(run) -> None:
    """Rows are filled up with idle ones."""
    flags = ("--ids", "5,6,7", "--ids", "8,9", "--ids", "4")
    one = ids(run(*flags)[1])
    assert [len(row) for row in one] == [4, 4, 4]
    assert ids(run(*flags, "--mesh", "fsdp=2,ep=4")[1]) == one
    assert ids(run(*flags, "--mesh", "dp=3")[1]) == one


def test_one_picture(run, tmp_path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8)
    PIL.Image.fromarray(pixels).save(tmp_path / "a.png")
    flags = ("--prompt", "hi", "--image", tmp_path / "a.png")
    (one,) = ids(run(*flags)[1])
    assert ids(run(*flags, "--mesh", "fsdp=2,ep=2")[1]) == [one]


def test_a_session(speaker) -> None:
    """Its caches are of rows that are filled up."""
    model, _ = speaker

    def talk(model) -> list[tuple[int, ...]]:
        session, said, answers = tm.Session(), [5, 6, 7], []
        for _ in range(2):
            pieces = list(tm.stream(model, [said], max_new_tokens=3, session=session))
            (answer,) = [piece.completion for piece in pieces if piece.completion]
            answers.append(answer.ids)
            said = [*said, *answer.ids, 9]
        return answers

    assert talk(tm.place(model, {"ep": 2, "dp": 2})) == talk(model)


def test_what_does_not_generate(run, monkeypatch) -> None:
    """Said before weights are read."""
    monkeypatch.setattr("trillion_moe.api.load", None)
    code, out, err = run("--ids", "5", "--mesh", "cp=2")
    assert (code, out) == (1, "")
    assert "a mesh with cp = 2 cuts sequences, and caches cannot be cut: legal is 1" in err
    assert "a mesh with pp = 2 has stages, which have no caches: legal is 1" in run("--ids", "5", "--mesh", "pp=2")[2]
    assert "--mesh ep=0x2: 'ep=0x2' is not legal, each axis is named once" in run("--ids", "5", "--mesh", "ep=0x2")[2]
