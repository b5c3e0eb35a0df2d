"""How far an implementation is from the definition, values and gradients, and how long it takes."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trillion_moe.verify.cases import Arrays, Case, Operator

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
"""Relative RMS, of the worst part of the worst array, that an operator's `factor` may change."""
RUNS = 3  # of which the best counts


@dataclasses.dataclass(frozen=True)
class Result:
    """error: the worst relative RMS, inf for what is not finite. where: of which array. time: seconds of the realistic
    cases, values and gradients. reason: why there is nothing of all this."""

    error: float = 0.0
    where: str = ""
    time: float = 0.0
    reason: str | None = None

    def worse(self, other: "Result") -> "Result":
        """Both taken together."""
        if self.reason or other.reason:
            return self if self.reason else other
        worst = max(self, other, key=lambda result: result.error)
        return dataclasses.replace(worst, time=self.time + other.time)


@dataclasses.dataclass(frozen=True)
class Problem:
    """A case in a dtype: floats rounded to it, cotangents (None where gradients are not compared), and the truth."""

    case: Case
    floats: Arrays
    cotangents: Arrays | None
    truth: dict[str, np.ndarray]

    @classmethod
    def of(cls, case: Case, dtype: str) -> "Problem":
        """Solved in float64 on the CPU, whatever the device that is verified."""
        floats = {n: a.astype(jnp.dtype("float32" if n in case.wide else dtype)) for n, a in case.floats.items()}
        exact = {name: a.astype(np.float64) for name, a in floats.items()}
        known, cotangents = case.known(exact), None
        with jax.default_device(jax.local_devices(backend="cpu")[0]), jax.enable_x64(True):
            if case.gradients:
                outputs = jax.eval_shape(case.reference, exact, known)
                cotangents = {name: _cotangent(case, i, a.shape, dtype) for i, (name, a) in enumerate(outputs.items())}
            truth = _solve(case.reference, exact, known, cotangents)
            return cls(case, floats, cotangents, {name: np.asarray(a) for name, a in truth.items()})


# Cases that share `run` or `reference` share what is compiled.


@partial(jax.jit, static_argnums=0)
def _solve(reference: Any, floats: Arrays, known: Arrays, cotangents: Arrays | None) -> Arrays:
    return _with_gradients(lambda floats: reference(floats, known), floats, cotangents)


@partial(jax.jit, static_argnums=(0, 1))
def _run(run: Any, implementation: str, floats: Arrays, constants: Arrays, cotangents: Arrays | None) -> Arrays:
    return _with_gradients(lambda floats: run(implementation, floats, constants), floats, cotangents)


def _with_gradients(run: Callable[[Arrays], Arrays], floats: Arrays, cotangents: Arrays | None) -> Arrays:
    """The arrays of `run` and, unless there are no cotangents, the gradients of the floats."""
    if cotangents is None:
        return run(floats)
    outputs, back = jax.vjp(run, floats)
    (gradients,) = back({name: cotangents[name].astype(a.dtype) for name, a in outputs.items()})
    return outputs | {f"gradient of {name}": a for name, a in gradients.items()}


def _cotangent(case: Case, seed: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """float32 numbers that the dtype holds."""
    dy = np.random.default_rng(seed).standard_normal(shape, np.float32)
    dy = np.asarray(np.abs(dy) if case.positive else dy)
    if case.dead is not None:
        dy[case.dead :] = np.nan
    return dy.astype(jnp.dtype(dtype)).astype(np.float32)


def tolerance(operator: Operator, dtype: str) -> float:
    return TOLERANCE[dtype] * operator.factor.get(dtype, 1.0)


def measure(problem: Problem, implementation: str) -> Result:
    """An implementation that raises, while it is compiled or run, is unavailable: whatever it raises is the reason."""
    case, here = problem.case, jax.default_backend()
    if implementation in ("tpu", "gpu") and implementation != here:
        return Result(reason=f"a kernel for {implementation.upper()}s; JAX runs on {here}")
    try:
        constants = case.prepare(implementation, dict(case.constants))
        arguments = jax.device_put((problem.floats, constants, problem.cotangents))
        program = partial(_run, case.run, implementation)
        found = jax.block_until_ready(program(*arguments))
        seconds = min(_seconds(program, arguments) for _ in range(RUNS)) if case.realistic else 0.0
    except Exception as error:
        first = next(iter(str(error).strip().splitlines()), "")
        return Result(reason=f"{case.name}: {type(error).__name__}: {first}")
    error, where = worst_error(case, found, problem.truth)
    return Result(error, f"{case.name}, {where}", seconds)


def _seconds(program: Any, arguments: Any) -> float:
    start = time.perf_counter()
    jax.block_until_ready(program(*arguments))
    return time.perf_counter() - start


def worst_error(case: Case, found: Mapping[str, Any], truth: Mapping[str, np.ndarray]) -> tuple[float, str]:
    """-> the largest error of any part of any array, and where that is."""
    errors = [
        (error(np.asarray(found[name], np.float64)[part], truth[name][part]), f"{name}{text}")
        for name in truth
        for part, text in _parts(case, name)
    ]
    return max(errors, key=lambda pair: pair[0])


def _parts(case: Case, name: str) -> Iterator[tuple[Any, str]]:
    parts = case.parts.get(name.removeprefix("gradient of "))
    if parts is None:
        yield ..., ""
        return
    for i, part in enumerate(parts):
        yield part, f" part {i}"


def error(found: np.ndarray, truth: np.ndarray) -> float:
    """Relative RMS; where the truth is all 0, anything else is inf, as is what is not finite where the truth is."""
    if not truth.size:
        return 0.0
    if found.shape != truth.shape or not np.isfinite(found[np.isfinite(truth)]).all():
        return math.inf
    size = float(np.abs(truth).max())
    if not size:
        return math.inf if found.any() else 0.0
    found, truth = found / size, truth / size  # else squares of the largest float32 numbers sum to inf
    return float(np.sqrt(np.mean((found - truth) ** 2) / np.mean(truth**2)))
