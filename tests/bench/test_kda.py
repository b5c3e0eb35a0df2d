"""The benchmark beside tokamax: it refuses to run without it, and gives both the same problem."""

import jax
import jax.numpy as jnp
import pytest

from trillion_moe.bench import kda
from trillion_moe.kernels.linear_attention import Case


def test_without_tokamax() -> None:
    with pytest.raises(SystemExit, match=r"needs tokamax 0\.0\.17 and has None: make bench-kda brings it"):
        kda.measure(1)


def test_rivals_solve_one_problem(monkeypatch) -> None:
    """tokamax's place is taken by ours behind its layout [H, B, T, ...]: no difference, ratios of both passes."""

    def stand_in(q, k, v, z, a_log, beta):
        q, k, v, z, beta = (jnp.moveaxis(a, 0, 2) for a in (q, k, v, z, beta))
        return jnp.moveaxis(kda._ours(q, k, v, z, a_log, beta), 2, 0)

    monkeypatch.setattr(kda, "CASE", Case(B=1, T=40, H=3, K=8, V=8))
    monkeypatch.setattr(kda, "version", lambda name: kda.TOKAMAX)
    monkeypatch.setattr(kda, "_tokamax", stand_in)
    found = kda.measure(1)
    assert max(found["difference"], found["gradients_difference"]) < 1e-6
    for what in ("forward", "forward and gradients"):
        assert found[what]["time_over_tokamax"].keys() == {"of_medians", "of_minima"}
        assert found[what]["peak_mb"]["ours"] > 0


def test_a_rival_that_solves_another_problem_is_not_timed(monkeypatch) -> None:
    """Gradients too: here those to beta alone are of something else."""

    def stand_in(q, k, v, z, a_log, beta):
        q, k, v, z, beta = (jnp.moveaxis(a, 0, 2) for a in (q, k, v, z, beta))
        return jnp.moveaxis(kda._ours(q, k, v, z, a_log, jax.lax.stop_gradient(beta)), 2, 0)

    monkeypatch.setattr(kda, "CASE", Case(B=1, T=40, H=3, K=8, V=8))
    monkeypatch.setattr(kda, "version", lambda name: kda.TOKAMAX)
    monkeypatch.setattr(kda, "_tokamax", stand_in)
    with pytest.raises(ArithmeticError, match="dbeta differs from tokamax's by 1"):
        kda.measure(1)
