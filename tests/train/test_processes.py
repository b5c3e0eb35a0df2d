"""A run over several real processes, and what becomes of it when one of them dies, stops, or has other flags or data.

Programs are compiled once for all runs here: the folder of the compiler's cache is that of the tests' session.
"""

import contextlib
import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
from tests.tiny import text_checkpoint
from tests.train.test_trainer import arrays

import trillion_moe as tm
from trillion_moe.cli import main
from trillion_moe.data.examples import DataConfig
from trillion_moe.distributed import Place, Processes, ProcessesError
from trillion_moe.programs import check_processes
from trillion_moe.run_config import to_json
from trillion_moe.sharding import LayoutError
from trillion_moe.train.report import read

LIMIT = 15.0  # seconds in which the others end when one process is killed
PATIENCE = 300.0  # of the tests, on a machine that is busy
LOCAL = Path(__file__).parents[2] / "configs" / "launch" / "local.sh"
TRAIN = [sys.executable, "-m", "trillion_moe.cli", "train", "--quiet"]


class Job:
    """Processes that are one run; what each says is in a file."""

    def __init__(self, folder: Path, commands, devices: int, environ: dict[str, str], where: list[Path] | None = None):
        folder.mkdir()
        port = free_port()
        common = os.environ | {
            "TRILLION_MOE_COORDINATOR": f"127.0.0.1:{port}",
            "TRILLION_MOE_PROCESSES": str(len(commands)),
            "JAX_NUM_CPU_DEVICES": str(devices),
        }
        self.files = [folder / f"{i}.txt" for i in range(len(commands))]
        self.processes = [
            subprocess.Popen(
                command, stdout=file.open("w"), stderr=subprocess.STDOUT,
                env=common | {"TRILLION_MOE_PROCESS": str(i)} | environ, cwd=None if where is None else where[i],
            )
            for i, (command, file) in enumerate(zip(commands, self.files, strict=True))
        ]  # fmt: skip

    def said(self, index: int) -> str:
        return self.files[index].read_text()

    def until(self, condition) -> None:
        """Wait for it, which all processes must live to see."""
        end = time.monotonic() + PATIENCE
        while not condition():
            ended = [i for i, process in enumerate(self.processes) if process.poll() is not None]
            assert not ended, self.said(ended[0])
            assert time.monotonic() < end, [file.read_text() for file in self.files]
            time.sleep(0.02)

    def codes(self, *indices: int) -> list[int]:
        """The exit codes of these, or of all."""
        chosen = [self.processes[i] for i in indices] or self.processes
        return [process.wait(PATIENCE) for process in chosen]


def free_port() -> int:
    """A port that nobody listens on, nor on the one before it."""
    while True:
        with socket.socket() as one, socket.socket() as two:
            one.bind(("127.0.0.1", 0))
            with contextlib.suppress(OSError):
                two.bind(("127.0.0.1", one.getsockname()[1] - 1))
                return one.getsockname()[1]


@pytest.fixture
def job(tmp_path):
    """Starts a Job; whatever is left of it when the test ends is killed."""
    jobs: list[Job] = []

    def job(commands, devices: int, *, where=None, **environ: str) -> Job:
        jobs.append(Job(tmp_path / f"said{len(jobs)}", commands, devices, environ, where))
        return jobs[-1]

    yield job
    for process in (process for job in jobs for process in job.processes):
        process.kill()
        process.wait()


def after(began: float) -> float:
    return time.monotonic() - began


# --- what needs no training -------------------------------------------------------------------------------------------

CHILD = """
import sys, time
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from trillion_moe.distributed import Timing, join, whole
from trillion_moe.sharding import Layout, put

with join(known=(ValueError,), timing=Timing(silence=4.0, say=1.0)) as processes:
    layout = Layout.make({"dp": jax.device_count()})
    x = put(np.arange(jax.device_count() * 2.0), NamedSharding(layout.mesh, PartitionSpec("dp")))
    add = jax.jit(lambda x: x + jnp.sum(x))
    sys.argv[1] == "slow" and processes.index == 1 and time.sleep(3)
    add.lower(x).compile()
    processes.wait("compile")
    for step in range(10**6 if sys.argv[1] == "long" else 3):
        x = add(x) * 0
        assert not whole(x).any()
        print("step", step, flush=True)
        if sys.argv[1] == "bug" and processes.index == 0:
            raise KeyError("nothing of this name")
        time.sleep(0.05)
print("END")
"""


