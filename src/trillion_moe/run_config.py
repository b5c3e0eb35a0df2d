"""One training run as plain data: a frozen dataclass from a Python recipe or JSON, changed by ``--set``, written back.

A recipe is a Python file with ``config() -> RunConfig``; JSON is what `to_json` wrote. Fields are checked against their
types by pydantic: an unknown name, a wrong type or a value that is not legal is an error that names it.
"""

import json
import runpy
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from trillion_moe.balance import BalanceConfig
from trillion_moe.config import ModelConfig
from trillion_moe.config_json import distinct
from trillion_moe.data.examples import DataConfig
from trillion_moe.transforms import LoRAConfig

RECIPES = Path(__file__).parent / "configs"
_STRICT: dict[str, Any] = {"extra": "forbid", "strict": True, "allow_inf_nan": False}


class RunConfigError(ValueError):
    """What is wrong with a run's configuration: the field, what it holds, what is legal; all of it."""


def _check(config: Any, **legal: tuple[bool, str]) -> None:
    """ValueError with every field that is not legal. legal: whether a field is, and what would be."""
    found = [f"{name} = {getattr(config, name)}: legal is {what}" for name, (fine, what) in legal.items() if not fine]
    if found:
        raise ValueError("; ".join(found))


def _at_least(low: int, value: int | float | None) -> tuple[bool, str]:
    return value is None or value >= low, f"at least {low}"


def _share(value: float) -> tuple[bool, str]:
    return 0 <= value <= 1, "0 to 1"


def _below_one(value: float) -> tuple[bool, str]:
    return 0 <= value < 1, "at least 0 and below 1"


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (Loshchilov & Hutter, arXiv 1711.05101): linear warm-up over `warmup` of all steps, then a cosine to
    `final` of `lr`. clip: global norm of the gradient; None = off."""

    __pydantic_config__ = _STRICT

    lr: float = 2e-4
    warmup: float = 0.03
    final: float = 0.1
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip: float | None = 1.0

    def __post_init__(self):
        _check(
            self,
            lr=_at_least(0, self.lr),
            warmup=_share(self.warmup),
            final=_share(self.final),
            b1=_below_one(self.b1),
            b2=_below_one(self.b2),
            eps=(self.eps > 0, "above 0"),
            weight_decay=_at_least(0, self.weight_decay),
            clip=(self.clip is None or self.clip > 0, "above 0, or null for off"),
        )


@dataclass(frozen=True)
class TrainConfig:
    """epochs, or steps (updates) if given. batch_size: rows of one pass, null = one for each part that a mesh makes of
    a batch; accumulate: passes of one update, whose gradients are summed and divided by all their supervised tokens.
    remat: recompute layers in the backward pass. pack: several examples in a row. dropout: share of its inputs that an
    adapter does not see in a pass.

    eval_every, save_every: updates between two; 0 = only at the end. keep: checkpoints besides the best one. patience:
    evaluations without a better loss after which to stop; None = never. balance: how experts are kept equally busy;
    null = routers are trained by gradients alone, and their biases stay.
    """

    __pydantic_config__ = _STRICT

    epochs: int = 1
    steps: int | None = None
    batch_size: int | None = 8
    accumulate: int = 1
    remat: bool = True
    pack: bool = False
    dropout: float = 0.0
    eval_every: int = 100
    save_every: int = 100
    keep: int = 2
    patience: int | None = None
    balance: BalanceConfig | None = None

    def __post_init__(self):
        one = ("epochs", "steps", "batch_size", "accumulate", "keep", "patience")
        legal = {name: _at_least(1, getattr(self, name)) for name in one}
        legal |= {name: _at_least(0, getattr(self, name)) for name in ("eval_every", "save_every")}
        _check(self, **legal, dropout=_below_one(self.dropout))


@dataclass(frozen=True)
class RunConfig:
    """One run. model: the folder of a checkpoint. data: JSON lines to train on; eval_data: to evaluate on, or eval_rows
    from the end of data. output: the run's folder. mesh: the devices of the run, as `load` takes it. lora: null trains
    every weight. dtype: null keeps the checkpoint's. examples: how rows become tokens and which of them have loss."""

    __pydantic_config__ = _STRICT

    model: str
    data: str
    eval_data: str | None = None
    eval_rows: int = 0
    output: str = "runs/train"
    mesh: str | dict[str, int] | None = None
    seed: int = 0
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    lora: LoRAConfig | None = field(default_factory=LoRAConfig)
    examples: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self):
        _check(self, eval_rows=_at_least(0, self.eval_rows), seed=(0 <= self.seed < 2**32, "0 to 2**32 - 1"))
        if self.eval_data is not None and self.eval_rows:
            raise ValueError("eval_data and eval_rows are both given: legal is one of them")
        if self.train.dropout and self.lora is None:
            raise ValueError(
                f"train.dropout = {self.train.dropout} without lora: legal is 0, it drops inputs of adapters"
            )
        if self.train.balance is not None and self.lora is not None:
            raise ValueError(
                "train.balance is given with lora: legal is null, adapters leave routers as they are, and what is "
                "exported of them holds no router's bias"
            )
        evaluates = self.train.eval_every and (self.eval_rows or self.eval_data is not None)
        if self.train.patience is not None and not evaluates:
            raise ValueError(
                f"train.patience = {self.train.patience} has no effect without evaluations: "
                "give eval_data or eval_rows, and train.eval_every above 0"
            )


