"""Which process this is: from flags, our variables, SLURM, a pod of Kubernetes; what is missing is named."""

import pytest

from trillion_moe.distributed import Place, ProcessesError, find
from trillion_moe.distributed.environment import SLURM

OURS = {"TRILLION_MOE_COORDINATOR": "node0:4000", "TRILLION_MOE_PROCESSES": "4", "TRILLION_MOE_PROCESS": "3"}
STEP = {
    "SLURM_JOB_ID": "4097", "SLURM_STEP_NODELIST": "gpu[007-009],gpu12", "SLURM_NTASKS": "32", "SLURM_PROCID": "17",
    "SLURM_LOCALID": "1",
}  # fmt: skip


@pytest.fixture
def environ(monkeypatch):
    """Sets variables of the process itself, which is where JAX looks for a cluster's; none of a cluster's are left."""
    jax = "JAX_LOCAL_DEVICE_IDS", "JAX_COORDINATOR_ADDRESS"
    for name in (*OURS, *SLURM, "JOB_COMPLETION_INDEX", *jax, "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    return lambda given: [monkeypatch.setenv(name, value) for name, value in given.items()]


def test_alone(environ) -> None:
    assert find({}) == Place() == Place(0, 1, "")
    environ(STEP)
    assert find({"processes": "1"}) == Place()
    environ({"SLURM_NTASKS": "1", "SLURM_PROCID": "0"})
    assert find({}) == Place()


def test_ours_and_flags(environ) -> None:
    """A flag wins over its variable; ours win over a cluster's."""
    environ(OURS | STEP)
    assert find({}) == Place(3, 4, "node0:4000")
    flags = {"coordinator": "[::1]:5000", "processes": None, "process": "2"}
    assert find(flags) == (place := Place(2, 4, "[::1]:5000"))
    assert (place.host, place.port) == ("::1", 5000)
    environ({"JAX_LOCAL_DEVICE_IDS": "4,5"})
    assert find({}).devices == (4, 5)


def test_a_pod_of_an_indexed_job(environ) -> None:
    """Its number is in the environment; alone it says nothing: such Jobs may be of single processes."""
    environ({"JOB_COMPLETION_INDEX": "1"})
    assert find({}) == Place()
    environ({name: value for name, value in OURS.items() if name != "TRILLION_MOE_PROCESS"})
    assert find({}) == Place(1, 4, "node0:4000")


def test_a_step_of_slurm(environ) -> None:
    """As JAX reads it: the first node, a port by the number of the job, one device for each process."""
    environ(STEP)
    assert find({}) == Place(17, 32, f"gpu007:{4097 % 4096 + 65536 - 4096}", (1,))


@pytest.mark.parametrize("name", sorted({*SLURM} - {"SLURM_NTASKS", "SLURM_PROCID"}))
def test_what_slurm_lacks(environ, name: str) -> None:
    """A batch script has some of the variables without srun: then it is no process of many, nor alone by mistake."""
    environ({key: value for key, value in STEP.items() if key != name})
    with pytest.raises(ProcessesError, match=rf"^{name} missing: start it with srun, .*found .*SLURM_PROCID=17"):
        find({})


def test_an_address_alone(environ) -> None:
    """JAX's own variable says that there are others, not how many: a process that went on would be alone by mistake."""
    environ({"JAX_COORDINATOR_ADDRESS": "node0:4000"})
    with pytest.raises(ProcessesError) as error:
        find({})
    assert str(error.value) == (
        "TRILLION_MOE_PROCESSES (or --processes) and TRILLION_MOE_PROCESS (or --process) missing: legal are all three "
        "of TRILLION_MOE_COORDINATOR = HOST:PORT of process 0, TRILLION_MOE_PROCESSES = how many there are, 1 = this "
        "one alone, TRILLION_MOE_PROCESS = which this is, from 0; found JAX_COORDINATOR_ADDRESS=node0:4000"
    )
    assert find({"processes": "1"}) == Place()
    environ(STEP)
    assert find({}) == Place(17, 32, "node0:4000", (1,))
    environ({"JAX_COORDINATOR_ADDRESS": "", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"})
    assert find({}) == Place()


def test_a_cluster_that_says_only_how_many(environ, monkeypatch) -> None:
    from jax._src.clusters import ClusterEnv

    detected = "auto_detect_unset_distributed_params"
    environ({})
    monkeypatch.setattr(ClusterEnv, detected, lambda *_: (None, 4, None, None))
    with pytest.raises(
        ProcessesError, match=r"COORDINATOR .* and TRILLION_MOE_PROCESS .* missing.* found processes=4$"
    ):
        find({})
    monkeypatch.setattr(ClusterEnv, detected, lambda *_: (None, 1, None, None))
    assert find({}) == Place()


@pytest.mark.parametrize("name", ["COORDINATOR", "PROCESSES", "PROCESS"])
def test_what_is_missing(environ, name: str) -> None:
    environ({key: value for key, value in OURS.items() if key != f"TRILLION_MOE_{name}"})
    with pytest.raises(ProcessesError) as error:
        find({})
    said, found = str(error.value).split("; found ")
    assert said == f"TRILLION_MOE_{name} (or --{name.lower()}) missing"
    assert found.count("=") == 2
    assert name + "=" not in found


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"PROCESS": "4"}, "process 4 of 4: legal is 0 to 3"),
        ({"PROCESS": "-1"}, "process is '-1': legal is a whole number"),
        ({"PROCESSES": "0"}, "processes is '0': legal is a whole number"),
        ({"PROCESSES": "four"}, "processes is 'four': legal is a whole number"),
        ({"COORDINATOR": "node0"}, "coordinator is 'node0': legal is HOST:PORT"),
        ({"COORDINATOR": ":4000"}, "coordinator is ':4000': legal is HOST:PORT"),
        ({"COORDINATOR": "node0:66000"}, "coordinator is 'node0:66000': legal is HOST:PORT"),
    ],
)
def test_what_is_wrong(environ, change, said: str) -> None:
    environ(OURS | {f"TRILLION_MOE_{name}": value for name, value in change.items()})
    with pytest.raises(ProcessesError) as error:
        find({})
    assert str(error.value).startswith(said)
    assert "found TRILLION_MOE_" in str(error.value)
