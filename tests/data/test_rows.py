"""Rows of JSONL files: the three forms, and every bad one by file, line and field."""

import pickle

import pytest

from trillion_moe.data.rows import SHOWN, BadRow, DataError, read_rows

USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
TOOL = {"type": "function", "function": {"name": "f"}}
CHAT = {"messages": [USER, ANSWER]}


def turns(*texts: str, **more) -> dict:
    speakers = ("human", "gpt")
    return {"conversations": [{"from": speakers[i % 2], "value": text} for i, text in enumerate(texts)], **more}


# --- the forms -------------------------------------------------------------------------------------------------------


def test_messages(write) -> None:
    path = write(CHAT, "", {"messages": [USER, ANSWER, USER, {**ANSWER, "weight": 1}], "tools": [TOOL]}, "  ")
    first, second = read_rows(str(path))
    assert (first.path, first.line, first.messages, first.tools) == (path, 1, (USER, ANSWER), ())
    assert (second.line, second.messages, second.tools) == (3, (USER, ANSWER, USER, ANSWER), (TOOL,))
    assert first.silent == second.silent == frozenset()
    assert first.text is second.text is None


def test_weight_says_what_is_not_learned(write) -> None:
    (row,) = read_rows(write({"messages": [USER, {**ANSWER, "weight": 0}, USER, ANSWER]}))
    assert row.silent == {1}
    assert row.messages == (USER, ANSWER, USER, ANSWER)


def test_prompt_and_completion(write) -> None:
    before = [{"role": "system", "content": "s"}, USER, ANSWER, USER]
    calls = [{"role": "assistant", "content": "", "tool_calls": []}, {"role": "tool", "content": "r"}, ANSWER]
    texts, mixed, both = read_rows(
        write(
            {"prompt": "q", "completion": "a"},
            {"prompt": before, "completion": "a", "tools": [TOOL]},
            {"prompt": before, "completion": calls},
        )
    )
    assert (texts.messages, texts.text, texts.silent) == ((USER, ANSWER), ("q", "a"), {0})
    assert (mixed.messages, mixed.text, mixed.silent, mixed.tools) == ((*before, ANSWER), None, {0, 1, 2, 3}, (TOOL,))
    assert (both.messages, both.silent) == ((*before, *calls), {0, 1, 2, 3})


def test_sharegpt_keeps_its_system_turns(write) -> None:
    """fault 100"""
    spoken = {"conversations": [{"from": "system", "value": "s"}, *turns("q", "a")["conversations"]]}
    for row in read_rows(write(spoken, turns("q", "a", system="s"))):
        assert row.messages == ({"role": "system", "content": "s"}, USER, ANSWER)


def test_sharegpt_puts_pictures_where_the_turns_say(write) -> None:
    row = turns("<image>\nand <image>?", "a", "<image>", "b", images=["1.png", "2.png", "3.png"])
    (read,) = read_rows(write(row))

    def picture(n: int) -> dict:
        return {"type": "image_url", "image_url": {"url": f"{n}.png"}}

    mixed = [picture(1), {"type": "text", "text": "\nand "}, picture(2), {"type": "text", "text": "?"}]
    assert [m["content"] for m in read.messages] == [mixed, "a", [picture(3)], "b"]


@pytest.mark.parametrize(("text", "images"), [("q", ["1.png"]), ("<image><image>", ["1.png"]), ("<image>", None)])
def test_pictures_and_placeholders_must_pair_up(write, text, images) -> None:
    """fault 113: 0 placeholders and 1 picture, 2 and 1, 1 and 0"""
    path = write(CHAT, turns(text, "a", images=images))
    with pytest.raises(DataError) as caught:
        read_rows(path)
    found = f"line 2, images: names {len(images or ())} picture(s), but the turns hold {text.count('<image>')} <image>"
    assert caught.value.findings == (found,)


def test_keys_can_be_passed_over(write) -> None:
    path = write({**CHAT, "id": 7}, {**CHAT, "source": "x"})
    assert [row.messages for row in read_rows(path, ignore=("id", "source"))] == [(USER, ANSWER)] * 2
    with pytest.raises(DataError, match="no row has the key 'sauce' that is to be ignored"):
        read_rows(path, ignore=("id", "source", "sauce"))


# --- bad rows --------------------------------------------------------------------------------------------------------


