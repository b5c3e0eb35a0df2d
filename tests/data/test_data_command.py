"""`trillion-moe data`: figures, marked rows, and what is refused or dropped."""

import argparse
import json

import pytest

from trillion_moe.data.command import add_arguments, run
from trillion_moe.data.rows import SHOWN, DataError
from trillion_moe.data.tokenizer import TokenizerError

ANSWER = {"role": "assistant", "content": "a"}
PICTURE = {"type": "image_url", "image_url": {"url": "c.png"}}
GOOD = {"messages": [{"role": "user", "content": [PICTURE]}, {**ANSWER, "reasoning_content": "r"}]}
TEXT = {"prompt": "one ", "completion": "two"}
EMPTY = {"prompt": "x", "completion": ""}


@pytest.fixture
def data(front_folder, write, capsys):
    """Calls the command on rows -> standard output, standard error."""

    def data(*rows, flags=(), folder=front_folder):
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        args = parser.parse_args([str(write(*rows)), "--model", str(folder), *map(str, flags)])
        assert run(args) == 0
        return capsys.readouterr()

    return data


def test_figures_and_marked_rows(data) -> None:
    out, err = data(GOOD, TEXT, flags=("--raw",))
    assert err == ""
    figures, picture, text = out.split("\n\n--- ")
    assert "\nsupervised tokens  " in figures
    assert "\nimages             1, 6 tokens\n" in figures
    assert "\ndropped            0\n" in figures
    assert picture.startswith("line 1: ")
    assert "image 84x56<|media_content|><image 84x56: 6 tokens><|media_end|>" in picture
    assert "<|open|>think<|sep|>⟦r<|close|>think<|sep|>" in picture
    assert picture.endswith("<|close|>message<|sep|><|end_of_msg|>⟧")
    assert text == "line 2: 4 of 8 tokens supervised\none ⟦two<|end_of_msg|>⟧\n"


def test_json(data) -> None:
    out, _ = data(GOOD, EMPTY, TEXT, TEXT, flags=("--json", "--raw", "--rows", 2, "--on-bad", "drop"))
    found = json.loads(out)
    assert found.keys() == {"statistics", "dropped", "examples"}
    assert found["statistics"]["dropped"] == {"unsupervised": 1}
    assert found["statistics"]["messages"] == {"user": 3, "assistant": 3}
    what = "completion: is empty: there is nothing to learn"
    assert found["dropped"] == [{"line": 2, "reason": "unsupervised", "what": what}]
    marked = "one ⟦two<|end_of_msg|>⟧"
    assert [one["line"] for one in found["examples"]] == [1, 3]
    assert found["examples"][1] == {"line": 3, "tokens": 8, "supervised": 4, "text": marked}


def test_flags_reach_the_rows(data) -> None:
    text = "a" * 100
    shown, long = {"messages": [{"role": "user", "content": "q"}, ANSWER, ANSWER]}, {"prompt": "q", "completion": text}

    def texts(*flags, rows=(shown,)) -> list[str]:
        return [one["text"] for one in json.loads(data(*rows, flags=("--json", *flags)).out)["examples"]]

    (every,), (last,), (answers,) = (texts("--supervise", name) for name in ("assistant", "last", "answers"))
    assert (every.count("⟦"), last.count("⟦"), answers.count("⟦")) == (2, 1, 2)
    assert "⟦<|close|>think" in every
    assert "⟦<|open|>response" in answers
    assert "think" not in texts("--no-thinking")[0]
    assert "thinking_effort=max`" in every
    assert "thinking_effort=low`" in texts("--effort", "low")[0]
    assert len(texts("--rows", 0)) == 0
    assert texts("--ignore", "id", "--ignore", "url", rows=({**shown, "id": 1, "url": 2},)) == [every]
    limit = "--no-thinking", "--max-length", 80
    assert len(texts(*limit, "--too-long", "drop", rows=(long, {**long, "completion": "a"}))) == 1
    assert texts(*limit, "--too-long", "truncate", rows=(long,))[0].endswith("aaaa⟧")
    with pytest.raises(DataError, match=r"rows.jsonl: 1 problem\(s\)\n  - line 1, length: .* max_length is 80"):
        texts(*limit, rows=(long,))


def test_dropped_rows_are_named(data) -> None:
    _, err = data(*[EMPTY] * (SHOWN + 2), TEXT, flags=("--raw", "--on-bad", "drop"))
    assert err.count("rows.jsonl: dropped line ") == SHOWN
    assert "rows.jsonl: dropped line 1, completion: is empty" in err
    assert err.endswith("rows.jsonl: ... and 2 more dropped\n")


def test_what_is_refused(data, tmp_path, front_folder) -> None:
    for rows, flags, what in (
        ((TEXT, EMPTY), (), "line 2, messages: no token is supervised"),
        ((EMPTY,), ("--on-bad", "drop"), "no supervised token is left: all 1 rows were dropped"),
        (('{"text": 1}',), (), "line 1, the line: has the keys"),
        ((GOOD,), ("--raw",), "raw has no effect"),
        ((TEXT,), ("--too-long", "drop"), "too_long = 'drop' has no effect while max_length is None"),
        ((TEXT,), ("--no-thinking", "--effort", "low"), "it has no effect with --no-thinking"),
        ((TEXT,), ("--rows", "-1"), "-1 is below 0"),
    ):
        with pytest.raises(DataError, match=what):
            data(*rows, flags=flags)
    (tmp_path / "config.json").write_text((front_folder / "config.json").read_text())
    with pytest.raises(TokenizerError, match=r"has neither tiktoken.model nor tokenizer.json"):
        data(TEXT, folder=tmp_path)
