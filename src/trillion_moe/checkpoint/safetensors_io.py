"""The safetensors file format, read strictly and written by streaming.

    8 bytes: n, little endian | n bytes: JSON header | the tensors' bytes, without holes or overlaps

The header maps a name to ``{"dtype", "shape", "data_offsets": [begin, end]}``, offsets counted from the end of the
header. Unlike a reader that maps the file and trusts it, this one compares what the header describes with the bytes
that are there. Source: safetensors 0.8 (format and the order in which it writes tensors).
"""

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from trillion_moe.config_json import distinct
from trillion_moe.distributed import current

MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors library

# Bits per element, in the order in which files hold them from last to first. A header may name any of these.
BITS = {
    name: bits
    for bits, names in (
        (4, "F4"),
        (6, "F6_E2M3 F6_E3M2"),
        (8, "BOOL U8 I8 F8_E5M2 F8_E4M3 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ"),
        (16, "I16 U16 F16 BF16"),
        (32, "I32 U32 F32"),
        (64, "C64 F64 I64 U64"),
    )
    for name in names.split()
}
RANK = {name: i for i, name in enumerate(BITS)}
STORED = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "uint8": "U8"}  # numpy name -> stored name
NAMES = tuple(BITS)

# What our tensors may be. E8M0 scales are handled as the bytes they are, never as numbers.
NUMPY = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "U8": np.dtype("u1"),
    "F8_E8M0": np.dtype("u1"),
}


class Entry(NamedTuple):
    """One tensor of a file; `start` counts from the beginning of the file, both numbers in bytes."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass
class Header:
    """The tensors of a file and what is wrong with it. `readable`: the names are known; `intact`: so are the bytes."""

    path: Path
    entries: dict[str, Entry] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)
    readable: bool = True

    @property
    def intact(self) -> bool:
        return self.readable and not self.findings

    def unreadable(self, why: str) -> "Header":
        self.findings.append(f"{self.path.name}: {why}")
        self.readable = False
        return self


def read_header(path: Path) -> Header:
    """The header of one file, compared with the file's length. Never raises for a bad file: see `Header.findings`."""
    header = Header(path)
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 8:
                return header.unreadable(f"{size} bytes, not a safetensors file (8 bytes of header length expected)")
            length = int.from_bytes(file.read(8), "little")
            if length > MAX_HEADER:
                return header.unreadable(f"header length {length} (at most {MAX_HEADER}): not a safetensors file")
            if length > size - 8:
                return header.unreadable(f"cut inside its header: {size} bytes, the header alone needs {8 + length}")
            text = file.read(length)
    except OSError as error:
        return header.unreadable(f"cannot be read: {error.strerror or error}")
    raw = _parse(header, text)
    if raw is not None:
        for name, value in raw.items():
            entry = _entry_of(value, 8 + length)
            if isinstance(entry, str):
                header.findings.append(f"{path.name}: {name}: {entry}")
            else:
                header.entries[name] = entry
        if header.intact:
            _check_extent(header, 8 + length, size)
    return header


def _parse(header: Header, text: bytes) -> dict[str, Any] | None:
    try:
        raw = json.loads(text.decode("utf-8"), object_pairs_hook=distinct)
    except (ValueError, RecursionError) as error:
        header.unreadable(f"its header is not JSON with distinct names: {error}")
        return None
    if not isinstance(raw, dict):
        header.unreadable(f"its header is a {type(raw).__name__}, not an object of tensors")
        return None
    raw.pop("__metadata__", None)
    return raw


