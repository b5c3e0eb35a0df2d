"""Timing in turn: rivals alternate, so that a busy machine slows all of them. And the memory of a program."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax


def alternate(rivals: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Seconds of `rounds` calls of each, one call of every rival a round, after one call that is not counted."""
    for run in rivals.values():
        jax.block_until_ready(run())
    seconds: dict[str, list[float]] = {name: [] for name in rivals}
    for _ in range(rounds):
        for name, run in rivals.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio(rival: list[float], ours: list[float]) -> dict[str, float]:
    """How many times faster `ours` is: of medians, and of minima (what a quiet machine would show)."""
    return {"of_medians": statistics.median(rival) / statistics.median(ours), "of_minima": min(rival) / min(ours)}


def summary(seconds: list[float]) -> dict[str, float]:
    return {"median_ms": 1e3 * statistics.median(seconds), "min_ms": 1e3 * min(seconds)}


def peak_mb(f: Any, *args: Any) -> float:
    """Arguments, results and temporaries of a jitted function's program, as its compiler says."""
    memory = f.lower(*args).compile().memory_analysis()
    return (memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes) / 1e6
