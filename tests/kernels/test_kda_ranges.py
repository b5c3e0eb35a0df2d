"""What ranges of tokens do to a state: shards of a sequence pass it on exactly, forward and backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.kernels.kda_tools import KERNELS, B, close, make
from tests.numerics import rel_rms

from trillion_moe.kernels.linear_attention import kda, kda_join, kda_range, pallas, ranges

SEGMENTS = np.stack([np.repeat([1, 2, 3], [37, 51, 40]), np.repeat([1, 0, 4], [70, 10, 48])])  # fault 17's documents


@pytest.fixture(autouse=True)
def _x64():
    with jax.enable_x64(True):
        yield


def sharded(x, state, segments, shards: int):
    """As devices would: every shard says what it does to a state, then runs from the state that comes to it."""
    parts = [tuple(a[:, at] for a in (*x, segments)) for at in np.split(np.arange(x[0].shape[1]), shards)]
    befores = [segments[:, 0]]
    for *_, mine in parts:  # the document that a shard leaves off in
        last = jnp.max(jnp.where(mine != 0, jnp.arange(mine.shape[1]), -1), axis=1)
        befores.append(jnp.where(last < 0, befores[-1], jnp.take_along_axis(mine, last[:, None], axis=1)[:, 0]))
    made = [
        kda_range(k, v, g, beta, segments=mine, state_segment=before)
        for (_, k, v, g, beta, mine), before in zip(parts, befores, strict=False)
    ]
    outs, reached = [], None
    for (*part, mine), before, one in zip(parts, befores, made, strict=False):
        entering = state if reached is None else reached[0] @ state + reached[1]
        o, _ = kda(*part, state=entering, segments=mine, state_segment=before)
        outs.append(o)
        reached = one if reached is None else kda_join(reached, one)
    return jnp.concatenate(outs, axis=1), reached[0] @ state + reached[1]


@pytest.mark.parametrize("shards", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_shards_equal_one_device_fault_9_17(shards) -> None:
    """fault 9, 17: documents that straddle the cut, a gate per head, all gradients through what the shards exchange."""
    x, state, cotangents = jax.tree.map(jnp.asarray, make(128))
    segments = jnp.asarray(SEGMENTS)

    def whole(x, state):
        return kda(*x, state=state, segments=segments, state_segment=segments[:, 0], impl="reference")

    results = []
    for run in (lambda x, state: sharded(x, state, segments, shards), whole):
        out, pull = jax.vjp(run, x, state)
        dx, dstate = pull(cotangents)
        results.append((*out, *dx, dstate))
    close(*results, "float64")


def test_join_is_an_operator_of_an_associative_scan() -> None:
    x, state, _ = jax.tree.map(jnp.asarray, make(12))
    made = [kda_range(*(a[:, at] for a in x[1:])) for at in np.split(np.arange(12), 4)]
    stacked = jax.tree.map(lambda *parts: jnp.stack(parts), *made)
    m, c = jax.lax.associative_scan(kda_join, stacked)
    assert rel_rms(m[-1] @ state + c[-1], kda(*x, state=state, impl="reference")[1]) < 1e-11
    with pytest.raises(ValueError, match="kda_join: ranges have shapes"):
        kda_join(made[0], jax.tree.map(lambda a: a[:1], made[1]))


def test_a_range_that_starts_a_document_forgets() -> None:
    x, _, _ = jax.tree.map(jnp.asarray, make(9))
    ones = jnp.ones((B, 9), jnp.int32)
    m, c = kda_range(*x[1:], segments=ones, state_segment=2 * jnp.ones(B, jnp.int32))
    assert not m.any()
    assert rel_rms(c, kda(*x, impl="reference")[1]) < 1e-11


def test_padding_alone_changes_nothing() -> None:
    x, _, _ = jax.tree.map(jnp.asarray, make(9))
    m, c = kda_range(*x[1:], segments=jnp.zeros((B, 9), jnp.int32), state_segment=jnp.ones(B, jnp.int32))
    assert np.array_equal(m, np.broadcast_to(np.eye(m.shape[-1]), m.shape))
    assert not c.any()


@pytest.mark.slow
@pytest.mark.parametrize("chip", sorted(KERNELS))
def test_by_the_kernels(chip) -> None:
    with jax.enable_x64(False):
        x, _, _ = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), make(70, -0.01))

        def run(*x, state):
            return pallas.kda(KERNELS[chip], *x, state=state, segments=None, state_segment=None, chunk=16)

        found = ranges.transition(run, *x[1:])
    want = kda_range(*(jnp.asarray(a, jnp.float64) for a in x[1:]), impl="reference")
    for got, exact in zip(found, want, strict=True):
        assert rel_rms(got, exact) < 1e-5


@pytest.mark.parametrize("shapes", [((3, 3), (1, 5)), ((2, 3, 3), (3, 5)), ((3, 1), (3, 5))])
def test_what_is_no_range_is_not_joined(shapes) -> None:
    m, c = map(jnp.ones, shapes)
    with pytest.raises(ValueError, match="kda_join: ranges have shapes"):
        kda_join((m, c), (m, c))


@pytest.mark.parametrize("impl", ["xla", "reference"])
def test_documents_may_be_of_any_integer_type(impl: str) -> None:
    x = jnp.ones((1, 2, 1, 2))

    def outputs(dtype: str, other: str) -> jax.Array:
        segments, before = jnp.array([[1, 2]], dtype), jnp.array([1], other)
        return kda(x, x, x, -x, x[..., 0], segments=segments, state_segment=before, impl=impl)[0]

    np.testing.assert_array_equal(outputs("int16", "int8"), outputs("int32", "int32"))
