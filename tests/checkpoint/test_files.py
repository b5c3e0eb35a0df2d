"""Files and folders that are no checkpoint, or not any more."""

import json
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.checkpoint.tools import GOLDENS, Checkpoint, blueprint_of, load, shard, write_index, write_raw

from trillion_moe import checkpoint
from trillion_moe.checkpoint import CheckpointError
from trillion_moe.checkpoint.safetensors_io import read_header

LINEAR = GOLDENS / "kimi_linear/a"


def entry(begin: int, end: int, dtype: str = "F32") -> dict:
    return {"dtype": dtype, "shape": [(end - begin) // 4], "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "0 bytes, not a safetensors file"),
        (b"\1\0\0", "3 bytes, not a safetensors file"),
        (struct.pack("<Q", 2**62) + b"{}", "header length 4611686018427387904 (at most 100000000)"),
        (struct.pack("<Q", 90) + b"{}", "cut inside its header: 10 bytes, the header alone needs 98"),
        (struct.pack("<Q", 4) + b"{]}{", "not JSON"),
        (struct.pack("<Q", 4) + b"\xff\xfe{}", "not JSON"),
        (struct.pack("<Q", 2) + b"[]", "a list, not an object"),
        (struct.pack("<Q", 16) + b'{"a":1,    "a":2}'[:16], "not JSON"),
        (struct.pack("<Q", 13) + b'{"a":1,"a":2}', "'a' is there twice"),
    ],
)
def test_no_header(data, why, tmp_path) -> None:
    (tmp_path / "f").write_bytes(data)
    header = read_header(tmp_path / "f")
    assert not header.readable
    assert why in header.findings[0]


@pytest.mark.parametrize(
    ("table", "size", "why"),
    [
        ({"a": entry(0, 8), "b": entry(4, 12)}, 12, "f: b: overlaps the previous one by 4 bytes"),
        ({"a": entry(0, 8), "b": entry(12, 16)}, 16, "f: b: follows 4 bytes of no tensor"),
        ({"a": entry(4, 8)}, 8, "f: a: follows 4 bytes of no tensor"),
        ({"a": entry(0, 8)}, 12, "bytes, its header describes"),
        ({"a": entry(0, 8), "b": entry(8, 16)}, 7, "2 tensors cut, the first is a"),
        ({"a": entry(0, 8, "F64")}, 8, "hold 8 bytes, F64 [2] needs 16"),
        ({"a": entry(0, 8, "FP7")}, 8, "unknown dtype 'FP7'"),
        ({"a": entry(0, 8) | {"shape": [-2]}}, 8, "shape [-2] is not a list of sizes"),
        ({"a": entry(0, 8) | {"shape": [True, 2]}}, 8, "is not a list of sizes"),
        ({"a": entry(0, 8) | {"data_offsets": [8, 0]}}, 8, "hold -8 bytes"),
        ({"a": entry(0, 8) | {"data_offsets": [0]}}, 8, "are not two positions"),
        ({"a": {"dtype": "F32", "shape": [2]}}, 8, "its header entry is not"),
        ({"a": 3}, 8, "its header entry is not"),
    ],
)
def test_headers_that_do_not_describe_their_file(table, size, why, tmp_path) -> None:
    write_raw(tmp_path / "f", table, b"\0" * size)
    header = read_header(tmp_path / "f")
    assert header.readable
    assert not header.intact
    assert why in header.findings[0]
    assert header.findings[0].startswith("f: ")


def test_empty_tensors_and_metadata_are_legal(tmp_path) -> None:
    write_raw(tmp_path / "f", {"__metadata__": {"format": "pt"}, "a": entry(0, 0), "b": entry(0, 4)}, b"\0" * 4)
    assert read_header(tmp_path / "f").intact


@pytest.fixture(scope="module")
def spoilt(tmp_path_factory):
    """A function that puts bytes into a folder in place of the golden's and loads it."""
    stored = checkpoint.read_config(LINEAR)
    blueprint, folder = blueprint_of(stored), tmp_path_factory.mktemp("spoilt")

    def with_bytes(data: bytes):
        (folder / "model.safetensors").write_bytes(data)
        return checkpoint.load_into(blueprint, folder, stored)

    return with_bytes


WHOLE = (LINEAR / "model.safetensors").read_bytes()
HEADER = 8 + int.from_bytes(WHOLE[:8], "little")


