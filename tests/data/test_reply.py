"""Replies: what the renderer wrote is read back exactly, and nothing a model writes is lost or raises."""

import itertools
import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trillion_moe.data.chat import ChatOptions, encode, prompt_text
from trillion_moe.data.reply import (
    CLOSE,
    END_OF_MSG,
    OPEN,
    SEP,
    Finding,
    Reply,
    ReplyParser,
    ToolCall,
    parse_reply,
    pieces,
)
from trillion_moe.data.tiktoken_model import write_tiktoken
from trillion_moe.data.tokenizer import load_tokenizer
from trillion_moe.data.xtml import XtmlChat, render
from trillion_moe.data.xtml_messages import RELEASE

GOLDEN = json.loads((Path(__file__).parents[1] / "goldens" / "front" / "chat.json").read_text(encoding="utf-8"))
CASES = {case["name"]: case for case in GOLDEN["cases"]}
QUIET = ChatOptions(effort=None, add_generation_prompt=False)
THINK_END = [(CLOSE, True), ("think", False), (SEP, True)]


def tag(marker: str, header: str) -> list[tuple[str, bool]]:
    return [(marker, True), (header, False), (SEP, True)]


ANSWER = tag(OPEN, "response")
ANSWER_END = tag(CLOSE, "response")
END = [*tag(CLOSE, "message"), (END_OF_MSG, True)]


def written(message: dict, thinking: bool = True) -> list[tuple[str, bool]]:
    """What the model wrote of this turn, as pieces."""
    options = ChatOptions(effort=None, add_generation_prompt=False, thinking=thinking)
    return [(s.text, s.control) for s in render([message], options) if s.generated]


def argument(key: str, kind: str, text: str) -> list[tuple[str, bool]]:
    return [*tag(OPEN, f'argument key="{key}" type="{kind}"'), (text, False), *tag(CLOSE, "argument")]


def calls(*inner: list[tuple[str, bool]]) -> list[tuple[str, bool]]:
    """A reply that thinks and answers nothing and holds one call of `f` with these pieces."""
    body = [piece for pieces in inner for piece in pieces]
    return [
        *THINK_END,
        *ANSWER,
        *ANSWER_END,
        *tag(OPEN, "tools"),
        *tag(OPEN, 'call tool="f" index="1"'),
        *body,
        *tag(CLOSE, "call"),
        *tag(CLOSE, "tools"),
        *END,
    ]


# --- inversion -------------------------------------------------------------------------------------------------------

texts = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"])),
    st.lists(st.sampled_from([OPEN, CLOSE, SEP, END_OF_MSG, "think", "response", "message", "&quot;", " "])).map(
        "".join
    ),
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
tool_calls = st.lists(st.tuples(texts.filter(bool), st.dictionaries(texts, values, max_size=3)), max_size=3)


def as_message(thinking: str | None, answer: str, made: list[tuple[str, dict]]) -> dict:
    found = [ToolCall(f"{name}:{n}", n + 1, name, arguments) for n, (name, arguments) in enumerate(made)]
    return Reply(thinking, answer, tuple(found)).message()


def cut(text: str, control: bool, at: list[int]) -> list[tuple[str, bool]]:
    """A piece in parts; special tokens stay whole."""
    places = sorted({0, len(text), *(n % (len(text) + 1) for n in at)})
    return [(text, control)] if control else [(text[a:b], False) for a, b in itertools.pairwise(places)]


@settings(max_examples=200, deadline=None)
@given(thinking=texts | st.none(), answer=texts, made=tool_calls, at=st.lists(st.integers(0, 50), max_size=4))
def test_parsing_inverts_rendering(thinking, answer, made, at):
    message = as_message(thinking, answer, made)
    parser = ReplyParser(thinking=thinking is not None)
    shown = {"think": "", "response": ""}
    for text, control in written(message, thinking is not None):
        for piece in cut(text, control, at):
            for channel, new in parser.push(*piece):
                shown[channel] += new
    reply = parser.finish()
    if thinking is not None and not thinking.strip():
        message["reasoning_content"] = ""  # the format has no reasoning that is white space only
    assert reply.message() == message
    assert reply.complete
    assert reply.findings == ()
    assert shown == {"think": reply.thinking or "", "response": reply.answer}


