"""Rows -> examples: what is supervised, what is refused or dropped and counted, and what people see of it."""

import dataclasses
import re

import numpy as np
import PIL.Image
import pytest
from tests.tiny import IDS

from trillion_moe.data.build import build_examples
from trillion_moe.data.chat import ChatError, ChatOptions
from trillion_moe.data.examples import DataConfig, Examples
from trillion_moe.data.jinja_chat import JinjaChat
from trillion_moe.data.report import decode_marked, statistics
from trillion_moe.data.rows import DataError
from trillion_moe.data.tokenizer import TokenizerError

MEDIA = IDS["<|media_pad|>"][0]
THOUGHT = {"role": "assistant", "content": "a1", "reasoning_content": "r1"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
CALLS = {"role": "assistant", "content": "", "reasoning_content": "r2", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "t"}
LAST = {"role": "assistant", "content": "a3"}
TOOL = {"type": "function", "function": {"name": "f"}}
TALK = [{"role": "system", "content": "s"}, {"role": "user", "content": "q1"}, THOUGHT]
TALK += [{"role": "user", "content": "q2"}, CALLS, RESULT, LAST]


def says(text: str) -> dict:
    return {"role": "user", "content": text}


def shows(*names: str, text: str = "?") -> dict:
    pictures = [{"type": "image_url", "image_url": {"url": f"{name}.png"}} for name in names]
    return {"role": "user", "content": [*pictures, {"type": "text", "text": text}]}


def talk(*messages, **more) -> dict:
    return {"messages": list(messages), **more}


def asked(text: str) -> dict:
    return talk(says(text), LAST)


def findings(error) -> tuple[str, ...]:
    return error.value.findings


@pytest.fixture
def marked(processor):
    def marked(examples: Examples, i: int = 0) -> str:
        return decode_marked(examples.items[i], processor.tokenizer)

    return marked


# --- what is supervised ----------------------------------------------------------------------------------------------


def tag(name: str, text: str, attributes: str = "") -> str:
    return f"<|open|>{name}{attributes}<|sep|>{text}<|close|>{name}<|sep|>"


def message(attributes: str, text: str, end: str = "<|end_of_msg|>") -> str:
    return tag("message", text, f" {attributes}") + end


DECLARED = message(
    'role="system" type="tool-declare"',
    "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n"
    '[{"function":{"name":"f"},"type":"function"}]\n```',
)
ARGUMENT = tag("argument", "1", ' key="x" type="number"')


def rendered(think: tuple[str, str], *turns: tuple[str, str]) -> str:
    """TALK with what goes around each thinking channel, and around what is behind it, of each of the three turns."""
    made = tag("call", ARGUMENT, ' tool="f" index="1"')
    bodies = (("r1", "a1", ""), ("r2", "", tag("tools", made)), ("", "a3", ""))
    said = []
    for (reasoning, answer, tools), (begin, end) in zip(bodies, turns, strict=True):
        closed = f"{reasoning}<|close|>think<|sep|>"
        rest = f"{tag('response', answer)}{tools}<|close|>message<|sep|><|end_of_msg|>"
        opened = '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>'
        said.append(f"{opened}{begin}{closed}{think[0] if begin or end else ''}{rest}{end}")
    return "".join(
        (
            *(DECLARED, message('role="system"', "s"), message('role="user"', "q1"), said[0]),
            *(message('role="user"', "q2"), said[1], message('role="tool" tool="f" index="1"', "t"), said[2]),
        )
    )


def test_every_turn_of_the_assistant(build, marked) -> None:
    """fault 101: several turns, thinking, calls and results, from behind the prompt to a turn's end"""
    text = marked(build(talk(*TALK, tools=[TOOL])))
    assert text == rendered(("", ""), *[("⟦", "⟧")] * 3)


def test_only_the_last_turn(build, marked) -> None:
    text = marked(build(talk(*TALK, tools=[TOOL]), supervise="last"))
    assert text == rendered(("", ""), ("", ""), ("", ""), ("⟦", "⟧"))


def test_only_answers(build, marked) -> None:
    text = marked(build(talk(*TALK, tools=[TOOL]), supervise="answers"))
    assert text == rendered(("⟦", ""), *[("", "⟧")] * 3)


def test_without_thinking_and_with_effort(build, marked) -> None:
    answer = '<|open|>message role="assistant"<|sep|><|open|>response<|sep|>⟦a3<|close|>response<|sep|>'
    answer += "<|close|>message<|sep|><|end_of_msg|>⟧"
    assert marked(build(asked("q"), thinking=False)) == message('role="user"', "q") + answer
    for effort in ("low", "max"):
        head = marked(build(asked("q"), effort=effort)).partition('<|open|>message role="user"')[0]
        assert f"`thinking_effort={effort}`" in head
    assert marked(build(asked("q"), effort="default")) == marked(build(asked("q"), effort="max"))


def test_messages_that_are_read_and_not_learned(build, marked) -> None:
    """A prompt's turns, and those of weight 0; the mask of the rest stays."""
    whole = marked(build(talk(*TALK)))
    spans = re.findall("⟦[^⟧]*⟧", whole)
    assert len(spans) == 3
    by_weight = build(talk(*TALK[:2], {**THOUGHT, "weight": 0}, *TALK[3:]))
    assert marked(by_weight) == whole.replace(spans[0], spans[0][1:-1])
    only_last = whole.replace(spans[0], spans[0][1:-1]).replace(spans[1], spans[1][1:-1])
    assert marked(build({"prompt": TALK[:6], "completion": [LAST]})) == only_last
    assert marked(build({"prompt": TALK[:6], "completion": "a3"})) == only_last


@pytest.mark.parametrize("thinking", [True, False])
def test_spans_are_what_generation_would_write(build, processor, thinking) -> None:
    """fault 101: each begins where the prompt of its turn ends, and ends where the conversation up to it does"""
    example = build(talk(*TALK), thinking=thinking).items[0]
    options = ChatOptions(thinking=thinking, effort=None)
    without_prompt = dataclasses.replace(options, add_generation_prompt=False)
    expected = np.zeros(len(example.ids), bool)
    for i, turn in enumerate(TALK):
        if turn["role"] == "assistant":
            prompt = processor.messages(TALK[:i], options).ids
            turn = processor.messages(TALK[: i + 1], without_prompt).ids
            assert example.ids[: len(turn)].tolist() == turn
            assert turn[: len(prompt)] == prompt
            expected[len(prompt) : len(turn)] = True
    assert np.array_equal(example.mask, expected)
    assert (example.ids.dtype, example.mask.dtype, example.line) == (np.int32, bool, 1)


DROPS = """
{%- for m in messages %}{{ '<|open|>' + m.role + '<|sep|>' }}
{%- if m.role == 'assistant' and loop.last %}{{ '<think>' + (m.reasoning_content or '') + '</think>' }}{% endif -%}
{{ m.content + '<|end_of_msg|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|open|>assistant<|sep|><think>' }}{% endif -%}
"""


def test_a_template_that_drops_earlier_thoughts(build, processor, marked) -> None:
    """fault 101: an earlier turn without its thoughts is not what the model wrote, so it is not learned"""
    other = dataclasses.replace(processor, chat=JinjaChat(DROPS, frozenset(IDS), {}))
    turns = [says("q1"), THOUGHT, says("q2"), {**THOUGHT, "content": "a2"}]
    user, model, end = "<|open|>user<|sep|>", "<|open|>assistant<|sep|>", "<|end_of_msg|>"
    shown = f"{user}q1{end}{model}a1{end}{user}q2{end}{model}<think>⟦r1</think>a2{end}⟧"
    assert marked(build(talk(*turns), processor=other)) == shown
    with pytest.raises(DataError, match=r"does not tell thinking from answers; legal is \['assistant', 'last'\]"):
        build(talk(*turns), processor=other, supervise="answers")
    with pytest.raises(DataError) as caught:
        build(talk(*turns[:3], {**turns[3], "weight": 0}), talk(*turns), processor=other)
    assert findings(caught) == ("line 1, messages: no token is supervised",)


def test_a_system_turn_is_in_the_ids(build, marked) -> None:
    """fault 100"""
    spoken = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    bare, first, beside = (
        marked(build({"conversations": turns, **more}))
        for turns, more in (
            (spoken, {}),
            ([{"from": "system", "value": "be brief"}, *spoken], {}),
            (spoken, {"system": "be brief"}),
        )
    )
    assert first == beside == message('role="system"', "be brief") + bare


# --- prompt and completion as texts ----------------------------------------------------------------------------------


def test_texts_are_a_message_and_its_answer(build, marked) -> None:
    text = {"prompt": "q", "completion": "a3"}
    assert marked(build(text)) == marked(build(asked("q")))


def test_raw_texts(build, processor, front_model, marked) -> None:
    """fault 96: the prompt is not learned; names of special tokens in a text stay text"""
    examples = build({"prompt": "one <|sep|>", "completion": " two"}, {"prompt": "", "completion": "xy"}, raw=True)
    assert marked(examples) == "one <|sep|>⟦ two<|end_of_msg|>⟧"
    assert IDS["<|sep|>"][0] not in examples.items[0].ids
    assert examples.items[0].ids[-1] == front_model.eos_ids[0]
    assert marked(examples, 1) == "x⟦y<|end_of_msg|>⟧"  # nothing comes before the first token
    figures = statistics(examples)
    assert (figures.tokens, figures.supervised) == (11 + 5 + 3, 5 + 2)
    with pytest.raises(DataError, match="raw has no effect: no row has a prompt and a completion that are texts"):
        build(asked("q"), raw=True)
    with pytest.raises(DataError, match="raw needs an end id behind completions"):
        build({"prompt": "x", "completion": "y"}, raw=True, model=dataclasses.replace(front_model, eos_ids=()))


def test_raw_texts_need_no_chat_format(build, processor) -> None:
    mute = dataclasses.replace(processor, chat=ChatError("folder", "no chat format"))
    text = {"prompt": "x", "completion": "y"}
    assert len(build(text, processor=mute, raw=True).items) == 1
    for rows, raw in (((text,), False), ((text, asked("q")), True)):
        with pytest.raises(ChatError, match="no chat format"):
            build(*rows, processor=mute, raw=raw)


# --- pictures --------------------------------------------------------------------------------------------------------


def test_pictures_take_their_tokens(build, processor, marked, tmp_path) -> None:
    """fault 101: media too. The same placeholders and patches as in a prompt, also where results are sorted."""
    calls = {**CALLS, "tool_calls": [{**CALL, "id": "1"}, {**CALL, "id": "2"}]}
    results = [{"role": "tool", "tool_call_id": i, "content": shows(p)["content"]} for i, p in (("2", "b"), ("1", "a"))]
    turns = [shows("c", "a"), calls, *results, {"role": "assistant", "content": shows("b", text="!")["content"]}]
    examples = build(talk(*turns), asked("q"))
    example = examples.items[0]
    assert [(p.number, p.size, p.grid_thw, p.tokens) for p in example.pictures] == [
        (0, (84, 56), (1, 4, 6), 6),
        (1, (20, 28), (1, 2, 2), 1),
        (3, (20, 28), (1, 2, 2), 1),
        (2, (30, 20), (1, 2, 4), 2),
        (4, (30, 20), (1, 2, 4), 2),
    ]
    assert np.flatnonzero(example.ids == MEDIA).tolist() == [
        at for p in example.pictures for at in range(p.start, p.start + p.tokens)
    ]
    assert not example.mask[example.ids == MEDIA].any()
    beside = dataclasses.replace(processor, folder=tmp_path)
    prompt = beside.messages(turns, ChatOptions(effort=None, add_generation_prompt=False))
    again = [at for p in example.pictures for at in range(p.start + 1, p.start + p.tokens)]
    assert np.delete(example.ids, again).tolist() == prompt.ids
    patches = examples.patches(0)
    assert np.array_equal(patches, prompt.patches.patches)
    assert patches.dtype == np.float32
    assert examples.patches(1) is None
    text = marked(examples)
    assert (
        "<|sep|><|media_begin|>image 84x56<|media_content|><image 84x56: 6 tokens><|media_end|><|media_begin|>" in text
    )
    mine = "⟧<|media_begin|>image 30x20<|media_content|><image 30x20: 2 tokens><|media_end|>⟦!"
    assert mine in text


def test_a_picture_in_a_data_uri(build, tmp_path) -> None:
    import base64

    build(asked("q"))
    uri = "data:image/png;base64," + base64.b64encode((tmp_path / "c.png").read_bytes()).decode()
    part = {"type": "image_url", "image_url": {"url": uri}}
    examples = build(talk({"role": "user", "content": [part]}, LAST), talk(shows("c"), LAST))
    assert np.array_equal(examples.patches(0), examples.patches(1))


def test_pictures_that_changed_since(build, tmp_path) -> None:
    examples = build(talk(shows("a", "c"), LAST))
    PIL.Image.new("RGB", (200, 100)).save(tmp_path / "c.png")
    with pytest.raises(DataError, match="line 1: a picture has another size than when it was checked"):
        examples.patches(0)
    (tmp_path / "c.png").unlink()
    with pytest.raises(
        DataError, match=r"line 1, message 0, content\[1\]: .*c.png cannot be read.*could be read before"
    ):
        examples.patches(0)


# --- lengths ---------------------------------------------------------------------------------------------------------


def test_a_cut_that_leaves_nothing_to_learn(build) -> None:
    """fault 94: a prompt of 10 tokens, max_length 8"""
    bad, good = {"prompt": "0123456789", "completion": "abc"}, {"prompt": "0", "completion": "abc"}
    cut = {"raw": True, "max_length": 8, "too_long": "truncate"}
    with pytest.raises(DataError) as caught:
        build(good, bad, **cut)
    assert findings(caught) == ("line 2, the first 8 of 14 tokens: no token is supervised",)
    examples = build(good, bad, bad, **cut, on_bad="drop")
    assert [item.line for item in examples.items] == [1]
    assert statistics(examples).dropped == {"unsupervised": 2}
    with pytest.raises(DataError) as caught:
        build(bad, bad, **cut, on_bad="drop")
    assert findings(caught) == ("no supervised token is left: all 2 rows were dropped (unsupervised 2)",)


def test_a_row_without_targets(build) -> None:
    """fault 95: two rows, one of them empty: never an example without a target"""
    good = {"prompt": "q", "completion": "a"}
    empty = [
        ({"prompt": "q", "completion": ""}, "completion: is empty: there is nothing to learn"),
        (talk(says("q")), "messages: no token is supervised: 0 assistant message(s) to learn, and none says anything"),
        (
            talk(says("q"), {**LAST, "content": " "}),
            "messages: no token is supervised: 1 assistant message(s) to learn",
        ),
        (talk(says("q"), {**LAST, "weight": 0}), "messages: no token is supervised: 0 assistant message(s) to learn"),
        ({"prompt": [says("q"), LAST], "completion": [says("q")]}, "messages: no token is supervised: 0 assistant"),
    ]
    for row, what in empty:
        with pytest.raises(DataError) as caught:
            build(good, row, raw=True)
        assert findings(caught)[0].startswith(f"line 2, {what}")
        (example,) = build(good, row, raw=True, on_bad="drop").items
        assert example.mask.sum() == 2


def test_rows_that_are_too_long(build) -> None:
    short, long = {"prompt": "01", "completion": "a"}, {"prompt": "0123", "completion": "abcdef"}
    rows, limit = (short, long), {"raw": True, "max_length": 6}
    with pytest.raises(DataError) as caught:
        build(*rows, **limit, on_bad="drop")  # another policy than that of bad rows
    assert findings(caught) == ("line 2, length: 11 tokens, max_length is 6",)
    dropped = build(*rows, **limit, too_long="drop")
    assert (len(dropped.items), statistics(dropped).dropped, statistics(dropped).truncated) == (1, {"too long": 1}, 0)
    cut = build(*rows, **limit, too_long="truncate")
    assert cut.items[1].ids.tolist() == build(*rows, raw=True).items[1].ids[:6].tolist()
    assert cut.items[1].mask.tolist() == [False] * 4 + [True] * 2
    assert (statistics(cut).truncated, cut.items[1].full_length) == (1, 11)
    whole = build(*rows, raw=True, max_length=11)
    assert (len(whole.items), statistics(whole).truncated) == (2, 0)


def test_no_cut_within_a_picture(build, processor) -> None:
    """faults 112 and 116: at every length, all of a picture's placeholders are there with its patches, or none"""
    row = talk(says("q"), LAST, shows("c", "b"))
    (whole,) = build(row).items
    inside = {at for p in whole.pictures for at in range(p.start + 1, p.start + p.tokens)}
    assert len(inside) == 5 + 1
    first = whole.pictures[0].start
    for limit in range(first - 2, len(whole.ids)):
        settings = {"max_length": limit, "too_long": "truncate"}
        if limit in inside:
            number = 0 if limit < whole.pictures[1].start else 1
            picture = whole.pictures[number]
            with pytest.raises(DataError) as caught:
                build(row, **settings)
            span = f"{picture.start}..{picture.start + picture.tokens - 1}"
            what = f"line 1, picture {number}: max_length {limit} would cut its placeholders, tokens {span}"
            assert findings(caught) == (what,)
            kept = build(row, asked(""), **settings, on_bad="drop")
            assert statistics(kept).dropped == {"cut image": 1}
            continue
        cut = build(row, **settings)
        pictures = cut.items[0].pictures
        assert (cut.items[0].ids == MEDIA).sum() == sum(p.tokens for p in pictures)
        patches = cut.patches(0)
        assert (0 if patches is None else len(patches)) == 4 * sum(p.tokens for p in pictures)
        assert pictures == tuple(p for p in whole.pictures if p.start < limit)


# --- bad rows --------------------------------------------------------------------------------------------------------


def test_bad_rows_are_named_all_at_once_or_dropped_and_counted(build, tmp_path) -> None:
    build(asked("q"))
    (tmp_path / "text.png").write_text("no picture")
    PIL.Image.new("I;16", (20, 20)).save(tmp_path / "deep.png")
    bad = [
        (talk({"role": "bard", "content": "x"}, LAST), "chat", "message 0, role: 'bard' is none of"),
        (talk(says("q"), {**LAST, "contents": "x"}), "chat", "message 1, contents: a assistant message holds only"),
        (talk(shows("absent"), LAST), "image", r"message 0, content[0]: "),
        (talk(shows("a", "text"), LAST), "image", r"message 0, content[1]: "),
        (talk(shows("a", "deep"), LAST), "image", "message 0, content[1]: mode "),
        (talk({"role": "user", "content": [{"type": "image"}]}, LAST), "chat", "message 0, content[0]: holds NoneType"),
        (talk(says("<|kimi_image_placeholder|>"), LAST), "image", "message 0: spells <|kimi_image_placeholder|>"),
        (talk(RESULT, LAST), "chat", "message 0: result 1 has no tool name"),
        (talk(says("q"), LAST, tools=[TOOL]), None, ""),
    ]
    rows = [row for row, *_ in bad]
    with pytest.raises(DataError) as caught:
        build(*rows)
    assert len(findings(caught)) == len(bad) - 1
    for line, (finding, (_, _, what)) in enumerate(zip(findings(caught), bad[:-1], strict=True), 1):
        assert finding.startswith(f"line {line}, {what}")
    examples = build(*rows, on_bad="drop")
    assert [item.line for item in examples.items] == [len(bad)]
    assert [(line, error.reason) for line, error in examples.dropped] == [
        (line, reason) for line, (_, reason, _) in enumerate(bad[:-1], 1)
    ]
    assert statistics(examples).dropped == {"chat": 4, "image": 4}


def test_a_text_without_encoding(build, processor, monkeypatch) -> None:
    def encode(self, text: str, *, specials: bool) -> list[int]:
        raise TokenizerError(f"{text!r} has none")

    monkeypatch.setattr(type(processor.tokenizer), "encode", encode)
    with pytest.raises(DataError) as caught:
        build({"prompt": "x", "completion": "y"}, raw=True)
    assert findings(caught) == ("line 1, text: 'x' has none",)


def test_pictures_for_a_model_without_eyes(build, processor) -> None:
    blind = dataclasses.replace(processor, images=None)
    with pytest.raises(DataError, match=r"line 1, message 0, content\[0\]: is a picture, but this model has no vision"):
        build(talk(shows("a"), LAST), processor=blind)


def test_a_placeholder_that_the_model_does_not_know(build, front_model) -> None:
    other = dataclasses.replace(front_model, media_id=3)
    with pytest.raises(DataError, match=f"have id {MEDIA} in the tokenizer, 3 in the model"):
        build(talk(shows("a"), LAST), model=other)


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"supervise": "all"}, "supervise = 'all': legal is one of ('assistant', 'last', 'answers')"),
        ({"too_long": "cut", "max_length": 8}, "too_long = 'cut': legal is one of ('refuse', 'drop', 'truncate')"),
        ({"on_bad": "ignore"}, "on_bad = 'ignore': legal is one of ('refuse', 'drop')"),
        ({"effort": "some"}, "effort = 'some': legal is one of ('low', 'high', 'max', 'default', None)"),
        ({"max_length": 1}, "max_length = 1: legal is None or an integer of at least 2"),
        ({"too_long": "drop"}, "too_long = 'drop' has no effect while max_length is None"),
    ],
)
def test_settings_that_are_not_legal(settings, what) -> None:
    with pytest.raises(DataError) as caught:
        DataConfig(**settings)
    assert findings(caught) == (what,)


