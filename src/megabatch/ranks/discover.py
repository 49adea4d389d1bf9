"""Find the rank of this process from the environment variables that launchers set.

A process that a launcher started must not train by itself: every process would then train a separate model and succeed.
So variables that indicate a launcher but not the rank are an error.
"""

import os
import re
import zlib
from collections.abc import Mapping, Sequence

from msgspec import Struct

from megabatch.errors import UserError

# rank, ranks, rank on this node, ranks on this node
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
LAUNCH_IDS = {"Open MPI": "OMPI_MCA_ess_base_jobid", "PALS": "PALS_APID", "PALS by its own names": "PALS_APID"}
JOIN = ("RANK", "WORLD_SIZE", "MASTER_ADDR")  # Kubeflow's PyTorchJob sets only these and MASTER_PORT
# The smallest value of each variable that indicates a launcher.  A size of 1 is harmless: shells and login profiles set
# it.  PALS sets the number of ranks only with --pmi=cray.
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
FIRST_SPECIAL_STEP = 0xFFFFFFF0  # Slurm's step ids from here on are shells and scripts, such as salloc's
MASTER_PORT, LARGEST_PORT = 29_500, 65_535
NUM_PORTS = 1000  # that a launch may choose from, if MASTER_PORT is not set
PORTS_BETWEEN_STEPS = 101  # prime to NUM_PORTS, so steps differ; jobs with nearby numbers rarely meet
NOT_KNOWN = -1


class RankInfo(Struct, frozen=True):
    """The rank of this process. If the launcher does not set the local rank, `store.locate` finds it."""

    rank: int
    num_ranks: int
    local_rank: int = NOT_KNOWN
    num_local_ranks: int = NOT_KNOWN  # on this node

    @property
    def is_single_node(self) -> bool:
        """Whether all ranks are on this node."""
        return self.num_local_ranks == self.num_ranks

    @property
    def is_located(self) -> bool:
        return NOT_KNOWN not in (self.local_rank, self.num_local_ranks)


def discover(environment: Mapping[str, str] = os.environ) -> RankInfo | None:
    """Return the rank of this process; None if no launcher started it."""
    given = {name: value for name, value in environment.items() if value}
    for names in COMPLETE.values():
        if all(name in given for name in names):
            return read_ranks(given, names)
    found, _ = find_ranks(given)
    if found is None:
        refuse_unknown_launcher(given)
    return found


def find_ranks(given: Mapping[str, str]) -> tuple[RankInfo | None, bool]:
    """Return the rank according to torch's or srun's variables, and whether it is according to srun's."""
    joined, step = read_join(given), read_slurm_step(given)
    # A launcher inside a Slurm step has priority.  If only the job's script exported the variables, srun's are right.
    is_step = step is not None and (joined is None or joined.num_ranks == step.num_ranks)
    return (step if is_step else joined), is_step


def launcher_name(environment: Mapping[str, str] = os.environ) -> str:
    """Return the name of the launcher that started this rank, for a message."""
    given = {name: value for name, value in environment.items() if value}
    known = (launcher for launcher, names in COMPLETE.items() if all(name in given for name in names))
    return next(known, "srun" if find_ranks(given)[1] else "RANK and WORLD_SIZE")


