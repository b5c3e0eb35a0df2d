"""Capacity follows what is asked for: on loads that are made up, and in a run."""

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
from tests.train.test_trainer import at, lines, stop

import trillion_moe as tm
from trillion_moe.layers.exchange import SHARES
from trillion_moe.train.capacity import Capacity

THREE = (0.25, 0.5, 1.0)


def asked(*shares: float) -> np.ndarray:
    """A histogram of exchanges which asked for these shares."""
    counts = np.zeros(SHARES + 1, np.int32)
    for share in shares:
        counts[int(np.ceil(share * SHARES))] += 1
    return counts


def followed(series, **options) -> list[float]:
    policy = Capacity(THREE, 1.0, **{"window": 4, "patience": 3} | options)
    return [policy.seen(asked(*np.atleast_1d(shares))) for shares in series]


def test_down_a_step_at_a_time_up_at_once() -> None:
    assert followed([0.2] * 7) == [1.0, 1.0, 0.5, 0.5, 0.5, 0.25, 0.25]
    # The largest of the window counts: until it has passed, nothing goes down.
    assert followed([0.2] * 6 + [0.9] + [0.2] * 9)[6:] == [1.0] * 6 + [0.5] * 3 + [0.25]


def test_it_does_not_swing() -> None:
    """Loads about the edge of a capacity: it stays with the larger, and what is asked for has always room."""
    series = [0.2 + 0.06 * (i % 4 == 0) for i in range(40)]
    capacities = followed(series)
    assert capacities[3:] == [0.5] * 37
    assert sum(a != b for a, b in pairwise(capacities)) == 1


def test_loads_that_grow_slowly_are_never_dropped() -> None:
    """The spare room is there before it is needed."""
    series = np.linspace(0.1, 0.95, 60)
    before = [1.0, *followed(series)]
    assert min(before) == 0.25
    assert all(capacity >= share for capacity, share in zip(before, series, strict=False))


def test_a_quantile_gives_up_on_what_is_rare() -> None:
    rare = [[0.1] * 99 + [0.9]] * 8
    assert followed(rare)[-1] == 1.0
    assert followed(rare, quantile=0.98)[-1] == 0.25


def test_exchanges_of_nothing_are_not_counted() -> None:
    assert followed([[0.0] * 99 + [0.9]] * 8, quantile=0.5)[-1] == 1.0
    assert followed([0.0] * 8)[-1] == 0.25


@pytest.mark.slow
def test_a_run_changes_its_capacity(trainer, adapted, config, tmp_path, monkeypatch) -> None:
    """Half of what a device has is asked for at the most: the run goes down to it, drops nothing and its losses are
    those of a run without capacities."""
    monkeypatch.setattr("trillion_moe.train.capacity.PATIENCE", 2)
    run = config(train={"steps": 5, "eval_every": 0, "save_every": 5})
    options = {"transport": "all_to_all", "capacity": 1.0, "capacities": (0.02, 0.5, 1.0)}
    found = trainer(run, model=tm.place(adapted, tm.Layout.make({"ep": 2}, **options)))
    found.run(quiet=True)
    of_run = lines(run)
    assert [line["capacity"] for line in of_run] == [1.0, 1.0, 0.5, 0.5, 0.5]
    assert all(line["dropped_assignments"] == 0 for line in of_run)
    assert found.layout.capacity == found.trainable.layout.capacity == found.frozen.layout.capacity == 0.5
    plain = dataclasses.replace(run, output=str(tmp_path / "plain"))
    trainer(plain, model=tm.place(adapted, tm.Layout.make({"ep": 2}, transport="ragged"))).run(quiet=True)
    np.testing.assert_allclose([line["loss"] for line in of_run], [line["loss"] for line in lines(plain)], rtol=1e-4)


@pytest.mark.slow
def test_a_capacity_that_was_too_small_is_left_at_once(trainer, adapted, config, monkeypatch) -> None:
    """Also by a run that was stopped: it goes on with the capacity that it had come to."""
    run = config(train={"steps": 2, "eval_every": 0, "save_every": 2})
    options = {"transport": "all_to_all", "capacity": 0.02, "capacities": (0.02, 1.0)}
    model = tm.place(adapted, tm.Layout.make({"ep": 2}, **options))
    with monkeypatch.context() as patch:
        at(1, stop(), patch)
        trainer(run, model=model).run(quiet=True)
    trainer(run, model=model).run(quiet=True)
    first, second = lines(run)
    assert (first["capacity"], second["capacity"]) == (0.02, 1.0)
    assert first["dropped_assignments"] > second["dropped_assignments"] == 0