BAD = {
    '{"messages": [': "the line: is not JSON with distinct keys: ",
    '{"messages": [], "messages": []}': "the line: is not JSON with distinct keys: 'messages' is there twice",
    '{"prompt": NaN}': "the line: is not JSON with distinct keys: NaN is no JSON number",
    "[" * 100_000: "the line: is not JSON with distinct keys: ",
    "[1]": "the line: holds a list; legal is an object with one of ('messages', 'prompt', 'conversations')",
    '{"text": "x"}': "the line: has the keys ['text']; legal is exactly one of ",
    '{"messages": [], "prompt": "x"}': "the line: has the keys ['messages', 'prompt']; legal is exactly one of ",
    '{"messages": [], "tols": []}': "tols: is an unknown key; legal are ('messages', 'tools')",
    '{"messages": [], "images": []}': "images: is an unknown key; legal are ('messages', 'tools')",
    '{"messages": [], "tools": ["f"]}': 'tools: must be a list of objects, not list ["f"]',
    '{"messages": []}': "messages: must be a list of messages, not list []",
    '{"messages": {"role": "user"}}': 'messages: must be a list of messages, not dict {"role": "user"}',
    '{"messages": ["x"]}': 'message 0: must be an object, not str "x"',
    '{"messages": [{"content": "x"}]}': "message 0, role: must be a text, not NoneType null",
    '{"messages": [{"role": "user"}]}': "message 0, content: is missing; legal is a text, or a list of parts",
    '{"messages": [{"role": "user", "content": 1}]}': "message 0, content: must be a text or a list of parts, not",
    '{"messages": [{"role": "user", "content": "x", "weight": 0}]}': "message 0, weight: is int 0; legal is 0 or 1, of",
    '{"messages": [{"role": "assistant", "content": "x", "weight": 0.5}]}': "message 0, weight: is float 0.5; legal",
    '{"prompt": "x"}': "completion: must be a text or a list of messages, not NoneType null",
    '{"prompt": "x", "completion": [{"role": "assistant", "content": "x"}]}': "completion: holds messages, but prompt",
    '{"prompt": 1, "completion": "x"}': "prompt: must be a list of messages, not int 1",
    '{"prompt": [{"role": "user", "content": "q"}, 1], "completion": "x"}': "prompt, message 1: must be an object",
    '{"prompt": [{"role": "user", "content": "q"}], "completion": []}': "completion: must be a list of messages, not",
    '{"conversations": "x"}': 'conversations: must be a list of turns, not str "x"',
    '{"conversations": [{"from": "gpt"}]}': "conversations, turn 0: must be an object with from and value, not dict",
    '{"conversations": [{"from": "bard", "value": "x"}]}': "conversations, turn 0, from: is str \"bard\"; legal is",
    '{"conversations": [{"from": "gpt", "value": 1}]}': "conversations, turn 0, value: must be a text, not int 1",
    '{"conversations": [{"from": "gpt", "value": "x"}], "system": 1}': "system: must be a text, not int 1",
    '{"conversations": [{"from": "gpt", "value": "x"}], "images": "a.png"}': "images: must be a list of paths or data",
}  # fmt: skip


def test_every_bad_row_is_named(write) -> None:
    rows = [row for bad in BAD for row in (CHAT, bad)]
    path = write(*rows)
    with pytest.raises(DataError) as caught:
        read_rows(path)
    found = caught.value.findings
    assert len(found) == len(BAD)
    for n, (finding, expected) in enumerate(zip(found, BAD.values(), strict=True)):
        assert finding.startswith(f"line {2 * n + 2}, {expected}"), finding
    text = str(caught.value)
    assert text.startswith(f"{path}: {len(BAD)} problem(s)\n  - line 2, ")
    assert text.count("\n") == SHOWN + 1
    assert text.endswith(f"\n  ... and {len(BAD) - SHOWN} more")


def test_bytes_that_are_no_text(write) -> None:
    path = write(CHAT)
    path.write_bytes(path.read_bytes() + b'{"prompt": "\xff", "completion": "x"}\n')
    with pytest.raises(DataError, match=r"line 2, the line: is not JSON .*utf-8"):
        read_rows(path)


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_a_file_without_rows(write, text) -> None:
    with pytest.raises(DataError, match="it holds no row"):
        read_rows(write(text))


def test_line_breaks_within_texts_are_none_of_the_file(write) -> None:
    path = write(CHAT)
    path.write_text('{"prompt": "a\u2028b", "completion": "c"}\r\n{"prompt": "d", "completion": "e"}', newline="")
    assert [(row.line, row.text) for row in read_rows(path)] == [(1, ("a\u2028b", "c")), (2, ("d", "e"))]


def test_errors_travel_between_processes() -> None:
    for error in (DataError("f", ["x", "y"]), BadRow("f", "x", "image")):
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))
