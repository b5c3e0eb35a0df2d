"""Checkpoints by themselves: what is read back, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.train.test_trainer import equal

from trillion_moe.checkpoint.errors import CheckpointError
from trillion_moe.train import checkpoints

BARE = {"step": 1, "depth": [], "capacity": None}


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
    assert raised.value.findings == ("['changed'] has other values than were saved",)


def test_no_device_holds_a_checkpoint_twice(tmp_path, monkeypatch) -> None:
    """It is read back in parts, none of which is kept; what is restored replaces, part by part, what was there."""
    given = {f"{i}": jnp.full((4, size), i) for i, size in enumerate((5, 5, 20, 1, 1))}
    expected = jax.tree.map(np.array, given)
    parts: list[list[str]] = []
    read = checkpoints._read
    monkeypatch.setattr(checkpoints, "AT_ONCE", 160)
    monkeypatch.setattr(checkpoints, "_read", lambda saved, like: parts.append([*like]) or read(saved, like))
    one = checkpoints.save(tmp_path, given, BARE, keep=1, best=None)
    assert parts == [["['0']", "['1']"], ["['2']"], ["['3']", "['4']"]]
    equal(given, expected)
    found = checkpoints.restore(one, given)
    assert parts[:3] == parts[3:]
    assert all(array.is_deleted() for array in given.values())
    equal(found, expected)


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
