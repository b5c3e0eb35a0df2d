"""What several processes agree on before one of them would wait for the others: the configuration, the checkpoint."""

import dataclasses
import json
import os
import threading
from argparse import Namespace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from trillion_moe.checkpoint import shared_disk
from trillion_moe.checkpoint.errors import CheckpointError
from trillion_moe.distributed import Place, Processes, ProcessesError
from trillion_moe.run_config import to_json
from trillion_moe.train import checkpoints, command
from trillion_moe.train.trainer import flat

ARRAYS = {"weights": jnp.arange(6.0)}
STATE = {
    "step": 7, "tokens": 0, "best": None, "best_step": None, "stale": 0, "data": {}, "config": {}, "depth": [],
    "capacity": None,
}  # fmt: skip


class Pair(Processes):
    """One of two processes. others: by point what the other one says, which otherwise says the same."""

    def __init__(self, index: int, **others):
        super().__init__(Place(index, 2, "a:9"))
        self.hosts = "a", "b"
        self.others = {name.replace("_", " "): value for name, value in others.items()}
        self.points: list[str] = []

    def gather(self, what, value=None):
        self.points.append(what)
        value = json.loads(json.dumps(value))
        point = next((name for name in self.others if what.startswith(name)), None)
        both = {self.index: value, 1 - self.index: value if point is None else self.others[point]}
        return both if both[0] != both[1] else {0: both[0]}


@pytest.fixture
def two_saved(trainer, config):
    """-> the configuration of a run that has ended with update 2, whose best is update 1."""
    settings = config(train={"steps": 2, "eval_every": 1}, eval_rows=1)
    run = trainer(settings)
    run.best, run.best_step = 0.5, 1
    for run.step in (1, 2):
        run.trainable = jax.tree.map(lambda a: jnp.full_like(a, run.step), run.trainable)
        run.save()
    return settings


def comes_late(folder: Path, seconds: float) -> threading.Timer:
    """Hides a folder for so long, as a host does that has an older list of what a shared disk holds."""
    hidden = folder.rename(folder.with_name(f"hidden-{folder.name}"))
    timer = threading.Timer(seconds, lambda: hidden.rename(folder))
    timer.start()
    return timer


def test_the_checkpoint_that_process_0_finds_is_waited_for(two_saved, trainer) -> None:
    """The latest, to go on from, and the best at the end; this process's own list has neither."""
    folder = Path(two_saved.output) / checkpoints.FOLDER
    with Pair(1, latest_checkpoint="00000002", checkpoint_of_update_1="00000001"):
        timer = comes_late(folder, 0.3)
        run = trainer(two_saved)
        timer.join()
        assert (run.step, run.best_step) == (2, 1)
        assert {float(a.max()) for a in jax.tree.leaves(run.trainable)} == {2.0}
        timer = comes_late(folder / "00000001", 0.3)
        result = run.run(quiet=True)
        timer.join()
    assert result.step == 1


def test_a_checkpoint_that_only_process_1_finds_is_not_taken(two_saved, trainer) -> None:
    """Where process 0 begins at the beginning all do; a best one that it has not is gone for all."""
    with Pair(1, latest_checkpoint=None):
        assert trainer(two_saved).step == 0
    with Pair(1, latest_checkpoint="00000002", checkpoint_of_update_1=None):
        run = trainer(two_saved)
        with pytest.raises(CheckpointError, match="the checkpoint of update 1, the best one, is gone"):
            run.run(quiet=True)


@pytest.mark.parametrize("index", [0, 1])
def test_who_does_not_see_the_checkpoint_is_named(tmp_path, monkeypatch, index: int) -> None:
    """By both, before either waits inside of Orbax."""
    monkeypatch.setattr(shared_disk, "SEEN", 0.3)
    saved = checkpoints.save(tmp_path, ARRAYS, STATE, keep=1, best=None)
    if index:
        saved.folder.rename(tmp_path / "elsewhere")
    others = {"latest_checkpoint": "00000007", "sight": True} if index else {"sight": False}
    with Pair(index, **others), pytest.raises(CheckpointError) as raised:
        checkpoints.agreed(tmp_path)
    assert raised.value.where == str(saved.folder)
    assert raised.value.findings == ("process 1 (host b) does not see state.json here in 0.3 s: share a disk",)


