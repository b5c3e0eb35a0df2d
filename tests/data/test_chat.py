"""Kimi K3's chat format against the goldens, and what no message may do."""

import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from trillion_moe.data import chat, xtml
from trillion_moe.data.chat import ChatError, ChatOptions, Segment, encode, image_order, load_chat, prompt_text
from trillion_moe.data.xtml import MEDIA_PAD, XtmlChat, render
from trillion_moe.data.xtml_messages import IMAGE_PLACEHOLDER, RELEASE, STRICT, VLLM, Dialect

GOLDEN = json.loads((Path(__file__).parents[1] / "goldens" / "front" / "chat.json").read_text(encoding="utf-8"))
CASES = {case["name"]: case for case in GOLDEN["cases"]}
ERRORS = {case["name"]: case for case in GOLDEN["errors"]}
# The release does these without a word; the strict dialect refuses them.
REFUSED = {
    "image_no_sizes": "image_sizes holds 0",
    "image_placeholder_in_user_text": "spells <|kimi_image_placeholder|>",
}
MARKERS = ("end_of_msg", "open", "close", "sep", "media_begin", "media_content", "media_end", "media_pad")
OTHERS = ("[BOS]", "[EOS]", "[start_header_id]", "[end_header_id]", "[EOT]", "<osagent_mode>", "[UNK]", "[PAD]")
SPECIALS = (*(f"<|{name}|>" for name in MARKERS), *OTHERS, "<|reserved_token_163600|>")
QUIET = ChatOptions(effort=None)
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


def options_of(case: dict) -> ChatOptions:
    """The golden files hold arguments of `build_chat_segments`, which adds no effort of its own."""
    given = dict(case["options"])
    return ChatOptions(effort=given.pop("thinking_effort", None), tools=case.get("tools", ()), **given)


def sizes_of(case: dict) -> list[tuple[int, int]]:
    return [(w, h) for w, h in case.get("image_sizes", ())]


def rendered(case: dict, dialect: Dialect) -> list[Segment]:
    return XtmlChat(dialect).render(case["messages"], options_of(case), sizes_of(case))


def call(name: str, arguments, key: str | None = None) -> dict:
    return {"id": key, "type": "function", "function": {"name": name, "arguments": arguments}}


# --- goldens ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_golden_segments(name):
    case = CASES[name]
    segments = rendered(case, RELEASE)
    assert prompt_text(segments) == case["prompt"]
    assert [["special" if s.control else "text", s.text] for s in segments] == case["segments"]


@pytest.mark.parametrize("name", CASES)
def test_strict_is_the_release_or_a_refusal(name):
    if name in REFUSED:
        with pytest.raises(ChatError, match=REFUSED[name].replace("|", r"\|")):
            rendered(CASES[name], STRICT)
    else:
        assert rendered(CASES[name], STRICT) == rendered(CASES[name], RELEASE)


@pytest.mark.parametrize("name", CASES)
def test_golden_text_of_vllm(name):
    case = CASES[name]
    assert case["vllm_style_same_text"] == ("vllm_style_prompt" not in case)
    assert prompt_text(rendered(case, VLLM)) == case.get("vllm_style_prompt", case["prompt"])


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("dialect", [STRICT, RELEASE], ids=["strict", "release"])
def test_golden_errors(name, dialect):
    assert ERRORS[name]["release_port"] == "error"
    with pytest.raises(ChatError):
        rendered(ERRORS[name], dialect)


def test_default_options_are_those_of_apply_chat_template():
    case = CASES["user_default_public"]
    assert case["options"] == {"thinking_effort": "max"}
    assert prompt_text(render(case["messages"])) == case["prompt"]
    bare = CASES["user_no_effort"]
    assert bare["options"] == {}
    assert prompt_text(render(bare["messages"], ChatOptions(effort=None))) == bare["prompt"]


class KnownIds:
    """Ids under the released vocabulary: those of the pieces that chats are made of, and of the markers."""

    def __init__(self):
        file = Path(__file__).parents[1] / "goldens" / "front" / "known_real_ids.json"
        self.pieces = json.loads(file.read_text(encoding="utf-8"))["chat_pieces"]
        self.markers = {"<|end_of_msg|>": 163586, "<|open|>": 163587, "<|close|>": 163588, "<|sep|>": 163589}

    def encode(self, text: str, *, specials: bool) -> list[int]:
        return [(self.markers if specials else self.pieces)[text]]


