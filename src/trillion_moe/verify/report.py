"""What was found, with what it was found on, as a table and as a file that later runs hold to."""

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from trillion_moe.config import ModelConfig
from trillion_moe.config_json import distinct
from trillion_moe.ops import IMPLEMENTATIONS
from trillion_moe.stamp import Stamp, write_report
from trillion_moe.verify.operators import operators_of

FORMAT, KEY = 1, "trillion_moe verify"
_STRICT: dict[str, Any] = {"extra": "forbid", "strict": True}
_SIZES = ("model_type", "hidden_size", "vocab_size", "dense_hidden_size", "activation", "situ_beta", "situ_linear_beta")

Verdict = Literal["pass", "fail", "unavailable"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)


class VerifyError(ValueError):
    """What cannot be verified, or a file of `trillion-moe verify` that does not hold here: all that is wrong."""


@dataclass(frozen=True)
class Row:
    """One implementation of an operator in a dtype. error: relative RMS, None where it could not be run; where: the
    array it was found in. time: seconds of the realistic cases, values and gradients. shape: the arrays' sizes, and
    what of the model they leave out."""

    __pydantic_config__ = _STRICT

    operator: str
    implementation: str
    dtype: str
    error: float | Literal["inf"] | None
    tolerance: float
    verdict: Verdict
    time: float | None
    shape: str
    where: str | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Report:
    """operators: all rows. fallback: operator -> dtype -> the implementations that passed, fastest first. config: the
    model's widths."""

    __pydantic_config__ = _STRICT

    stamp: Stamp
    config: dict[str, Any]
    operators: list[Row]
    fallback: dict[str, dict[str, list[str]]]

    @classmethod
    def of(cls, cfg: ModelConfig, rows: Iterable[Row]) -> "Report":
        rows = list(rows)
        return cls(Stamp.here(), sizes_of(cfg), rows, _fallback(rows))

    @property
    def failed(self) -> list[str]:
        """Operators, with their dtype, of which no implementation passed."""
        return [f"{name} in {dtype}" for name, by in self.fallback.items() for dtype, best in by.items() if not best]

    def write(self, path: str | Path) -> None:
        """To a file, which has its name only when it is whole; one that is there is replaced."""
        write_report(path, {KEY: FORMAT} | dataclasses.asdict(self))


def _fallback(rows: list[Row]) -> dict[str, dict[str, list[str]]]:
    found: dict[str, dict[str, list[str]]] = {}
    for row in sorted(rows, key=lambda row: math.inf if row.time is None else row.time):
        best = found.setdefault(row.operator, {}).setdefault(row.dtype, [])
        best += [row.implementation] if row.verdict == "pass" else []
    order = list(dict.fromkeys(row.operator for row in rows))
    return {name: dict(sorted(found[name].items())) for name in order}


def sizes_of(cfg: ModelConfig) -> dict[str, Any]:
    """What of a config the shapes depend on, as JSON gives it back."""
    parts = {name: part for name in ("kda", "mla", "moe", "vision") if (part := getattr(cfg, name)) is not None}
    sizes = {name: getattr(cfg, name) for name in _SIZES} | {n: dataclasses.asdict(p) for n, p in parts.items()}
    if "kda" in sizes:
        del sizes["kda"]["a_log_shape"]  # of the file: only a checkpoint's tensors say it
    return json.loads(json.dumps(sizes))


# --- reading ----------------------------------------------------------------------------------------------------------


def load(path: str | Path, cfg: ModelConfig, dtype: str) -> dict[str, str]:
    """Operator -> the first implementation of its fallback list, of the operators that have a choice.

    Raises VerifyError with all that stands against it: no file of `trillion-moe verify`; another machine or other
    versions; a model of other widths; an operator that is missing, or of which nothing passed in this dtype.
    """
    report, here = read(path), Stamp.here()
    names = [operator.name for operator in operators_of(cfg)]
    found = [*_differences("stamp", dataclasses.asdict(report.stamp), dataclasses.asdict(here))]
    found += _differences("config", report.config, sizes_of(cfg))
    found += [finding for name in names for finding in _refused(report, name, dtype)]
    if found:
        again = "run `trillion-moe verify` again"
        raise VerifyError(f"{path}: {len(found)} problem(s); {again}\n" + "\n".join(f"  - {line}" for line in found))
    return {name: report.fallback[name][dtype][0] for name in names if name in IMPLEMENTATIONS}


