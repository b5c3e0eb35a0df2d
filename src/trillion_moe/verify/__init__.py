"""Whether the operators of a model are right on this machine, and what their kernels are for machines elsewhere."""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax

from trillion_moe.config import ModelConfig
from trillion_moe.verify.cases import LARGEST, Case, Operator, Scale, fitted
from trillion_moe.verify.measure import TOLERANCE, Problem, Result, measure, tolerance
from trillion_moe.verify.operators import operators_of
from trillion_moe.verify.report import Report, Row, VerifyError

__all__ = ["DTYPES", "MEMORY", "Report", "Row", "VerifyError", "operators_of", "verify"]

DTYPES = tuple(TOLERANCE)
MEMORY = 2 << 30


def verify(
    config: ModelConfig | str | Path,
    *,
    dtypes: Sequence[str] = DTYPES,
    tokens: int = LARGEST.tokens,
    operators: Sequence[str] | None = None,
    memory: int = MEMORY,
    on_row: Callable[[Row], None] | None = None,
) -> Report:
    """Every operator of a config, each implementation, on JAX's default device, against its definition in float64.

    config: or a checkpoint's folder, or its config.json. tokens: of a case. operators: of those that the config has,
    None = all. memory: bytes that the float64 inputs and gradients of a case may take (the peak is about three times
    that): widths are the config's own; of experts, heads and words of the vocabulary a case has no more than 8, 4 and
    4,096, and fewer, and fewer tokens, until they fit. on_row: called with every row as it is measured.

    Raises VerifyError for a dtype or operator that is not there, for a memory too small and where JAX may not use the
    CPU; ConfigError for a config.
    """
    cfg = config if isinstance(config, ModelConfig) else ModelConfig.from_file(config)
    chosen = _chosen(cfg, operators)
    if odd := [dtype for dtype in dtypes if dtype not in DTYPES]:
        raise VerifyError(f"dtypes hold {odd[0]!r}: legal are {', '.join(DTYPES)}")
    if tokens < 8:  # below, the cases have no room for two documents and padding
        raise VerifyError(f"tokens is {tokens}; it must be at least 8")
    _check_cpu()
    scales = [_scale(operator, cfg, tokens, memory) for operator in chosen]
    rows: list[Row] = []
    for operator, scale in zip(chosen, scales, strict=True):
        try:
            for row in _rows(operator, cfg, scale, tuple(dict.fromkeys(dtypes))):
                rows.append(row)
                if on_row is not None:
                    on_row(row)
        except MemoryError as error:
            raise VerifyError(f"no memory for a case of {operator.name}: {error}") from None
    return Report.of(cfg, rows)


def _check_cpu() -> None:
    try:
        jax.local_devices(backend="cpu")
    except RuntimeError as error:
        raise VerifyError(f"the truth is computed on the CPU, which JAX was told not to use: {error}") from None


def _chosen(cfg: ModelConfig, names: Sequence[str] | None) -> list[Operator]:
    names = [names] if isinstance(names, str) else names
    has = {operator.name: operator for operator in operators_of(cfg)}
    if odd := [name for name in names or () if name not in has]:
        raise VerifyError(f"no operator {odd[0]!r} in this config: legal are {', '.join(has)}")
    return list(has.values()) if names is None else [has[name] for name in dict.fromkeys(names)]


def _scale(operator: Operator, cfg: ModelConfig, tokens: int, memory: int) -> Scale:
    scale = fitted(operator, cfg, tokens, memory)
    if scale is None:
        raise VerifyError(f"memory is {memory:,} bytes: too little for one case of {operator.name} at its own widths")
    return scale


def _rows(operator: Operator, cfg: ModelConfig, scale: Scale, dtypes: tuple[str, ...]) -> Iterator[Row]:
    """Each case is solved once in a dtype, for all implementations, and forgotten before the next is made."""
    results = {(dtype, name): Result() for dtype in dtypes for name in operator.implementations}
    shape = ""
    for case in operator.cases(cfg, scale):
        shape = shape or _shape(operator, scale, case)
        for dtype in dtypes:
            problem = Problem.of(case, dtype)
            for key in [key for key, so_far in results.items() if key[0] == dtype and so_far.reason is None]:
                results[key] = results[key].worse(measure(problem, key[1]))
    for (dtype, name), result in results.items():
        yield _row(operator.name, name, dtype, result, tolerance(operator, dtype), shape)


def _row(operator: str, name: str, dtype: str, result: Result, allowed: float, shape: str) -> Row:
    if result.reason is not None:
        return Row(operator, name, dtype, None, allowed, "unavailable", None, shape, reason=result.reason)
    verdict = "pass" if result.error <= allowed else "fail"
    error = result.error if math.isfinite(result.error) else "inf"
    return Row(operator, name, dtype, error, allowed, verdict, result.time, shape, where=result.where)


def _shape(operator: Operator, scale: Scale, case: Case) -> str:
    arrays = ", ".join(f"{name} {'x'.join(map(str, array.shape))}" for name, array in case.floats.items())
    cut = [f"{getattr(scale, name)} of {whole} {name}" for name, whole in operator.whole.items()]
    return f"{scale.tokens} tokens, {''.join(f'{text}, ' for text in cut)}{arrays}"