def warn_of_signal(preempt_signal: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return a warning if the launcher does not give its ranks the time to save after this signal."""
    if preempt_signal != "SIGTERM" or not environment.get("OMPI_COMM_WORLD_SIZE"):
        return ""
    return (
        "Open MPI kills ranks 1 s after SIGTERM, perhaps before they have saved; to stop the run, set "
        "run.preempt_signal=SIGUSR1 and send SIGUSR1 to mpirun"
    )


def read_ranks(given: Mapping[str, str], names: Sequence[str]) -> RankInfo:
    numbers = [read_number(given, name) for name in names]
    if numbers[0] >= numbers[1]:
        raise UserError(
            f"{names[0]}={numbers[0]} and {names[1]}={numbers[1]}: ranks count from 0, so it must be less; "
            f"set {names[1]} to the number of ranks"
        )
    return RankInfo(*numbers)


def read_join(given: Mapping[str, str]) -> RankInfo | None:
    """Read torch's variables. They need not include the local rank: `store.locate` finds it."""
    if not all(name in given for name in JOIN) or read_number(given, "WORLD_SIZE") == 1:
        return None  # a single rank may start others
    info = read_ranks(given, JOIN[:2])
    if "LOCAL_RANK" in given:
        return RankInfo(info.rank, info.num_ranks, read_number(given, "LOCAL_RANK"))
    if is_at_least(given.get("PET_NPROC_PER_NODE", ""), 2):
        # Kubeflow's RANK counts pods, but its WORLD_SIZE counts the processes that torchrun starts in them.
        raise UserError(needs_torchrun("PET_NPROC_PER_NODE", given))
    return info


def read_slurm_step(given: Mapping[str, str]) -> RankInfo | None:
    """Read srun's variables.

    In a job's script, outside srun, Slurm also sets SLURM_NTASKS and SLURM_PROCID, but no SLURM_STEP variables.  A step
    with one task is a shell (srun --pty bash).  The same holds for salloc, whose SLURM_NTASKS is the job's.
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
    counts, node = parse_tasks_per_node(tasks), read_number(given, "SLURM_NODEID") if "SLURM_NODEID" in given else 0
    is_known = sum(counts) == info.num_ranks and node < len(
        counts
    )  # otherwise the counts are of the job, not of the step
    return RankInfo(info.rank, info.num_ranks, info.local_rank, counts[node] if is_known else NOT_KNOWN)


def refuse_unknown_launcher(given: Mapping[str, str]) -> None:
    """Raise UserError if a launcher started this process without variables that give its rank."""
    # srun --mpi=cray_shasta sets PALS_RANKID, also for a shell.
    ignored = {"PALS_RANKID"} if "SLURM_STEP_NODELIST" in given else set[str]()
    found = (name for name, least in LAUNCHED.items() if is_at_least(given.get(name, ""), least))
    name = next((name for name in found if name not in ignored), None)
    missing = ", ".join(other for other in JOIN if other not in given)
    if name:
        raise UserError(
            f"{name}={given[name]} means that a launcher started this process, but its rank is not known "
            f"({f'{missing} not set' if missing else 'WORLD_SIZE is 1'}); "
            f"set RANK, WORLD_SIZE and MASTER_ADDR for each rank, or unset {name} if no launcher set it"
        )
    if is_at_least(
        given.get("PET_NNODES", "").rpartition(":")[2], 2
    ):  # torchrun's --nnodes: a number or a range such as 1:4
        raise UserError(needs_torchrun("PET_NNODES", given))


def is_at_least(text: str, least: int) -> bool:
    return text.isdecimal() and int(text) >= least


def needs_torchrun(name: str, given: Mapping[str, str]) -> str:
    return (
        f"{name}={given[name]} is meant for torchrun, which did not start this process; "
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
        raise UserError(f"MASTER_PORT={port} is not a port (1 to {LARGEST_PORT}); set a free port of rank 0's node")
    return port


def rendezvous_address(info: RankInfo, environment: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Return the host and port of the store through which the ranks connect."""
    if environment.get("MASTER_ADDR"):
        return environment["MASTER_ADDR"], read_port(environment, MASTER_PORT)
    if "SLURM_STEP_NODELIST" in environment:
        # Jobs may share a node, and so may the steps of a job, whose numbers are consecutive.
        job, step = (int(environment.get(name, "0")) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
        port = MASTER_PORT + (job + PORTS_BETWEEN_STEPS * step) % NUM_PORTS
        return first_host(environment["SLURM_STEP_NODELIST"]), read_port(environment, port)
    if info.is_single_node:
        # The ranks of one mpiexec on one node have the same parent, so two such runs use different ports.  PALS_APID
        # identifies the launch even if PALS starts the rank through a script.
        launch = zlib.crc32(environment["PALS_APID"].encode()) if "PALS_APID" in environment else os.getppid()
        return "127.0.0.1", read_port(environment, MASTER_PORT + launch % NUM_PORTS)
    raise UserError("MASTER_ADDR is not set, but the ranks are on several nodes; set it to the host of rank 0")


def launch_name(environment: Mapping[str, str] = os.environ) -> str:
    """Return a name that the ranks of a launch share and other launches do not have; empty if there is none."""
    given = {name: value for name, value in environment.items() if value}
    for launcher, names in COMPLETE.items():
        if all(name in given for name in names):
            identity = LAUNCH_IDS.get(launcher, "")
            return f"{launcher}'s {given[identity]}" if identity in given else ""
    # If the user set RANK, the ranks may be in several steps.
    return describe_step(given) if find_ranks(given)[1] else ""


def describe_step(given: Mapping[str, str]) -> str:
    """Return the name of a Slurm step. A requeued job keeps its number and counts steps from 0 again."""
    job, step, restart = (given.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"))
    return f"Slurm's step {job}.{step}" + (f" of restart {restart}" if restart != "0" else "")


def first_host(nodelist: str) -> str:
    """Return the first host of a Slurm node list: node003 for node[003-007,012],other1."""
    first = re.match(r"([^\[,]+)(?:\[([^\],-]+))?", nodelist)
    if first is None:
        raise UserError(f"SLURM_STEP_NODELIST={nodelist!r} does not name a host; set MASTER_ADDR to the host of rank 0")
    return first[1] + (first[2] or "")


def parse_tasks_per_node(counts: str) -> list[int]:
    """Return the number of tasks on each node: [2, 2, 2, 1] for Slurm's 2(x3),1."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", counts)
    return [int(count) for count, times in found for _ in range(int(times or 1))]
