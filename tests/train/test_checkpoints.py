"""Checkpoints by themselves: what is read back, and what is refused."""

import dataclasses
import json
import shutil
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.train.test_trainer import equal

from trillion_moe.checkpoint import orbax_arrays
from trillion_moe.checkpoint.errors import CheckpointError
from trillion_moe.train import checkpoints
from trillion_moe.train.report import read

BARE = {
    "step": 1, "tokens": 0, "best": None, "best_step": None, "stale": 0, "data": {}, "config": {}, "depth": [],
    "capacity": None,
}  # fmt: skip


def test_values_that_changed_on_disk_are_refused(tmp_path) -> None:
    """One bit of an array, which Orbax would give back as it is."""
    given = {"still": jnp.ones(3), "changed": jax.random.normal(jax.random.key(0), (64, 64))}
    one = checkpoints.save(tmp_path, given, BARE, keep=1, best=None)
    equal(checkpoints.restore(one, jax.tree.map(jnp.zeros_like, given)), given)
    file = max((path for path in one.folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    spoilt = bytearray(file.read_bytes())
    spoilt[len(spoilt) // 2] ^= 16
    file.write_bytes(spoilt)
    with pytest.raises(CheckpointError) as raised:
        checkpoints.restore(one, given)
    assert raised.value.where == str(one.folder)
    assert raised.value.findings == ("['changed'], as float32, has other values than were saved",)


def test_no_device_holds_a_checkpoint_twice(tmp_path, monkeypatch) -> None:
    """It is read back in parts, each of which is gone when the next one is read; what is restored replaces, part by
    part, what was there."""
    given = {f"{i}": jnp.full((4, size), i) for i, size in enumerate((5, 5, 20, 1, 1))}
    expected = jax.tree.map(np.array, given)
    parts, alive, gone, made = [], [], [], []

    def spy(folder, targets, sums):
        parts.append([*targets])
        alive.append(sum(one() is not None for one in made))
        gone.append("".join(name for name, array in given.items() if array.is_deleted()))
        found = read(folder, targets, sums)
        made.extend(weakref.ref(array) for array in found.values())
        return found

    read = checkpoints.read
    monkeypatch.setattr(orbax_arrays, "AT_ONCE", 160)
    monkeypatch.setattr(checkpoints, "read", spy)
    one = checkpoints.save(tmp_path, given, BARE, keep=1, best=None)
    assert parts == [["['0']", "['1']"], ["['2']"], ["['3']", "['4']"]]
    assert (alive, gone) == ([0, 0, 0], ["", "", ""])
    equal(given, expected)
    found = checkpoints.restore(one, given)
    assert parts[:3] == parts[3:]
    assert (alive[3:], gone[3:]) == ([0, 2, 3], ["", "01", "012"])
    assert all(array.is_deleted() for array in given.values())
    equal(found, expected)


def test_a_part_of_a_checkpoint(tmp_path) -> None:
    given = {"a": jnp.ones(3), "b": jnp.zeros(3)}
    one = checkpoints.save(tmp_path, given, BARE, keep=1, best=None)
    assert not checkpoints.restore(one, {"a": None, "b": given["b"]}, part=True)["b"].any()
    assert given["b"].is_deleted() > given["a"].is_deleted()


def test_an_array_that_the_store_lost(tmp_path) -> None:
    """state.json knows of it."""
    given = {"a": jnp.ones(3)}
    one = checkpoints.save(tmp_path, given, BARE, keep=1, best=None)
    state = {**one.state, "checksums": {**one.state["checksums"], "['b']": 0}}
    with pytest.raises(CheckpointError) as raised:
        checkpoints.restore(dataclasses.replace(one, state=state), {"a": jnp.ones(3), "b": jnp.ones(3)})
    assert raised.value.findings == ("Orbax has no ['b']",)


def test_a_checkpoint_of_other_arrays_is_refused(tmp_path) -> None:
    given = {"a": jnp.ones(3), "b": jnp.ones(3)}
    one = checkpoints.save(tmp_path, given, BARE, keep=1, best=None)
    for into, finding in (
        ({"a": given["a"]}, "['b'] is not in the run"),
        (given | {"c": jnp.ones(3)}, "['c'] is not in the checkpoint"),
        ({"a": jnp.ones(3), "b": jnp.ones(4)}, "Orbax cannot restore: "),
    ):
        with pytest.raises(CheckpointError) as raised:
            checkpoints.restore(one, into)
        assert raised.value.findings[0].startswith(finding)


def test_another_dtype_is_told(tmp_path) -> None:
    """Orbax casts to what is asked for."""
    one = checkpoints.save(tmp_path, {"a": jnp.full(3, 0.1)}, BARE, keep=1, best=None)
    with pytest.raises(CheckpointError, match=r"\['a'\], as bfloat16, has other values than were saved"):
        checkpoints.restore(one, {"a": jnp.ones(3, jnp.bfloat16)})


def test_a_disk_that_is_full(tmp_path, monkeypatch) -> None:
    """The checkpoint before it stays."""
    given = {"a": jnp.ones(3)}
    checkpoints.save(tmp_path, given, BARE, keep=1, best=None)

    def full(*_, **__):
        raise ValueError("RESOURCE_EXHAUSTED: No space left on device")

    monkeypatch.setattr("orbax.checkpoint.StandardCheckpointer.save", full)
    with pytest.raises(CheckpointError, match="Orbax cannot write: ValueError: RESOURCE_EXHAUSTED: No space left"):
        checkpoints.save(tmp_path, given, BARE | {"step": 2}, keep=1, best=None)
    assert [folder.name for folder in (tmp_path / "checkpoints").iterdir()] == ["00000001"]


def test_folders_of_other_names_are_left_alone(tmp_path) -> None:
    """Copies are no checkpoints of the run, and nothing of a user's is removed."""
    given = {"a": jnp.ones(3)}
    one = checkpoints.save(tmp_path, given, BARE, keep=1, best=None)
    shutil.copytree(one.folder, one.folder.with_name("1-backup"))
    shutil.copytree(one.folder, one.folder.with_name("00000001.old"))
    (tmp_path / "checkpoints" / "mine").mkdir()
    checkpoints.save(tmp_path, given, BARE | {"step": 2}, keep=1, best=None)
    assert [saved.step for saved in checkpoints.found(tmp_path)] == [2]
    names = {folder.name for folder in (tmp_path / "checkpoints").iterdir()}
    assert names == {"00000002", "00000001.old", "1-backup", "mine"}


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        ({"step": 3}, "state.json is of update 3"),
        ({"step": 1.0}, "state.json: step: Input should be a valid integer"),
        ({"step": True}, "state.json: step: Input should be a valid integer"),
        ({"step": None}, "state.json: step: Input should be a valid integer"),
        ({"checksums": []}, "state.json: checksums: Input should be an object"),
        ({"best": "low"}, "state.json: best: Input should be a valid number"),
        ([], "state.json: Input should be an object"),
    ],
)
def test_a_state_that_is_wrong(tmp_path, change, finding) -> None:
    one = checkpoints.save(tmp_path, {"a": jnp.ones(3)}, BARE, keep=1, best=None)
    state = one.state | change if isinstance(change, dict) else change
    (one.folder / checkpoints.STATE).write_text(json.dumps(state))
    with pytest.raises(CheckpointError) as raised:
        checkpoints.found(tmp_path)
    assert (raised.value.where, len(raised.value.findings)) == (str(one.folder), 1)
    assert raised.value.findings[0].startswith(finding)


def test_metrics_that_are_none(tmp_path) -> None:
    """A last line that was cut off is left out, others are named."""
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"kind": "train", "step": 1}\n{"kind": "tr')
    assert [line["step"] for line in read(file)] == [1]
    file.write_bytes(b'{"kind": "train", "step": 1}\n{"kind": "tr\n\0\0\n[1]\n{"a": 1}\n\xff\n' + b"[" * 10**5 + b"\n")
    with pytest.raises(CheckpointError) as raised:
        read(file)
    assert raised.value.where == str(file)
    assert raised.value.findings == tuple(f"line {n} is no line of metrics: take it out" for n in range(2, 8))
