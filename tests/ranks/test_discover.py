import os
import re
from pathlib import Path

import pytest
import yaml

from megabatch.errors import UserError
from megabatch.ranks.discover import (
    NOT_KNOWN,
    RankInfo,
    discover,
    first_host,
    launch_name,
    launcher_name,
    parse_tasks_per_node,
    rendezvous_address,
    warn_of_signal,
)
from megabatch.ranks.machine import fair_threads, host_identity, usable_cores

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
MPICH = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
PALS = {"PMI_RANK": "5", "PMI_SIZE": "8", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "4", "PALS_RANKID": "5"}
PALS_NAMES = {"PMI_RANK": "5", "PMI_SIZE": "8", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "4", "PALS_RANKID": "5"}
KUBEFLOW = {  # a PyTorchJob with nprocPerNode: 1
    "RANK": "5",
    "WORLD_SIZE": "8",
    "MASTER_ADDR": "job-master-0",
    "MASTER_PORT": "23456",
    "PET_NNODES": "8",
    "PET_NPROC_PER_NODE": "1",
    "PET_NODE_RANK": "5",
}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_JOB_ID": "12345",
}


BATCH_SCRIPT = {name: value for name, value in SRUN.items() if "STEP" not in name} | {"SLURM_PROCID": "0"}
SHELL = SRUN | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}


@pytest.mark.parametrize("environment", [TORCHRUN, OPEN_MPI, MPICH, PALS, PALS_NAMES, SRUN])
def test_rank_is_read_from_the_variables_of_each_launcher(environment: dict[str, str]) -> None:
    assert discover(environment) == RankInfo(rank=5, num_ranks=8, local_rank=1, num_local_ranks=4)


@pytest.mark.parametrize(
    ("environment", "local_rank"),
    [
        (KUBEFLOW, NOT_KNOWN),
        ({name: KUBEFLOW[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}, NOT_KNOWN),
        (KUBEFLOW | {"LOCAL_RANK": "", "LOCAL_WORLD_SIZE": ""}, NOT_KNOWN),
        (KUBEFLOW | {"LOCAL_RANK": "3", "NODE_RANK": "1"}, 3),  # Azure ML, DeepSpeed
    ],
)
def test_rank_size_and_address_are_sufficient(environment: dict[str, str], local_rank: int) -> None:
    info = discover(environment)
    assert info == RankInfo(5, 8, local_rank, NOT_KNOWN)
    assert not info.is_single_node and not info.is_located
    assert rendezvous_address(info, environment) == ("job-master-0", int(environment.get("MASTER_PORT", "29500")))


def test_the_innermost_launcher_has_priority() -> None:
    assert discover(SRUN | TORCHRUN | {"RANK": "2"}) == RankInfo(2, 8, 1, 4)
    inside = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "MASTER_ADDR": "gpu07"}
    assert discover(SRUN | inside) == RankInfo(9, 16, 1, NOT_KNOWN)
    exported = {"RANK": "0", "WORLD_SIZE": "8", "MASTER_ADDR": "gpu07"}  # by the job's script, for all tasks
    assert discover(SRUN | exported) == RankInfo(5, 8, 1, 4)
    assert discover(SRUN | {"PMI_RANK": "5", "PMI_SIZE": "8", "PALS_RANKID": "5"}) == RankInfo(5, 8, 1, 4)
    step = SRUN | {"SLURM_NTASKS": "64", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_ID": "0"}  # a step of a larger job
    assert discover(step) == RankInfo(5, 8, 1, 4)
    of_the_job = {name: value for name, value in step.items() if name != "SLURM_STEP_TASKS_PER_NODE"}
    assert discover(of_the_job | {"SLURM_TASKS_PER_NODE": "32(x2)"}) == RankInfo(5, 8, 1, NOT_KNOWN)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        BATCH_SCRIPT,
        BATCH_SCRIPT | {"MASTER_ADDR": "gpu07", "MASTER_PORT": "29500"},
        SHELL | {"SLURM_NTASKS": "1", "PMI_RANK": "0", "PMI_SIZE": "1", "PALS_RANKID": "0"},  # srun --pty bash
        SHELL | {"SLURM_STEP_NUM_TASKS": "1"},  # salloc: SLURM_NTASKS is that of the job
        SHELL | {"SLURM_STEP_ID": "4294967290"},
        {"WORLD_SIZE": "1"},
        {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "job-master-0",
            "PET_NNODES": "1",
            "PET_NPROC_PER_NODE": "auto",
        },
        {"WORLD_SIZE": "", "PMI_SIZE": "", "RANK": "", "FLUX_JOB_SIZE": ""},
        {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"},
        {"PMI_RANK": "0", "PMI_SIZE": "1", "PMIX_RANK": "0"},
        {"FLUX_JOB_SIZE": "1", "MV2_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_SIZE": "1"},
        {"RANK": "gold", "WORLD_SIZE": "-1", "LOCAL_RANK": "-1"},
        {"FLUX_URI": "local:///run/flux/local", "PBS_JOBID": "1.head", "PBS_NODEFILE": "/var/spool/1"},
    ],
)
def test_a_shell_or_a_script_is_not_a_rank(environment: dict[str, str]) -> None:
    assert discover(environment) is None