@pytest.mark.parametrize("name", CASES)
def test_golden_turns_are_read_back(name):
    case = CASES[name]
    options = ChatOptions(effort=None, thinking=case["options"].get("thinking", True))
    sizes = [tuple(size) for size in case.get("image_sizes", ())]
    segments = XtmlChat(RELEASE).render(case["messages"], options, sizes)
    for number, message in enumerate(case["messages"]):
        turn = [(s.text, s.control) for s in segments if s.generated and s.message == number]
        assert bool(turn) == (message["role"] == "assistant")
        if turn:
            reply = parse_reply(turn, thinking=options.thinking)
            assert (reply.complete, reply.findings) == (True, ())
            assert reply.answer == (message.get("content") or "")
            reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
            assert reply.thinking == (reasoning if options.thinking else None)
            assert [c.name for c in reply.tool_calls] == [c["function"]["name"] for c in message.get("tool_calls", ())]


def test_types_of_arguments():
    message = CASES["tool_call_all_types"]["messages"][1]
    (call,) = parse_reply(written(message)).tool_calls
    assert call.arguments == message["tool_calls"][0]["function"]["arguments"]
    assert {key: type(value) for key, value in call.arguments.items()} == {
        key: type(value) for key, value in message["tool_calls"][0]["function"]["arguments"].items()
    }
    assert list(call.arguments) == list(message["tool_calls"][0]["function"]["arguments"])


def test_results_find_their_calls_by_the_given_ids():
    reply = parse_reply(written(as_message("", "", [("f", {}), ("f", {})])))
    results = [{"role": "tool", "tool_call_id": c.id, "content": c.id} for c in reversed(reply.tool_calls)]
    order = [s.message for s in render([reply.message(), *results], QUIET) if s.text == "tool" and s.role == "tool"]
    assert list(dict.fromkeys(order)) == [2, 1]


# --- what comes of the ids -------------------------------------------------------------------------------------------


def test_marker_names_in_plain_text_are_text():
    """fault 105."""
    spelled = f"{CLOSE}think{SEP}{OPEN}response{SEP}{END_OF_MSG}"
    reply = parse_reply([(spelled, False), *THINK_END, *ANSWER, (spelled, False), *ANSWER_END, *END])
    assert reply == Reply(spelled, spelled, (), True)


def test_a_string_without_the_flagged_tokens_still_splits():
    """fault 106: Decoding with skip_special_tokens leaves out `<|end_of_msg|>` and keeps the other three."""
    text = "".join(text for text, _ in written(as_message("hmm", "yes", [("f", {"a": 1})]))).replace(END_OF_MSG, "")
    reply = parse_reply(text)
    assert (reply.thinking, reply.answer, reply.complete) == ("hmm", "yes", True)
    assert reply.tool_calls == (ToolCall("f:0", 1, "f", {"a": 1}),)


def test_a_string_without_any_marker_is_not_taken_for_a_whole_reply():
    assert parse_reply("all of it") == Reply("all of it", "", (), False)
    assert parse_reply("all of it", thinking=False) == Reply(None, "all of it", (), False)


class Letters:
    """One id per byte, special tokens from 256."""

    def __init__(self):
        self.specials = {name: 256 + n for n, name in enumerate((OPEN, CLOSE, SEP, END_OF_MSG, "[EOS]"))}

    class Stream:
        def __init__(self):
            self.held = b""

        def push(self, token_id) -> str:
            self.held += bytes([token_id])
            try:
                text, self.held = self.held.decode(), b""
            except UnicodeDecodeError:
                return ""
            return text

        def finish(self) -> str:
            text, self.held = self.held.decode(errors="replace"), b""
            return text

    def stream(self) -> Stream:
        return self.Stream()


def test_pieces_of_ids():
    ids = [*"é<|sep|>".encode(), 257, *b"think", 258, 0xC3, 260]
    found = list(pieces(ids, Letters()))
    assert [text for text, control in found if control] == [CLOSE, SEP, "[EOS]"]
    assert "".join(text for text, _ in found) == f"é<|sep|>{CLOSE}think{SEP}\ufffd[EOS]"
    assert parse_reply(found).thinking == "é<|sep|>"


@pytest.mark.parametrize("name", ["multi_turn_with_thinking", "user_control_markers", "tool_call_all_types"])
def test_ids_and_back(name, tmp_path):
    """Through a tokenizer whose tokens are bytes, so that characters come in parts."""
    names = (OPEN, CLOSE, SEP, END_OF_MSG, "<|media_pad|>", "[EOS]")
    write_tiktoken(tmp_path, [bytes([b]) for b in range(256)], {n: (256 + i, True) for i, n in enumerate(names)})
    tokenizer = load_tokenizer(tmp_path)
    messages = CASES[name]["messages"]
    segments = render(messages, QUIET)
    found = list(pieces(encode(segments, tokenizer), tokenizer))
    assert "".join(text for text, _ in found) == prompt_text(segments)
    assert [text for text, control in found if control] == [s.text for s in segments if s.control]
    for number in (n for n, m in enumerate(messages) if m["role"] == "assistant"):
        turn = [s for s in segments if s.generated and s.message == number]
        reply = parse_reply(pieces(encode(turn, tokenizer), tokenizer))
        assert reply == parse_reply([(s.text, s.control) for s in turn])
        assert reply.findings == ()


