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
    "tpu": {
        # Without, rows are asked for and awaited before the experts' kernels begin. Kimi K3's LoRA step on v5p_32: of
        # the 1,261 GB of its exchanges 61 % hidden with it and `moe._in_turn` (LOG.md); 6.6 GB more at the peak.
        "xla_tpu_use_aggressive_scheduling": True,
    },
}
"""By platform, as `jax.default_backend` names it."""


class Jitted:
    """`jax.jit` of f with the options of the platform there is, which is looked for when it is first needed.

    how: as of `jax.jit`.
    """

    def __init__(self, f: Callable, **how: Any):
        self._f, self._how = f, how
        functools.update_wrapper(self, f)

    @functools.cached_property
    def _program(self) -> Any:
        options = dict(OPTIONS.get(jax.default_backend(), {})) or None
        return jax.jit(self._f, compiler_options=options, **self._how)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._program(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """As `jax.jit` of it would."""
        return self._program.lower(*args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """Likewise, for another platform than that there is: without options, which are for its compiler."""
        return jax.jit(self._f, **self._how).trace(*args, **kwargs)


def jitted(f: Callable, **how: Any) -> Jitted:
    """f as a `Jitted`; a decorator."""
    return Jitted(f, **how)