def test_no_rows(processor, front_model) -> None:
    with pytest.raises(DataError, match="rows is empty"):
        build_examples([], processor, front_model, DataConfig())


# --- figures ---------------------------------------------------------------------------------------------------------


def test_figures(build) -> None:
    """fault 96: supervised tokens, x of y"""
    rows = [talk(*TALK), talk(shows("c", "b"), LAST), talk(says("q")), asked("x" * 400)]
    examples = build(*rows, on_bad="drop", max_length=400, too_long="drop")
    figures = statistics(examples)
    one, two = examples.items
    lengths = sorted((len(one.ids), len(two.ids)))
    supervised = int(one.mask.sum() + two.mask.sum())
    assert dataclasses.asdict(figures) == {
        "rows": 4,
        "dropped": {"unsupervised": 1, "too long": 1},
        "examples": 2,
        "truncated": 0,
        "tokens": sum(lengths),
        "supervised": supervised,
        "lengths": (lengths[0], sum(lengths) / 2, lengths[1]),
        "images": 2,
        "image_tokens": 8,
        "messages": {"system": 1, "user": 3, "assistant": 4, "tool": 1},
        "reasoning": 2,
    }
    assert 0 < supervised < sum(lengths)
    text = str(figures)
    assert f"supervised tokens  {supervised} of {sum(lengths)} ({supervised / sum(lengths):.1%})" in text
    assert "dropped            2 (unsupervised: 1; too long: 1)" in text
    assert "with reasoning     2 of 4 assistant messages" in text


def test_digest_tells_sets_apart(build) -> None:
    first, again = build(asked("q")), build(asked("q"))
    assert first.digest == again.digest
    others = [build(asked("p")), build(asked("q"), asked("q")), build(asked("q"), supervise="answers")]
    assert len({first.digest, *(other.digest for other in others)}) == 4