def test_ids_of_the_released_vocabulary():
    """fault 102."""
    messages = [
        {"role": "system", "content": "system"},
        {"role": "user", "content": "user", "name": "string"},
        {"role": "assistant", "content": "", "reasoning_content": "think", "tool_calls": [call("bash", {"key": None})]},
    ]
    known = KnownIds()
    known.pieces |= {"key": 1, "1": 2}  # stand-ins
    opened, closed, sep, end = 163587, 163588, 163589, 163586
    message, role, equals, quote = 2778, 6244, 878, 1
    attribute = [opened, message, role, equals]
    done = [closed, message, sep, end]
    think, response, tools, made, argument = 39964, 12092, 25385, 10257, 47185
    assert encode(render(messages, QUIET), known) == [
        *(*attribute, 14062, quote, sep, 14062, *done),
        *(*attribute, 2482, quote, 1530, equals, 2033, quote, sep, 2482, *done),
        *(*attribute, 69702, quote, sep),
        *(opened, think, sep, think, closed, think, sep, opened, response, sep, closed, response, sep),
        *(opened, tools, sep, opened, made, 4453, equals, 26523, quote, 4002, equals, 2, quote, sep),
        *(opened, argument, known.pieces[" key"], equals, 1, quote),
        *(1798, equals, 6562, quote, sep, 6562, closed, argument, sep, closed, made, sep, closed, tools, sep),
        *done,
        *(*attribute, 69702, quote, sep, opened, think, sep),
    ]


# --- what a message cannot do ----------------------------------------------------------------------------------------


PLACES = {
    "user": lambda t: ([{"role": "user", "content": t}], QUIET),
    "user part": lambda t: ([{"role": "user", "content": [{"type": "text", "text": t}]}], QUIET),
    "system": lambda t: ([{"role": "system", "content": t}], QUIET),
    "name": lambda t: ([{"role": "user", "content": "x", "name": t}], QUIET),
    "answer": lambda t: ([{"role": "assistant", "content": t}], QUIET),
    "reasoning": lambda t: ([{"role": "assistant", "content": "x", "reasoning_content": t}], QUIET),
    "tool name": lambda t: ([{"role": "assistant", "content": "", "tool_calls": [call(t, {"a": 1})]}], QUIET),
    "key": lambda t: ([{"role": "assistant", "content": "", "tool_calls": [call("f", {t: 1})]}], QUIET),
    "string": lambda t: ([{"role": "assistant", "content": "", "tool_calls": [call("f", {"a": t})]}], QUIET),
    "nested": lambda t: ([{"role": "assistant", "content": "", "tool_calls": [call("f", {"a": [{t: t}]})]}], QUIET),
    "no JSON": lambda t: ([{"role": "assistant", "content": "", "tool_calls": [call("f", "{" + t)]}], QUIET),
    "result": lambda t: ([{"role": "tool", "tool": "f", "content": t}], QUIET),
    "result name": lambda t: ([{"role": "tool", "tool": t, "content": "x"}], QUIET),
    "declaration": lambda t: ([], ChatOptions(tools=[{"type": "function", "function": {"name": t}}])),
    "later tools": lambda t: ([{"role": "system", "tools": [{t: t}]}], QUIET),
    "schema": lambda t: ([], ChatOptions(response_format={"type": "json_schema", "json_schema": {"schema": {t: t}}})),
}


@pytest.mark.parametrize("place", PLACES)
def test_texts_never_become_special(place):
    hostile = " ".join(("& <|", IMAGE_PLACEHOLDER, *SPECIALS))
    wanted = [s.text for s in render(*PLACES[place]("harmless")) if s.control]
    for dialect in (STRICT, VLLM, RELEASE):
        segments = XtmlChat(dialect).render(*PLACES[place](hostile))
        assert [s.text for s in segments if s.control] == wanted
        escaped = any(s.text in SPECIALS for s in segments if not s.control)
        assert not escaped
        assert any("<|open|>" in s.text and "[PAD]" in s.text for s in segments if not s.control)