def child(kind: str, count: int) -> list[list[str]]:
    return [[sys.executable, "-c", textwrap.dedent(CHILD), kind]] * count


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "victim", "number"),
    [(3, 0, signal.SIGKILL), (2, 1, signal.SIGKILL), (2, 0, signal.SIGSTOP), (2, 1, signal.SIGSTOP)],
)
def test_one_that_is_gone_ends_the_others(job, count: int, victim: int, number: int) -> None:
    """fault 41: and they name it: killed or, where nothing comes for 4 s here (60 s by default), stopped; process 0
    too, without which JAX itself aborts before Python can say a word."""
    run = job(child("long", count), 1)
    run.until(lambda: all("step 3" in run.said(i) for i in range(count)))
    began = time.monotonic()
    run.processes[victim].send_signal(number)
    others = [i for i in range(count) if i != victim]
    codes = run.codes(*others)
    assert after(began) < LIMIT
    assert codes == [1] * len(others)
    why = "its connection has ended" if number == signal.SIGKILL else "nothing has come for 4 s"
    for i in others:
        assert f"process {i} ends: process {victim} (host {socket.gethostname()}) is missing: {why}" in run.said(i)


@pytest.mark.slow
def test_one_that_has_a_bug_ends_the_others(job) -> None:
    run = job(child("bug", 2), 1)
    assert run.codes() == [1, 1]
    assert "KeyError: 'nothing of this name'" in run.said(0)
    assert "Traceback" in run.said(0)
    host = socket.gethostname()
    assert run.said(1).endswith(f"process 1 ends: process 0 (host {host}): KeyError: 'nothing of this name'\n")


@pytest.mark.slow
def test_one_that_compiles_longer_is_waited_for(job) -> None:
    """fault 42: who waits says for whom."""
    run = job(child("slow", 2), 2)
    assert run.codes() == [0, 0]
    said = f"process 0: waiting on compile of process 1 (host {socket.gethostname()}) for "
    assert run.said(0).count(said) >= 2
    assert "waiting" not in run.said(1)
    assert [run.said(i).splitlines()[-1] for i in (0, 1)] == ["END"] * 2


# --- training ---------------------------------------------------------------------------------------------------------

MESH = {"fsdp": 2, "ep": 2}
LONG = {"steps": 30, "batch_size": 4, "accumulate": 1, "eval_every": 10, "save_every": 4}


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> dict[str, str]:
    """A compilation cache for the processes of this module."""
    folder = str(tmp_path_factory.mktemp("compiled"))
    return {"JAX_COMPILATION_CACHE_DIR": folder, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}


@pytest.fixture
def written(write_rows, rows, tmp_path, monkeypatch):
    """Writes a configuration and ten rows -> the command that trains it."""

    def written(settings) -> list[str]:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "run.json").write_text(to_json(settings))
        write_rows(Path(settings.data), rows(10))
        return [*TRAIN, "--config", str(tmp_path / "run.json")]

    return written


def updates(output: Path) -> list[dict]:
    return [line for line in read(output / "metrics.jsonl") if line["kind"] == "train"]


