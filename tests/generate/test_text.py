"""Text and messages: the same tokens as by ids, streams, stop strings, seeds, sessions, and what is refused."""

import base64
import copy
import dataclasses
import io

import jax
import numpy as np
import PIL.Image
import pytest
from tests.tiny import IDS

import trillion_moe as tm
from trillion_moe.data.chat import ChatError, encode
from trillion_moe.data.image_files import ImageError
from trillion_moe.data.images import preprocess
from trillion_moe.generate import engine
from trillion_moe.generate.output import ChatText, Row, StopStrings
from trillion_moe.model import init_caches

QUIET = tm.ChatOptions(thinking=False)
NEW = 12


def picture(width=30, height=20, seed=0) -> PIL.Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return PIL.Image.fromarray(pixels)


def asked(*pictures, text="Which digit?") -> list[dict]:
    parts = [{"type": "image", "image": one} for one in pictures]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def test_a_string_is_its_ids(speaker) -> None:
    model, processor = speaker
    text = "user message é <|open|>"
    ids = processor.tokenizer.encode(text, specials=False)
    (by_ids,), (by_text,) = (
        tm.generate(model, [prompt], tokenizer=processor, max_new_tokens=NEW, temperature=1.0) for prompt in (ids, text)
    )
    assert by_text == by_ids
    assert by_text.text == processor.tokenizer.decode(by_text.ids, skip_specials=True)
    control = processor.tokenizer.encode(text, specials=True)
    assert len(control) < len(ids)
    (as_control,) = tm.generate(model, [text], tokenizer=processor, max_new_tokens=NEW, specials=True)
    assert as_control.ids == tm.generate(model, [control], max_new_tokens=NEW)[0].ids


def test_messages_with_pictures_are_their_ids_and_patches(speaker) -> None:
    """Two pictures of different sizes in one prompt, one in another, none in a third."""
    model, processor = speaker
    sizes = [(30, 20), (60, 10)]
    pictures = [picture(*size, seed=i) for i, size in enumerate(sizes)]
    prompts = [asked(*pictures), asked(pictures[1]), asked()]
    batch = tm.generate(model, prompts, tokenizer=processor, chat=QUIET, max_new_tokens=NEW)
    ids = [
        encode(processor.chat.render(messages, QUIET, image_sizes), processor.tokenizer)
        for messages, image_sizes in zip(prompts, (sizes, sizes[1:], ()), strict=True)
    ]
    assert [row.count(model.config.media_id) for row in ids] == [2, 1, 0]
    patches = [preprocess(one) for one in pictures]
    images = [
        tm.ImageBatch(np.concatenate([p.patches for p in some]), [p.grid_thw for p in some]) if some else None
        for some in (patches, patches[1:], [])
    ]
    by_ids = tm.generate(
        model, ids, images=images, max_new_tokens=NEW, eos_ids=(model.config.eos_ids[0], IDS["[EOS]"][0])
    )
    assert [c.ids for c in batch] == [c.ids for c in by_ids]
    alone = tm.generate(model, prompts[1:2], tokenizer=processor, chat=QUIET, max_new_tokens=NEW)
    assert alone == batch[1:2]


def test_image_sources_are_alike(speaker, tmp_path, monkeypatch) -> None:
    """A PIL image, its file by path, and a data URI."""
    _model, processor = speaker
    path = tmp_path / "picture.png"
    picture().save(path)
    uri = "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()
    url = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": uri}}]}]
    monkeypatch.chdir(tmp_path)
    rows = [asked(one, text="x")[0]["content"][:1] for one in (picture(), path, "picture.png", path.read_bytes())]
    prompts = [[{"role": "user", "content": row}] for row in rows] + [url]
    first, *others = (processor.messages(prompt, QUIET) for prompt in prompts)
    for other in others:
        assert other.ids == first.ids
        np.testing.assert_array_equal(other.patches.patches, first.patches.patches)


