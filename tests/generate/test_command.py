"""`trillion-moe generate`: every flag against `tm.generate`, files of prompts, what is refused, and how it ends.

Prompts have 257 to 500 tokens, as Kimi K3's thinking prompts do, so that few shapes are compiled.
"""

import json
import os
import shutil
import signal
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import PIL.Image
import pytest

import trillion_moe as tm
from trillion_moe.cli import main
from trillion_moe.data.reply import Reply, ToolCall
from trillion_moe.generate import command, engine
from trillion_moe.generate.output import Completion, Piece

NEW = 12
LONG = "How many pictures are there? " * 11
QUIET = tm.ChatOptions(thinking=False)


@pytest.fixture
def run(text_folder, capsys):
    """Calls the command -> exit code, standard output, standard error."""

    def call(*flags, folder=text_folder):
        limit = [] if "--max-new-tokens" in flags else ["--max-new-tokens", NEW]
        code = main(["generate", str(folder), *map(str, [*flags, *limit])])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return code, out, err

    return call


@pytest.fixture
def answers(speaker):
    """What `tm.generate` makes of prompts."""
    model, processor = speaker

    def call(*prompts, **settings):
        return tm.generate(model, list(prompts), **{"tokenizer": processor, "max_new_tokens": NEW} | settings)

    return call


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Two files of one size."""
    folder = tmp_path_factory.mktemp("pictures")
    for name, seed in (("a", 0), ("b", 1)):
        pixels = np.random.default_rng(seed).integers(0, 256, (20, 30, 3), np.uint8)
        PIL.Image.fromarray(pixels).save(folder / f"{name}.png")
    return folder


@pytest.fixture
def no_answers(monkeypatch):
    """Nothing may be generated."""
    monkeypatch.setattr(engine, "start", None)


def says(text, system=None) -> list[dict]:
    return [*([{"role": "system", "content": system}] if system else []), {"role": "user", "content": text}]


def lines(out) -> list:
    """The JSON objects, a line each. Texts may hold any line break but the one between them."""
    assert out.endswith("\n")
    return [json.loads(line) for line in out[:-1].split("\n")]


def write_lines(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# --- one prompt, and several ------------------------------------------------------------------------------------------


def test_a_prompt_is_a_message(run, answers) -> None:
    """The answer on standard output, what was thought and the figures on standard error."""
    (thought,) = answers(says("hi"))
    code, out, err = run("--prompt", "hi")
    assert (code, out) == (0, f"{thought.text}\n")
    assert err.startswith(f"{thought.reply.thinking}\n{len(thought.ids)} tokens; the first after ")
    (quiet,) = answers(says("hi", LONG), chat=QUIET)
    code, out, err = run("--prompt", "hi", "--system", LONG, "--no-thinking")
    assert (code, out) == (0, f"{quiet.text}\n")
    assert err.startswith(f"{len(quiet.ids)} tokens; the first after ")
    assert len({thought.ids, quiet.ids, answers(says("hi", "Be brief."))[0].ids}) == 3


def test_effort(run, answers) -> None:
    found = {}
    for effort in ("low", "high", "max"):
        (expected,) = answers(says("hi"), chat=tm.ChatOptions(effort=effort))
        _, out, _ = run("--prompt", "hi", "--effort", effort, "--json")
        found[effort] = tuple(lines(out)[0]["ids"])
        assert found[effort] == expected.ids
    assert len(set(found.values())) == 3
    assert lines(run("--prompt", "hi", "--json")[1])[0]["ids"] == list(found["max"])


SAMPLING = {"temperature": 1.5, "top_k": 200, "top_p": 0.98, "min_p": 0.001, "repetition_penalty": 1.1, "seed": 3}
OTHER = {"temperature": 0.7, "top_k": 2, "top_p": 0.1, "min_p": 0.9, "repetition_penalty": 0.05, "seed": 4}


def test_every_sampling_flag_does_its_work(run, answers) -> None:
    """All are given, and each in turn is changed."""
    found = {}
    for changed in (None, *OTHER):
        settings = SAMPLING | ({} if changed is None else {changed: OTHER[changed]})
        flags = [part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", value)]
        _, out, _ = run("--prompt", LONG, "--raw", "--json", *flags)
        found[changed] = tuple(lines(out)[0]["ids"])
        assert found[changed] == answers(LONG, **settings)[0].ids
    assert not [changed for changed in OTHER if found[changed] == found[None]]


def test_raw_text_is_continued(run, answers) -> None:
    for count in (NEW, 3):
        (expected,) = answers(LONG, max_new_tokens=count)
        assert len(expected.ids) == count
        assert run("--prompt", LONG, "--raw", "--max-new-tokens", count)[:2] == (0, f"{expected.text}\n")


def test_stop_strings(run, answers) -> None:
    """Each of them ends the answer."""
    (free,) = answers(LONG)
    late, early = free.text[-2:], free.text[3:5]
    for stops in ([late], [late, early]):
        (expected,) = answers(LONG, stop=stops)
        assert expected.finish == "stop"
        (found,) = lines(run("--prompt", LONG, "--raw", "--json", *(f"--stop={stop}" for stop in stops))[1])
        assert (found["text"], found["finish"], found["ids"]) == (expected.text, "stop", list(expected.ids))
    assert len(answers(LONG, stop=[late])[0].text) > len(expected.text)


@pytest.mark.slow  # nothing is compiled for this dtype otherwise
def test_dtype(run, text_folder) -> None:
    model = tm.load(text_folder, dtype="bfloat16")
    (expected,) = tm.generate(model, [[7, 8, 9]], max_new_tokens=NEW)
    code, out, _ = run("--ids", "7,8,9", "--dtype", "bfloat16")
    assert (code, out) == (0, ",".join(map(str, expected.ids)) + "\n")


def test_several_prompts(run, answers) -> None:
    expected = answers(says("hi"), says("and you?"))
    assert expected[0].ids != expected[1].ids
    flags = ("-p", "hi", "-p", "and you?")
    assert run(*flags)[:2] == (0, "".join(f"{completion.text}\n" for completion in expected))
    code, out, err = run(*flags, "--json")
    assert code == 0
    for i, (found, completion) in enumerate(zip(lines(out), expected, strict=True)):
        said = {"text": completion.text, "thinking": completion.reply.thinking, "ids": list(completion.ids)}
        findings = [{"what": finding.what, "raw": finding.raw} for finding in completion.reply.findings]
        assert found == {"prompt": i, "finish": "length", "complete": False, "findings": findings, **said}
    assert err.startswith(f"{2 * NEW} tokens; the first after ")


def test_json_of_calls_and_errors(capsys) -> None:
    """What a prompt has not is left out; half a surrogate pair, which a call's JSON may hold, is escaped."""
    reply = Reply("hm", "yes", (ToolCall("f:0", 1, "f", {"x": "é\ud800"}),))
    row = command.as_dict(4, Completion((7, 8), "yes", "error", reply, "prompt 4: no"))
    call = {"id": "f:0", "type": "function", "function": {"name": "f", "arguments": {"x": "é\ud800"}}}
    assert row == {
        "prompt": 4, "finish": "error", "text": "yes", "thinking": "hm", "tool_calls": [call], "error": "prompt 4: no",
        "complete": False, "ids": [7, 8],
    }  # fmt: skip
    assert json.loads(command._json(row).encode()) == row
    assert command._json({"text": "é"}) == '{"text": "é"}'
    assert command.as_dict(0, Completion((7,), None, "eos")) == {"prompt": 0, "finish": "eos", "ids": [7]}


