"""Kernels on an NVIDIA GPU at Kimi K3's shapes.

Grouped matmul against `torch._grouped_mm` and the card's own dense rate, Kimi Delta Attention (`gpu_kda.py`) against
fla.

    python -m trillion_moe.bench.gpu [--only grouped|kda] [--experts 112 --experts 56] [--rounds 10] [--output FILE]

Each kernel is first checked: a few groups' rows against a float32 product of decoded weights. Minutes in all.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trillion_moe.bench import gpu_kda
from trillion_moe.bench.clock import alternate, ratio, summary
from trillion_moe.bench.machine import machine
from trillion_moe.kernels import mxfp4
from trillion_moe.kernels.grouped_matmul import Situ, cases, gated_grouped_matmul, grouped_matmul
from trillion_moe.kernels.mxfp4 import gated_grouped_matmul_mxfp4, grouped_matmul_mxfp4

ROWS, LATENT, HIDDEN = 65_536, 3584, 3072
SITU = Situ(4.0, 25.0)
TOLERANCE = 2e-2  # relative RMS in bfloat16
Run = Callable[[], Any]


@dataclass(frozen=True)
class Problem:
    """bfloat16 rows and banks of one device, and the same banks packed, in the layout of `impl`'s kernel."""

    impl: str
    sizes: jax.Array
    x: jax.Array
    dy: jax.Array
    banks: tuple[jax.Array, jax.Array]
    packed: tuple[tuple[jax.Array, jax.Array], ...]
    layout: str

    @classmethod
    def of(cls, impl: str, experts: int, rows: int, k: int, n: int) -> "Problem":
        random = np.random.default_rng(0)
        layout = mxfp4.LAYOUT.get(impl, "nk")
        shapes = [(experts, n, k // each) if layout == "nk" else (experts, k // each, n) for each in (2, 32)]
        packed = tuple(
            (
                jnp.asarray(random.integers(0, 256, shapes[0], np.uint8)),
                jnp.asarray(random.integers(118, 124, shapes[1], np.uint8)),
            )
            for _ in range(2)
        )
        decode = jax.jit(partial(mxfp4.decode, layout=layout, dtype=jnp.bfloat16))
        decoded = [decode(*one) for one in packed]
        banks = [w if layout == "kn" else jnp.swapaxes(w, 1, 2) for w in decoded]
        x, dy = (
            jax.random.normal(jax.random.key(i), (rows, width), jnp.bfloat16) / width**0.5
            for i, width in enumerate((k, n))
        )
        return cls(impl, jnp.asarray(cases.zipf(rows, experts)), x, dy, (banks[0], banks[1]), packed, layout)

    def runs(self) -> Iterator[tuple[str, int, Callable[..., Any], tuple[Any, ...]]]:
        """Name, number of products, function and its arguments."""
        impl, layout, sizes = self.impl, self.layout, self.sizes

        def dense(x, w):
            return grouped_matmul(x, w, sizes, impl=impl)

        def packed(x, bank):
            return grouped_matmul_mxfp4(x, bank[0], bank[1], sizes, layout=layout, impl=impl)

        def gated(x, w):
            return gated_grouped_matmul(x, w[0], w[1], sizes, SITU, impl=impl)

        def gated_packed(x, w):
            return gated_grouped_matmul_mxfp4(x, w[0], w[1], sizes, SITU, layout=layout, impl=impl)

        def gradient(f, of, x, w, dy):
            _, vjp = jax.vjp(f, x, w) if of is None else jax.vjp(lambda x: f(x, w), x)
            return vjp(dy)

        yield "bf16 forward", 1, dense, (self.x, self.banks[0])
        yield "bf16 both gradients", 2, partial(gradient, dense, None), (self.x, self.banks[0], self.dy)
        yield "MXFP4 forward", 1, packed, (self.x, self.packed[0])
        yield "MXFP4 row gradient", 1, partial(gradient, packed, 0), (self.x, self.packed[0], self.dy)
        yield "bf16 gate and up", 2, gated, (self.x, self.banks)
        yield "MXFP4 gate and up", 2, gated_packed, (self.x, self.packed)

    def rows(self, expert: int) -> slice:
        start, size = int(self.sizes[:expert].sum()), int(self.sizes[expert])
        return slice(start, start + size)

    def expected(self, name: str, expert: int) -> list[jax.Array]:
        """What a run gives for the rows of one expert (of a bank's gradient, for the expert), in float32."""
        rows = self.rows(expert)
        x, dy = (a[rows].astype(jnp.float32) for a in (self.x, self.dy))
        gate, up = (w[expert].astype(jnp.float32) for w in self.banks)
        if "gate" in name:
            return [SITU(_exact(x, gate), _exact(x, up))]
        if "gradient" not in name:
            return [_exact(x, gate)]
        return [_exact(dy, gate.T), *([_exact(x.T, dy)] if "both" in name else [])]

    def error(self, name: str, found: Any, expert: int) -> float:
        """Relative RMS over one expert, the worst of a run's results."""
        arrays = jax.tree.leaves(found)
        parts = [arrays[0][self.rows(expert)], *(a[expert] for a in arrays[1:])]
        return max(map(_relative_rms, parts, self.expected(name, expert)))


def _exact(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def _relative_rms(found: jax.Array, expected: jax.Array) -> float:
    difference = jnp.mean(jnp.square(found.astype(jnp.float32) - expected))
    return float(jnp.sqrt(difference / jnp.mean(jnp.square(expected))))


def measure(
    impl: str, experts: int, *, rows: int = ROWS, k: int = LATENT, n: int = HIDDEN, rounds: int = 10, rival: bool = True
) -> list[dict[str, Any]]:
    """A row for each kernel. ArithmeticError for one that computes something else, before it is timed."""
    problem, results = Problem.of(impl, experts, rows, k, n), []
    side = min(8192, 2 * k)
    square = jnp.ones((side, side), jnp.bfloat16)
    matmul = jax.jit(jnp.matmul)
    for name, products, f, args in problem.runs():
        run = jax.jit(f)
        found = run(*args)
        for expert in sorted({0, experts // 2, experts - 1}):
            if not (error := problem.error(name, found, expert)) <= TOLERANCE:  # nor NaN
                raise ArithmeticError(f"{name}: expert {expert} is off by {error:.1e} (relative RMS)")
        del found
        rivals: dict[str, Run] = {
            "ours": lambda run=run, args=args: run(*args),
            "dense": lambda: matmul(square, square),
        }
        if rival and name.startswith("bf16") and "gate" not in name:
            rivals["torch"] = _torch(problem, name)
        seconds = alternate(rivals, rounds)
        rate = 2 * rows * k * n * products / min(seconds["ours"])
        row = {"experts": experts, "what": name, "tflops": rate / 1e12, **{r: summary(s) for r, s in seconds.items()}}
        row["share_of_dense_rate"] = rate / (2 * side**3 / min(seconds["dense"]))
        if "torch" in seconds:
            row["faster_than_torch"] = ratio(seconds["torch"], seconds["ours"])["of_minima"]
        results.append(row)
    return results


def _torch(problem: Problem, name: str) -> Run:
    """`torch._grouped_mm` of the same arrays, handed over on the device."""
    import torch  # pyright: ignore[reportMissingImports]

    grouped_mm: Any = vars(torch)["_grouped_mm"]  # of no public module
    x, dy, w = (torch.from_dlpack(a) for a in (problem.x, problem.dy, problem.banks[0]))
    offsets = torch.from_dlpack(jnp.cumsum(problem.sizes).astype(jnp.int32))
    x, w = (a.detach().requires_grad_("gradient" in name) for a in (x, w))
    y = grouped_mm(x, w, offs=offsets)

    def run() -> None:
        if "gradient" in name:
            torch.autograd.grad(y, (x, w), dy, retain_graph=True)
        else:
            grouped_mm(x, w, offs=offsets)
        torch.cuda.synchronize()

    return run


def main() -> int:
    parser = argparse.ArgumentParser(prog="trillion_moe.bench.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("grouped", "kda"), help="both by default")
    parser.add_argument("--experts", type=int, action="append", help="of one device; 112 and 56 (EP8, EP16) by default")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--without-torch", action="store_true", help="no rivals: neither torch nor fla is needed")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    args = parser.parse_args()
    if jax.default_backend() != "gpu":
        print(f"an NVIDIA GPU is needed, JAX has {jax.default_backend()}: see trillion-moe doctor", file=sys.stderr)
        return 1
    results: dict[str, Any] = {"machine": machine() | {"device": jax.devices()[0].device_kind}, "rows": []}
    for experts in () if args.only == "kda" else args.experts or (112, 56):
        for row in measure("gpu", experts, rounds=args.rounds, rival=not args.without_torch):
            results["rows"].append(row)
            torch = f", {row['faster_than_torch']:.2f}x torch" if "faster_than_torch" in row else ""
            print(
                f"E={experts:<4} {row['what']:22} {row['tflops']:6.0f} TFLOP/s, "
                f"{row['share_of_dense_rate']:.0%} of a dense matmul's{torch}",
                flush=True,
            )
    for row in (
        () if args.only == "grouped" else gpu_kda.measure("gpu", rounds=args.rounds, rival=not args.without_torch)
    ):
        results["rows"].append(row)
        fla = f", {row['faster_than_fla']:.2f}x fla" if "faster_than_fla" in row else ""
        print(f"{row['what']}: {row['ours']['min_ms']:.2f} ms{fla}", flush=True)
    if args.output:
        args.output.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
