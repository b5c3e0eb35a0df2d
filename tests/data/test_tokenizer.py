"""Tokenizers against the released pattern, ids made by independent implementations, and the library's own decoders."""

import hashlib
import json
import os
import pickle
import re
import time
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trillion_moe.data import tiktoken_model
from trillion_moe.data.tiktoken_model import PATTERN, cut, read_ranks, write_tiktoken
from trillion_moe.data.tokenizer import StreamDecoder, Tokenizer, TokenizerError, load_tokenizer

FRONT = Path(__file__).parents[1] / "goldens" / "front"
WORDS = json.loads((FRONT / "pretokenizer.json").read_text(encoding="utf-8"))
CLASSES = json.loads((FRONT / "classes.json").read_text(encoding="utf-8"))
TINY = json.loads((FRONT / "tiny_encodings.json").read_text(encoding="utf-8"))
REAL = json.loads((FRONT / "known_real_ids.json").read_text(encoding="utf-8"))
REAL_FOLDER = os.environ.get("TRILLION_MOE_KIMI_K3_TOKENIZER")
KEPT = ("<|open|>", "<|close|>", "<|sep|>")
LINES = (FRONT / "tiny.tiktoken").read_text().splitlines()
BYTES = [bytes([value]) for value in range(256)]
TEXTS = st.text(st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from(" \n\té中🧑‍\x1c\x85'sA1")))


def by_name(cases: list[dict]) -> dict:
    return {"argvalues": cases, "ids": [case["name"] for case in cases]}


def whole(parts: list) -> str:
    return "".join(text * times for text, times in parts)


def lengths(runs: list) -> list[int]:
    return list(chain.from_iterable([length] * times for length, times in runs))


def digest(ids: list[int]) -> str:
    return hashlib.sha256(np.asarray(ids, "<u4").tobytes()).hexdigest()