def test_thinking_and_answer_are_shown_apart(capsys) -> None:
    done = Completion((1, 2, 3), "42", "eos")
    pieces = [("hm", "think"), (", well", "think"), ("4", "response"), ("2", "response")]
    assert command.show([*(Piece(0, *piece) for piece in pieces), Piece(0, "", completion=done)]) == [done]
    assert tuple(capsys.readouterr()) == ("42", "hm, well\n")
    command.show([Piece(0, "cut off", "think"), Piece(0, "", completion=done)])
    assert tuple(capsys.readouterr()) == ("", "cut off\n")


# --- pictures ---------------------------------------------------------------------------------------------------------


def with_pictures(*paths, text="Alike?") -> list[dict]:
    parts = [{"type": "image", "image": str(path)} for path in paths]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def test_pictures_stand_before_the_prompt(run, answers, pictures, monkeypatch) -> None:
    """In the order given; relative paths begin at the working directory."""
    (expected,) = answers(with_pictures(pictures / "a.png", pictures / "b.png"))
    monkeypatch.chdir(pictures)
    (found,) = lines(run("--image", "a.png", "--image", pictures / "b.png", "--prompt", "Alike?", "--json")[1])
    assert found["ids"] == list(expected.ids)
    (swapped,) = lines(run("--image", "b.png", "--image", "a.png", "--prompt", "Alike?", "--json")[1])
    assert swapped["ids"] != found["ids"]


