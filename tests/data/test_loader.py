"""Batches: shapes, order, packing, shards, and going on where a run stopped."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tiny import IDS

from trillion_moe.data.loader import Loader, first_fit
from trillion_moe.data.rows import DataError
from trillion_moe.inputs import check_inputs
from trillion_moe.layers.vision_positions import ImageBatch
from trillion_moe.model import Model, next_token_targets

PAD = IDS["[PAD]"][0]


def text(length: int) -> dict:
    """A raw row of this many tokens, the last two of them supervised."""
    return {"prompt": "p" * (length - 2), "completion": "c"}


def lines(batches) -> list[tuple[tuple[int, ...], ...]]:
    return [batch["rows"] for batch in batches]


@pytest.fixture
def sized(build):
    """Examples of these lengths."""
    return lambda *lengths: build(*map(text, lengths), raw=True)


@pytest.fixture
def numbers(sized):
    """64 examples of equal length, for what concerns the order only."""
    return sized(*[3] * 64)


# --- shapes ----------------------------------------------------------------------------------------------------------


def test_a_batch(sized) -> None:
    examples = sized(3, 5, 4)
    first, last = Loader(examples, batch_size=2, lengths=[8], seed=None, epochs=1)
    p, c, end = ord("p"), ord("c"), IDS["<|end_of_msg|>"][0]
    assert first["tokens"].tolist() == [[p, c, end, *[PAD] * 5], [p, p, p, c, end, *[PAD] * 3]]
    assert first["segments"].tolist() == [[1] * 3 + [0] * 5, [1] * 5 + [0] * 3]
    assert first["loss_mask"].tolist() == [[0, 1, 1, *[0] * 5], [0, 0, 0, 1, 1, 0, 0, 0]]
    assert [first[name].dtype for name in ("tokens", "segments", "loss_mask")] == [np.int32, np.int32, bool]
    assert (first["patches"], first["grids"], first["rows"]) == (None, (), ((1,), (2,)))
    # The rest is filled up, not dropped.
    assert last["rows"] == ((3,), ())
    assert last["tokens"].shape == (2, 8)
    assert (last["segments"].sum(), last["loss_mask"].sum()) == (4, 2)
    assert (last["tokens"][1] == PAD).all()


def test_a_batch_has_the_least_length_that_holds_its_rows(sized) -> None:
    batches = Loader(sized(3, 4, 5, 3, 9, 16), batch_size=2, lengths=[4, 8, 16], seed=None, epochs=1)
    assert [batch["tokens"].shape for batch in batches] == [(2, 4), (2, 8), (2, 16)]


def test_packing(sized) -> None:
    """Each example into the first row with room, once for all epochs."""
    examples = sized(6, 5, 3, 7, 4, 3)
    first, last = Loader(examples, batch_size=2, lengths=[10], seed=None, epochs=1, pack=True)
    assert (first["rows"], last["rows"]) == (((1, 3), (2, 5)), ((4, 6), ()))
    assert first["segments"].tolist() == [[1] * 6 + [2] * 3 + [0], [1] * 5 + [2] * 4 + [0]]
    assert (first["loss_mask"].sum(), last["loss_mask"].sum()) == (8, 4)
    for epoch in by_epoch(Loader(examples, batch_size=2, lengths=[10], seed=5, epochs=3, pack=True)):
        assert sorted(row for rows in epoch for row in rows) == [(), (1, 3), (2, 5), (4, 6)]


def by_epoch(loader) -> list[list]:
    found = lines(loader)
    n = loader.batches_per_epoch
    return [found[i : i + n] for i in range(0, len(found), n)]


@given(st.lists(st.integers(1, 12), max_size=30))
@settings(deadline=None, max_examples=50)
def test_first_fit(sizes) -> None:
    bins = first_fit(sizes, 12)
    assert sorted(itertools.chain(*bins)) == list(range(len(sizes)))
    for n, numbers in enumerate(bins):
        assert sum(sizes[i] for i in numbers) <= 12
        for i in numbers:  # no earlier bin had room when it came
            for earlier in bins[:n]:
                assert sum(sizes[j] for j in earlier if j < i) + sizes[i] > 12


def test_pictures(build) -> None:
    """fault 112: patches and placeholders belong together, in packed and shuffled rows and in every shard"""
    names = ["a", "", "cb", "b", "", "c"]
    parts = [[{"type": "image_url", "image_url": {"url": f"{n}.png"}} for n in name] for name in names]
    asked = [{"role": "user", "content": [*part, {"type": "text", "text": "?"}]} for part in parts]
    rows = [{"messages": [question, {"role": "assistant", "content": "a"}]} for question in asked]
    examples = build(*rows, thinking=False)
    longest = max(len(item.ids) for item in examples.items)
    grids = {"a": (1, 2, 2), "b": (1, 2, 4), "c": (1, 4, 6)}
    for pack, shard in itertools.product((False, True), ((0, 1), (0, 2), (1, 2))):
        loader = Loader(examples, batch_size=4, lengths=[2 * longest], seed=3, epochs=2, pack=pack, shard=shard)
        for batch in loader:
            held = "".join(names[line - 1] for row in batch["rows"] for line in row)
            assert batch["grids"] == tuple(grids[name] for name in held)
            if not held:
                assert batch["patches"] is None
                continue
            expected = [examples.patches(line - 1) for row in batch["rows"] for line in row if names[line - 1]]
            assert np.array_equal(batch["patches"], np.concatenate(expected))


@pytest.mark.parametrize("pack", [False, True])
def test_batches_are_what_the_model_takes(build, front_model, pack) -> None:
    """Every true of the mask is one target of the loss (fault 97: so its count can weigh micro-batches)."""
    picture = {"type": "image_url", "image_url": {"url": "c.png"}}
    answer = {"role": "assistant", "content": "a"}
    talks = [[{"role": "user", "content": content}, answer, answer] for content in ([picture], "q", "qq", "qqq")]
    examples = build(*({"messages": talk} for talk in talks), text(5), raw=True)
    loader = Loader(examples, batch_size=2, lengths=[512], seed=None, epochs=1, pack=pack)
    model, supervised = Model(front_model), 0
    for batch in loader:
        images = None if batch["patches"] is None else ImageBatch(batch["patches"], batch["grids"])
        tokens, segments, _ = check_inputs(front_model, batch["tokens"], batch["segments"], images)
        assert np.array_equal(tokens, batch["tokens"])
        assert np.array_equal(segments, batch["segments"])
        _, counted = next_token_targets(model, batch)
        assert int(counted.sum()) == batch["loss_mask"].sum()
        supervised += int(counted.sum())
    assert supervised == sum(item.mask.sum() for item in examples.items)


# --- order -----------------------------------------------------------------------------------------------------------


def test_every_epoch_has_every_row_once_in_an_order_of_its_own(numbers) -> None:
    loader = Loader(numbers, batch_size=10, lengths=[4], seed=1, epochs=3)
    assert loader.batches_per_epoch == 7
    epochs = by_epoch(loader)
    flat = [[line for rows in epoch for row in rows for line in row] for epoch in epochs]
    assert len(epochs) == 3
    assert all(sorted(epoch) == list(range(1, 65)) for epoch in flat)
    assert len({*map(tuple, flat), tuple(range(1, 65))}) == 4
    assert [(loader.order(e) + 1).tolist() for e in range(3)] == flat
    assert lines(loader) == lines(Loader(numbers, batch_size=10, lengths=[4], seed=1, epochs=3, threads=0))


def test_seeds_share_no_order(numbers) -> None:
    """Not even an epoch apart, as Grain's own would."""
    loaders = [Loader(numbers, batch_size=8, lengths=[4], seed=seed) for seed in (0, 1, 2)]
    orders = {tuple(loader.order(epoch)) for loader in loaders for epoch in range(4)}
    assert len(orders) == 12