def spellings(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return [tokenizer.decode([token_id]) for token_id in ids]


def streamed(tokenizer: Tokenizer, ids, *, skip_specials: bool = False) -> list[str]:
    decoder = tokenizer.stream(skip_specials=skip_specials)
    return [*(decoder.push(token_id) for token_id in ids), decoder.finish()]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Tokenizer:
    """256 bytes and 200 merges; K3's named control tokens at the same distance behind them."""
    ranks = sorted((pair := read_ranks(FRONT / "tiny.tiktoken")), key=pair.__getitem__)
    folder = tmp_path_factory.mktemp("tiny")
    named = {name: n for name, n in TINY["special_tokens"].items() if not name.startswith("<|reserved")}
    specials = {name: (n, name not in KEPT) for name, n in named.items()}
    write_tiktoken(folder, ranks, specials, bos="[BOS]", eos="<|end_of_msg|>", pad="[PAD]", unk="[UNK]")
    assert (folder / "tiktoken.model").read_bytes() == (FRONT / "tiny.tiktoken").read_bytes()
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def k3_folder(tmp_path_factory) -> Path:
    """As many ranks as Kimi K3 and no tokenizer_config.json: all golden words are tokens, the rest is never used."""
    found = [case["pieces"] for case in WORDS["cases"]]
    found += [[word for kind, word in case.get("with_specials", []) if kind == "text"] for case in WORDS["cases"]]
    for case in WORDS["long_cases"]:
        found.append(list(slices(whole(case["parts"]), lengths(case["piece_lengths_rle"]))))
    words = dict.fromkeys(word.encode() for word in chain.from_iterable(found))
    tokens = [*BYTES, *(word for word in words if len(word) > 1)]
    unused = (b"\xff" + n.to_bytes(3, "big") for n in range(tiktoken_model.K3_RANKS - len(tokens)))
    folder = tmp_path_factory.mktemp("k3")
    write_tiktoken(folder, [*tokens, *unused], {})
    (folder / "tokenizer_config.json").unlink()
    return folder


@pytest.fixture(scope="module")
def k3(k3_folder) -> Tokenizer:
    return load_tokenizer(k3_folder)


def slices(text: str, sizes: list[int]):
    start = 0
    for size in sizes:
        yield text[start : start + size]
        start += size
    assert start == len(text)


# --- from text to words -------------------------------------------------------------------------------------------


def test_pattern_is_that_of_the_release():
    assert PATTERN == WORDS["pattern"] == "|".join(WORDS["alternatives"])
    rules = WORDS["cut_rules"]
    assert (rules["chunk_chars"], rules["max_same_class_run"]) == (tiktoken_model.CHUNK, tiktoken_model.RUN)


@pytest.mark.parametrize("name", [name for name in CLASSES["sets"] if name != "space_python_isspace"])
def test_character_classes_of_the_installed_engine(name):
    """Another version of Unicode in tiktoken would change ids without a word. Unmatched characters are dropped."""
    import tiktoken

    assert name not in ("upper_side", "lower_side", "han") or CLASSES["sets"][name] in PATTERN
    ranks = {token: rank for rank, token in enumerate(BYTES)}
    engine = tiktoken.Encoding(name, pat_str=CLASSES["sets"][name], mergeable_ranks=ranks, special_tokens={})
    every = "".join(map(chr, chain(range(0xD800), range(0xE000, 0x110000))))
    assert engine.decode(engine.encode_ordinary(every)) == "".join(map(chr, members(name)))


def members(name: str) -> list[int]:
    return [code for low, high in CLASSES["ranges"][name] for code in range(low, high + 1)]


def test_cuts_and_pattern_differ_in_white_space():
    spaces = [code for code in range(0x110000) if tiktoken_model._RUNS.fullmatch(f"{chr(code)} ")]
    assert spaces == members("space_python_isspace")
    assert spaces == [code for code in range(0x110000) if chr(code).isspace()]
    assert set(spaces) - set(members("space_regex")) == set(range(0x1C, 0x20))


@pytest.mark.parametrize("case", **by_name(WORDS["cases"]))
def test_words(k3, case):
    assert spellings(k3, k3.encode(case["text"], specials=False)) == case["pieces"]
    read = k3.encode(case["text"], specials=True)
    kinds = ["special" if n >= tiktoken_model.K3_RANKS else "text" for n in read]
    expected = case.get("with_specials", [["text", word] for word in case["pieces"]])
    assert [[kind, word] for kind, word in zip(kinds, spellings(k3, read), strict=True)] == expected


@pytest.mark.parametrize("case", **by_name(WORDS["long_cases"]))
def test_long_words(k3, case):
    text = whole(case["parts"])
    assert len(text) == case["chars"]
    assert [len(piece) for piece in cut(text)] == lengths(case["cut_lengths_rle"])
    ids = k3.encode(text, specials=False)
    sizes = {token_id: len(k3.decode([token_id])) for token_id in set(ids)}
    assert [sizes[token_id] for token_id in ids] == lengths(case["piece_lengths_rle"])
    assert k3.decode(ids) == text


def slow_cut(text: str, chunk: int, run: int):
    """The counter of the specification, one character at a time."""
    for start in range(0, len(text), chunk):
        part, piece, count, space = text[start : start + chunk], "", 0, None
        for character in part:
            count = count + 1 if character.isspace() == space else 1
            space = character.isspace()
            if count > run:
                yield piece
                piece, count = "", 1
            piece += character
        yield piece


@given(st.text("ab \n\x1c\u3000"), st.integers(1, 12), st.integers(1, 5))
def test_cut_counts_like_the_specification(text, chunk, run):
    assert list(cut(text, chunk, run)) == list(slow_cut(text, chunk, run))


# --- ids ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", **by_name(TINY["cases"]))
def test_ids(tiny, case):
    assert tiny.encode(case["text"], specials=False) == case["ids"]
    assert tiny.encode(case["text"], specials=True) == case.get("ids_all_special", case["ids"])
    assert tiny.decode(case["ids"]) == case["text"] == "".join(streamed(tiny, case["ids"]))


@pytest.mark.parametrize("case", **by_name(TINY["long_cases"]))
def test_ids_of_long_texts(tiny, case):
    text = whole(case["parts"])
    ids, read = tiny.encode(text, specials=False), tiny.encode(text, specials=True)
    assert (len(ids), digest(ids)) == (case["num_ids"], case["ids_sha256_u32le"])
    assert ids[: len(case["head"])] == case["head"]
    assert ids[-len(case["tail"]) :] == case["tail"]
    assert len(read) == case.get("all_special_num_ids", case["num_ids"])
    assert digest(read) == case.get("all_special_sha256_u32le", case["ids_sha256_u32le"])


def test_a_name_across_a_cut_is_text(tiny):
    across, before = ("a" * count + "[BOS]" + "b" * 10 for count in (24_998, 24_990))
    assert tiny.bos_id not in tiny.encode(across, specials=True)
    assert tiny.encode(before, specials=True).count(tiny.bos_id) == 1


def test_a_control_token_is_a_hard_border(tiny):
    """Blanks before it are at the end of their text: they stay together instead of leaving one to the next word."""
    inside, edge = tiny.encode("  x", specials=True), tiny.encode("  <|sep|>x", specials=True)
    assert edge == [*tiny.encode("  ", specials=False), tiny.specials["<|sep|>"], *tiny.encode("x", specials=False)]
    assert inside[: len(edge) - 2] != edge[:-2]


@pytest.mark.parametrize("character", " a中\n!", ids=["space", "letter", "han", "newline", "sign"])
def test_a_megabyte_of_one_character_takes_no_time(tiny, character):
    """Uncut, a run of spaces overflows the regular expression's stack; uncut letters once took time squared."""
    text = character * 1_000_000
    pieces = list(cut(text))
    assert [len(piece) for piece in pieces] == [25_000] * 40
    start = time.perf_counter()
    ids = tiny.encode(text, specials=True)
    assert time.perf_counter() - start < 5
    assert tiny.decode(ids) == text


@settings(deadline=None, max_examples=200)
@given(TEXTS, st.booleans())
def test_round_trip(tiny, text, specials):
    ids = tiny.encode(text, specials=specials)
    assert tiny.decode(ids) == text == "".join(streamed(tiny, np.asarray(ids, np.int32)))


def test_pickling_for_workers(tiny):
    copy = pickle.loads(pickle.dumps(tiny))
    assert copy.encode("the <|sep|>", specials=True) == tiny.encode("the <|sep|>", specials=True)
    assert copy.specials == tiny.specials


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 711)), st.booleans())
def test_streaming_any_ids_is_decoding_them(tiny, ids, skip):
    assert "".join(streamed(tiny, ids, skip_specials=skip)) == tiny.decode(ids, skip_specials=skip)