@settings(max_examples=12, deadline=None)
@given(
    st.one_of(st.integers(0, HEADER), st.integers(HEADER, len(WHOLE) - 1), st.integers(len(WHOLE) - 64, len(WHOLE) - 1))
)
def test_cut_anywhere(spoilt, length: int) -> None:
    """fault 46: no prefix of a file is taken for it, and the numbers are right."""
    with pytest.raises(CheckpointError) as caught:
        spoilt(WHOLE[:length])
    text = "\n".join(caught.value.findings)
    assert "model.safetensors: " in text
    if length >= HEADER:
        assert f"{length} bytes, its header describes {len(WHOLE)} ({len(WHOLE) - length} are missing)" in text


@settings(max_examples=12, deadline=None)
@given(st.integers(8, HEADER - 1), st.integers(0, 255))
def test_a_damaged_header_byte_is_refused_or_harmless(spoilt, at: int, byte: int) -> None:
    """Whatever the byte becomes, nothing but CheckpointError is raised, and never is a tensor taken for another."""
    data = bytearray(WHOLE)
    data[at] = byte
    try:
        model = spoilt(bytes(data))
    except CheckpointError:
        return
    assert (model.norm == 1).all() or model.norm.dtype == "float32"


# --- folders ----------------------------------------------------------------------------------------------------------


def test_folders_that_hold_no_checkpoint(tmp_path) -> None:
    def why(folder) -> str:
        with pytest.raises(CheckpointError) as caught:
            load(folder)
        assert str(caught.value).startswith(f"{folder}: 1 problem(s)")
        return caught.value.findings[0]

    assert why(tmp_path / "nowhere") == "no such folder"
    assert why(LINEAR / "config.json") == "not a folder"
    assert why(tmp_path) == "no checkpoint: an empty folder"
    golden = Checkpoint.golden("kimi_linear/a")
    golden.write(tmp_path / "a")
    (tmp_path / "a/config.json").unlink()
    assert why(tmp_path / "a") == "config.json is missing"
    golden.write(tmp_path / "b", shards=2, index=False)
    golden.write(tmp_path / "b")
    assert why(tmp_path / "b").startswith("no model.safetensors.index.json, and more than one candidate")
    golden.write(tmp_path / "c", shards=2, index=False)
    golden.write(tmp_path / "c", shards=3, index=False)
    assert "shards of more than one set" in why(tmp_path / "c")
    golden.write(tmp_path / "d")
    (tmp_path / "d/model.safetensors").rename(tmp_path / "d/weights.safetensors")
    assert why(tmp_path / "d") == "no checkpoint: neither model.safetensors nor model.safetensors.index.json is in it"


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "x", "a": "y"}}']
)
def test_an_index_that_is_none(text, tmp_path) -> None:
    folder = Checkpoint.golden("kimi_linear/a").write(tmp_path / "in", shards=2)
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"model.safetensors.index.json (is not JSON|has no weight_map)"):
        load(folder)


def test_an_index_that_leads_out_of_the_folder(tmp_path) -> None:
    folder = Checkpoint.golden("kimi_linear/a").write(tmp_path / "in", shards=2)
    write_index(folder, {"model.norm.weight": "../model.safetensors"})
    with pytest.raises(CheckpointError, match=r"'../model.safetensors' is not the name of a safetensors file here"):
        load(folder)


def test_a_shard_that_the_index_does_not_name(tmp_path) -> None:
    folder = Checkpoint.golden("kimi_linear/a").write(tmp_path / "in", shards=2)
    (folder / "model.safetensors").write_bytes((folder / shard(1, 2)).read_bytes())
    with pytest.raises(
        CheckpointError, match=r"model.safetensors: model.safetensors.index.json does not name this file"
    ):
        load(folder)


def test_a_file_of_zeros_in_place_of_a_shard(tmp_path) -> None:
    """fault 46: an unreadable shard is one finding, not one per tensor."""
    folder = Checkpoint.golden("kimi_linear/a").write(tmp_path / "in", shards=2)
    (folder / shard(1, 2)).write_bytes(b"")
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert caught.value.findings == (
        f"{shard(1, 2)}: 0 bytes, not a safetensors file (8 bytes of header length expected)",
    )


def test_config_findings_are_not_lost(tmp_path) -> None:
    folder = Checkpoint.golden("kimi_linear/a").write(tmp_path / "in")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ValueError, match="model_type = 'llama'"):
        load(folder)
