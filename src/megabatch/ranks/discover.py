"""Which rank this process is: torchrun, Slurm's srun and MPI's mpiexec say so in variables of their own."""

import os
import re
from collections.abc import Mapping

from msgspec import Struct

from megabatch.errors import UserError

# rank, ranks, rank on this host, ranks on this host
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
OPEN_MPI = (
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
MPICH = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
SLURM = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
MASTER_PORT = 29_500


class RankInfo(Struct, frozen=True):
    """Which rank this process is."""

    rank: int
    num_ranks: int
    local_rank: int
    num_local_ranks: int  # on this host

    @property
    def is_alone(self) -> bool:
        """This host has all ranks."""
        return self.num_local_ranks == self.num_ranks


def discover(environment: Mapping[str, str] = os.environ) -> RankInfo | None:
    """Which of the ranks that a launcher has started this process is; None if none has."""
    for names in (TORCHRUN, OPEN_MPI, MPICH):
        if all(name in environment for name in names):
            return RankInfo(*(read_number(environment, name) for name in names))
    # In a batch script, outside of srun, Slurm sets SLURM_NTASKS and SLURM_PROCID too, but no step's variables.
    # A step of one task is a shell (srun --pty bash).
    is_step = "SLURM_STEP_NODELIST" in environment and environment.get("SLURM_NTASKS") != "1"
    if all(name in environment for name in SLURM) and is_step:
        rank, num_ranks, local_rank = (read_number(environment, name) for name in SLURM)
        counts = per_node(environment.get("SLURM_STEP_TASKS_PER_NODE", environment.get("SLURM_TASKS_PER_NODE", "1")))
        return RankInfo(rank, num_ranks, local_rank, counts[int(environment.get("SLURM_NODEID", "0"))])
    return None


def read_number(environment: Mapping[str, str], name: str) -> int:
    if not environment[name].isdecimal():
        raise UserError(f"the variable {name}={environment[name]!r} must be a number; unset it if no launcher set it")
    return int(environment[name])


def read_port(environment: Mapping[str, str], default: int) -> int:
    return read_number(environment, "MASTER_PORT") if "MASTER_PORT" in environment else default


def rendezvous_address(info: RankInfo, environment: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """The host and port at which the ranks find each other."""
    if "MASTER_ADDR" in environment:
        return environment["MASTER_ADDR"], read_port(environment, MASTER_PORT)
    if "SLURM_STEP_NODELIST" in environment:
        # A port of the job's own: two jobs may share a node.
        port = MASTER_PORT + int(environment.get("SLURM_JOB_ID", "0")) % 1000
        return first_host(environment["SLURM_STEP_NODELIST"]), read_port(environment, port)
    if info.is_alone:
        # The ranks of one mpiexec on one host have the same parent: two such runs do not find each other.
        return "127.0.0.1", read_port(environment, MASTER_PORT + os.getppid() % 1000)
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
