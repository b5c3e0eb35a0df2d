"""A run that balances experts: what updates do to the biases of routers, what is kept of them, what is refused."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from tests.tiny import MOE, tiny_k3
from tests.train.test_trainer import arrays, at, equal, lines, saved, stop

import trillion_moe as tm
from trillion_moe.balance import BalanceConfig
from trillion_moe.run_config import RunConfigError, check_balance, from_json, load_run_config
from trillion_moe.train import checkpoints

BALANCE = BalanceConfig(method="quantile", ema=0.25, sequence_loss=0.01)
RUN = {"lora": None, "train": {"steps": 4, "dropout": 0.0, "eval_every": 2, "save_every": 2, "balance": BALANCE}}
BIAS = "layers.0.ffn.router.bias"


@pytest.fixture(scope="module")
def plain(folder):
    return jax.device_put(tm.load(folder), jax.devices()[0])


@pytest.fixture
def started(trainer, plain, rows, config):
    """Makes the trainer of a run, by default `RUN`; a configuration is made for each name."""

    def started(name: str, model=None, **changes):
        here = Path(config().output).with_name(name)
        settings = config(**RUN | changes, output=str(here))
        return settings, trainer(settings, held_out=rows(3, first=10), model=model or plain)

    return started


def test_a_stopped_run_has_the_biases_of_an_unbroken_one(started, monkeypatch) -> None:
    """Bit for bit: they are in its checkpoints, and the last ones are in the model."""
    whole, run = started("whole")
    before, result = np.asarray(arrays(run.frozen)[BIAS]), run.run(quiet=True)
    settings, run = started("stopped")
    with monkeypatch.context() as patch:
        at(3, stop(), patch)
        assert run.run(quiet=True).step == 3
    settings, run = started("stopped")
    assert run.step == 3
    assert np.asarray(arrays(run.frozen)[BIAS]).any()
    again = run.run(quiet=True)
    assert lines(settings) == lines(whole)
    equal(again.model, result.model)
    assert (before == 0).all()
    assert len(set(np.asarray(arrays(result.model)[BIAS]))) > 4
    assert all((line.get("sequence_loss", 0) > 0) == (line["kind"] == "train") for line in lines(whole))
    assert saved(settings)[-1] == 4


def test_updates_alone_move_biases(started) -> None:
    """Evaluation does not; of the best update, which is not the last, the biases come back with the weights."""
    _, run = started("evaluated")
    start = jax.tree.map(np.array, run.frozen)
    run._evaluated()
    equal(run.frozen, start)
    settings, run = started("best")
    last = np.array(arrays(run.run(quiet=True).model)[BIAS])
    run.best_step = 2
    result = run._best()
    assert not np.array_equal(arrays(result.model)[BIAS], last)
    kept = next(one for one in checkpoints.found(Path(settings.output)) if one.step == 2)
    best = np.array(arrays(result.model)[BIAS])
    *_, biases = checkpoints.restore(kept, run._arrays(), part=True)
    np.testing.assert_array_equal(arrays(biases)[BIAS], best)
    assert best.any()


@pytest.mark.slow
def test_over_a_mesh(started, plain) -> None:
    """The same updates; signs, from counts that are whole numbers, to the last bit."""
    signs = RUN["train"] | {"balance": BalanceConfig(method="sign", rate=0.01)}
    one, run = started("one", train=signs)
    expected = run.run(quiet=True)
    cut, run = started("cut", train=signs, model=tm.place(plain, tm.Layout.make({"ep": 2, "cp": 2})))
    found = run.run(quiet=True)
    np.testing.assert_array_equal(arrays(found.model)[BIAS], arrays(expected.model)[BIAS])
    assert np.abs(arrays(found.model)[BIAS]).max() == pytest.approx(0.04)
    for a, b in zip(lines(cut), lines(one), strict=True):
        assert a.get("expert_counts") == b.get("expert_counts")
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"method": "sign"}, "rate = None: legal is above 0 with method 'sign', null without"),
        ({"method": "quantile", "rate": 0.1}, "rate = 0.1: legal is above 0 with method 'sign', null without"),
        (
            {"method": "sign", "rate": 1.0, "ema": 0.5},
            "ema = 0.5: legal is at least 0 and below 1 with method",
        ),
        ({"method": "quantile", "ema": 1.0}, "ema = 1.0: legal is at least 0 and below 1"),
        ({"sequence_loss": -0.1}, "sequence_loss = -0.1: legal is at least 0"),
        ({}, "neither method nor sequence_loss is given: balance = null says that"),
        ({"method": "random"}, "Input should be 'quantile' or 'sign'"),
        ({"methods": "sign"}, "no such field; legal here: method, rate, ema, sequence_loss"),
    ],
)
def test_settings_that_are_not_legal(settings: dict, says: str) -> None:
    run = {"model": "m", "data": "d", "lora": None, "train": {"balance": settings}}
    with pytest.raises(RunConfigError) as error:
        from_json(json.dumps(run), "run.json")
    assert says in str(error.value)


def test_settings_without_effect(started, tmp_path) -> None:
    set_ = ["model=m", "data=d", "train.balance.method=quantile"]
    with pytest.raises(RunConfigError, match=r"train\.balance is given with lora: legal is null"):
        load_run_config("lora", set_)
    config = load_run_config("lora", [*set_, "lora=null"])
    assert config.train.balance == BalanceConfig(method="quantile")
    for cfg, says in (
        (tiny_k3(mlp=("dense",) * 5, moe=None), "the model has no layer with routed experts"),
        (tiny_k3(moe=_moe(top_k=8)), "a token has all 8 experts"),
        (tiny_k3(moe=_moe(num_groups=4, topk_groups=2)), "has no meaning for 4 groups"),
    ):
        with pytest.raises(RunConfigError, match=says):
            check_balance(config, cfg)
    check_balance(load_run_config("lora", [*set_, "lora=null"]), tiny_k3())


def _moe(**changes):
    return dataclasses.replace(MOE, **changes)
