"""Which files a checkpoint consists of: one file, or shards with an index. Nothing is guessed, nothing dropped."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

from trillion_moe.checkpoint.errors import CheckpointError
from trillion_moe.config_json import distinct

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHARD = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors")


@dataclass
class Shards:
    """`files` in order; `index`: the file that the index names for every tensor, None without one; `missing`: shards
    that should be there and are not."""

    folder: Path
    files: list[Path]
    index: dict[str, str] | None = None
    missing: list[str] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)


def find_shards(folder: str | Path) -> Shards:
    """The files of a folder. Raises CheckpointError if it is none or holds no checkpoint; the rest becomes findings."""
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(folder, ["no such folder" if not folder.exists() else "not a folder"])
    present = {path.name: path for path in sorted(folder.glob("model*.safetensors"))}
    if (folder / INDEX).exists():
        return _indexed(folder, present)
    numbered = {name: match for name in present if (match := SHARD.fullmatch(name))}
    if SINGLE in present and len(present) == 1:
        return Shards(folder, [present[SINGLE]])
    if numbered and len(numbered) == len(present):
        return _numbered(folder, present, numbered)
    if not present:
        what = "an empty folder" if not any(folder.iterdir()) else f"neither {SINGLE} nor {INDEX} is in it"
        raise CheckpointError(folder, [f"no checkpoint: {what}"])
    raise CheckpointError(folder, [f"no {INDEX}, and more than one candidate: {', '.join(present)}"])


def _numbered(folder: Path, present: dict[str, Path], numbered: dict[str, re.Match[str]]) -> Shards:
    """Shards without an index are taken if their own numbers say that none is absent."""
    totals = {match[2] for match in numbered.values()}
    if len(totals) > 1:
        raise CheckpointError(folder, [f"no {INDEX}, and shards of more than one set: {', '.join(numbered)}"])
    wanted = [f"model-{i + 1:05d}-of-{next(iter(totals))}.safetensors" for i in range(int(next(iter(totals))))]
    missing = [name for name in wanted if name not in present]
    findings = [f"{name}: missing: its number says that it belongs here, and there is no {INDEX}" for name in missing]
    findings += [f"{name}: its number is not one of 1 to {len(wanted)}" for name in present if name not in wanted]
    return Shards(folder, list(present.values()), None, missing, findings)


def _indexed(folder: Path, present: dict[str, Path]) -> Shards:
    table = _read_index(folder / INDEX)
    named = sorted(set(table.values()))
    odd = [name for name in named if "/" in name or "\\" in name or not name.endswith(".safetensors")]
    if odd:
        raise CheckpointError(folder, [f"{INDEX}: {name!r} is not the name of a safetensors file here" for name in odd])
    missing = [name for name in named if not (folder / name).is_file()]
    shards = Shards(folder, [folder / name for name in named if name not in missing], table, missing)
    for name in missing:
        lost = [tensor for tensor, file in table.items() if file == name]
        more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
        shards.findings.append(f"{name}: missing: {INDEX} puts {', '.join(lost[:3])}{more} there")
    shards.findings += [f"{name}: {INDEX} does not name this file" for name in present if name not in named]
    return shards


def _read_index(path: Path) -> dict[str, str]:
    try:
        table = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=distinct)
    except (ValueError, RecursionError, OSError) as error:
        raise CheckpointError(path.parent, [f"{INDEX} is not JSON with distinct names: {error}"]) from None
    weights = table.get("weight_map") if isinstance(table, dict) else None
    if not isinstance(weights, dict) or not weights or not all(isinstance(file, str) for file in weights.values()):
        raise CheckpointError(path.parent, [f"{INDEX} has no weight_map from tensors to files"])
    return weights