def test_streaming_never_shows_half_a_character(tiny):
    emoji = tiny.encode("👋🏽é", specials=False)
    assert streamed(tiny, emoji) == ["", "", "", "👋", "", "", "", "🏽", "", "é", ""]
    assert streamed(tiny, emoji[:2]) == ["", "", "\ufffd"]
    assert streamed(tiny, [*emoji[:2], *tiny.encode("x", specials=False)]) == ["", "", "\ufffdx", ""]
    decoder = tiny.stream()
    assert decoder.push(emoji[0]) == ""
    assert decoder.finish() == "\ufffd"
    assert decoder.push(tiny.encode("x", specials=False)[0]) == "x"
    assert decoder.finish() == ""


def test_lone_surrogates_are_replaced_as_in_the_library(tiny):
    assert tiny.decode(tiny.encode("a\ud83d b \ud83d\udc4b", specials=False)) == "a\ufffd b 👋"


# --- the control tokens of Kimi K3 ----------------------------------------------------------------------------------


def test_control_tokens_of_kimi_k3(k3):
    assert k3.vocab_size == 163_840
    assert sorted(k3.specials.values()) == list(range(163_584, 163_840))
    assert (k3.bos_id, k3.eos_id, k3.pad_id) == (163_584, 163_585, 163_839)
    named = {name: n + 163_584 - TINY["base"] for name, n in TINY["special_tokens"].items() if "reserved" not in name}
    assert {name: n for name, n in k3.specials.items() if "reserved" not in name} == named
    assert k3.specials["<|reserved_token_163592|>"] == 163_592
    assert "<|reserved_token_163838|>" not in k3.specials
    ((text, ids),) = REAL["ids_all_special"]
    controls = [n for n in ids if n >= 163_584]
    assert [n for n in k3.encode(text, specials=True) if n >= 163_584] == controls == [163_587, 163_586, 163_584]
    assert max(k3.encode(text, specials=False)) < 163_584
    assert max(k3.encode("<|kimi_image_placeholder|><|im_end|><think>", specials=True)) < 163_584


def test_decoding_skips_thirteen_tokens_and_keeps_the_structure(k3):
    everything = range(163_584, 163_840)
    dropped = [n for n in everything if not k3.decode([n], skip_specials=True)]
    assert dropped == [*range(163_584, 163_587), 163_590, 163_591, 163_593, *range(163_602, 163_606), 163_649,
                       163_838, 163_839]  # fmt: skip
    reply = "<|open|>think<|sep|>hm<|close|>think<|sep|><|end_of_msg|>"
    ids = k3.encode(reply, specials=True)
    assert k3.decode(ids, skip_specials=True) == reply.removesuffix("<|end_of_msg|>")
    assert "".join(streamed(k3, ids, skip_specials=True)) == reply.removesuffix("<|end_of_msg|>")
    assert k3.decode(everything) == "".join(sorted(k3.specials, key=lambda name: k3.specials[name]))


