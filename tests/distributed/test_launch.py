"""The launch scripts: that they parse, start what there is, and set what is read."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from trillion_moe.cli import _parser
from trillion_moe.distributed import Place, find
from trillion_moe.distributed.environment import INDEXED_JOB, NAMES, variable

LAUNCH = Path(__file__).parents[2] / "configs" / "launch"
FLAGS = ["--config", "lora", "--data", "my rows.jsonl"]


def called(tmp_path: Path, script: str, program: str, **environ: str) -> list[list[str]]:
    """The arguments that a script gives a program, which is replaced by one that writes them down."""
    fake = tmp_path / program
    fake.write_text('#!/bin/bash\nprintf "%s\\n" "$@" > "$FOUND"\n')
    fake.chmod(0o755)
    found = tmp_path / "found"
    path = f"{tmp_path}:{os.environ['PATH']}"
    subprocess.run(
        [LAUNCH / script, *FLAGS], env=os.environ | environ | {"PATH": path, "FOUND": str(found)}, check=True
    )
    return found.read_text().splitlines()


@pytest.mark.parametrize("script", sorted(path.name for path in LAUNCH.glob("*.sh")))
def test_scripts_parse(script: str) -> None:
    assert os.access(LAUNCH / script, os.X_OK)
    subprocess.run(["bash", "-n", LAUNCH / script], check=True)
    named = set(re.findall(r"TRILLION_MOE_\w+", (LAUNCH / script).read_text()))
    assert named <= {variable(name) for name in NAMES}


def test_slurm(tmp_path: Path) -> None:
    """A process for each GPU, started by srun, which sets what JAX reads; the rest goes to the program."""
    text = (LAUNCH / "slurm.sh").read_text()
    given = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", text, re.M))
    assert given["ntasks-per-node"] == given["gpus-per-node"]
    options, rest = [], called(tmp_path, "slurm.sh", "srun")
    while rest[0].startswith("--"):
        options.append(rest.pop(0))
    assert "--kill-on-bad-exit=1" in options
    assert rest == ["trillion-moe", "train", *FLAGS]


def test_xla_knows_the_flag_that_ends_what_hangs_between_gpus() -> None:
    """It ends a process that is given another."""
    flag = "--xla_gpu_nccl_termination_timeout_seconds=600"
    for script in ("slurm.sh", "kubernetes.yaml"):
        assert flag in (LAUNCH / script).read_text()
    code = "import jax; jax.jit(lambda x: x)(1)"
    for flags, known in ((flag, True), ("--xla_gpu_no_such_flag=600", False)):
        found = subprocess.run([sys.executable, "-c", code], env=os.environ | {"XLA_FLAGS": flags}, capture_output=True)
        assert (found.returncode == 0) == known, found.stderr


def test_tpu_pod(tmp_path: Path) -> None:
    rest = called(tmp_path, "tpu_pod.sh", "gcloud", TPU="slice", ZONE="z")
    assert rest[:-1] == ["compute", "tpus", "tpu-vm", "ssh", "slice", "--zone", "z", "--worker=all", "--command"]
    assert shlex.split(rest[-1]) == ["trillion-moe", "train", *FLAGS]
    bare = {name: value for name, value in os.environ.items() if name not in ("TPU", "ZONE")}
    ended = subprocess.run([LAUNCH / "tpu_pod.sh"], env=bare, capture_output=True, text=True)
    assert ended.returncode
    assert "TPU: is not set: the name of the slice" in ended.stderr


def test_kubernetes(monkeypatch) -> None:
    """Pods that are numbered, find pod 0 by the service's name, and are as many as they are told."""
    service, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    name, spec, pod = job["metadata"]["name"], job["spec"], job["spec"]["template"]["spec"]
    assert (service["kind"], job["kind"], spec["completionMode"]) == ("Service", "Job", "Indexed")
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": name}
    assert pod["subdomain"] == service["metadata"]["name"]
    (container,) = pod["containers"]
    environ = {entry["name"]: entry["value"] for entry in container["env"]} | {INDEXED_JOB: "1"}
    count = spec["completions"]
    assert find({}, environ) == Place(1, count, environ[variable("coordinator")])
    assert spec["parallelism"] == count
    assert environ[variable("coordinator")].startswith(f"{name}-0.{pod['subdomain']}:")
    program, *rest = [*container["command"], *container["args"]]
    assert program == "trillion-moe"
    assert _parser().parse_args(rest).config == "kimi_k3_lora"
    monkeypatch.setenv(INDEXED_JOB, "0")
    assert find({}, {}) == Place()


def test_local(tmp_path: Path) -> None:
    """As many as are asked for, each with its number and one address; the first code that is not 0 is the end's."""
    shown = "$TRILLION_MOE_PROCESS $TRILLION_MOE_PROCESSES $TRILLION_MOE_COORDINATOR $*"
    script = f'echo "{shown}"; exit "$TRILLION_MOE_PROCESS"'
    ended = subprocess.run([LAUNCH / "local.sh", "3", "bash", "-c", script, "x", "a b"], capture_output=True, text=True)
    assert ended.returncode == 1
    lines = sorted(line.split(maxsplit=3) for line in ended.stdout.splitlines())
    assert [(line[0], line[1], line[3]) for line in lines] == [(str(i), "3", "a b") for i in range(3)]
    assert len({line[2] for line in lines}) == 1
    find({}, dict(zip(map(variable, ("process", "processes", "coordinator")), lines[2], strict=False)))
    assert subprocess.run([LAUNCH / "local.sh", "0", "true"], capture_output=True).returncode == 2


def ended(process: subprocess.Popen, seconds: float = 20) -> int | None:
    """Its code; None, and it is killed, if it has not ended by then: who leaves `Popen` waits for it."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        return None


def test_local_tells_the_process_that_was_just_started(tmp_path: Path) -> None:
    """A signal that comes between the start of a process and the line that notes it, planted there."""
    script = (LAUNCH / "local.sh").read_text().replace("    children+=", "    kill -TERM $$\n    children+=")
    assert script.count("kill -TERM $$") == 1
    (tmp_path / "local.sh").write_text(script)
    flags = ["bash", tmp_path / "local.sh", "1", "sleep", "30"]
    with subprocess.Popen(flags) as all_:
        assert ended(all_) == 143


def test_local_passes_signals_on(tmp_path: Path) -> None:
    script = f'trap "echo told > {tmp_path}/$TRILLION_MOE_PROCESS; exit 143" TERM; echo up; while :; do sleep 0.1; done'
    with subprocess.Popen([LAUNCH / "local.sh", "2", "bash", "-c", script], stdout=subprocess.PIPE, text=True) as all_:
        assert all_.stdout is not None
        assert [all_.stdout.readline() for _ in range(2)] == ["up\n"] * 2
        all_.terminate()
        assert ended(all_) == 143
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