def test_the_stream_is_the_completion(speaker) -> None:
    model, processor = speaker
    prompts = ["user", "a longer message", asked(picture())]
    settings = {"tokenizer": processor, "chat": QUIET, "max_new_tokens": 40, "temperature": 1.5, "seed": [1, 2, 3]}
    completions = tm.generate(model, prompts, **settings)
    texts, ids, done = ["", "", ""], [[], [], []], {}
    for piece in tm.stream(model, prompts, **settings):
        assert piece.prompt not in done
        texts[piece.prompt] += piece.text
        ids[piece.prompt] += piece.ids
        if piece.completion:
            done[piece.prompt] = piece.completion
    assert [done[i] for i in range(3)] == completions
    assert ids == [list(c.ids) for c in completions]
    assert texts[:2] == [c.text for c in completions[:2]]


def test_one_seed_one_text(speaker) -> None:
    """Whatever else is in the batch; another seed gives another text."""
    model, processor = speaker
    settings = {"tokenizer": processor, "max_new_tokens": NEW, "temperature": 1.5, "top_p": 0.9}
    (alone,) = tm.generate(model, ["user"], seed=7, **settings)
    batch = tm.generate(model, ["user", "message", "user", "user " * 30], seed=[7, 1, 8, 9], **settings)
    assert batch[0].ids == alone.ids
    assert batch[2].ids != alone.ids
    assert tm.generate(model, ["user"] * 2, seed=7, **settings) == [alone, alone]


def test_a_stop_string_ends_the_text(speaker) -> None:
    """Also across tokens; ids go up to the token that completed it."""
    model, processor = speaker
    settings = {"tokenizer": processor, "max_new_tokens": 40, "temperature": 1.5, "seed": 4}
    (free,) = tm.generate(model, ["user"], **settings)
    stop = free.text[5:8]
    at = free.text.index(stop)
    (cut,) = tm.generate(model, ["user"], stop=stop, **settings)
    assert (cut.text, cut.finish) == (free.text[:at], "stop")
    assert cut.ids == free.ids[: len(cut.ids)]
    assert processor.tokenizer.decode(cut.ids, skip_specials=True).startswith(free.text[: at + len(stop)])
    assert "".join(p.text for p in tm.stream(model, ["user"], stop=stop, **settings)) == cut.text
    unmet, _ = tm.generate(model, ["user", "message"], stop=["\0never\0"], **settings)
    assert unmet == free


def test_stop_strings_hold_back_what_may_begin_one() -> None:
    stop = StopStrings(["END", "\n\n"])
    assert stop.push([("text", "an E")]) == [("text", "an ")]
    assert stop.push([("text", "N")]) == []
    assert stop.push([("text", "E\n")]) == [("text", "ENE")]
    assert stop.push([("think", "\n")]) == [("text", "\n")]  # another channel: the first one's text is let go
    assert stop.flush() == [("think", "\n")]
    assert not stop.met
    assert stop.push([("think", "aENDb\n\n")]) == [("think", "a")]
    assert stop.met
    assert stop.push([("think", "more")]) == []


# --- sessions ---------------------------------------------------------------------------------------------------------


def follow(model, processor, session, messages, **more):
    pieces = list(tm.stream(model, [messages], tokenizer=processor, chat=QUIET, session=session, **more))
    return pieces[-1].completion


@pytest.fixture
def held(speaker):
    """A session after one turn with a picture, its messages, and the ids that it made."""
    model, processor = speaker
    session, messages = tm.Session(), asked(picture())
    done = follow(model, processor, session, messages, max_new_tokens=5, eos_ids=())
    prompt = processor.messages(messages, QUIET).ids
    return session, prompt, list(done.ids)


def test_a_follow_up_uses_the_cache_and_equals_a_cold_run(speaker, held) -> None:
    """By ids, so that the first answer stands in the second prompt token by token; the new turn has its own picture."""
    model, processor = speaker
    session, prompt, made = held
    more = processor.messages(asked(picture(40, 20, seed=5), text="and this?"), QUIET)
    images = [processor.messages(asked(picture()), QUIET).patches, more.patches]
    both = tm.ImageBatch(np.concatenate([p.patches for p in images]), [g for p in images for g in p.grid_thw])
    ids = [*prompt, *made, *more.ids]
    settings = {"images": both, "max_new_tokens": 8, "eos_ids": ()}
    (cold,) = tm.generate(model, [ids], **settings)
    warm = list(tm.stream(model, [ids], session=session, **settings))[-1].completion
    assert warm.ids == cold.ids
    # A placeholder became two tokens, and the last new token was never entered.
    assert session.reused == len(prompt) + 1 + len(made) - 1


