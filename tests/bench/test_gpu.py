"""The benchmark for GPUs: it checks what it times, here with the portable implementation at small sizes."""

import jax
import pytest

from trillion_moe.bench import gpu, gpu_kda
from trillion_moe.kernels import linear_attention, mxfp4
from trillion_moe.kernels.linear_attention import Case

SMALL = {"rows": 96, "k": 64, "n": 48, "rounds": 1, "rival": False}


@pytest.mark.slow
def test_every_kernel_is_checked_and_timed() -> None:
    rows = gpu.measure("xla", 4, **SMALL)
    names = ["bf16 forward", "bf16 both gradients", "MXFP4 forward", "MXFP4 row gradient"]
    assert [row["what"] for row in rows] == [*names, "bf16 gate and up", "MXFP4 gate and up"]
    assert all(row["tflops"] > 0 and row["share_of_dense_rate"] > 0 for row in rows)


@pytest.mark.slow
def test_a_kernel_that_is_wrong_is_not_timed(monkeypatch) -> None:
    right = mxfp4.IMPLS["xla"]

    def wrong(x, packed, scale, sizes, layout):
        return right(x, (packed >> 4) | (packed << 4), scale, sizes, layout)

    monkeypatch.setitem(mxfp4.IMPLS, "xla", wrong)
    with pytest.raises(ArithmeticError, match="MXFP4 forward: expert 0 is off by"):
        gpu.measure("xla", 4, **SMALL)


@pytest.mark.slow
def test_kda_is_checked_and_timed(monkeypatch) -> None:
    small = Case(B=1, T=64, H=3, K=16, V=8)
    rows = gpu_kda.measure("xla", case=small, rounds=1, rival=False)
    whats = [f"KDA {what}, {how}" for how in ("one sequence", "8 documents") for what in WHATS]
    assert [row["what"] for row in rows] == whats
    monkeypatch.setitem(linear_attention.IMPLS, "gpu", _without_decay)
    with pytest.raises(ArithmeticError, match="KDA forward, one sequence: o is off by"):
        gpu_kda.measure("gpu", case=small, rounds=1, rival=False)


@pytest.mark.slow
def test_kda_s_rival_is_checked_too(monkeypatch) -> None:
    """In fla's place: the recurrence, which is timed, and one that forgets to decay when it takes gradients."""
    small = Case(B=1, T=64, H=3, K=16, V=8)
    impls = {False: "reference", True: "reference"}

    def stand_in(x, do, segments, backward):
        run = (gpu_kda._gradients if backward else gpu_kda._forward)(impls[backward], segments)
        return lambda: run(x, do), lambda: list(run(x, do))

    monkeypatch.setattr(gpu_kda, "_fla", stand_in)
    for row in gpu_kda.measure("xla", case=small, rounds=1):
        assert row["off"].keys() == {"ours", "fla"}
        assert row["time_over_fla"].keys() == {"of_medians", "of_minima"}
    monkeypatch.setitem(linear_attention.IMPLS, "gpu", _without_decay)
    impls[True] = "gpu"
    with pytest.raises(ArithmeticError, match="KDA forward and gradients, one sequence, fla: o is off by"):
        gpu_kda.measure("xla", case=small, rounds=1)


WHATS = ("forward", "forward and gradients")


def _without_decay(q, k, v, g, beta, **options):
    return linear_attention.IMPLS["xla"](q, k, v, 0 * g, beta, **options)


def test_without_a_gpu(monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["gpu"])
    assert jax.default_backend() == "cpu"
    assert gpu.main() == 1
    assert "an NVIDIA GPU is needed, JAX has cpu" in capsys.readouterr().err