def test_skipping_joins_the_bytes_around(tiny):
    first, *rest = tiny.encode("中", specials=False)
    assert tiny.decode([first, tiny.bos_id, *rest], skip_specials=True) == "中"
    assert streamed(tiny, [first, tiny.bos_id, *rest], skip_specials=True) == ["", "", "", "中", ""]


@pytest.mark.skipif(REAL_FOLDER is None, reason="TRILLION_MOE_KIMI_K3_TOKENIZER names no folder with Kimi K3's files")
def test_ids_of_the_real_vocabulary():
    folder = Path(REAL_FOLDER or "")
    assert hashlib.sha256((folder / "tiktoken.model").read_bytes()).hexdigest() == REAL["tiktoken_model_sha256"]
    real = load_tokenizer(folder)
    assert [real.encode(text, specials=False) for text, _ in REAL["ids_no_special"]] == [
        ids for _, ids in REAL["ids_no_special"]
    ]
    assert [real.encode(text, specials=True) for text, _ in REAL["ids_all_special"]] == [
        ids for _, ids in REAL["ids_all_special"]
    ]
    assert {text: real.encode(text, specials=False) for text in REAL["chat_pieces"]} == {
        text: [token_id] for text, token_id in REAL["chat_pieces"].items()
    }
    for case in REAL["long"]:
        assert len(real.encode(whole(case["parts"]), specials=False)) == case["num_ids"]


# --- folders --------------------------------------------------------------------------------------------------------


def folder_with(tmp_path: Path, lines: list[str] | None = None, config: dict | str | None = None) -> Path:
    """A folder of 256 byte tokens, or of these lines, and this tokenizer_config.json."""
    write_tiktoken(tmp_path, BYTES, {})
    if lines is not None:
        (tmp_path / "tiktoken.model").write_text("\n".join(lines))
    (tmp_path / "tokenizer_config.json").unlink()
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return tmp_path


def added(**tokens: str) -> dict:
    return {"added_tokens_decoder": {n[1:]: {"content": name, "special": True} for n, name in tokens.items()}}


def test_written_folder_comes_back(tmp_path):
    ranks = [*BYTES, b"ab", b"abc", "中".encode()]
    specials = {"[BOS]": (259, True), "[EOS]": (300, True), "<|open|>": (261, False)}
    write_tiktoken(tmp_path / "new", ranks, specials, bos="[BOS]", eos="[EOS]")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["tiktoken.model", "tokenizer_config.json"]
    back = load_tokenizer(tmp_path / "new")
    assert isinstance(back, Tokenizer)
    assert isinstance(back.stream(), StreamDecoder)
    assert (back.vocab_size, back.bos_id, back.eos_id, back.pad_id) == (515, 259, 300, None)
    assert {name: back.specials[name] for name in specials} == {name: n for name, (n, _) in specials.items()}
    assert back.encode("abc中<|open|>", specials=True) == [257, 258, 261]
    assert back.decode([259, 261, 300], skip_specials=True) == "<|open|>"
    config = json.loads((tmp_path / "new" / "tokenizer_config.json").read_text())
    assert config["bos_token"] == "[BOS]"
    assert config["unk_token"] is None


def test_names_may_be_objects_and_null(tmp_path):
    names = {"bos_token": {"content": "[A]"}, "eos_token": None}
    tokenizer = load_tokenizer(folder_with(tmp_path, config=added(_300="[A]") | names))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (300, None, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({3: "??? 3"}, r"tiktoken\.model, line 4: b'\?\?\?' is not base64"),
        ({3: "JA==3"}, r"tiktoken\.model, line 4 must be a token in base64, a blank and its rank, not b'JA==3'"),
        ({3: "JA== -3"}, r"line 4 must be"),
        ({3: LINES[0]}, r"line 4: b'!' is already on line 1"),
        ({3: "JA== 2"}, r"line 4: rank 2 is already on line 3"),
        ({3: "JA== 900"}, r"line 4: rank 900, but 456 tokens have 0\.\.455"),
        ({3: "emVybw== 3"}, r"1 of the 256 single bytes have no rank, first 0x24"),
    ],
)
def test_malformed_lines(tmp_path, change, message):
    lines = [change.get(at, line) for at, line in enumerate(LINES)]
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(folder_with(tmp_path, lines, added(_456="[BOS]")))