def test_a_save_is_seen_by_all_before_it_is_read_back(tmp_path, monkeypatch) -> None:
    def read(*_):
        raise AssertionError("reads, while the other cannot")

    with Pair(0) as alike:
        checkpoints.save(tmp_path, ARRAYS, STATE, keep=1, best=None)
    names = ["name of 00000007 given", "00000007/state.json written", "sight of 00000007/state.json"]
    assert alike.points[-5:] == [*names, "checkpoint read back", "old checkpoints removed"]
    monkeypatch.setattr(checkpoints, "read", read)
    with (
        Pair(0, sight=False),
        pytest.raises(CheckpointError, match=r"00000008: 1 .*\n.*process 1 \(host b\) does not see"),
    ):
        checkpoints.save(tmp_path, ARRAYS, STATE | {"step": 8}, keep=1, best=None)


@pytest.mark.parametrize("index", [0, 1])
def test_an_output_that_one_does_not_see(tmp_path, monkeypatch, index: int) -> None:
    """Found before a run begins; the mark by which it is found does not stay."""
    monkeypatch.setattr(shared_disk, "SEEN", 0.0)
    with Pair(index, sight=index == 1) as processes, pytest.raises(CheckpointError) as raised:
        command._check_shared(tmp_path, processes)
    assert raised.value.findings == ("process 1 (host b) does not see what process 0 writes here: share a disk",)
    assert not list(tmp_path.iterdir())
    with Pair(0) as processes:
        command._check_shared(tmp_path, processes)


def test_folders_are_opened_before_a_file_counts_as_absent(tmp_path, monkeypatch) -> None:
    """As NFS needs it, which answers by what it knew of a folder until that is opened."""
    file, opened, really = tmp_path / "folder" / "file", [], os.open
    file.parent.mkdir()
    file.touch()
    monkeypatch.setattr(shared_disk, "SEEN", 0.0)
    monkeypatch.setattr(os, "open", lambda path, flags: opened.append(Path(path)) or really(path, flags))
    monkeypatch.setattr(os.path, "exists", lambda path: opened[-2:] == [tmp_path, file.parent])
    with Pair(1):
        assert shared_disk.blind(file) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"train": {"save_every": 7}}, "train.save_every is 7 in process 1 (host b), 1 in process 0"),
        ({"train": {"keep": 9}}, "train.keep is 9 in process 1 (host b), 2 in process 0"),
        ({"lora": None, "train": {"dropout": 0.0}}, "lora.rank is not there in process 1 (host b), 2 in process 0"),
        ({"mesh": {"ep": 2}}, "mesh.ep is 2 in process 1 (host b), not there in process 0"),
        ({"output": "other"}, "output is 'other' in process 1 (host b), '"),
    ],
)
def test_the_whole_configuration_is_the_same(config, tmp_path, changes, said: str) -> None:
    """Of both a field that differs is named, before a file of the model is read."""
    ours, other = config(), config(**changes)
    for index, (here, there) in enumerate([(ours, other), (other, ours)]):
        (tmp_path / "run.json").write_text(to_json(here))
        with Pair(index, configuration=flat(there) | {"--dry-run": False}), pytest.raises(ProcessesError) as raised:
            command.run(arguments(tmp_path / "run.json"), never)
        assert str(raised.value).startswith("the configuration of all processes must be the same: ")
        assert said in str(raised.value)


def test_no_field_is_left_out(config) -> None:
    """Nor is the flag that ends a run before it begins."""
    given = flat(config())
    for part in ("train", "optimizer", "examples", "lora"):
        assert {f"{part}.{field.name}" for field in dataclasses.fields(getattr(config(), part))} <= given.keys()
    assert {field.name for field in dataclasses.fields(config())} == {name.partition(".")[0] for name in given}


def test_a_dry_run_of_one_of_them(config, tmp_path) -> None:
    (tmp_path / "run.json").write_text(to_json(config()))
    dry = flat(config()) | {"--dry-run": True}
    with (
        Pair(0, configuration=dry),
        pytest.raises(ProcessesError, match=r"same: --dry-run is True in process 1 \(host b\)"),
    ):
        command.run(arguments(tmp_path / "run.json"), never)


def test_a_model_that_is_another_one_elsewhere(config, tmp_path) -> None:
    """By its configuration, and by how large its files of weights are."""
    run = config(mesh={"fsdp": 8})
    (tmp_path / "run.json").write_text(to_json(run))
    here = command.told_apart_by(Path(run.model))
    for name in ("crc32 of config.json", *(file.name for file in Path(run.model).glob("*.safetensors"))):
        with (
            Pair(0, model=here | {name: 5}),
            pytest.raises(ProcessesError, match=rf"the model of all .* same: {name} is 5 in process 1 \(host b\)"),
        ):
            command.run(arguments(tmp_path / "run.json"), never)


def never(*_, **__):
    raise AssertionError("weights are read")


def arguments(file: Path) -> Namespace:
    return Namespace(config=str(file), data=None, model=None, output=None, mesh=None, set=[], dry_run=False, quiet=True)