def test_pictures_of_a_file_lie_beside_it(run, answers, pictures, tmp_path, monkeypatch) -> None:
    """Whatever the working directory; full paths stay what they are."""
    (expected,) = answers(with_pictures(pictures / "a.png", pictures / "b.png"))
    monkeypatch.chdir(tmp_path)
    file = write_lines(pictures / "prompts.jsonl", {"messages": with_pictures("a.png", pictures / "b.png")})
    code, out, _ = run("--input", file)
    assert (code, lines(out)[0]["ids"]) == (0, list(expected.ids))
    code, _, err = run("--input", shutil.copy(file, tmp_path))
    assert code == 1
    assert f"prompts.jsonl, line 1: message 0, content[0]: {tmp_path / 'a.png'} cannot be read" in err


# --- files of prompts -------------------------------------------------------------------------------------------------

IDS = np.random.default_rng(0).integers(6, 250, 300).tolist()
ROWS = [
    {"prompt": "hi", "id": "first"},
    {"messages": says("and\u2028you?"), "id": {"row": [1]}},
    {"ids": IDS},
    {"messages": [*says("hi"), {"role": "assistant", "content": "ho"}, *says("hi")], "id": 0},
    {"prompt": "bye", "id": None},
]


@pytest.fixture
def rows_file(tmp_path):
    """ROWS, with blank lines, another end of line, and a line break of Unicode's within a string."""
    texts = [json.dumps(row, ensure_ascii=False) for row in ROWS]
    path = tmp_path / "prompts.jsonl"
    path.write_bytes("\n".join(["", *texts[:2], "  ", f"{texts[2]}\r", *texts[3:]]).encode())
    return path


def test_a_file_of_prompts(run, answers, rows_file) -> None:
    """In their order, batches of 2, 2 and 1; ids come back as they were."""
    prompts = [row.get("messages") or row.get("ids") or says(row["prompt"]) for row in ROWS]
    expected = [answers(prompt)[0] for prompt in prompts]
    code, out, err = run("--input", rows_file, "--batch-size", 2)
    found = lines(out)
    assert code == 0
    assert [row["ids"] for row in found] == [list(completion.ids) for completion in expected]
    assert [row["text"] for row in found] == [completion.text for completion in expected]
    assert [row["prompt"] for row in found] == [0, 1, 2, 3, 4]
    assert [row.get("id", "none") for row in found] == ["first", {"row": [1]}, "none", 0, "none"]
    assert err.startswith(f"{5 * NEW} tokens; the first after ")
    output = rows_file.with_name("answers.jsonl")
    output.write_text("of before")
    code, out, _ = run("--input", rows_file, "--batch-size", 2, "--output", output)
    assert (code, out, lines(output.read_text())) == (0, "", found)
    assert {path.name for path in rows_file.parent.iterdir()} == {"prompts.jsonl", "answers.jsonl"}


def test_flags_reach_the_prompts_of_a_file(run, answers, tmp_path) -> None:
    """--system and --raw concern lines with a prompt, --no-thinking those with messages too."""
    for flags, prompt, messages, chat in (
        (["--raw"], LONG, says("hi"), tm.ChatOptions()),
        (["--system", "Sing.", "--no-thinking"], says(LONG, "Sing."), says("hi", LONG), QUIET),
    ):
        file = write_lines(tmp_path / "prompts.jsonl", {"prompt": LONG}, {"messages": messages})
        _, out, _ = run("--input", file, "--batch-size", 1, *flags)
        expected = [answers(one, chat=chat)[0] for one in (prompt, messages)]
        assert [row["ids"] for row in lines(out)] == [list(completion.ids) for completion in expected]


