"""`tokenizer.json` folders: byte-level as most models have it, and sentencepiece-like with byte tokens."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Library

from trillion_moe.data.tiktoken_model import write_tiktoken
from trillion_moe.data.tokenizer import StreamDecoder, Tokenizer, TokenizerError, load_tokenizer

TEXT = "the water and the miller's wheel, 中文 日本 été été"
NAMES = ("<s>", "</s>", "<think>")
MARK = "\u2581"


def streamed(tokenizer: Tokenizer, ids, *, skip_specials: bool = False) -> list[str]:
    decoder = tokenizer.stream(skip_specials=skip_specials)
    return [*(decoder.push(token_id) for token_id in ids), decoder.finish()]


def byte_level() -> Library:
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    library.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet))
    return with_names(library)


def sentencepiece_like(decoder: Any) -> Library:
    """Words with a mark in front; characters without a token become byte tokens."""
    words = ["<unk>", *(f"<0x{value:02X}>" for value in range(256)), MARK, *"theab,é", "\ufffd"]
    merges = [("t", "h"), ("th", "e"), (MARK, "the"), (MARK, "a")]
    words += [left + right for left, right in merges]
    model = models.BPE({word: n for n, word in enumerate(words)}, merges, byte_fallback=True, unk_token="<unk>")
    library = Library(model)
    library.normalizer = normalizers.Sequence([normalizers.Prepend(MARK), normalizers.Replace(Regex(" "), MARK)])
    library.decoder = decoder
    return with_names(library)


def with_names(library: Library) -> Library:
    library.add_special_tokens(["<s>", "</s>"])
    library.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    begin = library.token_to_id("<s>")
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    return library


LLAMA = [decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
LIBRARIES = {
    "byte-level": byte_level,
    "stripped": lambda: sentencepiece_like(decoders.Sequence(LLAMA)),
    "metaspace": lambda: sentencepiece_like(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])),
}


def save(folder: Path, library: Library, config: dict | None = None) -> Path:
    library.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module", params=LIBRARIES)
def pair(request, tmp_path_factory) -> tuple[Tokenizer, Library]:
    library = LIBRARIES[request.param]()
    return load_tokenizer(save(tmp_path_factory.mktemp(request.param), library)), library


def test_interface(pair):
    tokenizer, library = pair
    assert isinstance(tokenizer, Tokenizer)
    assert isinstance(tokenizer.stream(), StreamDecoder)
    assert tokenizer.specials == {name: library.token_to_id(name) for name in NAMES}
    assert tokenizer.vocab_size == library.get_vocab_size()
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (None, None, None)
    again = pickle.loads(pickle.dumps(tokenizer))
    assert [again.encode("the <s>", specials=flag) for flag in (True, False)] == [
        tokenizer.encode("the <s>", specials=flag) for flag in (True, False)
    ]


@settings(deadline=None, max_examples=100)
@given(st.text(st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from("the a,é 中👋"))))
def test_ids_are_the_librarys_and_nothing_is_added(pair, text):
    tokenizer, library = pair
    ids = tokenizer.encode(text, specials=True)
    assert ids == library.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == library.decode(ids, skip_special_tokens=False)
    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)


def test_names_as_text(pair):
    """Also the name that is added without being flagged: the library's own switch would still read it."""
    tokenizer, library = pair
    text = "the<s>a</s><think>"
    controls = [library.token_to_id(name) for name in NAMES]
    assert [n for n in tokenizer.encode(text, specials=True) if n in controls] == controls
    ids = tokenizer.encode(text, specials=False)
    assert not set(ids) & set(controls)
    assert tokenizer.decode(ids) == text
    library.encode_special_tokens = True
    assert library.token_to_id("<think>") in library.encode(text, add_special_tokens=False).ids
    library.encode_special_tokens = False


def test_what_is_skipped(pair):
    tokenizer, _ = pair
    ids = tokenizer.encode("<s>the<think> a</s>", specials=True)
    skipped = tokenizer.decode(ids, skip_specials=True)
    assert skipped.startswith("the<think>")
    assert "</s>" not in skipped
    assert "".join(streamed(tokenizer, ids, skip_specials=True)) == skipped


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_streaming_any_ids_is_decoding_them(pair, data):
    tokenizer, library = pair
    hot = [library.token_to_id(name) for name in (*NAMES, "<0xC3>", "<0xA9>", "<0xFF>", MARK, "\ufffd", "Ã", "©", "é")]
    ids = st.one_of(st.sampled_from([n for n in hot if n is not None]), st.integers(0, tokenizer.vocab_size - 1))
    drawn, skip = data.draw(st.lists(ids)), data.draw(st.booleans())
    parts = streamed(tokenizer, drawn, skip_specials=skip)
    assert "".join(parts) == tokenizer.decode(drawn, skip_specials=skip)


