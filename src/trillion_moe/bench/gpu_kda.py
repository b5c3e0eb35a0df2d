"""Kimi Delta Attention on an NVIDIA GPU at Kimi K3's width, against flash-linear-attention's Triton kernels (`fla`).

One sequence of 8,192 tokens, and eight packed documents of 1,024. Each is first checked on a few heads against the
portable form in float32.
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
CHECKED = 2  # heads


def measure(impl: str, *, case: Case = CASE, rounds: int = 10, rival: bool = True) -> list[dict[str, Any]]:
    """Forward, and forward with the gradients to q, k, v, g and beta. ArithmeticError for what is off."""
    q, k, v, g, beta = cases.inputs(case, dtype=jnp.bfloat16)
    x = (q, k, v, g.astype(jnp.float32), beta.astype(jnp.float32))
    do = jax.random.normal(jax.random.key(9), v.shape, v.dtype)
    packed = jnp.repeat(jnp.arange(1, DOCUMENTS + 1, dtype=jnp.int32), case.T // DOCUMENTS)[None]
    rows = []
    for layout, segments in (("one sequence", None), (f"{DOCUMENTS} documents", packed)):
        for what, form in (("forward", _forward), ("forward and gradients", _gradients)):
            run = form(impl, segments)
            _check(what, run(x, do), form("xla", segments), x, do)
            rivals: dict[str, Callable[[], Any]] = {"ours": lambda run=run: run(x, do)}
            if rival:
                rivals["fla"] = _fla(x, do, segments, backward="gradients" in what)
            seconds = alternate(rivals, rounds)
            row = {"what": f"KDA {what}, {layout}", **{name: summary(s) for name, s in seconds.items()}}
            if rival:
                row["faster_than_fla"] = ratio(seconds["fla"], seconds["ours"])["of_minima"]
            rows.append(row)
    return rows


def _forward(impl: str, segments: jax.Array | None) -> Callable[..., Any]:
    return jax.jit(lambda x, do: (kda(*x, segments=segments, impl=impl)[0],))


def _gradients(impl: str, segments: jax.Array | None) -> Callable[..., Any]:
    def run(x, do):
        o, pull = jax.vjp(lambda *x: kda(*x, segments=segments, impl=impl)[0], *x)
        return o, *pull(do)

    return jax.jit(run)


def _check(what: str, found: Any, exact: Callable[..., Any], x: tuple[jax.Array, ...], do: jax.Array) -> None:
    few = [a[:, :, :CHECKED].astype(jnp.float32) for a in (*x, do)]
    for name, got, want in zip(("o", "dq", "dk", "dv", "dg", "dbeta"), found, exact(few[:-1], few[-1]), strict=False):
        off = jnp.mean(jnp.square(got[:, :, :CHECKED].astype(jnp.float32) - want)) / jnp.mean(jnp.square(want))
        if not float(off) ** 0.5 <= TOLERANCE:  # nor NaN
            raise ArithmeticError(f"KDA {what}: {name} is off by {float(off) ** 0.5:.1e} (relative RMS)")


def _fla(x: tuple[jax.Array, ...], do: jax.Array, segments: jax.Array | None, backward: bool) -> Callable[[], Any]:
    """`fla.ops.kda.chunk_kda` of the same arrays, handed over on the device."""
    import torch  # pyright: ignore[reportMissingImports]
    from fla.ops.kda import chunk_kda  # pyright: ignore[reportMissingImports]

    inputs = [torch.from_dlpack(a).detach().requires_grad_(backward) for a in x]
    cotangent, starts = torch.from_dlpack(do), None
    if segments is not None:
        ends = np.cumsum(np.bincount(np.asarray(segments)[0])[1:])
        starts = torch.tensor([0, *ends], dtype=torch.int64, device="cuda")

    def run() -> None:
        q, k, v, g, beta = inputs
        o, _ = chunk_kda(q, k, v, g, beta, scale=1.0, cu_seqlens=starts)
        if backward:
            torch.autograd.grad(o, inputs, cotangent)
        torch.cuda.synchronize()

    return run
