"""How long single calls take, and how that is distributed."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

WARM_UP = 3
"""Calls that are not counted, besides the one whose result is checked."""


@dataclass(frozen=True)
class Seconds:
    """Of `calls` calls, each from the call on until its result is there. Percentiles lie between two calls in
    proportion, so p99 of fewer than a hundred is close to the greatest."""

    calls: int
    mean: float
    p50: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Seconds":
        p50, p95, p99, most = (float(x) for x in np.percentile(seconds, (50, 95, 99, 100)))
        return cls(len(seconds), float(np.mean(seconds)), p50, p95, p99, most)


def timed(call: Callable[[], Any], calls: int) -> list[float]:
    """Seconds of each of `calls` calls, one after the other, behind `WARM_UP` that are not counted."""
    for _ in range(WARM_UP):
        jax.block_until_ready(call())
    found = []
    for _ in range(calls):
        began = time.perf_counter()
        jax.block_until_ready(call())
        found.append(time.perf_counter() - began)
    return found
