"""Checkpoints that a test can take apart, spoil and write again. Shares no code with what is tested."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from trillion_moe import checkpoint
from trillion_moe.layers.segments import depth_plan
from trillion_moe.model import Model
from trillion_moe.transforms import quantize_experts
from trillion_moe.weights import PackedLayout

GOLDENS = Path(__file__).parent.parent / "goldens"
NUMPY = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "U8": np.uint8, "F8_E8M0": np.uint8}
FLOAT32 = ("A_log", "dt_bias", "conv1d.weight", "o_norm.weight", "e_score_correction_bias")  # the spec's complete list


class Tensor(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, dtype: str, array: Any) -> "Tensor":
        array = np.asarray(array, NUMPY[dtype])
        return cls(dtype, array.shape, array.tobytes())

    @property
    def array(self) -> np.ndarray:
        return np.frombuffer(self.data, NUMPY[self.dtype]).reshape(self.shape).copy()

    def cast(self, dtype: str) -> "Tensor":
        return Tensor.of(dtype, self.array)


def read_tensors(path: Path) -> dict[str, Tensor]:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    body, table = data[8 + length :], json.loads(data[8 : 8 + length])
    table.pop("__metadata__", None)
    return {
        name: Tensor(e["dtype"], tuple(e["shape"]), body[slice(*e["data_offsets"])])
        for name, e in sorted(table.items())
    }


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    table, begin = {}, 0
    for name, t in tensors.items():
        table[name] = {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [begin, begin + len(t.data)]}
        begin += len(t.data)
    write_raw(path, table, b"".join(t.data for t in tensors.values()))


def write_raw(path: Path, table: Any, body: bytes) -> None:
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)


@dataclasses.dataclass
class Checkpoint:
    """Tensors and config of a checkpoint, to be changed in place."""

    tensors: dict[str, Tensor]
    config: dict[str, Any]

    @classmethod
    def golden(cls, name: str) -> "Checkpoint":
        folder = GOLDENS / name
        return cls(read_tensors(folder / "model.safetensors"), json.loads((folder / "config.json").read_text()))

    @classmethod
    def read(cls, folder: Path) -> "Checkpoint":
        tensors = {}
        for path in sorted(folder.glob("*.safetensors")):
            tensors |= read_tensors(path)
        return cls(dict(sorted(tensors.items())), json.loads((folder / "config.json").read_text()))

    def rename(self, old: str, new: str) -> None:
        self.tensors = {name.replace(old, new): tensor for name, tensor in self.tensors.items()}

    def put(self, name: str, dtype: str, array: Any) -> None:
        self.tensors[name] = Tensor.of(dtype, array)

    def cast(self, dtype: str) -> None:
        """Round what may be rounded."""
        for name, tensor in self.tensors.items():
            if tensor.dtype == "F32" and not name.endswith(FLOAT32):
                self.tensors[name] = tensor.cast(dtype)

    def write(self, folder: Path, shards: int = 1, index: bool = True) -> Path:
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        if shards == 1:
            write_tensors(folder / "model.safetensors", self.tensors)
            return folder
        names, files = list(self.tensors), {}
        for i in range(shards):
            mine = names[i * len(names) // shards : (i + 1) * len(names) // shards]
            write_tensors(folder / shard(i + 1, shards), {name: self.tensors[name] for name in mine})
            files |= dict.fromkeys(mine, shard(i + 1, shards))
        if index:
            write_index(folder, files)
        return folder


def shard(i: int, of: int) -> str:
    return f"model-{i:05d}-of-{of:05d}.safetensors"


def read_index(folder: Path) -> dict[str, str]:
    return json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]


def write_index(folder: Path, files: Mapping[str, str]) -> None:
    table = {"metadata": {}, "weight_map": dict(files)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(table))


def load(
    folder: Path,
    dtype: str | None = None,
    quantization: str = "keep",
    scan: bool | None = None,
    layout: PackedLayout = "nk",
):
    """What `tm.load` does with a folder of safetensors."""
    stored = checkpoint.read_config(folder)
    blueprint, stored = blueprint_of(stored, dtype, quantization, scan, layout), stored
    return checkpoint.load_into(blueprint, folder, stored, keep_dtypes=dtype is None)


def blueprint_of(
    stored, dtype: str | None = None, quantization: str = "keep", scan: bool | None = None, layout: PackedLayout = "nk"
):
    cfg = stored if quantization == "keep" else dataclasses.replace(stored, quantization=None)
    blueprint = Model(cfg, dtype=dtype, plan=depth_plan(cfg, scan=scan))
    return blueprint if cfg.quantization is None else quantize_experts(blueprint, layout=layout)


def build(cfg, dtype, segments):
    """The blueprint that `load_orbax` asks for."""
    return Model(cfg, dtype=dtype, plan=segments)


def layer(model, i: int):
    """Decoder layer i of an unrolled model."""
    return [block for segment in model.segments for block in segment][i]
