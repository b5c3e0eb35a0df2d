"""The two files of an adapter: adapter_config.json as PEFT writes it, and adapter_model.safetensors.

What PEFT's config has no key for (the base's fingerprint, which factors were one array) is in the metadata of the
safetensors file: PEFT warns about keys that it does not know. Source of keys and meanings: PEFT 0.21, LoraConfig.
"""

import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from trillion_moe.checkpoint.errors import CheckpointError
from trillion_moe.checkpoint.safetensors_io import Entry, read_header
from trillion_moe.config_json import distinct

CONFIG, TENSORS, KEY = "adapter_config.json", "adapter_model.safetensors", "trillion_moe"

# Keys that say how an adapter was trained or where its base lies, not what it computes.
_INERT = (
    *("auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "exclude_modules", "inference_mode"),
    *("layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout", "lora_ga_config", "megatron_core"),
    *("peft_version", "qalora_group_size", "revision", "runtime_config", "target_modules", "task_type"),
)
_READ = (
    *("alpha_pattern", "bias", "init_lora_weights", "lora_alpha", "peft_type", "r", "rank_pattern"),
    *("target_parameters", "use_rslora"),
)
_MEANS = {  # keys that must be off, and what they would mean
    "alora_invocation_tokens": "an adapter that is active for a part of the tokens",
    "fan_in_fan_out": "factors of transposed weights",
    "layer_replication": "another depth than the model's",
    "lora_bias": "biases",
    "modules_to_save": "whole modules trained beside the adapter",
    "trainable_token_indices": "trained rows of the embedding",
    "use_dora": "DoRA: magnitudes beside the factors",
    "use_qalora": "QA-LoRA: pooled inputs",
}
# Initialisations that leave the base as it is. Others (pissa, olora, corda, loftq) train against a changed base.
_INIT = (True, False, None, "gaussian", "orthogonal", "eva")


@dataclass(frozen=True)
class Settings:
    """What adapter_config.json says of ranks and scaling, and what we noted when we wrote the adapter.

    ours: the note in the safetensors metadata, empty for an adapter from elsewhere; see `adapters`.
    """

    rank: int
    alpha: float
    rslora: bool = False
    ranks: Mapping[str, int] = field(default_factory=dict)
    alphas: Mapping[str, float] = field(default_factory=dict)
    parameters: tuple[str, ...] = ()
    version: str | None = None
    ours: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def _compiled(self) -> dict[str, re.Pattern[str]]:
        return {key: re.compile(rf"(.*\.)?({key})$") for key in (*self.ranks, *self.alphas)}

    def rank_of(self, module: str) -> int:
        return self._first(self.ranks, module, self.rank)

    def scaling_of(self, module: str) -> float:
        rank = self.rank_of(module)
        return self._first(self.alphas, module, self.alpha) / (math.sqrt(rank) if self.rslora else rank)

    def _first(self, pattern: Mapping[str, Any], module: str, default: Any) -> Any:
        """As PEFT matches: keys are regular expressions for the end of a path, and the first that fits decides."""
        return next((value for key, value in pattern.items() if self._compiled[key].match(module)), default)

    def unmatched(self, modules: Iterable[str]) -> Iterator[str]:
        """Patterns that no module of the adapter meets: a scaling meant for something would be lost silently."""
        modules = list(modules)
        for what, pattern in (("rank_pattern", self.ranks), ("alpha_pattern", self.alphas)):
            for key in pattern:
                if not any(map(self._compiled[key].match, modules)):
                    yield f"{CONFIG}: {what} {key!r} matches no tensor of the adapter"

    @property
    def transposes(self) -> bool | None:
        """Whether PEFT's version was one that took a fused parameter [E, out, in] for [E, in, out] (before 0.19)."""
        match = re.match(r"(\d+)\.(\d+)", self.version or "")
        return None if match is None else (int(match[1]), int(match[2])) < (0, 19)


def read_files(folder: Path) -> tuple[Settings, dict[str, Entry]]:
    """The settings, and where every tensor lies. CheckpointError with all that is wrong with the files themselves."""
    if not folder.is_dir():
        raise CheckpointError(folder, ["no such folder" if not folder.exists() else "not a folder"])
    if missing := [name for name in (CONFIG, TENSORS) if not (folder / name).is_file()]:
        pickled = (
            "; adapter_model.bin is a pickle, which is not read" if (folder / "adapter_model.bin").exists() else ""
        )
        raise CheckpointError(folder, [f"no adapter: {' and '.join(missing)} missing{pickled}"])
    header = read_header(folder / TENSORS)
    raw, findings = _json(folder / CONFIG)
    findings += [*_config_findings(raw), *header.findings] if raw is not None else header.findings
    ours, wrong = _note(folder / TENSORS) if header.readable else ({}, [])
    if not header.entries and header.intact:
        findings.append(f"{TENSORS}: holds no tensor")
    if findings + wrong or raw is None:
        raise CheckpointError(folder, [*findings, *wrong])
    settings = Settings(
        raw["r"], float(raw["lora_alpha"]), bool(raw.get("use_rslora")), raw.get("rank_pattern") or {},
        {key: float(alpha) for key, alpha in (raw.get("alpha_pattern") or {}).items()},
        tuple(raw.get("target_parameters") or ()), raw.get("peft_version"), ours,
    )  # fmt: skip
    return settings, header.entries


def _json(path: Path) -> tuple[dict[str, Any] | None, list[str]]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=distinct)
    except (ValueError, RecursionError, OSError) as error:
        return None, [f"{path.name} is not JSON with distinct names: {error}"]
    if not isinstance(raw, dict):
        return None, [f"{path.name} is a {type(raw).__name__}, not an object"]
    return raw, []