def test_placeholder_spelled_in_a_text_is_an_image_only_in_the_release():
    text = f"{IMAGE_PLACEHOLDER} and {IMAGE_PLACEHOLDER}"
    messages = [{"role": "user", "content": [{"type": "text", "text": text}, {"type": "image"}]}]
    plain = render(messages, QUIET, [(3, 4)])
    assert [s.text for s in plain if IMAGE_PLACEHOLDER in s.text] == [text]
    assert image_order(plain) == (0,)
    taken = XtmlChat(RELEASE).render(messages, QUIET, [(1, 1), (2, 2), (3, 4)])
    assert image_order(taken) == (0, 1, 2)
    assert [s.text for s in taken if s.text.startswith("image ")] == ["image 1x1", "image 2x2", "image 3x4"]


def test_encode_keeps_segments_apart():
    class Recorder:
        def __init__(self):
            self.calls = []

        def encode(self, text: str, *, specials: bool) -> list[int]:
            self.calls.append((text, specials))
            return [len(self.calls)] if specials else [0] * len(text)

    recorder = Recorder()
    segments = render([{"role": "user", "content": "hi <|sep|>"}], QUIET)
    ids = encode(segments, recorder)
    assert recorder.calls == [(s.text, s.control) for s in segments]
    assert len(ids) == sum(1 if s.control else len(s.text) for s in segments)


def test_a_tokenizer_without_the_markers_is_refused():
    class Letters:
        def encode(self, text: str, *, specials: bool) -> list[int]:
            return [ord(c) for c in text]

    with pytest.raises(ChatError, match=r"'<\|open\|>': this tokenizer makes 8 tokens of it"):
        encode(render([]), Letters())


# --- what the model writes -------------------------------------------------------------------------------------------


TURNS = [
    {"role": "user", "content": "q1"},
    {"role": "assistant", "content": "a1", "reasoning_content": "r1", "name": "k"},
    {"role": "user", "content": "q2"},
    {"role": "assistant", "content": "a2", "tool_calls": [call("f", {"x": "y"}, "c")]},
    {"role": "tool", "content": "t", "tool_call_id": "c"},
]
BEHIND_THINK = "<|close|>think<|sep|><|open|>response<|sep|>"
END = "<|close|>message<|sep|><|end_of_msg|>"
CALL = (
    '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>argument key="x" type="string"<|sep|>y'
    "<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>"
)


@pytest.mark.parametrize(
    ("thinking", "first", "second"),
    [
        (True, f"r1{BEHIND_THINK}a1", f"{BEHIND_THINK}a2"),
        (False, "a1", "a2"),
    ],
)
def test_generated_is_what_follows_the_generation_prompt(thinking, first, second):
    options = replace(QUIET, thinking=thinking)
    segments = render(TURNS, options)
    written = {i: prompt_text(s for s in segments if s.generated and s.message == i) for i in range(len(TURNS))}
    closed = f"<|close|>response<|sep|>{END}"
    assert written == {0: "", 1: first + closed, 2: "", 3: second + "<|close|>response<|sep|>" + CALL + END, 4: ""}
    assert not any(s.generated for s in segments if s.message is None)
    # The prompt for a turn, then what the model wrote of it, are the conversation up to there.
    so_far = render(TURNS[:4], replace(options, add_generation_prompt=False))
    assert prompt_text(render(TURNS[:3], options)) + written[3] == prompt_text(so_far)


def test_channels_and_roles():
    segments = render(TURNS, QUIET)
    where = {(s.message, s.role, s.channel) for s in segments}
    assert {w for w in where if w[0] == 3} == {(3, "assistant", c) for c in (None, "think", "response", "tools")}
    assert {w for w in where if w[0] == 4} == {(4, "tool", None)}
    assert [s.text for s in segments if s.message == 1 and s.channel == "think" and not s.control] == [
        "think",
        "r1",
        "think",
    ]


def test_images_in_an_answer_are_not_generated():
    message = {"role": "assistant", "content": [{"type": "text", "text": "see "}, {"type": "image"}]}
    segments = render([message], QUIET, [(5, 6)])
    block = [s for s in segments if s.text in ("image 5x6", MEDIA_PAD)]
    assert len(block) == 2
    assert not any(s.generated for s in block)
    assert next(s for s in segments if s.text == "see ").generated