def test_an_error_leaves_no_output(run, rows_file, monkeypatch) -> None:
    """Neither a part of it nor another name; what lay there before still does."""
    decode, left = engine.decode, [4]

    def fails_at_last(*args):
        left[0] -= 1
        if not left[0]:
            raise OSError("the disk is gone")
        return decode(*args)

    monkeypatch.setattr(engine, "decode", fails_at_last)
    output = rows_file.with_name("answers.jsonl")
    output.write_text("of before")
    code, out, err = run("--input", rows_file, "--batch-size", 2, "--output", output)
    assert (code, out, err) == (1, "", "trillion-moe generate: the disk is gone\n")
    assert not left[0]
    assert output.read_text() == "of before"
    assert {path.name for path in rows_file.parent.iterdir()} == {"prompts.jsonl", "answers.jsonl"}


LEGAL = "is not an object with one of messages (a list of objects), prompt (a string), ids (a list of integers)"
BAD = [
    ('{"prompt": "hi"', "not JSON with distinct keys: Expecting ',' delimiter"),
    (b'{"prompt": "\xff"}', "not JSON with distinct keys: 'utf-8' codec can't decode byte 0xff"),
    ('{"prompt": "hi", "prompt": "ho"}', "not JSON with distinct keys: 'prompt' is there twice"),
    ("[" * 100_000, "not JSON with distinct keys: "),
    ('{"promt": "hi"}', f'\'{{"promt": "hi"}}\' {LEGAL}'),
    ('{"prompt": "hi", "temperature": 1}', LEGAL),
    ('{"prompt": "hi", "ids": [7]}', LEGAL),
    ('{"prompt": ["hi"]}', LEGAL),
    ('{"messages": ["hi"]}', LEGAL),
    ('{"ids": [7, true]}', LEGAL),
    ('{"ids": []}', "is empty: there is no token to continue from"),
    ('{"messages": []}', "is empty: there is no token to continue from"),
    ('{"ids": [7, 600]}', "token id 600 at position 1 is outside 0..516"),
    ('{"ids": [7, 99999999999999999999]}', "tokens must be integers"),
    ('{"messages": [{"role": "boss", "content": "?"}]}', "message 0, role: 'boss' is none of"),
    (json.dumps({"messages": with_pictures("no.png")}), "message 0, content[0]: "),
]


