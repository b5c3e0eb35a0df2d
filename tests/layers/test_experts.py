"""Two arrays that go with rows through their experts, so that what brings and takes them is hidden behind products."""

import jax
import jax.numpy as jnp
import numpy as np
from tests.numerics import rel_rms
from tests.tiny import tiny_k3

from trillion_moe.blueprint import init
from trillion_moe.layers.moe import Experts

CFG = tiny_k3()
EXPERTS = init(Experts(CFG, dtype="float32"), jax.random.key(0))
COUNTS = jnp.zeros(CFG.moe.num_experts, jnp.int32).at[jnp.array([1, 2])].set(jnp.array([7, 5]))
X = jnp.asarray(np.random.default_rng(0).normal(size=(12, EXPERTS.gate.shape[1])), jnp.float32)


def through(experts: Experts, x_RL, came_N, goes_N, turns: bool):
    """A number made of all four, linear in `came` and `goes`, as exchanges are."""
    came_N = jnp.sin(came_N)
    y_RL, two = experts(x_RL, COUNTS, CFG, (came_N, goes_N) if turns else ())
    came_N, goes_N = two or (came_N, goes_N)
    return jnp.sum(y_RL**2) + came_N @ jnp.arange(3.0) + goes_N @ jnp.arange(1.0, 4.0)


def test_values_and_gradients_are_as_without() -> None:
    at = EXPERTS, X, jnp.arange(3.0), jnp.ones(3)
    found, expected = (
        jax.value_and_grad(through, argnums=(0, 1, 2, 3), allow_int=True)(*at, turns) for turns in (True, False)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, expected)
    assert all(rel_rms(a, jnp.zeros_like(a)) > 0 for a in jax.tree.leaves(expected[1]))


def test_order_of_what_is_scheduled() -> None:
    """A barrier forward and one backward: nothing else keeps a compiler from one exchange after the other."""
    text = str(jax.make_jaxpr(jax.grad(lambda x: through(EXPERTS, x, jnp.arange(3.0), jnp.ones(3), True)))(X))
    assert text.count("optimization_barrier") == 2