def read(path: str | Path) -> Report:
    """VerifyError for what is no whole report, with every field that is wrong; OSError for a file that is not there."""
    import pydantic

    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=distinct)
    except (ValueError, RecursionError) as error:
        raise VerifyError(f"{path} is not JSON with distinct keys: {error}") from None
    if not isinstance(data, dict) or data.pop(KEY, None) != FORMAT:
        raise VerifyError(f"{path} is no file of `trillion-moe verify --json`: it does not hold {KEY!r}: {FORMAT}")
    try:
        return pydantic.TypeAdapter(Report).validate_json(json.dumps(data))
    except pydantic.ValidationError as error:
        said = dict.fromkeys(f"  - {'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise VerifyError(f"{path}: {len(said)} problem(s)\n" + "\n".join(said)) from None


def _differences(where: str, then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    found = []
    for name in dict.fromkeys([*then, *now]):
        was, is_ = then.get(name), now.get(name)
        if isinstance(was, dict) and isinstance(is_, dict):
            found += _differences(f"{where}.{name}", was, is_)
        elif was != is_:
            found.append(f"{where}.{name} was {was!r}, is {is_!r}")
    return found


def _refused(report: Report, name: str, dtype: str) -> list[str]:
    rows = [row for row in report.operators if (row.operator, row.dtype) == (name, dtype)]
    if not rows:
        dtypes = ", ".join(sorted({row.dtype for row in report.operators if row.operator == name}))
        return [f"operators: no row of {name} in {dtype}, which the model has" + (f" (only {dtypes})" * bool(dtypes))]
    passed = [row.implementation for row in rows if row.verdict == "pass"]
    for row in rows:
        holds = isinstance(row.error, float) and 0 <= row.error <= row.tolerance
        if (row.verdict == "pass") != holds or sum(r.implementation == row.implementation for r in rows) > 1:
            return [
                f"operators: {name} {row.implementation} in {dtype} contradicts itself: {row.verdict}, "
                f"error {row.error}, tolerance {row.tolerance}, or is there twice"
            ]
    chosen = report.fallback.get(name, {}).get(dtype, [])
    if not chosen:
        said = "; ".join(f"{row.implementation}: {row.reason or f'error {row.error} at {row.where}'}" for row in rows)
        return [f"fallback.{name}.{dtype}: no implementation passed ({said})"]
    odd = [c for c in chosen if c not in passed or c not in IMPLEMENTATIONS.get(name, (c,))]
    legal = ", ".join(passed) or "none"
    return [f"fallback.{name}.{dtype} holds {c!r}, which did not pass: legal are {legal}" for c in odd]


# --- the table --------------------------------------------------------------------------------------------------------

HEAD = f"{'operator':22} {'implementation':14} {'dtype':9} {'error':>8} {'tolerance':>9} {'verdict':11} {'time':>10}"
HEAD += "  what it was tried on, or why not"


def line(row: Row) -> str:
    error = "-" if row.error is None else "inf" if row.error == "inf" else f"{row.error:.1e}"
    seconds = "-" if row.time is None else f"{row.time * 1e3:,.2f} ms"
    why = row.reason if row.reason else f"{row.shape}" + (f"; {row.where}" if row.verdict == "fail" else "")
    return (
        f"{row.operator:22} {row.implementation:14} {row.dtype:9} {error:>8} {row.tolerance:9.1e} {row.verdict:11} "
        f"{seconds:>10}  {why}"
    )
