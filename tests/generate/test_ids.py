"""Greedy generation: where rows end, that rows know nothing of each other, images, and what is refused."""

import dataclasses
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.tiny import filled, tiny_k3

import trillion_moe as tm
from trillion_moe.generate import engine
from trillion_moe.sampling import SamplingConfig

STEPS = 6
LENGTHS = (3, 9, 70)  # the last one needs another bucket, of prompt and of cache, than the others


@pytest.fixture(scope="module")
def model():
    """Two layers."""
    kinds = {"num_layers": 2, "attention": ("kda", "mla"), "mlp": ("dense", "moe")}
    return filled(tiny_k3(**kinds, eos_ids=(2, 5)))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(6, 300, length).tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def free(model, prompts) -> list[tuple[int, ...]]:
    """The ids of a run in which no row meets the config's end tokens."""
    completions = tm.generate(model, prompts, max_new_tokens=STEPS)
    assert [c.finish for c in completions] == ["length"] * 3
    assert [len(c.ids) for c in completions] == [STEPS] * 3
    assert all(c.text is None for c in completions)
    return [c.ids for c in completions]


@pytest.fixture(scope="module")
def ends(free) -> tuple[int, int]:
    """Two end tokens: row 0 meets one at its second step, row 1 the other at its fourth, row 2 none."""
    eos = free[0][1], free[1][3]
    assert [until(ids, eos) for ids in free] == [free[0][:2], free[1][:4], free[2]]
    return eos


def until(ids, eos) -> tuple[int, ...]:
    """The ids up to the first end token, which is kept."""
    return next((ids[: i + 1] for i, token in enumerate(ids) if token in eos), ids)


def changed(model, **arrays):
    """A copy of the model with other arrays."""
    copy = jax.tree.map(lambda leaf: leaf, model)
    for name, array in arrays.items():
        setattr(copy, name, array)
    return copy


def test_every_id_is_the_argmax_of_forward(model, prompts, free) -> None:
    """One pass over prompts and completions, packed into one row, whatever bucket the prompts were padded to."""
    rows = [prompt + list(ids[:-1]) for prompt, ids in zip(prompts, free, strict=True)]
    segments = [i + 1 for i, row in enumerate(rows) for _ in row]
    logits, _ = tm.forward(model, [list(chain(*rows))], segments=[segments])
    best, ends = np.argmax(logits[0], axis=-1), np.cumsum([len(row) for row in rows])
    assert [tuple(best[end - STEPS : end].tolist()) for end in ends] == free


def test_an_end_token_ends_its_row_and_is_kept(model, prompts, free, ends) -> None:
    found = tm.generate(model, prompts, max_new_tokens=STEPS, eos_ids=ends)
    assert [c.ids for c in found] == [free[0][:2], free[1][:4], free[2]]
    assert [c.finish for c in found] == ["eos", "eos", "length"]


def test_the_configs_end_tokens_are_the_default(model, prompts, free, ends) -> None:
    """Tokens 2 and 5 get the logits of those two, and a little more."""
    other = changed(model, head=model.head.at[:, [2, 5]].set(1.001 * model.head[:, jnp.asarray(ends)]))
    found = tm.generate(other, prompts, max_new_tokens=STEPS)
    assert [c.ids for c in found] == [(free[0][0], 2), (*free[1][:3], 5), free[2]]
    assert [c.finish for c in found] == ["eos", "eos", "length"]


@pytest.mark.parametrize("row", [0, 1])
def test_rows_of_a_batch_equal_prompts_alone(model, prompts, free, ends, row) -> None:
    """Neither the length of the others nor the step at which they end matters."""
    for eos in (ends, (2, 5)):
        (alone,) = tm.generate(model, [prompts[row]], max_new_tokens=STEPS, eos_ids=eos)
        assert alone.ids == until(free[row], eos)