def _config_findings(raw: dict[str, Any]) -> Iterator[str]:
    if raw.get("peft_type") != "LORA":
        yield f"{CONFIG}: peft_type = {raw.get('peft_type')!r}: legal is 'LORA'"
    if (bias := raw.get("bias") or "none") != "none":
        yield f"{CONFIG}: bias = {bias!r}, biases trained beside the adapter, is not supported: legal is 'none'"
    for key, value in raw.items():
        if value and key not in (*_INERT, *_READ):
            means = f", {_MEANS[key]}," if key in _MEANS else ", a key that is not known here,"
            yield f"{CONFIG}: {key} = {json.dumps(value)}{means} is not supported: legal is null or false"
    if (init := raw.get("init_lora_weights")) not in _INIT:
        yield (
            f"{CONFIG}: init_lora_weights = {init!r} is not supported: the adapter belongs to a base that this "
            "initialisation has changed; convert it with PEFT (path_initial_model_for_weight_conversion)"
        )
    if not _is_rank(raw.get("r")):
        yield f"{CONFIG}: r = {raw.get('r')!r}: legal is an integer >= 1"
    if not _is_number(raw.get("lora_alpha")):
        yield f"{CONFIG}: lora_alpha = {raw.get('lora_alpha')!r}: legal is a finite number"
    yield from _pattern_findings("rank_pattern", raw, _is_rank, "integers >= 1")
    yield from _pattern_findings("alpha_pattern", raw, _is_number, "finite numbers")
    parameters = raw.get("target_parameters") or []
    if not isinstance(parameters, list) or not all(isinstance(name, str) for name in parameters):
        yield f"{CONFIG}: target_parameters = {parameters!r}: legal is null or a list of names"
    if not isinstance(raw.get("peft_version"), str | None):
        yield f"{CONFIG}: peft_version = {raw['peft_version']!r}: legal is a text such as '0.21.2'"


def _is_rank(value: Any) -> bool:
    return type(value) is int and value >= 1


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max  # an int may be greater than any float


def _pattern_findings(name: str, raw: dict[str, Any], legal: Any, what: str) -> Iterator[str]:
    pattern = raw.get(name) or {}
    if not isinstance(pattern, dict):
        yield f"{CONFIG}: {name} = {pattern!r}: legal is an object of regular expressions and {what}"
        return
    for key, value in pattern.items():
        if not legal(value):
            yield f"{CONFIG}: {name} {key!r} = {value!r}: legal are {what}"
        try:
            re.compile(rf"(.*\.)?({key})$")
        except re.error as error:
            yield f"{CONFIG}: {name} {key!r} is no regular expression: {error}"


def _note(path: Path) -> tuple[dict[str, Any], list[str]]:
    """What we noted in the metadata of a sound file, and what is wrong with it."""
    with open(path, "rb") as file:
        text = file.read(int.from_bytes(file.read(8), "little"))
    metadata = json.loads(text).get("__metadata__") or {}
    if not isinstance(metadata, dict) or KEY not in metadata:
        return {}, []
    try:
        note = json.loads(metadata[KEY])
    except (TypeError, ValueError):
        note = None
    if note is None or not _is_note(note):
        return {}, [f"{TENSORS}: its metadata {KEY} = {metadata[KEY]!r} is not what an export writes"]
    return note, []


def _is_note(note: Any) -> bool:
    """{"base": fingerprint, "experts": {name: {"shared": ["a", "b"], "ids": [expert, ...], "ranks": [low, high]}}}"""
    if not isinstance(note, dict) or note.keys() != {"base", "experts"} or not isinstance(note["experts"], dict):
        return False
    return isinstance(note["base"], str) and all(map(_is_about, note["experts"].values()))


def _is_about(about: Any) -> bool:
    if not isinstance(about, dict) or not about.keys() <= {"shared", "ids", "ranks"}:
        return False
    shared, ids, ranks = (about.get(name, []) for name in ("shared", "ids", "ranks"))
    if not all(isinstance(one, list) for one in (shared, ids, ranks)):
        return False
    counts = all(type(number) is int and number >= 0 for number in (*ids, *ranks))
    return (
        counts
        and all(one in ("a", "b") for one in shared)
        and len({*ids}) == len(ids)
        and ("ranks" not in about or (len(ranks) == 2 and ranks[0] <= ranks[1]))
    )
