"""Which rank this process is: every launcher sets variables that say so.

A process that a launcher started must not train by itself: each of them would end with a model, and with success.
So variables that look like a launcher's and do not say which rank this is are refused.
"""

import os
import re
import zlib
from collections.abc import Mapping, Sequence

from msgspec import Struct

from megabatch.errors import UserError

# rank, ranks, rank on this host, ranks on this host
COMPLETE = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "PALS": ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
    "PALS by its own names": ("PMI_RANK", "PMI_SIZE", "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
}
JOIN = ("RANK", "WORLD_SIZE", "MASTER_ADDR")  # all that Kubeflow's PyTorchJob sets, besides MASTER_PORT
# From which value on a variable says that a launcher started this process, and is not harmless: a size of 1 is that of
# a shell or of a login profile.  PALS names the number of ranks only with --pmi=cray.
LAUNCHED = {
    "WORLD_SIZE": 2,
    "RANK": 1,
    "OMPI_COMM_WORLD_SIZE": 2,
    "PMI_SIZE": 2,
    "PMI_RANK": 1,
    "PMIX_RANK": 1,
    "PALS_RANKID": 0,
    "MV2_COMM_WORLD_SIZE": 2,
    "FLUX_JOB_SIZE": 2,
    "JSM_NAMESPACE_SIZE": 2,
    "HOROVOD_SIZE": 2,
    "SLURM_PROCID": 1,
}
FIRST_SPECIAL_STEP = 0xFFFFFFF0  # Slurm's steps from here on are shells and scripts, such as that of salloc
MASTER_PORT, LARGEST_PORT = 29_500, 65_535
NOT_KNOWN = -1


class RankInfo(Struct, frozen=True):
    """Which rank this process is.  If no launcher says so, its place on its host is known once the ranks have met."""

    rank: int
    num_ranks: int
    local_rank: int = NOT_KNOWN
    num_local_ranks: int = NOT_KNOWN  # on this host

    @property
    def is_alone(self) -> bool:
        """This host has all ranks."""
        return self.num_local_ranks == self.num_ranks

    @property
    def is_located(self) -> bool:
        return NOT_KNOWN not in (self.local_rank, self.num_local_ranks)


def discover(environment: Mapping[str, str] = os.environ) -> RankInfo | None:
    """Return which of the ranks that a launcher started this process is; None if no launcher did."""
    given = {name: value for name, value in environment.items() if value}
    for names in COMPLETE.values():
        if all(name in given for name in names):
            return read_ranks(given, names)
    joined, step = read_join(given), read_slurm_step(given)
    # A launcher inside a step counts.  Variables that the job's script exported for all tasks give way to srun's.
    found = joined if joined and step and joined.num_ranks != step.num_ranks else step or joined
    if found is None:
        refuse_unknown_launcher(given)
    return found


def read_ranks(given: Mapping[str, str], names: Sequence[str]) -> RankInfo:
    numbers = [read_number(given, name) for name in names]
    if numbers[0] >= numbers[1]:
        raise UserError(
            f"{names[0]}={numbers[0]} and {names[1]}={numbers[1]}: ranks count from 0, so it must be less; "
            f"set {names[1]} to the number of ranks"
        )
    return RankInfo(*numbers)


def read_join(given: Mapping[str, str]) -> RankInfo | None:
    """Read torch's own variables, which need not say what ranks share a host: then they ask (`store.locate`)."""
    if not all(name in given for name in JOIN) or read_number(given, "WORLD_SIZE") == 1:
        return None  # a rank that is the only one may start others
    info = read_ranks(given, JOIN[:2])
    if "LOCAL_RANK" in given:
        return RankInfo(info.rank, info.num_ranks, read_number(given, "LOCAL_RANK"))
    if is_at_least(given.get("PET_NPROC_PER_NODE", ""), 2):
        # Kubeflow counts pods in RANK, and in WORLD_SIZE the processes that torchrun is to start in them.
        raise UserError(needs_torchrun("PET_NPROC_PER_NODE", given))
    return info