# --- what models do --------------------------------------------------------------------------------------------------


def test_cut_off_anywhere():
    whole = written(as_message("hmm", "yes", [("f", {"a": 1}), ("g", {"b": "x"})]))
    full = parse_reply(whole)
    assert full.complete
    for n in range(len(whole)):
        reply = parse_reply(whole[:n])
        done = n >= len(whole) - 1  # the message is closed
        assert reply.complete == done
        assert full.thinking is not None
        assert full.thinking.startswith(reply.thinking or "")
        assert full.answer.startswith(reply.answer)
        assert reply.tool_calls == full.tool_calls[: len(reply.tool_calls)]


def test_a_call_that_was_cut_off_is_a_finding():
    whole = written(as_message("", "", [("f", {"a": "one two"})]))
    at = next(n for n, (text, _) in enumerate(whole) if text == "one two")
    reply = parse_reply([*whole[:at], ("one", False)])
    assert reply.tool_calls == ()
    raw = '<|open|>call tool="f" index="1"<|sep|><|open|>argument key="a" type="string"<|sep|>one'
    assert reply.findings == (Finding("call 1 of 'f' was cut off", raw),)


@pytest.mark.parametrize(
    ("inner", "problem"),
    [
        (argument("a", "number", "1x"), "argument 'a': '1x' is no number"),
        (argument("a", "number", "true"), "argument 'a': 'true' is no number"),
        (argument("a", "boolean", "1"), "argument 'a': '1' is no boolean"),
        (argument("a", "null", ""), "argument 'a': '' is no null"),
        (argument("a", "object", "[]"), r"argument 'a': '\[\]' is no object"),
        (argument("a", "array", "[" * 9999), "argument 'a': .* is no array"),
        (argument("a", "integer", "1"), r"argument 'a': type 'integer' is none of \('string', 'number'"),
        (argument("a", "null", "null") * 2, "argument 'a': 'a' is there twice"),
        ([*tag(OPEN, 'argument type="null"'), ("null", False), *tag(CLOSE, "argument")], "an argument without key"),
        ([("stray", False)], "text 'stray' outside its arguments"),
        ([*tag(OPEN, "json"), ("{", False), *tag(CLOSE, "json")], "argument 'json': '{' is no object"),
        ([*tag(OPEN, 'argument key="a" type="null"'), ("null", False)], "argument was not closed"),
    ],
)
def test_a_malformed_call_is_not_given_out(inner, problem):
    reply = parse_reply(calls(inner))
    assert reply.tool_calls == ()
    assert reply.complete
    (finding,) = [f for f in reply.findings if f.what.startswith("call of 'f'")]
    assert finding.raw.startswith('<|open|>call tool="f"')
    assert finding.raw.endswith("<|close|>call<|sep|>")
    assert re.fullmatch(f"call of 'f': {problem}.*", finding.what)


def test_a_good_call_behind_a_malformed_one():
    bad, good = calls(argument("a", "number", "x")), calls(argument("a", "number", "2"))
    call = good[good.index(("tools", False)) + 2 : good.index(("tools", False), -9) - 1]
    at = bad.index(("tools", False), bad.index(("call", False)))
    reply = parse_reply([*bad[: at - 1], *call, *bad[at - 1 :]])
    assert reply.tool_calls == (ToolCall("f:0", 1, "f", {"a": 2}),)
    assert [f.what for f in reply.findings] == ["call of 'f': argument 'a': 'x' is no number"]


def test_an_index_that_does_not_count_is_noted():
    reply = parse_reply([(text.replace('index="1"', 'index="7"'), control) for text, control in calls()])
    assert reply.tool_calls == (ToolCall("f:0", 1, "f", {}),)
    assert reply.findings == (Finding("call 1 of 'f' has index '7'", ""),)


def test_arguments_as_one_json_element():
    inner = [*tag(OPEN, 'json type="object"'), ('{"a": [1]}', False), *tag(CLOSE, "json")]
    assert parse_reply(calls(inner)).tool_calls == (ToolCall("f:0", 1, "f", {"a": [1]}),)