@pytest.mark.parametrize(
    ("environment", "value", "missing"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "WORLD_SIZE=2", "MASTER_ADDR not set"),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "WORLD_SIZE=2", "RANK not set"),
        ({"RANK": "1", "MASTER_ADDR": "a"}, "RANK=1", "WORLD_SIZE not set"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": ""}, "WORLD_SIZE=2", "MASTER_ADDR not set"),
        ({"WORLD_SIZE": "1", "PMI_RANK": "0", "PMI_SIZE": "12"}, "PMI_SIZE=12", "RANK, MASTER_ADDR not set"),
        ({"FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "4"}, "FLUX_JOB_SIZE=4", "RANK, WORLD_SIZE, MASTER_ADDR not set"),
        ({"MV2_COMM_WORLD_RANK": "0", "MV2_COMM_WORLD_SIZE": "4"}, "MV2_COMM_WORLD_SIZE=4", "not set"),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}, "OMPI_COMM_WORLD_SIZE=4", "not set"),
        ({"JSM_NAMESPACE_SIZE": "4"}, "JSM_NAMESPACE_SIZE=4", "not set"),
        ({"PALS_RANKID": "0", "PALS_LOCAL_RANKID": "0", "PALS_LOCAL_SIZE": "1"}, "PALS_RANKID=0", "not set"),  # pmix
        ({"PMIX_RANK": "3"}, "PMIX_RANK=3", "not set"),
        (BATCH_SCRIPT | {"SLURM_PROCID": "3"}, "SLURM_PROCID=3", "not set"),
        (KUBEFLOW | {"RANK": "0", "WORLD_SIZE": "1", "FLUX_JOB_SIZE": "4"}, "FLUX_JOB_SIZE=4", "WORLD_SIZE is 1"),
    ],
)
def test_an_unknown_launcher_fails(environment: dict[str, str], value: str, missing: str) -> None:
    with pytest.raises(UserError) as caught:
        discover(environment)
    line = str(caught.value)
    assert line.startswith(f"{value} means that a launcher started this process")
    assert f"{missing}); set RANK, WORLD_SIZE and MASTER_ADDR for each rank, or unset " in line


@pytest.mark.parametrize(
    ("environment", "value"),
    [
        (KUBEFLOW | {"WORLD_SIZE": "64", "PET_NPROC_PER_NODE": "8"}, "PET_NPROC_PER_NODE=8"),  # RANK counts pods
        ({"PET_NNODES": "2", "PET_NPROC_PER_NODE": "auto"}, "PET_NNODES=2"),  # Kubeflow's Trainer
        ({"PET_NNODES": "1:4"}, "PET_NNODES=1:4"),
    ],
)
def test_variables_for_torchrun_without_torchrun_fail(environment: dict[str, str], value: str) -> None:
    with pytest.raises(
        UserError, match=f"^{value} is meant for torchrun, .*; start it with torchrun -m megabatch, or unset"
    ):
        discover(environment)
    assert discover(environment | TORCHRUN) == RankInfo(5, 8, 1, 4)


def test_a_rank_that_is_not_less_than_the_number_of_ranks_fails() -> None:
    with pytest.raises(UserError, match=r"^RANK=8 and WORLD_SIZE=8: .*less; set"):
        discover(KUBEFLOW | {"RANK": "8"})


def test_rendezvous_is_on_the_first_host_of_the_step_or_at_master_addr() -> None:
    info = RankInfo(5, 8, 1, 4)
    assert rendezvous_address(info, SRUN) == ("gpu07", 29_500 + 345)
    assert rendezvous_address(info, SRUN | {"MASTER_ADDR": "head", "MASTER_PORT": "7"}) == ("head", 7)
    host, port = rendezvous_address(RankInfo(1, 2, 1, 2), MPICH)
    assert host == "127.0.0.1" and 29_500 <= port < 30_500
    steps = [rendezvous_address(info, SRUN | {"SLURM_STEP_ID": str(step)}) for step in range(1000)]
    assert steps[0] == ("gpu07", 29_500 + 345) and len(set(steps)) == 1000
    with pytest.raises(UserError, match="MASTER_ADDR is not set"):
        rendezvous_address(info, MPICH)
    launched = [rendezvous_address(RankInfo(0, 2, 0, 2), PALS | {"PALS_APID": name}) for name in ("a", "a", "b")]
    assert launched[0] == launched[1] != launched[2]
    for invalid in ("0", "65536"):
        with pytest.raises(UserError, match=rf"^MASTER_PORT={invalid} is not a port \(1 to 65535\); set"):
            rendezvous_address(info, KUBEFLOW | {"MASTER_PORT": invalid})