@pytest.mark.parametrize("change", ["earlier token", "shorter", "picture", "model"])
def test_a_prompt_that_differs_starts_cold(speaker, held, change) -> None:
    """fault 5: never a state of another prefix."""
    model, processor = speaker
    session, prompt, made = held
    patches = processor.messages(asked(picture(seed=1 if change == "picture" else 0)), QUIET).patches
    ids = [*prompt, *made, 40, 41]
    if change == "earlier token":
        ids[1] += 1
    if change == "shorter":
        ids = prompt
    if change == "model":
        model = jax.tree.map(lambda leaf: leaf.copy(), model)
    settings = {"images": tm.ImageBatch(patches.patches, patches.grid_thw), "max_new_tokens": 6, "eos_ids": ()}
    (cold,) = tm.generate(model, [ids], **settings)
    warm = list(tm.stream(model, [ids], session=session, **settings))[-1].completion
    assert session.reused == 0
    assert warm.ids == cold.ids


def test_a_session_after_a_stop_string(speaker) -> None:
    """The caches also hold what was decoded past it: a prompt without that starts cold, one with it goes on."""
    model, processor = speaker
    settings = {"tokenizer": processor, "max_new_tokens": 40, "temperature": 1.5, "seed": 4}
    (free,) = tm.generate(model, ["user"], **settings)
    begin = len(processor.tokenizer.decode(free.ids[:3], skip_specials=True))  # two tokens into the first long run
    stop, prompt = free.text[begin : begin + 20], processor.tokenizer.encode("user", specials=False)
    assert free.text.index(stop) == begin
    for known, reused in ((6, 0), (17, len(prompt) + 17)):
        session = tm.Session()
        *_, last = tm.stream(model, ["user"], session=session, stop=stop, **settings)
        assert (last.completion.finish, last.completion.text) == ("stop", free.text[:begin])
        again = [*prompt, *free.ids[:known], 33]
        *_, warm = tm.stream(model, [again], session=session, max_new_tokens=4)
        assert session.reused == reused
        assert warm.completion == tm.generate(model, [again], max_new_tokens=4)[0]


# --- what is refused --------------------------------------------------------------------------------------------------


def test_refusals_name_the_prompt(speaker, tmp_path) -> None:
    model, processor = speaker
    with pytest.raises(ChatError, match=r"prompt 1: message 0.*role"):
        tm.generate(model, ["x", [{"role": "boss", "content": "?"}]], tokenizer=processor)
    with pytest.raises(ImageError, match=r"prompt 0: message 0, content\[0\]: .*nowhere\.png"):
        tm.generate(model, [asked(tmp_path / "nowhere.png")], tokenizer=processor)
    with pytest.raises(tm.InputError, match="images are given beside prompts that are not token ids"):
        tm.generate(model, ["x"], tokenizer=processor, images=[None])
    with pytest.raises(tm.InputError, match="stop holds an empty string"):
        tm.generate(model, ["x"], tokenizer=processor, stop=["a", ""])
    with pytest.raises(tm.InputError, match="seed holds 2 numbers for 1 prompts; legal is one number, or one each"):
        tm.generate(model, ["x"], tokenizer=processor, seed=[1, 2])
    with pytest.raises(tm.InputError, match="a session holds one conversation, and there are 2 prompts"):
        tm.stream(model, [[7], [8]], session=tm.Session())
    with pytest.raises(tm.InputError, match="prompt 1 is empty"):
        tm.generate(model, ["x", ""], tokenizer=processor)


def test_every_token_of_a_picture_has_its_place(speaker) -> None:
    """fault 111: one placeholder becomes 16 x 16 positions, not one."""
    model, processor = speaker
    encoded = processor.messages(asked(picture(448, 448)), QUIET)
    images = tm.ImageBatch(encoded.patches.patches, encoded.patches.grid_thw)
    row = engine.Prompts.of(model, [encoded.ids], images).row(0)
    assert len(row) == len(encoded.ids) - 1 + 256
    assert row.count(model.config.media_id) == 256