def read_slurm_step(given: Mapping[str, str]) -> RankInfo | None:
    """Read srun's variables.

    In a job's script, outside srun, Slurm sets SLURM_NTASKS and SLURM_PROCID too, but not those of a step.  A step of
    one task is a shell (srun --pty bash), and so is that of salloc, whose SLURM_NTASKS is that of the job.
    """
    size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in given else "SLURM_NTASKS"
    names = ("SLURM_PROCID", size, "SLURM_LOCALID")
    if not all(name in given for name in (*names, "SLURM_STEP_NODELIST")):
        return None
    is_special = "SLURM_STEP_ID" in given and read_number(given, "SLURM_STEP_ID") >= FIRST_SPECIAL_STEP
    if is_special or read_number(given, size) == 1:
        return None
    info = read_ranks(given, names)
    tasks = given.get("SLURM_STEP_TASKS_PER_NODE", given.get("SLURM_TASKS_PER_NODE", ""))
    counts, node = per_node(tasks), read_number(given, "SLURM_NODEID") if "SLURM_NODEID" in given else 0
    is_known = sum(counts) == info.num_ranks and node < len(counts)  # else they are those of the job, not of the step
    return RankInfo(info.rank, info.num_ranks, info.local_rank, counts[node] if is_known else NOT_KNOWN)


def refuse_unknown_launcher(given: Mapping[str, str]) -> None:
    """Raise UserError if a launcher started this process, and set no variables from which its rank can be read."""
    # srun --mpi=cray_shasta sets PALS_RANKID, also for a shell.
    ignored = {"PALS_RANKID"} if "SLURM_STEP_NODELIST" in given else set[str]()
    found = (name for name, least in LAUNCHED.items() if is_at_least(given.get(name, ""), least))
    name = next((name for name in found if name not in ignored), None)
    missing = ", ".join(other for other in JOIN if other not in given)
    if name:
        raise UserError(
            f"{name}={given[name]} says that a launcher started this process, but not which rank it is "
            f"({f'{missing} not set' if missing else 'WORLD_SIZE is 1'}); "
            f"set RANK, WORLD_SIZE and MASTER_ADDR for each rank, or unset {name} if no launcher set it"
        )
    if is_at_least(given.get("PET_NNODES", "").rpartition(":")[2], 2):  # torchrun's --nnodes: 2, or from 1 to 4 as 1:4
        raise UserError(needs_torchrun("PET_NNODES", given))


def is_at_least(text: str, least: int) -> bool:
    return text.isdecimal() and int(text) >= least


def needs_torchrun(name: str, given: Mapping[str, str]) -> str:
    return (
        f"{name}={given[name]} asks for torchrun, which did not start this process; "
        f"start it with torchrun -m megabatch, or unset {name} if no launcher set it"
    )


def read_number(environment: Mapping[str, str], name: str) -> int:
    if not environment[name].isdecimal():
        raise UserError(f"the variable {name}={environment[name]!r} must be a number; unset it if no launcher set it")
    return int(environment[name])


def read_port(environment: Mapping[str, str], default: int) -> int:
    if not environment.get("MASTER_PORT"):
        return default
    port = read_number(environment, "MASTER_PORT")
    if not 0 < port <= LARGEST_PORT:
        raise UserError(f"MASTER_PORT={port} is not a port (1 to {LARGEST_PORT}); set a free one of rank 0's host")
    return port


def rendezvous_address(info: RankInfo, environment: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """The host and port at which the ranks find each other."""
    if environment.get("MASTER_ADDR"):
        return environment["MASTER_ADDR"], read_port(environment, MASTER_PORT)
    if "SLURM_STEP_NODELIST" in environment:
        # A port of the job's own: two jobs may share a node.
        port = MASTER_PORT + int(environment.get("SLURM_JOB_ID", "0")) % 1000
        return first_host(environment["SLURM_STEP_NODELIST"]), read_port(environment, port)
    if info.is_alone:
        # The ranks of one mpiexec on one host have the same parent: two such runs do not find each other.  PALS names
        # what it started, also where a script stands between it and a rank.
        launch = zlib.crc32(environment["PALS_APID"].encode()) if "PALS_APID" in environment else os.getppid()
        return "127.0.0.1", read_port(environment, MASTER_PORT + launch % 1000)
    raise UserError("MASTER_ADDR is not set, and the ranks are on several hosts; set it to the host of rank 0")


def first_host(nodelist: str) -> str:
    """node[003-007,012],other1 -> node003"""
    first = re.match(r"([^\[,]+)(?:\[([^\],-]+))?", nodelist)
    if first is None:
        raise UserError(f"SLURM_STEP_NODELIST={nodelist!r} names no host; set MASTER_ADDR to the host of rank 0")
    return first[1] + (first[2] or "")


def per_node(counts: str) -> list[int]:
    """Slurm's 2(x3),1 -> [2, 2, 2, 1]"""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", counts)
    return [int(count) for count, times in found for _ in range(int(times or 1))]