def test_one_new_token(model, prompts, free) -> None:
    for eos, finish in (((2, 5), "length"), ((free[0][0], 5), "eos")):
        (found,) = tm.generate(model, prompts[:1], max_new_tokens=1, eos_ids=eos)
        assert (found.ids, found.finish) == (free[0][:1], finish)


def test_an_end_token_at_once(model, prompts, free) -> None:
    """One row ends with its first token, or all of them do."""
    assert len({ids[0] for ids in free}) == 3
    first, *others = tm.generate(model, prompts, max_new_tokens=STEPS, eos_ids=(free[0][0], 5))
    assert first == tm.Completion(free[0][:1], None, "eos")
    assert [c.ids for c in others] == [until(ids, free[0][:1]) for ids in free[1:]]
    assert tm.generate(model, prompts[:1], max_new_tokens=STEPS, eos_ids=(free[0][0], 5)) == [first]


def test_an_end_token_on_the_last_step(model, prompts, free) -> None:
    """It counts as an end although no further token was allowed."""
    assert free[0][-1] not in free[0][:-1]
    (found,) = tm.generate(model, prompts[:1], max_new_tokens=STEPS, eos_ids=(free[0][-1], 5))
    assert found == tm.Completion(free[0], None, "eos")


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompts", ["1,2", [], [1, 2], {"role": "user"}], ids=str)
def test_prompts_are_a_list_of_prompts(model, prompts) -> None:
    with pytest.raises(tm.InputError, match="prompts must be a non-empty list whose items are token-id lists, strings"):
        tm.generate(model, prompts)


@pytest.mark.parametrize("prompt", ["1,2", [{"role": "user", "content": "?"}]], ids=str)
def test_text_needs_a_tokenizer(model, prompt) -> None:
    with pytest.raises(tm.InputError, match=r"prompt 1 is no list of token ids: give tokenizer=.*load_processor"):
        tm.generate(model, [[7], prompt])
    with pytest.raises(tm.InputError, match=r"stop strings need text: give tokenizer"):
        tm.generate(model, [[7]], stop="x")


def test_bad_prompts_are_named(model) -> None:
    with pytest.raises(tm.InputError, match="prompt 1 is empty"):
        tm.generate(model, [[7], []])
    fraction: Any = 7.5
    with pytest.raises(TypeError, match="must be integers"):
        tm.generate(model, [[7, fraction]])
    for row in ([7, 300], [7, -1]):
        with pytest.raises(tm.InputError, match=rf"token id {row[1]} at row 1, position 1 is outside 0\.\.299"):
            tm.generate(model, [[7], row])
    with pytest.raises(tm.InputError, match="row 1, position 0: image placeholder 3"):
        tm.generate(model, [[7], [3]])
    for count in (0, -1):
        with pytest.raises(tm.InputError, match=f"max_new_tokens is {count}; it must be at least 1"):
            tm.generate(model, [[7]], max_new_tokens=count)


def test_logits_that_are_not_finite_are_named(model, prompts) -> None:
    """Of every prompt: an error."""
    bad = changed(model, head=model.head.at[0, 0].set(jnp.nan))
    with pytest.raises(
        FloatingPointError, match=r"prompt 0: logits are not finite at new token 0 \(of 6\); prompt 1: "
    ):
        tm.generate(bad, prompts, max_new_tokens=STEPS)


def test_a_nan_fails_its_prompt_and_no_other(model, prompts, free) -> None:
    """In the embedding of a token that comes up in row 1, or stands in a prompt."""
    token = free[1][1]  # and no other row's; padding is 0
    assert token not in {0, *free[0], free[1][0], *free[2]}.union(*prompts)
    bad = changed(model, embed=model.embed.at[token].set(jnp.nan))
    good, failed, other = tm.generate(bad, prompts, max_new_tokens=STEPS)
    assert (failed.ids, failed.finish) == (free[1][:2], "error")
    assert failed.error == "prompt 1: logits are not finite at new token 2 (of 6)"
    assert [good.ids, other.ids] == [free[0], free[2]]
    at_once = tm.generate(bad, [prompts[0], [9, token, 9], prompts[2]], max_new_tokens=STEPS)
    assert [c.ids for c in at_once] == [free[0], (), free[2]]
    assert at_once[1].error == "prompt 1: logits are not finite at new token 0 (of 6)"
    ended = tm.generate(bad, prompts, max_new_tokens=STEPS, eos_ids=(token, 5))  # a row that has ended feeds nothing
    assert [c.ids for c in ended] == [free[0], free[1][:2], free[2]]


