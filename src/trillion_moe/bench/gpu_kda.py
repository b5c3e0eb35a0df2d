"""Kimi Delta Attention on an NVIDIA GPU at Kimi K3's width, against flash-linear-attention's Triton kernels (`fla`).

One sequence of 8,192 tokens, and eight packed documents of 1,024. Each, fla's too, is first checked on a few heads
against the portable form in float32: outputs, final state and every gradient.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trillion_moe.bench.clock import alternate, ratio, summary
from trillion_moe.kernels.linear_attention import CASES, Case, cases, kda

CASE = dataclasses.replace(CASES["kimi_k3"], T=8192)
DOCUMENTS = 8
TOLERANCE = 2e-2  # relative RMS in bfloat16
RIVAL = 5e-2  # of fla, whose rounding is its own: beyond it, fla solves another problem
CHECKED = 2  # heads
NAMES = ("o", "state", "dq", "dk", "dv", "dg", "dbeta")


def measure(impl: str, *, case: Case = CASE, rounds: int = 10, rival: bool = True) -> list[dict[str, Any]]:
    """Forward, and forward with the gradients to q, k, v, g and beta. off: relative RMS, the worst of all results.

    ArithmeticError for what is off by more than its bar, before it is timed.
    """
    q, k, v, g, beta = cases.inputs(case, dtype=jnp.bfloat16)
    x = (q, k, v, g.astype(jnp.float32), beta.astype(jnp.float32))
    do = jax.random.normal(jax.random.key(9), v.shape, v.dtype)
    packed = jnp.repeat(jnp.arange(1, DOCUMENTS + 1, dtype=jnp.int32), case.T // DOCUMENTS)[None]
    rows = []
    for layout, segments in (("one sequence", None), (f"{DOCUMENTS} documents", packed)):
        for what, form in (("forward", _forward), ("forward and gradients", _gradients)):
            run, named = form(impl, segments), f"KDA {what}, {layout}"
            want = form("xla", segments)([a[:, :, :CHECKED].astype(jnp.float32) for a in x], do[:, :, :CHECKED])
            off = {"ours": _off(named, run(x, do), want, TOLERANCE)}
            rivals: dict[str, Callable[[], Any]] = {"ours": lambda run=run: run(x, do)}
            if rival:
                rivals["fla"], results = _fla(x, do, segments, backward="gradients" in what)
                off["fla"] = _off(f"{named}, fla", results(), want, RIVAL)
            seconds = alternate(rivals, rounds)
            row = {"what": named, "off": off, **{name: summary(s) for name, s in seconds.items()}}
            if rival:
                faster = ratio(seconds["fla"], seconds["ours"])
                row["faster_than_fla"] = faster["of_minima"]
                row["time_over_fla"] = {name: 1 / value for name, value in faster.items()}
            rows.append(row)
    return rows


def _forward(impl: str, segments: jax.Array | None) -> Callable[..., Any]:
    return jax.jit(lambda x, do: kda(*x, segments=segments, impl=impl))


def _gradients(impl: str, segments: jax.Array | None) -> Callable[..., Any]:
    def run(x, do):
        o, pull, state = jax.vjp(lambda *x: kda(*x, segments=segments, impl=impl), *x, has_aux=True)
        return o, state, *pull(do.astype(o.dtype))

    return jax.jit(run)


def _off(named: str, found: Any, want: Any, bar: float) -> float:
    """The largest relative RMS of all results, over the heads that `want` has."""
    worst = 0.0
    for name, got, exact in zip(NAMES, found, want, strict=False):
        few = got[:, :CHECKED] if name == "state" else got[:, :, :CHECKED]
        off = jnp.mean(jnp.square(few.astype(jnp.float32) - exact)) / jnp.mean(jnp.square(exact))
        if not float(off) ** 0.5 <= bar:  # nor NaN
            raise ArithmeticError(f"{named}: {name} is off by {float(off) ** 0.5:.1e} (relative RMS)")
        worst = max(worst, float(off) ** 0.5)
    return worst


def _fla(
    x: tuple[jax.Array, ...], do: jax.Array, segments: jax.Array | None, backward: bool
) -> tuple[Callable[[], Any], Callable[[], list[jax.Array]]]:
    """`fla.ops.kda.chunk_kda` of the same arrays, handed over on the device: to be timed, and its results for us."""
    import torch  # pyright: ignore[reportMissingImports]
    from fla.ops.kda import chunk_kda  # pyright: ignore[reportMissingImports]

    inputs = [torch.from_dlpack(a).detach().requires_grad_(backward) for a in x]
    cotangent, starts = torch.from_dlpack(do), None
    if segments is not None:
        ends = np.cumsum(np.bincount(np.asarray(segments)[0])[1:])
        starts = torch.tensor([0, *ends], dtype=torch.int64, device="cuda")

    def run() -> list[Any]:
        q, k, v, g, beta = inputs
        o, states = chunk_kda(q, k, v, g, beta, scale=1.0, cu_seqlens=starts, output_final_state=True)
        grads = torch.autograd.grad(o, inputs, cotangent) if backward else ()
        torch.cuda.synchronize()
        return [o, states[-1:], *grads]  # the state of the last document

    return run, lambda: [jnp.from_dlpack(a.detach().contiguous()) for a in run()]