def test_launches_have_names_if_their_launcher_numbers_them() -> None:
    steps = [SRUN | {"SLURM_STEP_ID": step, "SLURM_RESTART_COUNT": count} for step in "01" for count in ("", "1")]
    assert [launch_name(step) for step in steps] == [
        "Slurm's step 12345.0",
        "Slurm's step 12345.0 of restart 1",
        "Slurm's step 12345.1",
        "Slurm's step 12345.1 of restart 1",
    ]
    assert launch_name(OPEN_MPI | {"OMPI_MCA_ess_base_jobid": "77"}) == "Open MPI's 77"
    assert launch_name(PALS | {"PALS_APID": "a"}) == "PALS's a"
    # Ranks that the user numbered may be in several steps.
    several_steps = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_ID": "3"}
    assert [launch_name(each) for each in (MPICH, KUBEFLOW, SRUN | KUBEFLOW | several_steps, {})] == [""] * 4
    named = (TORCHRUN, OPEN_MPI, MPICH, SRUN, KUBEFLOW)
    assert [launcher_name(each) for each in named] == ["torchrun", "Open MPI", "MPICH", "srun", "RANK and WORLD_SIZE"]


def test_a_stop_signal_after_which_open_mpi_kills_its_ranks_is_warned_of() -> None:
    warnings = [warn_of_signal("SIGTERM", each) for each in (OPEN_MPI, MPICH, SRUN, {})]
    assert warnings[0].startswith("Open MPI kills ranks 1 s after SIGTERM") and warnings[1:] == [""] * 3
    assert warn_of_signal("SIGUSR1", OPEN_MPI) == ""


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [("a", "a"), ("a,b", "a"), ("n[3-5]", "n3"), ("n[003,7],m", "n003"), ("x-1.cluster,y", "x-1.cluster")],
)
def test_first_host_of_a_nodelist(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


def test_a_variable_that_is_not_a_number_is_reported() -> None:
    with pytest.raises(UserError, match="the variable RANK='a' must be a number"):
        discover(TORCHRUN | {"RANK": "a"})


def test_tasks_per_node_are_parsed() -> None:
    assert parse_tasks_per_node("2(x3),1") == [2, 2, 2, 1]


def test_ranks_share_their_usable_cores() -> None:
    eight = frozenset(range(8))
    torchrun = [("a", eight)] * 2 + [("b", eight)] * 3
    assert [fair_threads(rank, torchrun) for rank in range(5)] == [4, 4, 2, 2, 2]
    srun = [("a", frozenset(range(4 * rank, 4 * rank + 4))) for rank in range(2)]  # separate cores per task
    assert [fair_threads(rank, srun) for rank in range(2)] == [4, 4]
    assert fair_threads(0, [("a", frozenset({0}))] * 3) == 1  # more ranks than cores
    assert fair_threads(1, [("a", frozenset({0, 1, 2})), ("a", frozenset({2, 3, 4}))]) == 2  # 2.5


def test_host_identity_has_name_boot_id_and_namespaces() -> None:
    name, boot, network, processes = host_identity().split()
    assert name == os.uname().nodename
    assert boot == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert network.startswith("net:[") and processes.startswith("pid:[")
    assert usable_cores() == os.sched_getaffinity(0)


def test_the_documented_job_of_kubernetes_gives_each_pod_its_rank() -> None:
    page = (Path(__file__).parents[2] / "docs/clusters.md").read_text()
    found = re.search(r"## Kubernetes\n.*?```yaml\n(.*?)```", page, re.DOTALL)
    assert found
    service, job = yaml.safe_load_all(found[1])
    name, spec = job["metadata"]["name"], job["spec"]
    pod, (container,) = spec["template"]["spec"], spec["template"]["spec"]["containers"]
    variables = {each.pop("name"): each for each in container["env"]}
    rank, values = variables.pop("RANK"), {key: each["value"] for key, each in variables.items()}
    # Kubernetes labels the pods of a job with its name, and an indexed pod with its host name and subdomain.
    assert (service["kind"], job["kind"], spec["completionMode"]) == ("Service", "Job", "Indexed")
    assert service["metadata"]["name"] == pod["subdomain"] and service["spec"]["selector"] == {"job-name": name}
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"] is True
    assert rank["valueFrom"]["fieldRef"]["fieldPath"] == (
        "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    )
    assert values["MASTER_ADDR"] == f"{name}-0.{pod['subdomain']}"
    assert str(spec["completions"]) == str(spec["parallelism"]) == values["WORLD_SIZE"]
    assert pod["restartPolicy"] == "Never"  # the only policy with a podFailurePolicy
    assert spec["podFailurePolicy"]["rules"] == [
        {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [2]}}
    ]
    for index in range(spec["completions"]):
        info = discover(values | {"RANK": str(index), "KUBERNETES_SERVICE_HOST": "10.0.0.1"})
        assert info == RankInfo(index, spec["completions"])
        assert rendezvous_address(info, values) == (values["MASTER_ADDR"], int(values["MASTER_PORT"]))