def test_blank_lines_and_other_line_ends_are_read(tmp_path):
    lines = [f"{line}\r" for line in LINES]
    tokenizer = load_tokenizer(folder_with(tmp_path, ["", *lines, ""], added()))
    assert tokenizer.vocab_size == 456 + 256


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, r"tiktoken\.model has 256 ranks and .* has no tokenizer_config\.json; .* only for Kimi K3's 163584"),
        ({"bos_token": "[BOS]"}, r"tokenizer_config\.json has no added_tokens_decoder"),
        ('{\n"bos_token":', r"tokenizer_config\.json, line 2: Expecting value"),
        ("[]", r"must hold an object, not list"),
        ({"added_tokens_decoder": []}, r"added_tokens_decoder must be an object of id: token, not list"),
        ({"added_tokens_decoder": {"x": {"content": "a"}}}, r"added_tokens_decoder\['x'\] must be an id"),
        ({"added_tokens_decoder": {"300": {"content": ""}}}, r"added_tokens_decoder\['300'\]"),
        ({"added_tokens_decoder": {"300": {"content": "a", "special": 1}}}, r"'special': 1"),
        (added(_255="[A]"), r"config\.json: '\[A\]' has id 255, the rank of an ordinary token"),
        (added(_512="[A]"), r"config\.json: '\[A\]' has id 512; control ids are 256\.\.511"),
        (added(_300="[A]", _301="[A]"), r"'\[A\]' names both id 300 and id 301"),
        (added(_300="<|reserved_token_301|>"), r"names both id 300 and id 301"),
        (added(_300="[A", _301="[A]"), r"the name '\[A' begins the name '\[A\]'"),
        (added(_300="[A]") | {"eos_token": "[B]"}, r"config\.json: eos_token '\[B\]' is no token of this vocabulary"),
        (added(_300="[A]") | {"pad_token": 3}, r"pad_token must be the name of a token or null, not 3"),
    ],
)
def test_malformed_configs(tmp_path, config, message):
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(folder_with(tmp_path, config=config))


@pytest.mark.parametrize("name", ["<|end_of_msg|>", "<|im_end|>"])
def test_kimi_k3s_names_with_a_config_that_has_no_table(tmp_path, k3_folder, name):
    """The config still says which tokens bound a text; a name that K3 lacks shows that it is another model's."""
    (tmp_path / "tiktoken.model").symlink_to(k3_folder / "tiktoken.model")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": name}))
    if name == "<|end_of_msg|>":
        tokenizer = load_tokenizer(tmp_path)
        assert (tokenizer.eos_id, tokenizer.bos_id) == (163_586, None)
    else:
        with pytest.raises(TokenizerError, match=r"eos_token '<\|im_end\|>' is no token"):
            load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([*BYTES, b"a"], {}), r"257 tokens must be different and not empty"),
        (([*BYTES, b""], {}), r"not empty"),
        ((BYTES[1:], {}), r"1 of the 256 single bytes have no rank, first 0x00"),
        ((BYTES, {"[A]": (7, True)}), r"has id 7, the rank of an ordinary token"),
        ((BYTES, {"[A]": (300, True), "[B]": (300, True)}), r"2 control tokens share 1 ids"),
        ((BYTES, {"[A]": (300, True)}, "[B]"), r"bos_token '\[B\]' is not among the control tokens \['\[A\]'\]"),
    ],
)
def test_what_could_not_be_read_is_not_written(tmp_path, arguments, message):
    ranks, specials, *bos = arguments
    with pytest.raises(TokenizerError, match=message):
        write_tiktoken(tmp_path, ranks, specials, bos=bos[0] if bos else None)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("bad", [-1, 712])
def test_ids_outside_the_vocabulary(tiny, bad):
    message = re.escape(f"token id {bad} at position 1 is outside 0..711")
    with pytest.raises(TokenizerError, match=message):
        tiny.decode([0, bad])
    with pytest.raises(TokenizerError, match=f"token id {bad}"):
        tiny.stream().push(bad)


def test_folder_without_tokenizer(tmp_path):
    with pytest.raises(TokenizerError, match=r"has neither tiktoken\.model nor tokenizer\.json"):
        load_tokenizer(tmp_path)