def _entry_of(value: Any, data_start: int) -> Entry | str:
    """One value of a header, or what is wrong with it."""
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        return "its header entry is not {dtype, shape, data_offsets}"
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        return f"unknown dtype {dtype!r}"
    if not isinstance(shape, list) or any(type(n) is not int or n < 0 for n in shape):
        return f"shape {shape!r} is not a list of sizes"
    if not isinstance(offsets, list) or len(offsets) != 2 or any(type(n) is not int or n < 0 for n in offsets):
        return f"data_offsets {offsets!r} are not two positions"
    begin, end = offsets
    bits = math.prod(shape) * BITS[dtype]
    if bits % 8 or end - begin != bits // 8:
        return f"data_offsets [{begin}, {end}] hold {end - begin} bytes, {dtype} {shape} needs {bits / 8:g}"
    return Entry(dtype, tuple(shape), data_start + begin, end - begin)


def _check_extent(header: Header, data_start: int, size: int) -> None:
    """Tensors must follow each other from the end of the header to the end of the file."""
    expected, file = data_start, header.path.name
    ordered = sorted(header.entries.items(), key=lambda item: (item[1].start, item[1].nbytes))
    for name, entry in ordered:
        gap = entry.start - expected
        if gap:
            what = f"follows {gap} bytes of no tensor" if gap > 0 else f"overlaps the previous one by {-gap} bytes"
            header.findings.append(f"{file}: {name}: {what}")
        expected = max(expected, entry.start + entry.nbytes)
    if expected > size:
        cut = [name for name, entry in ordered if entry.start + entry.nbytes > size]
        header.findings.append(
            f"{file}: truncated: {size} bytes, its header describes {expected} ({expected - size} are missing); "
            f"{len(cut)} tensors cut, the first is {cut[0]}"
        )
    elif expected < size:
        header.findings.append(f"{file}: {size} bytes, its header describes {expected}: {size - expected} too many")


# ----------------------------------------------------------------------------------------------------------------------


class Reader:
    """Reads bytes of a few files straight into arrays; a context manager that closes them."""

    def __init__(self, files: list[Path]):
        self._files, self._open = files, {}

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._open.values():
            handle.close()
        self._open.clear()

    def read(self, file: int, start: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        return self.into(file, start, np.empty(shape, NUMPY[dtype]))

    def into(self, file: int, start: int, out: np.ndarray) -> np.ndarray:
        """Fill a contiguous array. EOFError if the file has become shorter than its header said."""
        if file not in self._open:
            self._open[file] = open(self._files[file], "rb", buffering=0)  # noqa: SIM115
        handle, view = self._open[file], out.reshape(-1).view(np.uint8).data
        handle.seek(start)
        while len(view):
            got = handle.readinto(view)
            if not got:
                raise EOFError(f"{self._files[file]}: ends before byte {start + out.nbytes}; was it changed meanwhile?")
            view = view[got:]
        return out


# ----------------------------------------------------------------------------------------------------------------------


class Planned(NamedTuple):
    """A tensor to be written; `fetch` gives its array only when its turn has come."""

    dtype: str
    shape: tuple[int, ...]
    fetch: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * BITS[self.dtype] // 8


def write_file(path: Path, tensors: Mapping[str, Planned], metadata: Mapping[str, str]) -> None:
    """Write a new file in the library's order (wide dtypes first, then by name), one tensor in memory, and sync it.

    Of several processes the first one writes; all fetch every tensor, which may lie over all of them.
    """
    order = sorted(tensors, key=lambda name: (-RANK[tensors[name].dtype], name))
    if not current().first:
        for name in order:
            tensors[name].fetch()
        return
    table: dict[str, Any] = {"__metadata__": dict(metadata)}
    begin = 0
    for name in order:
        end = begin + tensors[name].nbytes
        table[name] = {"dtype": tensors[name].dtype, "shape": list(tensors[name].shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            file.write(_bytes_of(name, tensors[name]))
        file.flush()
        os.fsync(file.fileno())


def _bytes_of(name: str, planned: Planned) -> memoryview:
    array = np.ascontiguousarray(planned.fetch())
    if array.shape != planned.shape or array.dtype.itemsize * 8 != BITS[planned.dtype]:
        raise AssertionError(f"{name}: {array.dtype} {array.shape} was announced as {planned.dtype} {planned.shape}")
    return array.reshape(-1).view(np.uint8).data