def test_streaming_does_not_hold_text_back(pair):
    tokenizer, _ = pair
    ids = tokenizer.encode("the the, a", specials=False)
    parts = streamed(tokenizer, ids)
    assert parts[-1] == ""
    assert sum(map(bool, parts)) >= len(ids) - 1


def test_half_a_character_waits(pair):
    tokenizer, _ = pair
    ids = tokenizer.encode("👋a", specials=False)
    parts = streamed(tokenizer, ids)
    assert "".join(parts) == "👋a"
    assert sum("\ufffd" in part for part in parts) == 0
    decoder = tokenizer.stream()
    first = next(i for i, n in enumerate(ids) if "\ufffd" in tokenizer.decode([n]))
    assert decoder.push(ids[first]) == ""
    assert decoder.finish() == "\ufffd"
    assert decoder.finish() == ""


def test_config_names_and_flags(tmp_path):
    library = byte_level()
    ids = {name: library.token_to_id(name) for name in NAMES}
    table = {str(n): {"content": name, "special": name != "</s>"} for name, n in ids.items()}
    names = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": "!"}
    tokenizer = load_tokenizer(save(tmp_path, library, {"added_tokens_decoder": table} | names))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (ids["<s>"], ids["</s>"], library.token_to_id("!"))
    assert tokenizer.decode([n for n in ids.values() if n is not None], skip_specials=True) == "</s>"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"bos_token": "<bos>"}, r"tokenizer_config\.json: bos_token '<bos>' is no token of this vocabulary"),
        ({"added_tokens_decoder": {"5": {"content": "<x>"}}}, r"id 5 is '<x>', but no added token in tokenizer\.json"),
        ({"added_tokens_decoder": {"290": {"content": "<x>"}}}, r"id 290 is '<x>', but '<s>' in tokenizer\.json"),
    ],
)
def test_configs_that_contradict(tmp_path, config, message):
    assert byte_level().token_to_id("<s>") == 290
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(save(tmp_path, byte_level(), config))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{\n"model": nil', r"tokenizer\.json, line 2: Expecting value"),
        (b"{}", r"tokenizer\.json: Model missing"),
        (b'{"a": "\xff"}', r"tokenizer\.json: byte 7 is not UTF-8"),
    ],
)
def test_malformed_files(tmp_path, content, message):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(tmp_path)


def test_truncation_and_padding_of_the_file_are_off(tmp_path):
    library = byte_level()
    library.enable_truncation(3)
    library.enable_padding(length=50)
    tokenizer = load_tokenizer(save(tmp_path, library))
    for specials in (True, False):
        assert tokenizer.decode(tokenizer.encode(TEXT, specials=specials)) == TEXT


def test_ids_without_token(tmp_path):
    library = Library(models.WordLevel({"a": 0, "b": 5, "<unk>": 6}, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.add_special_tokens(["<unk>"])
    tokenizer = load_tokenizer(save(tmp_path, library))
    assert tokenizer.vocab_size == 7
    assert tokenizer.encode("a c b", specials=False) == [0, 6, 5]
    with pytest.raises(TokenizerError, match="token id 3 at position 1 has no token"):
        tokenizer.decode([0, 3])
    with pytest.raises(TokenizerError, match=r"token id 7 at position 0 is outside 0\.\.6"):
        tokenizer.stream().push(7)


def test_a_model_that_spells_out_a_control_token(tmp_path):
    pieces = [("<unk>", 0.0), ("</s>", -1.0), ("a", -2.0)]
    library = Library(models.Unigram(pieces, unk_id=0))
    library.add_special_tokens(["<unk>", "</s>"])
    tokenizer = load_tokenizer(save(tmp_path, library))
    assert tokenizer.encode("aé", specials=False) == [2, 0]
    assert tokenizer.encode("a</s>", specials=True) == [2, 1]
    with pytest.raises(TokenizerError, match=r"the model of tokenizer\.json itself puts '</s>' together \(id 1\)"):
        tokenizer.encode("a</s>", specials=False)


def test_lone_surrogates(pair):
    with pytest.raises(TokenizerError, match=r"position 4 of the text is the lone surrogate U\+D83D"):
        pair[0].encode("the \ud83d", specials=True)


def test_tiktoken_model_wins(tmp_path):
    save(tmp_path, byte_level())
    write_tiktoken(tmp_path, [bytes([value]) for value in range(256)], {})
    assert load_tokenizer(tmp_path).encode("a", specials=False) == [ord("a")]