def check_balance(config: RunConfig, model: ModelConfig) -> None:
    """RunConfigError where `config.train.balance` can have no effect on a model."""
    moe, balance = model.moe, config.train.balance
    if balance is None:
        return
    if moe is None or "moe" not in model.mlp:
        raise RunConfigError("train.balance is given, but the model has no layer with routed experts: legal is null")
    if moe.top_k == moe.num_experts:
        raise RunConfigError(
            f"train.balance is given, but a token has all {moe.num_experts} experts, whatever biases are: legal is null"
        )
    if balance.method == "quantile" and moe.num_groups > 1:
        raise RunConfigError(
            f"train.balance.method = 'quantile' has no meaning for {moe.num_groups} groups of experts, some of which a "
            "token leaves out before it compares: legal are 'sign' and null"
        )


_PARTS: Mapping[str, Any] = {
    "examples": DataConfig, "optimizer": OptimizerConfig, "train": TrainConfig, "lora": LoRAConfig,
    "balance": BalanceConfig,
}  # fmt: skip


def to_json(config: RunConfig) -> str:
    return json.dumps(asdict(config), indent=2) + "\n"


def from_json(text: str | bytes, where: str) -> RunConfig:
    """RunConfigError with everything that is wrong; `where` names the source."""
    import pydantic

    adapter = pydantic.TypeAdapter(RunConfig)
    try:
        return adapter.validate_json(text)
    except pydantic.ValidationError as error:
        # Once each: what fits no member of a union is said for every one of them.
        found = dict.fromkeys(f"  - {_where(e['loc'])}{_says(e)}" for e in error.errors())
        raise RunConfigError(f"{where}: {len(found)} problem(s)\n" + "\n".join(found)) from None


def _where(path: Sequence[Any]) -> str:
    """The field; pydantic names the members of a union too, by their types."""
    fields = [str(part) for part in path if "[" not in str(part)]
    return f"{'.'.join(fields)}: " if fields else ""


def _says(error: Any) -> str:
    if error["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        *parents, name = error["loc"]
        homes = [f"{part}.{name}" for part, kind in _PARTS.items() if name in kind.__dataclass_fields__]
        meant = f" (or {' or '.join(homes)}?)" if homes and not parents else ""
        return f"no such field; legal here: {', '.join(_fields_at(parents))}{meant}"
    inside = isinstance(error["input"], dict | list)  # the message then names the field
    return error["msg"].removeprefix("Value error, ") + ("" if inside else f" (given: {error['input']!r})")


def _fields_at(path: Sequence[Any]) -> list[str]:
    known = [_PARTS[part] for part in path if part in _PARTS]
    return list((known[-1] if known else RunConfig).__dataclass_fields__)


def load_run_config(source: str, assignments: Sequence[str] = ()) -> RunConfig:
    """The configuration of NAME (a recipe of ours), FILE.py or FILE.json, with ``field.field=value`` put in.

    A value is JSON where it can be, else a string.
    """
    where = source
    if source.endswith(".json"):
        data = _object(Path(source))
    else:
        path = Path(source) if source.endswith(".py") else RECIPES / f"{source}.py"
        if not path.is_file():
            ours = [p.stem for p in RECIPES.glob("*.py") if "RunConfig" in p.read_text(encoding="utf-8")]
            known = ", ".join(sorted(ours))
            raise RunConfigError(f"no configuration {source!r}: legal are FILE.py, FILE.json, or one of ours: {known}")
        config = _recipe(path)
        if not isinstance(config, RunConfig):
            raise RunConfigError(f"{path} must define config() -> trillion_moe.RunConfig, not {type(config).__name__}")
        data = asdict(config)
    for assignment in assignments:
        _assign(data, assignment)
        where = f"{source} with --set {', '.join(assignments)}"
    try:
        text = json.dumps(data)
    except TypeError as error:
        raise RunConfigError(f"{where}: {error}; legal are plain values, a path as a text") from None
    return from_json(text, where)


def _recipe(path: Path) -> Any:
    """What the config() of a Python file gives, None without one."""
    try:
        made = runpy.run_path(str(path)).get("config")
        return made() if callable(made) else None
    except (Exception, SystemExit) as error:  # whatever a file of the user's may raise
        raise RunConfigError(f"{path}: {type(error).__name__}: {error}") from error


def _object(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=distinct)
    except (OSError, ValueError, RecursionError) as error:
        raise RunConfigError(f"{path}: {error}") from None
    if not isinstance(data, dict):
        raise RunConfigError(f"{path} holds {type(data).__name__}, not an object")
    return data


def _assign(data: dict[str, Any], assignment: str) -> None:
    path, equals, text = assignment.partition("=")
    if not equals or not path:
        raise RunConfigError(f"--set {assignment}: legal is field.field=value")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = text
    *parents, name = path.split(".")
    for parent in parents:
        inner = data.setdefault(parent, {})
        if inner is None:
            inner = data[parent] = {}
        if not isinstance(inner, dict):
            raise RunConfigError(f"--set {path}: {parent} is {inner!r}, which has no fields")
        data = inner
    data[name] = value