def test_without_seed_it_is_the_order_of_the_file(numbers) -> None:
    endless = Loader(numbers, batch_size=16, lengths=[4], seed=None)
    found = lines(itertools.islice(endless, 8))
    assert [line for rows in found for (line,) in rows] == [*range(1, 65)] * 2


@pytest.mark.parametrize("pack", [False, True])
def test_shards_together_are_the_whole(sized, pack) -> None:
    examples = sized(*(3 + i % 7 for i in range(22)))
    common = {"batch_size": 4, "lengths": [5, 9], "seed": 2, "epochs": 2, "pack": pack}
    whole = list(Loader(examples, **common))
    for count in (2, 4):
        shards = [list(Loader(examples, **common, shard=(i, count))) for i in range(count)]
        for batch, *mine in zip(whole, *shards, strict=True):
            for name in ("tokens", "segments", "loss_mask"):
                assert np.array_equal(np.concatenate([part[name] for part in mine]), batch[name])
            assert tuple(row for part in mine for row in part["rows"]) == batch["rows"]


# --- going on --------------------------------------------------------------------------------------------------------


def test_a_run_goes_on_with_what_would_have_followed(numbers) -> None:
    """fault 126: 64 shuffled rows, stopped after 3 batches of epoch 2: position and order of the epoch come back"""
    common = {"batch_size": 8, "lengths": [4], "seed": 7, "epochs": 4}
    unbroken = lines(Loader(numbers, **common))
    first = iter(Loader(numbers, **common))
    done = lines(itertools.islice(first, 2 * 8 + 3))
    state = json.loads(json.dumps(first.get_state()))
    assert state["position"] == first.position == 19
    second = iter(Loader(numbers, **common))
    second.set_state(state)
    rest = lines(second)
    assert done + rest == unbroken
    assert len(rest) == 13
    # The epoch's own order it is, not that of the first one.
    assert rest[:5] == unbroken[19:24] != unbroken[3:8]


