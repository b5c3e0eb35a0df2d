"""What XLA is told where steps are compiled: to work while devices talk, where it does not by itself."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "gpu": {
        # Without, what a collective brings is awaited right after it was asked for.
        "xla_gpu_enable_latency_hiding_scheduler": True,
        # One at a time by default: a chunk that goes out, one that comes back and sizes would share one kernel's time.
        "xla_gpu_experimental_parallel_collective_overlap_limit": 4,
    },
}
"""By platform, as `jax.default_backend` names it. A TPU's compiler schedules so by itself."""


def jitted(f: Callable, **how: Any) -> Callable:
    """`jax.jit` of f with the options of the platform there is, which is looked for when f is first called.

    how: as of `jax.jit`.
    """

    @functools.cache
    def made() -> Any:
        return jax.jit(f, compiler_options=dict(OPTIONS.get(jax.default_backend(), {})) or None, **how)

    @functools.wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        return made()(*args, **kwargs)

    return call
