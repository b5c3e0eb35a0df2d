"""Which process of a job this is: from flags, from our environment variables, or from what started it.

    --coordinator  TRILLION_MOE_COORDINATOR   HOST:PORT of process 0; the port before it must be free too
    --processes    TRILLION_MOE_PROCESSES     how many there are; 1 = alone, whatever else is set
    --process      TRILLION_MOE_PROCESS       which one this is, from 0; else JOB_COMPLETION_INDEX (Kubernetes)

Without any of them JAX is asked, which knows SLURM, TPU pods, Open MPI and, with the package `kubernetes`, Jobs. It
also reads JAX_COORDINATOR_ADDRESS, which says nothing of how many there are: with that alone no run begins.
"""

import argparse
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

PREFIX, INDEXED_JOB, ADDRESS = "TRILLION_MOE_", "JOB_COMPLETION_INDEX", "JAX_COORDINATOR_ADDRESS"
NAMES = ("coordinator", "processes", "process")
SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
DETECTION_SECONDS = 300  # for the name of process 0 to be known


class ProcessesError(RuntimeError):
    """Processes that cannot work together: what is missing or differs, of which of them, and what was found."""


@dataclass(frozen=True)
class Place:
    """This process among the others. coordinator: host:port of process 0, empty if it is alone. devices: numbers of
    the GPUs of this host that it may use, None = all."""

    index: int = 0
    count: int = 1
    coordinator: str = ""
    devices: tuple[int, ...] | None = None

    @property
    def host(self) -> str:
        return self.coordinator.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        return int(self.coordinator.rpartition(":")[2])


def find(given: Mapping[str, str | None], environ: Mapping[str, str] = os.environ) -> Place:
    """given: what flags say of `NAMES`, None where they do not.

    Raises ProcessesError naming what is missing beside what was found, and what is no number or out of range.
    """
    found = {f"--{name}": given[name] for name in NAMES if given.get(name) is not None}
    found |= {v: environ[v] for name in NAMES if f"--{name}" not in found and (v := variable(name)) in environ}
    if not found:
        return _detected(environ)
    values = {name: found.get(f"--{name}", found.get(variable(name))) for name in NAMES}
    if values["processes"] is not None and _number("processes", values["processes"], found) == 1:
        return Place()
    if values["process"] is None and INDEXED_JOB in environ:
        values["process"] = found[INDEXED_JOB] = environ[INDEXED_JOB]
    if missing := [f"{variable(name)} (or --{name})" for name in NAMES if values[name] is None]:
        raise ProcessesError(f"{' and '.join(missing)} missing; found {_listed(found)}")
    index, count = (_number(name, values[name], found) for name in ("process", "processes"))
    if not 0 <= index < count:
        raise ProcessesError(f"process {index} of {count}: legal is 0 to {count - 1}; found {_listed(found)}")
    _check_address(str(values["coordinator"]), found)
    return Place(index, count, str(values["coordinator"]), _devices(environ))


def variable(name: str) -> str:
    return f"{PREFIX}{name.upper()}"


def _detected(environ: Mapping[str, str]) -> Place:
    """As JAX detects it: it knows where each kind of job keeps its numbers."""
    from jax._src.clusters import ClusterEnv  # JAX has no public name for it

    steps = [name for name in SLURM if name in environ]
    if "SLURM_PROCID" in steps and environ.get("SLURM_NTASKS", "1") != "1" and len(steps) < len(SLURM):
        missing = " and ".join(name for name in SLURM if name not in steps)
        shown = _listed({name: environ[name] for name in steps})
        raise ProcessesError(f"{missing} missing: start it with srun, or with --processes 1; found {shown}")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "\nKubernetes environment", UserWarning)  # a pod that is no Job of processes
        try:
            address, count, index, devices = ClusterEnv.auto_detect_unset_distributed_params(
                environ.get(ADDRESS) or None, None, None, _devices(environ), None, DETECTION_SECONDS
            )
        except Exception as error:  # whatever a cluster's own service raises
            raise ProcessesError(f"{error}; give --coordinator, --processes and --process, or --processes 1") from error
    if count == 1 or (address is None and count is None and index is None):
        return Place()
    if address is None or count is None or index is None:
        names = ADDRESS if environ.get(ADDRESS) else "coordinator", "processes", "process"
        raise ProcessesError(_partly(dict(zip(names, (address, count, index), strict=True))))
    return Place(index, count, address, None if devices is None else tuple(devices))


def _partly(known: Mapping[str, str | int | None]) -> str:
    """What to say of a job of which JAX knows a part: each process, taken as alone, would write the same output."""
    missing = " and ".join(f"{variable(name)} (or --{name})" for name, value in known.items() if value is None)
    legal = "HOST:PORT of process 0", "how many there are, 1 = this one alone", "which this is, from 0"
    all_ = ", ".join(f"{variable(name)} = {what}" for name, what in zip(NAMES, legal, strict=True))
    found = {name: str(value) for name, value in known.items() if value is not None}
    return f"{missing} missing: legal are all three of {all_}; found {_listed(found)}"


def _devices(environ: Mapping[str, str]) -> tuple[int, ...] | None:
    given = environ.get("JAX_LOCAL_DEVICE_IDS")
    if not given:
        return None
    if not all(number.strip().isdecimal() for number in given.split(",")):
        raise ProcessesError(f"JAX_LOCAL_DEVICE_IDS = {given!r}: legal are numbers from 0 with commas between")
    return tuple(int(number) for number in given.split(","))


def _number(name: str, value: str | None, found: Mapping[str, str | None]) -> int:
    try:
        number = int(str(value))
    except ValueError:
        number = -1
    if number < (name == "processes"):
        raise ProcessesError(f"{name} is {value!r}: legal is a whole number; found {_listed(found)}")
    return number


def _check_address(address: str, found: Mapping[str, str | None]) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 1 < int(port) < 2**16:
        raise ProcessesError(f"coordinator is {address!r}: legal is HOST:PORT, ports from 2; found {_listed(found)}")


def _listed(found: Mapping[str, str | None]) -> str:
    return ", ".join(f"{name}={value}" for name, value in found.items()) or "nothing"


def add_place_flags(parser: argparse.ArgumentParser) -> None:
    given = "each is started with the same flags; SLURM, a TPU pod or TRILLION_MOE_* in the environment say which it is"
    processes = parser.add_argument_group("several processes", given)
    processes.add_argument("--coordinator", metavar="HOST:PORT", help="of process 0")
    processes.add_argument("--processes", metavar="N", help="how many there are; 1: alone, whatever else is set")
    processes.add_argument("--process", metavar="I", help="which one this is, from 0")


def place_flags(args: argparse.Namespace) -> dict[str, str | None]:
    """What the flags say of this process among others, as `join` takes it."""
    return {name: getattr(args, name) for name in NAMES}