def test_a_run_goes_on_with_other_shards(numbers) -> None:
    common = {"batch_size": 8, "lengths": [4], "seed": 7}
    whole = iter(Loader(numbers, **common))
    lines(itertools.islice(whole, 11))
    state = whole.get_state()
    expected = lines(itertools.islice(whole, 10))
    whole.set_state(state)  # back, though batches were made ahead
    assert lines(itertools.islice(whole, 10)) == expected
    halves = [iter(Loader(numbers, **common, shard=(i, 2))) for i in range(2)]
    for half in halves:
        half.set_state(state)
    both = zip(*(lines(itertools.islice(half, 10)) for half in halves), strict=True)
    assert [a + b for a, b in both] == expected
    assert halves[0].get_state() == halves[1].get_state() == whole.get_state()


@pytest.mark.parametrize("threads", [0, 2])
def test_any_position(numbers, threads) -> None:
    loader = Loader(numbers, batch_size=8, lengths=[4], seed=7, epochs=3, threads=threads)
    for position in (0, 1, 7, 8, 9, 24):
        batches = iter(loader)
        lines(itertools.islice(batches, position))
        state = batches.get_state()
        rest = lines(batches)
        assert len(rest) == 24 - position
        batches.set_state(state)  # the same one again
        assert lines(batches) == rest
        other = iter(loader)
        other.set_state(state)
        assert lines(other) == rest


def test_a_state_of_other_batches_is_refused(numbers, sized) -> None:
    """fault 126: nothing that would change the order goes by unnoticed"""
    common = {"batch_size": 8, "lengths": [4], "seed": 7, "epochs": 2}
    state = iter(Loader(numbers, **common)).get_state()
    for change, what in (
        ({"seed": 8}, "seed was 7 when the state was taken and is 8"),
        ({"seed": None}, "seed was 7 when the state was taken and is None"),
        ({"batch_size": 4}, "batch_size was 8 when the state was taken and is 4"),
        ({"lengths": [4, 8]}, "lengths was [4] when the state was taken and is [4, 8]"),
        ({"pack": True}, "pack was False when the state was taken and is True"),
    ):
        with pytest.raises(DataError) as caught:
            iter(Loader(numbers, **common | change)).set_state(state)
        assert caught.value.findings == (f"cannot go on from this state: {what}",)
    with pytest.raises(DataError, match=r"examples was '[0-9a-f]{16}' when the state was taken"):
        iter(Loader(sized(*[4] * 64), **common)).set_state(state)
    batches = iter(Loader(numbers, **common))
    for changed, what in (
        ({"order": 1}, f"the order of the epoch had checksum 1 and has {state['order']}"),
        ({"position": 17}, r"position 17 is not in 0..16"),
        ({"position": -1}, r"position -1 is not in 0..16"),
        ({"position": "1"}, r"position '1' is not in 0..16"),
    ):
        with pytest.raises(DataError, match=what):
            batches.set_state(state | changed)
    with pytest.raises(DataError, match=r"has position, order and settings; this one has \['position'\]"):
        batches.set_state({"position": 1})
    iter(Loader(numbers, **common | {"epochs": 5})).set_state(state)  # more of the same may follow


# --- what is not legal -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"batch_size": 0}, "batch_size = 0: legal is a multiple of the 1 process(es)"),
        ({"batch_size": 3, "shard": (0, 2)}, "batch_size = 3: legal is a multiple of the 2 process(es)"),
        ({"shard": (2, 2)}, "shard = (2, 2): legal is (number of this process, from 0; processes)"),
        ({"lengths": []}, "lengths = (): legal are one or more integers of at least 1, rising"),
        ({"lengths": [8, 4]}, "lengths = (8, 4): legal are one or more integers of at least 1, rising"),
        ({"lengths": [0, 4]}, "lengths = (0, 4): legal are one or more integers of at least 1, rising"),
        ({"lengths": [4]}, "line 2 has 5 tokens, the greatest length is 4"),
        ({"seed": -1}, "seed = -1: legal is an integer of at least 0"),
        ({"epochs": 0}, "epochs = 0: legal is an integer of at least 1"),
        ({"threads": -1}, "threads = -1: legal is an integer of at least 0"),
    ],
)
def test_what_is_not_legal(sized, change, what) -> None:
    with pytest.raises(DataError) as caught:
        Loader(sized(3, 5), **{"batch_size": 2, "lengths": [8]} | change)
    assert caught.value.findings == (what,)


def test_a_picture_that_is_gone_stops_the_run(build, tmp_path) -> None:
    picture = {"type": "image_url", "image_url": {"url": "a.png"}}
    examples = build({"messages": [{"role": "user", "content": [picture]}, {"role": "assistant", "content": "a"}]})
    (tmp_path / "a.png").unlink()
    with pytest.raises(DataError, match=r"line 1, message 0, content\[0\]: .*it could be read before"):
        next(iter(Loader(examples, batch_size=1, lengths=[512])))