# --- images ----------------------------------------------------------------------------------------------------------


def pictures(n: int) -> list[dict]:
    return [{"role": "user", "content": [{"type": "text", "text": "see"}, *[{"type": "image"}] * n]}]


@pytest.mark.parametrize(
    ("parts", "sizes", "error"),
    [
        (0, 1, r"image_sizes: 1 size\(s\), but the messages hold 0 image part\(s\)"),
        (2, 1, r"message 0, content\[2\]: image 2, but image_sizes holds 1 size\(s\)"),
        (1, 0, r"message 0, content\[1\]: image 1, but image_sizes holds 0 size\(s\)"),
    ],
)
@pytest.mark.parametrize("dialect", [STRICT, VLLM], ids=["strict", "vllm"])
def test_images_and_sizes_that_do_not_pair_up(parts, sizes, error, dialect):
    if dialect is VLLM and sizes == 0:
        return
    with pytest.raises(ChatError, match=error):
        XtmlChat(dialect).render(pictures(parts), QUIET, [(8, 8)] * sizes)


@pytest.mark.parametrize("size", [(0, 5), (5,), (5, 2.0)])
def test_a_size_is_two_integers(size):
    with pytest.raises(ChatError, match=r"must be .width, height., two integers of 1 or more"):
        render(pictures(1), QUIET, lambda part: size)


def test_sizes_from_a_function_of_the_part():
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": u}} for u in ("a", "bb")]}]
    segments = render(messages, QUIET, lambda part: (len(part["image_url"]["url"]), 7))
    assert [s.text for s in segments if s.text.startswith("image ")] == ["image 1x7", "image 2x7"]


def test_sorted_results_carry_their_images_along():
    messages = [
        {"role": "assistant", "content": "", "tool_calls": [call("f", {}, "a"), call("g", {}, "b")]},
        {"role": "tool", "tool_call_id": "b", "content": [{"type": "image"}]},
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "image"}]},
        {"role": "user", "content": [{"type": "image"}]},
    ]
    segments = render(messages, QUIET, [(1, 1), (2, 2), (3, 3)])
    assert image_order(segments) == (1, 0, 2)
    assert [s.text for s in segments if s.text.startswith("image ")] == ["image 2x2", "image 1x1", "image 3x3"]


# --- tools -----------------------------------------------------------------------------------------------------------


def headers(messages: list[dict]) -> list[str]:
    """`tool:index:content` of every result in the prompt."""
    text = prompt_text(render(messages, ChatOptions(effort=None, add_generation_prompt=False)))
    results = text.split('role="tool" tool="')[1:]
    return [r.partition("<|close|>")[0].replace('" index="', ":").replace('"<|sep|>', ":") for r in results]


def test_results_are_sorted_and_named_by_their_calls():
    calls = {"role": "assistant", "content": "", "tool_calls": [call("f", {}, "a"), call("g", {}, "b")]}
    a, b = ({"role": "tool", "tool_call_id": key, "content": key, "name": "stale"} for key in "ab")
    assert headers([calls, b, a]) == ["f:1:a", "g:2:b"]
    assert headers([calls, b, {"role": "user", "content": "u"}, a]) == ["g:1:b", "f:2:a"]  # two runs, one count
    assert headers([calls, b, a, {**calls, "tool_calls": []}, a]) == ["f:1:a", "g:2:b", "stale:1:a"]
    twice = {**calls, "tool_calls": [call("f", {}, "a"), call("g", {}, "a")]}
    assert headers([twice, a, a]) == ["f:1:a", "f:2:a"]
    unknown = {"role": "tool", "tool_call_id": "z", "content": "z"}
    assert headers([calls, unknown, {**a, "name": None}]) == ["f:1:z", "g:2:a"]  # not all ids match: by position


def test_a_result_without_name_is_refused_with_the_calls():
    calls = {"role": "assistant", "content": "", "tool_calls": [call("f", {}, "a")]}
    with pytest.raises(ChatError, match=r"message 2: result 2 has no tool name.*\[\('a', 'f'\)\]"):
        render([calls, {"role": "tool", "content": "x"}, {"role": "tool", "content": "y"}])


