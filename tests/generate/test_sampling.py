"""The choice of a token: cuts against their definition, draws against their distribution, rows against each other."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trillion_moe as tm
from trillion_moe.sampling import Sampler, SamplingConfig, _cut, choose

LOGITS = np.log(np.array([0.4, 0.25, 0.15, 0.1, 0.06, 0.04]))
chosen = jax.jit(choose)


def draws(config: SamplingConfig, logits=LOGITS, count=4000, prompt=()) -> np.ndarray:
    """How often each token comes, over `count` seeds."""
    configs = [SamplingConfig(**{**vars(config), "seed": seed}) for seed in range(count)]
    sampler = Sampler.of(configs, [list(prompt)] * count, len(logits))
    tokens, _ = chosen(jnp.tile(jnp.asarray(logits, jnp.float32), (count, 1)), sampler)
    return np.bincount(np.asarray(tokens), minlength=len(logits)) / count


def kept(p: np.ndarray, keep) -> np.ndarray:
    left = np.where(keep, p, 0)
    return left / left.sum()


P = np.exp(LOGITS)
HOT = np.exp(LOGITS / 2) / np.exp(LOGITS / 2).sum()
EXPECTED = {
    "all": (SamplingConfig(1.0), P),
    "temperature": (SamplingConfig(2.0), HOT),
    "top_k": (SamplingConfig(1.0, top_k=2), kept(P, [1, 1, 0, 0, 0, 0])),
    "top_k of more than there are": (SamplingConfig(1.0, top_k=99), P),
    "top_p between two sums": (SamplingConfig(1.0, top_p=0.7), kept(P, [1, 1, 1, 0, 0, 0])),
    "top_p below the first": (SamplingConfig(1.0, top_p=0.1), kept(P, [1, 0, 0, 0, 0, 0])),
    "top_p of what top_k left": (SamplingConfig(1.0, top_k=3, top_p=0.8), kept(P, [1, 1, 0, 0, 0, 0])),
    "top_p of the heated": (SamplingConfig(2.0, top_p=0.45), kept(HOT, [1, 1, 0, 0, 0, 0])),
    "min_p": (SamplingConfig(1.0, min_p=0.3), kept(P, [1, 1, 1, 0, 0, 0])),
    "min_p of 1": (SamplingConfig(1.0, min_p=1.0), kept(P, [1, 0, 0, 0, 0, 0])),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_draws_follow_the_definition(name) -> None:
    """Tokens that are ruled out never come; the others within four standard errors."""
    config, expected = EXPECTED[name]
    found = draws(config)
    assert not found[expected == 0].any()
    assert (np.abs(found - expected) <= 4 * np.sqrt(expected * (1 - expected) / 4000) + 1e-9).all(), found


def test_ties_at_the_cut_stay() -> None:
    found = draws(SamplingConfig(1.0, top_k=2), np.log([0.4, 0.3, 0.3]))
    assert (found > 0.2).all()


def test_top_p_takes_only_as_many_of_equals_as_it_needs() -> None:
    found = draws(SamplingConfig(1.0, top_p=0.3), np.zeros(8))
    assert np.count_nonzero(found) == 3


def test_the_coldest_draw_is_greedy() -> None:
    """Large logits over the least temperature do not overflow."""
    logits = [3e4, 2.9e4, -3e4]
    assert draws(SamplingConfig(1e-3), logits, count=20).tolist() == [1, 0, 0]


def test_barred_tokens_never_come() -> None:
    for config in (SamplingConfig(), SamplingConfig(1.0)):
        sampler = Sampler.of([config], [[0]], 4, barred=[2, 3])
        tokens = set()
        for _ in range(30):
            token, sampler = chosen(jnp.array([[0.0, 0.1, 9.0, 8.0]]), sampler)
            tokens.add(int(token[0]))
        assert tokens <= {0, 1}


def test_cuts_are_those_of_transformers() -> None:
    """Top-k, top-p and min-p one after the other, ties among them; needs transformers and torch (extra `parity`)."""
    torch = pytest.importorskip("torch")
    processors = pytest.importorskip("transformers.generation.logits_process")
    logits = np.round(np.random.default_rng(0).normal(size=(20, 60)), 1).astype(np.float32)
    for k, p, m in ((7, 1.0, 0.0), (None, 0.8, 0.0), (None, 1.0, 0.1), (12, 0.7, 0.05)):
        expected = torch.tensor(logits)
        if k:
            expected = processors.TopKLogitsWarper(k)(None, expected)
        if p < 1:
            expected = processors.TopPLogitsWarper(p)(None, expected)
        if m:
            expected = processors.MinPLogitsWarper(m)(None, expected)
        sampler = Sampler.of([SamplingConfig(1.0, k, p, m)] * 20, [[0]] * 20, 60)
        kept = np.isfinite(np.asarray(_cut(jnp.asarray(logits), sampler)))
        np.testing.assert_array_equal(kept.sum(axis=1), np.isfinite(expected.numpy()).sum(axis=1))


def test_repetition_penalty_divides_or_multiplies() -> None:
    """Of tokens in the prompt and of drawn ones: 2 / 1.5 < 1.5 < 2, and -1 * 1.5 < -1.2."""
    config = SamplingConfig(repetition_penalty=1.5)
    for logits, expected in (([2.0, 1.5, 0.0], 1), ([-1.0, -1.2, -9.0], 1), ([2.0, 1.2, 0.0], 0)):
        token, sampler = chosen(jnp.array([logits]), Sampler.of([config], [[0]], 3))
        assert int(token[0]) == expected
        np.testing.assert_array_equal(sampler.seen[0], [i in (0, expected) for i in range(3)])


def test_rows_choose_for_themselves() -> None:
    """Each kind of row gives in a mixed batch what it gives alone; drawing goes on in another way at every step."""
    configs = [SamplingConfig(), *(config for config, _ in EXPECTED.values()), SamplingConfig(0.7, seed=9)]
    logits = jax.random.normal(jax.random.key(0), (len(configs), 50))
    mixed = Sampler.of(configs, [[1, 2]] * len(configs), 50)
    steps = []
    for _ in range(20):
        tokens, mixed = chosen(logits, mixed)
        steps.append(np.asarray(tokens))
    assert all(token == int(jnp.argmax(logits[0])) for token in np.stack(steps)[:, 0])
    assert len(set(np.stack(steps)[:, -1].tolist())) > 5
    for row, config in enumerate(configs):
        alone = Sampler.of([config], [[1, 2]], 50)
        for step in steps:
            token, alone = chosen(logits[row : row + 1], alone)
            assert int(token[0]) == step[row]


def test_greedy_costs_nothing_more() -> None:
    sampler = Sampler.of([SamplingConfig(seed=3, top_k=5)] * 2, [[1], [2]], 9)
    assert len(jax.tree.leaves(sampler)) == 1  # `drawn`
    assert "sort" not in str(jax.make_jaxpr(choose)(jnp.zeros((2, 9)), sampler))


@pytest.mark.parametrize(
    ("setting", "value", "legal"),
    [
        ("temperature", -0.1, "0 for greedy, or 0.001 to 1000"),
        ("temperature", 1e-30, "0 for greedy, or 0.001 to 1000"),
        ("temperature", float("nan"), "0 for greedy, or 0.001 to 1000"),
        ("top_k", 0, "an integer >= 1, or None for off"),
        ("top_p", 0.0, "above 0 and at most 1"),
        ("top_p", 1.5, "above 0 and at most 1"),
        ("min_p", -1.0, "from 0 to 1"),
        ("repetition_penalty", 0.0, "0.01 to 100, 1 for off"),
        ("repetition_penalty", 1e39, "0.01 to 100, 1 for off"),
        ("seed", -1, "an integer from 0 to 2^32 - 1"),
    ],
)
def test_settings_out_of_range_are_named(setting, value, legal) -> None:
    with pytest.raises(tm.InputError, match=re.escape(f"{setting} is {value}; legal is {legal}")):
        SamplingConfig(**{setting: value})