@pytest.mark.slow
def test_a_run_over_two_processes(job, written, config, trainer, adapted, rows, tmp_path, cache) -> None:
    """Process 0 killed, then a signal to process 1 alone, after which both save the same update and end; one process
    goes on over the same mesh. In all the updates of one process. Reports are written once."""
    settings = config(mesh=MESH, train=LONG, optimizer={"lr": 1e-3}, eval_rows=3)
    model = tm.place(adapted, tm.Layout.make(MESH))
    one = dataclasses.replace(settings, output=str(tmp_path / "one"))
    given = rows(10)[:7], rows(10)[7:]
    expected = trainer(one, *given, model=model).run(quiet=True)
    command, output = written(settings), Path(settings.output)

    run = job([command] * 2, 2, **cache)
    run.until(lambda: (output / "checkpoints" / "00000004" / "state.json").is_file() and len(updates(output)) > 5)
    began = time.monotonic()
    run.processes[0].kill()
    assert run.codes(1) == [1]
    assert after(began) < LIMIT
    assert f"process 1 ends: process 0 (host {socket.gethostname()}) is missing" in run.said(1)
    reached = len(updates(output))

    run = job([command] * 2, 2, **cache)
    run.until(lambda: len(updates(output)) > reached)
    run.processes[1].send_signal(signal.SIGTERM)
    assert run.codes() == [143, 143]
    assert re.search(r"goes on behind update (4|8|12|16) of 30", run.said(0))
    stopped = len(updates(output))
    assert reached < stopped < 30
    assert f"signal 15: checkpoint of update {stopped} saved" in run.said(0)
    assert max(path.name for path in (output / "checkpoints").iterdir()) == f"{stopped:08d}"
    assert "supervised tokens" not in run.said(1)

    last = trainer(settings, *given, model=model)
    assert last.step == stopped
    found = last.run(quiet=True)
    both = [read(path / "metrics.jsonl") for path in (output, Path(one.output))]
    assert [line["step"] for line in both[0] if line["kind"] == "train"] == [*range(1, 31)]
    for line, was in zip(*both, strict=True):
        assert (line["kind"], line.get("expert_counts")) == (was["kind"], was.get("expert_counts"))
        for name in {*was} & {"loss", "accuracy", "grad_norm", "lr", "tokens"}:
            np.testing.assert_allclose(line[name], was[name], rtol=1e-3)
    for name, array in arrays(expected.model).items():
        np.testing.assert_allclose(arrays(found.model)[name], array, rtol=1e-2, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_a_run_over_four_processes(written, config, trainer, adapted, tmp_path, cache) -> None:
    """Of one device each, started by the script for one host, to the adapter: as one process does it."""
    short = {"steps": 1, "batch_size": 4, "accumulate": 1}
    settings = config(mesh={"ep": 4}, train=short, optimizer={"lr": 1e-3})
    command, output = written(settings), Path(settings.output)
    environ = os.environ | cache | {"JAX_NUM_CPU_DEVICES": "1"}
    ended = subprocess.run([LOCAL, "4", *command], env=environ, capture_output=True, text=True, timeout=2 * PATIENCE)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == str(output / "adapter")
    assert ended.stdout.count(str(output)) == 1
    assert ended.stderr.count("supervised tokens") == 1
    one = dataclasses.replace(settings, output=str(tmp_path / "one"))
    expected = trainer(one, model=tm.place(adapted, tm.Layout.make({"ep": 4}))).run(quiet=True)
    found = arrays(tm.load_adapter(tm.load(settings.model), output / "adapter"))
    for name, array in arrays(expected.model).items():
        np.testing.assert_allclose(found[name], array, rtol=1e-2, atol=1e-5, err_msg=name)
    (line,), (was,) = updates(output), updates(Path(one.output))
    np.testing.assert_allclose(line["loss"], was["loss"], rtol=1e-4)


@pytest.mark.slow
def test_pictures_over_two_processes(config, tmp_path, cache) -> None:
    """A pass with pictures of two sizes, then one in which a process has none: as one process does it."""
    content = [[{"type": "text", "text": "What is it?"}] for _ in range(4)]
    for i in range(3):
        pixels = np.random.default_rng(i).integers(0, 256, (20, 20 + 10 * i, 3), np.uint8)
        PIL.Image.fromarray(pixels).save(tmp_path / f"{i}.png")
        content[i].insert(0, {"type": "image_url", "image_url": {"url": f"{i}.png"}})
    rows = [{"messages": [{"role": "user", "content": one}, {"role": "assistant", "content": "A."}]} for one in content]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = config(
        model=str(text_checkpoint(tmp_path / "model")), mesh={"dp": 2}, examples=DataConfig(thinking=False),
        lora=tm.LoRAConfig(rank=2), train={"accumulate": 1, "epochs": 1, "dropout": 0.0},
    )  # fmt: skip
    (tmp_path / "run.json").write_text(to_json(settings))
    flags = ["--config", str(tmp_path / "run.json"), "--output"]
    environ = os.environ | cache | {"JAX_NUM_CPU_DEVICES": "1"}
    command = [LOCAL, "2", *TRAIN, *flags, str(tmp_path / "two")]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=2 * PATIENCE)
    assert ended.returncode == 0, ended.stderr
    assert main(["train", "--quiet", *flags, str(tmp_path / "one")]) == 0
    both = [updates(tmp_path / name) for name in ("two", "one")]
    assert [line["step"] for line in both[0]] == [1, 2]
    for line, was in zip(*both, strict=True):
        np.testing.assert_allclose(line["loss"], was["loss"], rtol=1e-4)
    two, one = (
        arrays(tm.load_adapter(tm.load(settings.model), tmp_path / name / "adapter")) for name in ("two", "one")
    )
    for name, array in one.items():
        np.testing.assert_allclose(two[name], array, rtol=1e-2, atol=1e-5, err_msg=name)


SAVE = """
import sys
import jax
import trillion_moe as tm
from trillion_moe.checkpoint.safetensors_io import Reader
from trillion_moe.distributed import join

starts, into = [], Reader.into
Reader.into = lambda self, file, start, out: starts.append(start) or into(self, file, start, out)

with join():
    model = tm.load(sys.argv[1], mesh={"ep": 2})
    print("read from", *starts, flush=True)
    assert not model.segments[0][0].ffn.experts.down.is_fully_addressable
    tm.save(sys.argv[2] + "/hf", model)
    tm.save(sys.argv[2] + "/orbax", model, format="orbax")
    again = tm.load(sys.argv[2] + "/orbax", mesh={"ep": 2})
    for one, was in zip(jax.tree.leaves(again), jax.tree.leaves(model), strict=True):
        assert one.sharding == was.sharding and bool((one == was).all())
"""