def test_pictures_and_placeholders_that_do_not_pair_up(speaker) -> None:
    """fault 113, fault 112, fault 116: none for a picture, two for one, one for none, a run that was cut; by row."""
    model, processor = speaker
    media, encoded = model.config.media_id, processor.messages(asked(picture(56, 56)), QUIET)
    one = tm.ImageBatch(encoded.patches.patches, encoded.patches.grid_thw)
    for row, images in (([7], one), ([7, media, media], one), ([7, media], None), ([7, *[media] * 3], one)):
        with pytest.raises(tm.InputError, match=r"row 1.*placeholder"):
            tm.generate(model, [[7], row], images=[None, images])


def test_a_turned_picture_has_the_turned_size_in_the_prompt(speaker) -> None:
    """EXIF orientation 6 is a quarter turn: off as in the release, on with the setting."""
    _, processor = speaker
    shot = picture(30, 60)
    exif = shot.getexif()
    exif[274] = 6
    file = io.BytesIO()
    shot.save(file, "PNG", exif=exif)
    for apply, size, grid in ((False, "30x60", (1, 6, 4)), (True, "60x30", (1, 4, 6))):
        own = dataclasses.replace(processor, images=dataclasses.replace(processor.images, apply_exif=apply))
        encoded = own.messages(asked(file.getvalue()), QUIET)
        assert f"image {size}" in own.tokenizer.decode(encoded.ids)
        assert encoded.patches.grid_thw == (grid,)


def test_end_tokens_are_no_text(speaker) -> None:
    """K3 ends a turn with one token and a text with another: neither is part of an answer, whichever comes."""
    _, processor = speaker
    for name in ("<|end_of_msg|>", "[EOS]"):
        end = IDS[name][0]
        parser = processor.format.parser(QUIET)
        row = Row(ChatText(processor.tokenizer, parser, [IDS["<|end_of_msg|>"][0], IDS["[EOS]"][0]]), [end], ())
        for token in [*processor.tokenizer.encode("yes", specials=False), end]:
            row.push(token)
        _, completion = row.end("length")
        assert (completion.text, completion.finish, completion.reply.complete) == ("yes", "eos", True)


def test_ids_without_a_token_are_never_drawn(speaker) -> None:
    """The model's vocabulary may be larger than the tokenizer's."""
    model, processor = speaker
    small = copy.copy(processor.tokenizer)
    small.vocab_size = 200
    own = dataclasses.replace(processor, tokenizer=small)
    (found,) = tm.generate(model, [[7, 8]], tokenizer=own, max_new_tokens=30, temperature=5.0)
    assert max(found.ids) < 200


def test_a_placeholder_that_the_model_wrote_is_no_picture(speaker) -> None:
    """The caches then hold a state that no prompt with pictures has: start cold."""
    model, processor = speaker
    media = model.config.media_id
    encoded = processor.messages(asked(picture(28, 28)), QUIET)
    one = tm.ImageBatch(encoded.patches.patches, encoded.patches.grid_thw)
    two = tm.ImageBatch(np.concatenate([one.patches] * 2), one.grid_thw * 2)
    session, prompts = tm.Session(), engine.Prompts.of(model, [encoded.ids], one)
    session.keep(model, init_caches(model, 1, 64), [*prompts.row(0), media], one)
    rest, caches, _ = session.take(model, engine.Prompts.of(model, [[*encoded.ids, media, 9]], two))
    assert caches is None
    assert rest.row(0) == [*encoded.ids, media, 9]


def test_a_model_that_was_changed_in_place_starts_cold(speaker) -> None:
    model = jax.tree.map(lambda leaf: leaf, speaker[0])
    session = tm.Session()
    *_, last = tm.stream(model, [[7, 8]], session=session, max_new_tokens=4)
    model.embed = model.embed.at[5].set(0.0)
    list(tm.stream(model, [[7, 8, *last.completion.ids, 9]], session=session, max_new_tokens=4))
    assert session.reused == 0


def test_limits_are_checked_before_anything_is_compiled(speaker) -> None:
    model, _ = speaker
    with pytest.raises(tm.InputError, match=r"2 tokens, max_new_tokens is 3000000000: legal are 1048576 together"):
        tm.generate(model, [[7, 8]], max_new_tokens=3_000_000_000)
    for wrong in (-1, model.config.vocab_size):
        with pytest.raises(tm.InputError, match=rf"eos_ids holds {wrong}; token ids are 0\.\.516"):
            tm.generate(model, [[7, 8]], eos_ids=[wrong])
