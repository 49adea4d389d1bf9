import os
from pathlib import Path

import pytest

from megabatch.errors import UserError
from megabatch.ranks.discover import RankInfo, discover, first_host, per_node, rendezvous_address
from megabatch.ranks.machine import fair_threads, host_identity, usable_cores

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
MPICH = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_JOB_ID": "12345",
}


@pytest.mark.parametrize("environment", [TORCHRUN, OPEN_MPI, MPICH, SRUN])
def test_every_launcher_says_which_rank_this_is(environment: dict[str, str]) -> None:
    assert discover(environment) == RankInfo(rank=5, num_ranks=8, local_rank=1, num_local_ranks=4)


def test_torchrun_inside_of_a_slurm_job_is_torchrun() -> None:
    assert discover(SRUN | TORCHRUN | {"RANK": "2"}) == RankInfo(2, 8, 1, 4)


def test_a_slurm_batch_script_is_not_a_rank() -> None:
    batch_script = {name: value for name, value in SRUN.items() if "STEP" not in name}
    assert discover(batch_script) is None
    assert discover({}) is None


def test_ranks_meet_at_the_first_host_of_the_step_or_where_they_are_told() -> None:
    info = RankInfo(5, 8, 1, 4)
    assert rendezvous_address(info, SRUN) == ("gpu07", 29_500 + 345)
    assert rendezvous_address(info, SRUN | {"MASTER_ADDR": "head", "MASTER_PORT": "7"}) == ("head", 7)
    host, port = rendezvous_address(RankInfo(1, 2, 1, 2), MPICH)
    assert host == "127.0.0.1" and 29_500 <= port < 30_500
    with pytest.raises(UserError, match="MASTER_ADDR is not set"):
        rendezvous_address(info, MPICH)


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [("a", "a"), ("a,b", "a"), ("n[3-5]", "n3"), ("n[003,7],m", "n003"), ("x-1.cluster,y", "x-1.cluster")],
)
def test_the_first_host_of_a_nodelist(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


def test_a_variable_that_is_no_number_is_named() -> None:
    with pytest.raises(UserError, match="the variable RANK='a' must be a number"):
        discover(TORCHRUN | {"RANK": "a"})


def test_tasks_per_node() -> None:
    assert per_node("2(x3),1") == [2, 2, 2, 1]


def test_ranks_share_the_cores_that_they_may_use() -> None:
    eight = frozenset(range(8))
    torchrun = [("a", eight)] * 2 + [("b", eight)] * 3
    assert [fair_threads(rank, torchrun) for rank in range(5)] == [4, 4, 2, 2, 2]
    srun = [("a", frozenset(range(4 * rank, 4 * rank + 4))) for rank in range(2)]  # each task its own
    assert [fair_threads(rank, srun) for rank in range(2)] == [4, 4]
    assert fair_threads(0, [("a", frozenset({0}))] * 3) == 1  # more ranks than cores
    assert fair_threads(1, [("a", frozenset({0, 1, 2})), ("a", frozenset({2, 3, 4}))]) == 2  # 2.5


def test_hosts_are_told_apart_by_name_boot_and_namespaces() -> None:
    name, boot, network, processes = host_identity().split()
    assert name == os.uname().nodename
    assert boot == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert network.startswith("net:[") and processes.startswith("pid:[")
    assert usable_cores() == os.sched_getaffinity(0)