def test_a_nan_changes_no_bit_of_the_other_rows(model, prompts, free) -> None:
    """Logits and caches of rows 0 and 2 after prefill and six tokens, against a run in which row 1 is sound."""
    token = free[1][1]
    bad = changed(model, embed=model.embed.at[token].set(jnp.nan))
    runs = []
    for weights in (model, bad):
        sampling = [SamplingConfig()] * 3
        now = engine.start(weights, engine.Prompts.of(weights, prompts, None), sampling, [STEPS + 9] * 3)
        _, now = engine.decode(weights, now, (), STEPS)
        runs.append((np.asarray(now.logits), [np.asarray(a) for a in jax.tree.leaves(now.caches)]))
    (sound, caches), (poisoned, others) = runs
    assert np.isnan(poisoned[1]).all()
    np.testing.assert_array_equal(sound[[0, 2]], poisoned[[0, 2]])
    for a, b in zip(caches, others, strict=True):
        np.testing.assert_array_equal(a[[0, 2]], b[[0, 2]])


# --- images -----------------------------------------------------------------------------------------------------------


def first_block(model):
    """The model without its later layers, which compiles sooner."""
    kinds = model.plan[0].layers
    attention, mlp = zip(*((kind.attention, kind.ffn) for kind in kinds), strict=True)
    cfg = dataclasses.replace(model.config, num_layers=len(kinds), attention=attention, mlp=mlp)
    return changed(model, config=cfg, plan=model.plan[:1], segments=model.segments[:1])


def test_images_beside_a_row_of_text(goldens) -> None:
    """One placeholder an image; expected is the argmax of one forward pass over the expanded ids."""
    folder = goldens / "kimi_k3" / "a"
    model, golden = first_block(tm.load(folder)), load_file(folder / "image_text.safetensors")
    images = [None, tm.ImageBatch(golden["pixel_values"], golden["grid_thws"])]
    short, prompt, expanded = [440, 146, 63, 243], golden["input_ids"][0].tolist(), golden["input_ids_expanded"][0]
    with pytest.raises(tm.InputError, match="images are given for 1 rows, tokens have 2"):
        tm.generate(model, [short, prompt], images=images[1:])
    text, pictured = tm.generate(model, [short, prompt], images=images, max_new_tokens=3, eos_ids=())
    assert (len(text.ids), len(pictured.ids), pictured.finish) == (3, 3, "length")
    rows = [[*short, *text.ids], [*expanded.tolist(), *pictured.ids]]
    width = len(rows[1])
    tokens = [row + [0] * (width - len(row)) for row in rows]
    segments = [[1] * len(row) + [0] * (width - len(row)) for row in rows]
    logits, _ = tm.forward(model, tokens, segments=segments, images=images)
    for row, found in ((0, text), (1, pictured)):
        end = len(rows[row]) - 1
        assert np.argmax(logits[row, end - 3 : end], axis=-1).tolist() == list(found.ids)


def test_bfloat16(model) -> None:
    """Every product of decoding exists for bfloat16 on this platform; the first ids are those of a whole pass."""
    narrow = filled(model.config, dtype="bfloat16")
    prompt = [7, 42, 99]
    (found,) = tm.generate(narrow, [prompt], max_new_tokens=3)
    for i, token in enumerate(found.ids):
        logits, _ = tm.forward(narrow, [[*prompt, *found.ids[:i]]])
        assert float(logits[0, -1, token]) >= float(logits[0, -1].max()) - 0.05