def starting(folder: Path) -> dict[int, str]:
    """The tensors of a file by their first byte in it."""
    data = (folder / "model.safetensors").read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    table = json.loads(data[8:begin])
    return {begin + table[name]["data_offsets"][0]: name for name in table if name != "__metadata__"}


@pytest.mark.slow
def test_saved_by_two_processes(job, folder, tmp_path) -> None:
    """Both formats, of arrays that no process has whole: what was loaded, bit for bit. Each reads its own experts."""
    run = job([[sys.executable, "-c", SAVE, str(folder), str(tmp_path)]] * 2, 1)
    assert run.codes() == [0, 0], run.said(0)
    for i in (0, 1):
        (line,) = re.findall("^read from (.*)$", run.said(i), re.MULTILINE)
        found = [name for name in map(starting(folder).get, map(int, line.split())) if name is not None]
        experts = [int(match[1]) for name in found if (match := re.search(r"experts\.(\d+)\.", name))]
        assert sorted(experts) == sorted([*range(4 * i, 4 * i + 4)] * 3)
        assert "model.embed_tokens.weight" in "".join(found)
    assert (tmp_path / "hf" / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    model, again = arrays(tm.load(folder)), arrays(tm.load(tmp_path / "orbax"))
    for name, array in model.items():
        np.testing.assert_array_equal(again[name], array)
    assert not [path.name for path in tmp_path.iterdir() if "unfinished" in path.name]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "flags", "lines", "said"),
    [
        (1, ["--no-such-flag"], None, "unrecognized arguments: --no-such-flag"),
        (0, [], ['{"prompt": "a", "completion": "b"}', '{"prompt": 3}'], "- line 2, completion: "),
        (1, [], ['{"prompt": "a", "completion": "b"}'] * 9, "the data of all processes must be the same: data is '"),
    ],
    ids=["flag", "row", "data"],
)
def test_one_that_is_given_something_else(job, written, config, tmp_path, victim, flags, lines, said) -> None:
    """Nobody hangs, and all say what was wrong where. The file of data is of the host that reads it."""
    command = written(config(mesh={"fsdp": 2}, data="rows.jsonl", output=str(tmp_path / "out")))
    hosts = [tmp_path / "host0", tmp_path / "host1"]
    good = Path("rows.jsonl").read_text()
    for i, host in enumerate(hosts):
        host.mkdir()
        (host / "rows.jsonl").write_text(good if lines is None or i != victim else "\n".join(lines) + "\n")
    commands = [command, command]
    commands[victim] = [*command, *flags]
    run = job(commands, 1, where=hosts)
    assert 0 not in run.codes()
    for i in (0, 1):
        assert said in run.said(i)
        assert "Traceback" not in run.said(i)
    if "same" not in said:
        assert f"process {1 - victim} ends: process {victim}" in run.said(1 - victim)


# --- in one process ---------------------------------------------------------------------------------------------------


class Recorded(Processes):
    """The first of two processes of which the other agrees with everything: the points at which it waited."""

    def __init__(self):
        super().__init__(Place(0, 2, "a:9"))
        self.points: list[str] = []

    def gather(self, what, value=None):
        self.points.append(what)
        return {0: value}


def test_all_have_compiled_before_one_runs(trainer, config, rows) -> None:
    """fault 42: gradients of two lengths, their sum, the update, and the evaluation, each once."""
    given = [*rows(3), {"prompt": "a" * 70 + "=", "completion": "b"}]
    with Recorded() as processes:
        run = config(train={"epochs": 3, "eval_every": 1, "save_every": 0})
        trainer(run, given, held_out=rows(2, first=10)).run(quiet=True)
    assert processes.points[:5] == ["latest checkpoint", *["compile"] * 4]
    assert processes.points.count("compile") == 5
    assert [point for point in processes.points if point.startswith("update")] == [f"update {i}" for i in (1, 2, 3)]


def test_a_mesh_that_leaves_out_processes() -> None:
    with Recorded():
        with pytest.raises(LayoutError, match=r"mesh has 1 device\(s\), the 2 processes have 8: legal is a mesh over"):
            check_processes(None)
        with pytest.raises(LayoutError, match=r"mesh has 4 device\(s\)"):
            check_processes(tm.Layout.make({"ep": 4}))
        check_processes(tm.Layout.make({"ep": 8}))
    check_processes(None)


def test_a_mesh_that_is_another_one_elsewhere() -> None:
    """Of a file, say, that is not the same on every host: compiled programs would wait for each other for ever."""

    class Other(Recorded):
        def gather(self, what, value=None):
            return {0: value, 1: value | {"transport": "ragged"}}

    with Other() as processes:
        processes.hosts = ("a", "b")
        says = r"the mesh of all .*: transport is 'ragged' in process 1 \(host b\), 'replicated' in process 0$"
        with pytest.raises(ProcessesError, match=says):
            check_processes(tm.Layout.make({"ep": 8}))