def test_channels_that_were_not_closed():
    reply = parse_reply([("hmm", False), *ANSWER, ("yes", False), *END])
    assert (reply.thinking, reply.answer, reply.complete) == ("hmm", "yes", True)
    assert [f.what for f in reply.findings] == ["think was not closed", "response was not closed"]
    ended = parse_reply([*THINK_END, *ANSWER, ("yes", False), (END_OF_MSG, True)])
    assert (ended.answer, ended.complete) == ("yes", True)


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("header", ["", 'message role="assistant"'])
def test_the_prefix_of_the_prompt_may_be_repeated(thinking, header):
    prefix = tag(OPEN, header) if header else []
    reply = parse_reply(
        [*prefix, *tag(OPEN, "think"), ("hmm", False), *THINK_END, *ANSWER, ("yes", False)], thinking=thinking
    )
    assert reply == Reply("hmm", "yes", (), False)


def test_an_answer_without_its_channel_is_an_answer():
    reply = parse_reply([*THINK_END, ("\n", False), ("yes", False), *END])
    assert (reply.answer, reply.complete) == ("yes", True)
    assert reply.findings == (Finding("text directly in a message", "yes"),)


def test_white_space_between_elements_is_passed_over():
    whole = written(as_message("a", "b", [("f", {"x": "y"})]))
    spaced = [*whole[:4], ("\n ", False), *whole[4:]]
    assert parse_reply(spaced) == parse_reply(whole)


@pytest.mark.parametrize(
    ("stray", "text"),
    [
        (tag(OPEN, "call"), "<|open|>call<|sep|>"),
        (tag(OPEN, 'nonsense a="b"'), '<|open|>nonsense a="b"<|sep|>'),
        (tag(OPEN, "two words"), "<|open|>two words<|sep|>"),
        (tag(CLOSE, "tools"), "<|close|>tools<|sep|>"),
        (tag(CLOSE, 'response a="b"'), '<|close|>response a="b"<|sep|>'),
        ([(SEP, True)], "<|sep|>"),
        ([(OPEN, True), ("x", False), (OPEN, True), (SEP, True)], "<|open|>x<|open|><|sep|>"),
        ([("[EOS]", True)], "[EOS]"),
    ],
)
def test_structure_in_a_wrong_place_is_shown_as_text(stray, text):
    reply = parse_reply([*THINK_END, *ANSWER, ("a", False), *stray, ("b", False), *ANSWER_END, *END])
    assert (reply.answer, reply.complete) == (f"a{text}b", True)
    assert reply.findings
    assert "".join(f.raw for f in reply.findings) == text


def test_special_tokens_within_an_argument_are_its_text():
    inner = [*tag(OPEN, 'argument key="a" type="string"'), *tag(OPEN, "response"), *tag(CLOSE, "argument")]
    reply = parse_reply(calls(inner))
    assert reply.tool_calls[0].arguments == {"a": "<|open|>response<|sep|>"}
    assert [f.what for f in reply.findings] == ["response inside argument"]


def test_nothing_counts_behind_the_end():
    whole = written(as_message("", "yes", []))
    reply = parse_reply([*whole, *tag(OPEN, 'message role="user"'), ("forged", False), *END])
    assert (reply.answer, reply.complete) == ("yes", True)
    assert "forged" in {f.raw for f in reply.findings}


def test_cut_off_inside_a_tag():
    assert parse_reply([("a", False), (CLOSE, True), ("thi", False)]) == Reply(
        "a", "", (), False, (Finding("cut off inside a tag", "<|close|>thi"),)
    )


piece = st.tuples(st.sampled_from([OPEN, CLOSE, SEP, END_OF_MSG, "[EOS]"]), st.just(True)) | st.tuples(
    st.sampled_from(["think", "response", "message", "tools", "json", " ", "x", "1"])
    | st.sampled_from(['call tool="f" index="1"', 'argument key="a" type="number"', "call", "argument"]),
    st.just(False),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(piece, max_size=40), st.booleans())
def test_no_reply_raises_or_loses_text(found, thinking):
    found = [(f"x{n}." if text == "x" else text, control) for n, (text, control) in enumerate(found)]
    parser = ReplyParser(thinking=thinking)
    shown = [new for text, control in found for new in parser.push(text, control)]
    reply = parser.finish()
    everywhere = repr(reply)
    assert all(text in everywhere for text, _ in found if text.startswith("x"))
    assert parser.finish() == reply
    assert "".join(t for c, t in shown if c == "response") == reply.answer
    assert "".join(t for c, t in shown if c == "think") == (reply.thinking or "")
    assert json.dumps(reply.message())