def test_every_bad_line_is_named(run, no_answers, tmp_path) -> None:
    """All at once, and before anything is generated."""
    path = tmp_path / "prompts.jsonl"
    texts = [text if isinstance(text, bytes) else text.encode() for text, _ in BAD]
    path.write_bytes(b"\n\n".join([b'{"prompt": "good"}', *texts, b'{"ids": [7]}']))
    code, out, err = run("--input", path, "--output", tmp_path / "answers.jsonl")
    assert (code, out) == (1, "")
    found = err.removeprefix("trillion-moe generate: ").splitlines()
    for n, (line, (_, message)) in enumerate(zip(found, BAD, strict=True)):
        assert line.startswith(f"{path}, line {2 * n + 3}: ")
        assert message in line
        assert "prompt 0" not in line
        assert "row 0" not in line
    assert str(tmp_path / "no.png") in found[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.jsonl"]


def test_many_bad_lines_are_counted(run, no_answers, tmp_path) -> None:
    path = write_lines(tmp_path / "prompts.jsonl", *[{"promt": "hi"}] * 30)
    assert run("--input", path)[2].endswith("\n... and 10 more\n")
    path.write_text("\n \n")
    assert f"{path} holds no prompt; every line is an object" in run("--input", path)[2]


def test_flags_that_concern_no_line(run, no_answers, tmp_path) -> None:
    ids, messages = {"ids": [7]}, {"messages": says("hi")}
    for flags, forms, rows in (
        (["--system", "x"], "prompt", [ids, messages]),
        (["--raw"], "prompt", [ids, messages]),
        (["--no-thinking"], "prompt or messages", [ids]),
        (["--effort", "low"], "prompt or messages", [ids]),
    ):
        path = write_lines(tmp_path / "prompts.jsonl", *rows)
        message = f"trillion-moe generate: {flags[0]} has no effect: no line of {path} holds {forms}\n"
        assert run("--input", path, *flags) == (1, "", message)


# --- refused before anything is loaded --------------------------------------------------------------------------------

HI = ["--prompt", "hi"]
CHAT_ONLY = "in a chat: not with --ids, not with --raw"
CHAT_FLAGS = (["--system", "x"], ["--no-thinking"])
DRAW_FLAGS = ("--top-k", "--top-p", "--min-p", "--seed")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ids", "7", "--image", "a.png"], "--image is legal with one --prompt"),
        (["--chat", "--image", "a.png"], "--image is legal with one --prompt, without --raw (with --chat: /image)"),
        ([*HI, *HI, "--image", "a.png"], "--image is legal with one --prompt"),
        ([*HI, "--raw", "--image", "a.png"], "--image is legal with one --prompt"),
        *((["--ids", "7", *flag], f"{flag[0]} is legal {CHAT_ONLY}") for flag in CHAT_FLAGS),
        *(([*HI, "--raw", *flag], f"{flag[0]} is legal {CHAT_ONLY}") for flag in CHAT_FLAGS),
        (["--ids", "7", "--effort", "low"], "--effort is legal in a chat, without --no-thinking"),
        ([*HI, "--no-thinking", "--effort", "low"], "--effort is legal in a chat, without --no-thinking"),
        (["--ids", "7", "--raw"], "--raw is legal with --prompt or --input"),
        (["--chat", "--raw"], "--raw is legal with --prompt or --input"),
        *(([*HI, flag, "5"], f"{flag} is legal with a --temperature above 0") for flag in DRAW_FLAGS),
        (["--ids", "7", "--stop", "x"], "--stop is legal with text, not with --ids"),
        (["--chat", "--json"], "--json is legal without --chat"),
        ([*HI, "--output", "out.jsonl"], "--output is legal with --input"),
        ([*HI, "--batch-size", "2"], "--batch-size is legal with --input"),
        (["--input", "in.jsonl", "--batch-size", "0"], "--batch-size is 0; it must be at least 1"),
        (["--input", "absent.jsonl"], "--input: absent.jsonl does not exist"),
        ([*HI, "--image", "in.jsonl", "--image", "absent.png"], "--image: absent.png does not exist"),
        (["--input", "in.jsonl", "--output", "no/out.jsonl"], "--output: the folder no does not exist"),
        (["--input", "in.jsonl", "--output", "folder"], "--output: folder is there and is no file"),
        (["--input", "in.jsonl", "--output", "../here/in.jsonl"], "is the file of --input"),
        ([*HI, "--temperature=-1"], "temperature is -1.0; legal is 0 for greedy, or 0.001 to 1000"),
        ([*HI, "--temperature", "1", "--top-p", "2"], "top_p is 2.0; legal is above 0 and at most 1"),
        ([*HI, "--max-new-tokens", "0"], "max_new_tokens is 0; it must be at least 1"),
        ([*HI, "--stop", ""], "stop holds an empty string"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_refused_at_once(flags, message, run, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(tm.api, "load", None)
    (tmp_path / "here" / "folder").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    write_lines(tmp_path / "here" / "in.jsonl", {"prompt": "hi"})
    code, out, err = run(*flags)
    assert (code, out, err[:23]) == (1, "", "trillion-moe generate: ")
    assert message in err


def test_usage_and_help(capsys) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["generate", "folder", "--ids", "99999999999999999999"])
    assert exit_.value.code == 2
    assert "is not a comma-separated list of token ids" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    words = " ".join(capsys.readouterr().out.split())
    assert "relative paths of pictures in it begin at the file's own folder" in words


# --- how it ends ------------------------------------------------------------------------------------------------------


def test_a_folder_without_tokenizer(run, text_folder, tmp_path, answers) -> None:
    """Token ids need none."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(text_folder / name, tmp_path)
    code, out, err = run("--prompt", "hi", folder=tmp_path)
    assert (code, out) == (1, "")
    assert err.startswith(f"trillion-moe generate: {tmp_path}")
    assert "tiktoken.model" in err
    code, out, _ = run("--ids", ",".join(map(str, IDS)), folder=tmp_path)
    assert (code, out) == (0, ",".join(map(str, answers(IDS)[0].ids)) + "\n")


@pytest.fixture(scope="module")
def broken_folder(text_folder, speaker, tmp_path_factory):
    """A model that chokes on a tilde."""
    model = tm.load(text_folder)
    model.embed = model.embed.at[ord("~")].set(jnp.nan)
    folder = tmp_path_factory.mktemp("broken") / "tiny"
    tm.save(folder, model)
    for name in ("tiktoken.model", "tokenizer_config.json"):
        shutil.copy(text_folder / name, folder)
    return folder


def test_a_prompt_that_fails(run, answers, broken_folder, tmp_path) -> None:
    """The others are answered all the same; the exit code is 1."""
    expected = answers(says("hi"), says("and you?"))
    assert not any(ord("~") in completion.ids for completion in expected)
    what = f"logits are not finite at new token 0 (of {NEW})"
    code, out, err = run("-p", "~", "-p", "and you?", folder=broken_folder)
    assert (code, out) == (1, f"\n{expected[1].text}\n")
    assert err.endswith(f"\ntrillion-moe generate: prompt 0: {what}\n")
    file = write_lines(tmp_path / "in.jsonl", {"prompt": "hi"}, {"prompt": "and you?"}, {"prompt": "~", "id": "bad"})
    output = tmp_path / "out.jsonl"
    code, _, err = run("--input", file, "--output", output, "--batch-size", 2, folder=broken_folder)
    *good, bad = lines(output.read_text())
    error = f"{file}, line 3: {what}"
    assert code == 1
    assert [row["ids"] for row in good] == [list(completion.ids) for completion in expected]
    assert (bad["prompt"], bad["id"], bad["finish"], bad["error"], bad["ids"]) == (2, "bad", "error", error, [])
    assert err.endswith(f"\ntrillion-moe generate: {error}\n")
    code, out, err = run("-p", "~", folder=broken_folder)
    assert (code, out) == (1, "\n")
    assert err.endswith(f"0 tokens\ntrillion-moe generate: prompt 0: {what}\n")


def test_an_interrupt(run, answers, rows_file, monkeypatch) -> None:
    """Ctrl-C once 17 tokens are there: they stay, no output file does, and the exit code is 130."""
    decode, before = engine.decode, [2]

    def interrupted(*args):
        if not before[0]:
            signal.raise_signal(signal.SIGINT)
        before[0] -= 1
        return decode(*args)

    (begun,) = answers(LONG.upper(), max_new_tokens=17)
    monkeypatch.setattr(engine, "decode", interrupted)
    code, out, err = run("--prompt", LONG.upper(), "--raw", "--max-new-tokens", 100)
    assert (code, err) == (130, "\n")
    assert begun.finish == "length"
    assert begun.text.startswith(out)
    assert len(out) >= 17 - 3  # the last bytes may be no whole character
    before[0] = 2
    output = rows_file.with_name("answers.jsonl")
    assert run("--input", rows_file, "--batch-size", 2, "--output", output) == (130, "", "\n")
    assert [path.name for path in rows_file.parent.iterdir()] == ["prompts.jsonl"]


@pytest.mark.parametrize("flags", [["--raw"], ["--raw", "--json"]], ids=" ".join)
def test_a_closed_pipe(flags, text_folder, monkeypatch, capsys) -> None:
    """Whether found at once or at the last flush; nothing is said, and nothing is left to be written."""
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(["generate", str(text_folder), "--prompt", LONG, "--max-new-tokens", str(NEW), *flags]) == 141
    assert "Broken" not in capsys.readouterr().err


@pytest.mark.slow  # a process, which the test above spares
def test_a_closed_pipe_of_a_process(text_folder) -> None:
    command = f"{sys.executable} -m trillion_moe.cli inspect {text_folder} | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("141\n", "")