def test_arguments_that_are_no_json_stay_verbatim():
    messages = [{"role": "assistant", "content": "", "tool_calls": [call("f", "{'a': 1}")]}]
    text = prompt_text(render(messages, QUIET))
    assert """<|open|>json type="object"<|sep|>{'a': 1}<|close|>json<|sep|><|close|>call""" in text


def test_a_call_may_come_without_function_object():
    bare, full = {"name": "f", "arguments": {"a": 1}}, {"function": {"name": "f", "arguments": {"a": 1}}}
    assert render([{"role": "assistant", "tool_calls": [bare]}]) == render(
        [{"role": "assistant", "tool_calls": [full]}]
    )


def test_a_system_message_can_declare_tools():
    text = prompt_text(render([{"role": "system", "tools": [WEATHER]}], QUIET))
    head, _, rest = text.partition("\n\n```json\n")
    assert head.startswith('<|open|>message role="system" type="tool-declare"<|sep|>## New Tools Available\n')
    assert rest.startswith('[{"function":{"name":"weather","parameters":{"properties":{},"type":"object"}},"type"')


# --- refusals --------------------------------------------------------------------------------------------------------


def with_calls(*calls) -> list[dict]:
    return [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": list(calls)}]


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([{"role": "developer", "content": "x"}], r"message 0, role: 'developer' is none of .*write 'system'"),
        ([{"role": ["user"], "content": "x"}], r"message 0, role: \['user'\] is none of"),
        ([{"content": "x"}], "message 0, role: None is none of"),
        ([{"role": "user", "content": "x", "tool_calls": [{}]}], "message 0, tool_calls: a user message holds only"),
        ([{"role": "assistant", "content": "x", "refusal": "no"}], "message 0, refusal: a assistant message holds"),
        ([{"role": "user", "content": 5}], "message 0, content: must be a text, None or a list of parts, not int"),
        ([{"role": "user", "content": ["x"]}], r"message 0, content\[0\]: type 'str' is none of 'text', 'image'"),
        ([{"role": "user", "content": [{"type": "video"}]}], r"content\[0\]: type 'video' is none of"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"content\[0\]: text must be a text, not NoneType"),
        ([{"role": "user", "content": "x", "name": 5}], "message 0, name: must be a text, not int"),
        ([{"role": "assistant", "reasoning": ["x"]}], "message 0, reasoning: must be a text, not list"),
        ([{"role": "system", "tools": WEATHER}], "message 0, tools: must be a list of dicts"),
        ([{"role": "system", "tools": [WEATHER], "content": "x"}], "message 0, content: has no place in a system"),
        (with_calls("f"), r"message 1, tool_calls\[0\]: needs function.name"),
        (with_calls(call("f", {}), call("", {})), r"message 1, tool_calls\[1\]: needs function.name"),
        (with_calls(call("f", "[1]")), r"message 1, tool_calls\[0\], arguments: JSON list '\[1\]'; it must be an obj"),
        (with_calls(call("f", {1: 2})), r"arguments: key 1 is a int, not a text"),
        (with_calls(call("f", {"a": b"x"})), r"tool_calls\[0\], argument 'a': bytes has no JSON type"),
        (with_calls(call("f", {"a": [b"x"]})), r"tool_calls\[0\]: argument cannot be written as JSON"),
        ([{"role": "assistant", "tool_calls": {"a": 1}}], "message 0, tool_calls: must be a list, not dict"),
    ],
)
def test_what_the_format_cannot_hold_is_refused(messages, error):
    with pytest.raises(ChatError, match=error):
        render(messages)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"effort": "medium"}, r"option effort: 'medium' is none of \('low', 'high', 'max'\), 'default', None"),
        ({"tool_choice": "always"}, "option tool_choice: 'always' is none of"),
        ({"tools": [{"a": {1, 2}}]}, "option tools: cannot be written as JSON"),
        ({"response_format": "xml"}, "option response_format: type 'xml' is none of"),
        ({"response_format": {"a": 1}}, "option response_format: type None is none of"),
        ({"response_format": "json_schema"}, "option response_format: 'json_schema' without a schema"),
        ({"response_schema": {"a": 1}}, "option response_schema: needs response_format 'json_schema', which is None"),
    ],
)
def test_options_without_effect_or_sense_are_refused(options, error):
    with pytest.raises(ChatError, match=error):
        render([], ChatOptions(**options))


def test_tools_are_a_list_of_dicts():
    assert chat.is_tool_list([{}])
    assert not chat.is_tool_list({})
    assert not chat.is_tool_list([WEATHER, "weather"])


def test_the_release_skips_what_it_does_not_know():
    messages = [{"role": "developer", "content": "x"}, {"role": "user", "content": "q", "weight": 1}]
    known = [{"role": "user", "content": "q"}]
    assert prompt_text(XtmlChat(RELEASE).render(messages, QUIET)) == prompt_text(render(known, QUIET))
    with_tools = [{"role": "system", "tools": [WEATHER], "content": "lost"}]
    assert XtmlChat(RELEASE).render(with_tools) == render([{"role": "system", "tools": [WEATHER]}])
    developer = XtmlChat(Dialect(developer="system")).render([{"role": "developer", "content": "x"}])
    assert developer == render([{"role": "system", "content": "x"}])
    empty = [{"role": "user", "content": "q", "weight": None, "annotations": []}]
    assert render(empty, QUIET) == render(known, QUIET)


def test_dialects():
    one = XtmlChat(Dialect(attributes="one")).render([{"role": "user", "content": "x"}], QUIET)
    assert [s.text for s in one][:4] == ["<|open|>", "message", ' role="user"', "<|sep|>"]
    messages = [{"role": "assistant", "tool_calls": [call("f", {"a": [1, {"b": 2}]})]}]
    assert '>[1,{"b":2}]<' in prompt_text(XtmlChat(Dialect(argument_json="compact")).render(messages, QUIET))
    with pytest.raises(ChatError, match="dialect unknown: 'drop' is none of"):
        Dialect(unknown="drop")


def test_errors_can_be_pickled():
    error = pickle.loads(pickle.dumps(ChatError("message 3", "wrong")))
    assert (error.where, error.what, str(error)) == ("message 3", "wrong", "message 3: wrong")


# --- folders ---------------------------------------------------------------------------------------------------------


def write(folder: Path, name: str, content) -> None:
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))


def test_load_chat_knows_kimi_k3_by_its_config_or_its_tokens(tmp_path):
    write(tmp_path, "config.json", {"model_type": "kimi_k3"})
    assert load_chat(tmp_path, ()) == XtmlChat()
    write(tmp_path, "config.json", {"model_type": "other"})
    assert load_chat(tmp_path, ["[BOS]", "<|open|>"]) == XtmlChat()


def test_load_chat_finds_a_template(tmp_path):
    config = {"chat_template": "{{ bos_token }}", "bos_token": {"content": "<s>"}, "added_tokens_decoder": None}
    write(tmp_path, "tokenizer_config.json", config)
    assert load_chat(tmp_path, ["<s>"]).render([]) == [Segment("<s>", control=True)]
    write(tmp_path, "tokenizer_config.json", {**config, "chat_template": [{"name": "default", "template": "hi"}]})
    assert load_chat(tmp_path, ["<s>"]).render([]) == [Segment("hi")]
    write(tmp_path, "chat_template.jinja", "<tool>{{ bos_token }}")
    assert [s.text for s in load_chat(tmp_path, ["<s>", "<tool>"]).render([]) if s.control] == ["<tool>", "<s>"]


def test_load_chat_refuses_a_folder_without_a_format(tmp_path):
    with pytest.raises(ChatError, match=r"no chat format: config.json does not say model_type 'kimi_k3'"):
        load_chat(tmp_path, ())
    write(tmp_path, "tokenizer_config.json", {"chat_template": [{"name": "rag", "template": "hi"}]})
    with pytest.raises(ChatError, match=r"chat_template has no 'default'; it has \['rag'\]"):
        load_chat(tmp_path, ())


def test_markers_are_those_of_the_golden_files():
    specials = {text for case in CASES.values() for kind, text in case["segments"] if kind == "special"}
    media = {xtml.MEDIA_BEGIN, xtml.MEDIA_CONTENT, xtml.MEDIA_PAD, xtml.MEDIA_END}
    assert specials == {xtml.OPEN, xtml.CLOSE, xtml.SEP, xtml.END_OF_MSG} | media
