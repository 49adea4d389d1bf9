"""A small Slurm cluster on one machine, which ends with the process that started it.

    head     a network namespace with munged and slurmctld
    node0-1  two more, each with a slurmd that offers four CPUs

Each also has a process namespace, whose first process dies with its parent.  Then the kernel kills the rest of the
namespace, so no daemon outlives the command, even after kill -9.  Slurm tracks processes by /proc, without cgroups.
"""

import os
import re
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from megabatch.errors import UserError
from megabatch_lab.chaos.launcher import FOREIGN, begin_child
from megabatch_lab.chaos.namespaces import Host, namespaces
from megabatch_lab.chaos.processes import all_processes, environment_of, is_alive, parent_of

HEAD, NODES = "head", ("node0", "node1")
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "nsenter", "unshare")
LOG = "job-%a.log"  # %a: the number of the task of an array, else a large number
FIRST_WITHOUT_CGROUPS = (24, 5)  # the version of Slurm in which cgroups can be disabled
CPUS = 4  # per node, even if the machine has fewer
START_S, POLL_S = 30.0, 0.1
MOST_CHARACTERS = 107  # of a socket's path, on Linux
LONGEST_SOCKET = "spool-node0/node0_99999.4294967295"  # of a step
# cred_expire: a requeued job waits for as long, by default two minutes.  SlurmdTimeout: until a lost node is down.
CONFIG = """
ClusterName=chaos
SlurmctldHost=head({head})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
SlurmdTimeout=10
KillWait=60
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=node0 NodeAddr={node0} CPUs={cpus}
NodeName=node1 NodeAddr={node1} CPUs={cpus}
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=60
PartitionName=high Nodes=ALL PriorityTier=10
"""
# The first process of a namespace reaps the others.  `ip netns exec` would mount another /sys.
INIT = 'mount --bind "$1" /etc/hosts && hostname "$2" && echo ready && while :; do sleep 0.2; done'


def require_slurm() -> None:
    """Raise UserError unless this is root with Slurm installed."""
    missing = [program for program in PROGRAMS if not shutil.which(program)]
    if missing or os.geteuid() != 0:
        lacking = " and ".join([*(["root"] if os.geteuid() else []), *missing])
        raise UserError(f"--slurm needs {lacking}; run it as root, with slurm-wlm, munge and iproute2 installed")


def cgroup_plugin() -> str:
    """Return a plugin for cgroup.conf, which slurmd reads although nothing uses cgroups here."""
    version = subprocess.run(["slurmd", "-V"], capture_output=True, text=True).stdout
    found = re.search(r"(\d+)\.(\d+)", version)
    is_old = found is not None and (int(found[1]), int(found[2])) < FIRST_WITHOUT_CGROUPS
    return "cgroup/v1" if is_old else "disabled"


class Machine:
    """A host with a name and separate processes: the head or a node."""

    def __init__(self, name: str, host: Host, folder: Path) -> None:
        self.name, self.host, self.folder = name, host, folder
        self.holder: subprocess.Popen[str] | None = None
        self.daemons: list[subprocess.Popen[bytes]] = []

    def boot(self) -> None:
        enter = ["nsenter", f"--net=/run/netns/{self.host.name}"]
        unshare = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        self.holder = subprocess.Popen(
            [*enter, *unshare, "sh", "-c", INIT, "sh", str(self.folder / "hosts"), self.name],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # unshare reports that its child was killed
            text=True,
            env=self.environment(),
            start_new_session=True,
            preexec_fn=partial(begin_child, os.getpid()),
        )
        assert self.holder.stdout
        if self.holder.stdout.readline() != "ready\n":
            raise UserError("namespaces of processes cannot be created here; run it on a kernel that allows them")

    def environment(self) -> dict[str, str]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if name not in FOREIGN and not name.startswith(("SLURM", "SBATCH"))
        }
        return kept | {"SLURM_CONF": str(self.folder / "slurm.conf")}

    @property
    def init(self) -> int:
        """The process id of the first process of the namespace."""
        assert self.holder
        (child,) = Path(f"/proc/{self.holder.pid}/task/{self.holder.pid}/children").read_text().split()
        return int(child)

    def command(self, words: Sequence[str]) -> list[str]:
        return ["nsenter", f"--target={self.init}", "--net", "--uts", "--mount", "--pid", "--", *words]

    def start(self, words: Sequence[str]) -> None:
        """Start a daemon in the foreground.  It ends with the machine."""
        with (self.folder / f"{self.name}.out").open("ab") as out:
            daemon = subprocess.Popen(
                self.command(words),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=self.environment(),
                cwd="/",
                start_new_session=True,
                preexec_fn=partial(begin_child, os.getpid()),
            )
            self.daemons.append(daemon)

    def require_daemons(self) -> None:
        """Raise UserError if a daemon has ended."""
        if any(daemon.poll() is not None for daemon in self.daemons):
            output = (self.folder / f"{self.name}.out").read_text(errors="replace")
            found = re.search(r".*(error|fatal): .*", output)
            raise UserError(f"a daemon of Slurm ended on {self.name}: {found[0] if found else 'no error printed'}")

    def processes(self) -> list[int]:
        with suppress(OSError, ValueError):
            here = Path(f"/proc/{self.init}/ns/pid").stat()
            return [process for process in all_processes() if is_in(process, here)]
        return []

    def end(self) -> None:
        """Kill everything on the machine, at once and without notifying others, like a power cut."""
        if self.holder:
            with suppress(OSError, ValueError):
                os.kill(self.init, signal.SIGKILL)
            self.holder.kill()
            self.holder.communicate()
            self.holder = None


def is_in(process: int, namespace: os.stat_result) -> bool:
    with suppress(OSError):
        return os.path.samestat(Path(f"/proc/{process}/ns/pid").stat(), namespace)
    return False


class Slurm:
    def __init__(self, folder: Path, hosts: Sequence[Host]) -> None:
        self.folder = folder
        self.machines = {name: Machine(name, host, folder) for name, host in zip((HEAD, *NODES), hosts, strict=True)}
        self.head = self.machines[HEAD]

    def boot(self) -> None:
        addresses = {name: machine.host.address for name, machine in self.machines.items()}
        for name in ("state", *(f"spool-{name}" for name in NODES)):
            (self.folder / name).mkdir()
        names = [f"{address} {name}" for name, address in addresses.items()]
        (self.folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
        (self.folder / "slurm.conf").write_text(CONFIG.format(folder=self.folder, cpus=CPUS, **addresses))
        (self.folder / "cgroup.conf").write_text(f"CgroupPlugin={cgroup_plugin()}\n")
        (self.folder / "munge.key").touch(mode=0o600)
        (self.folder / "munge.key").write_bytes(secrets.token_bytes(1024))
        for machine in self.machines.values():
            machine.boot()
        files = {name: f"--{name}-file={self.folder}/munge.{name}" for name in ("key", "pid", "log", "seed")}
        self.head.start(["munged", "-F", "--force", f"--socket={self.folder}/munge.socket", *files.values()])
        wait_for((self.folder / "munge.socket").exists, START_S, "munged did not start")
        self.head.start(["slurmctld", "-D"])
        for name in NODES:
            self.machines[name].start(["slurmd", "-D"])
        wait_for(self.is_ready, START_S, f"Slurm did not start; see {self.folder}")

    def is_ready(self) -> bool:
        for machine in self.machines.values():
            machine.require_daemons()
        return self.idle_nodes() == len(NODES)

    def idle_nodes(self) -> int:
        return self.call("sinfo", "-h", "-N", "-p", "low", "-t", "idle", "-o", "%n").count("node")

    def call(self, *words: str) -> str:
        """Run a command of Slurm on the head; return its output, even if it fails."""
        done = subprocess.run(
            self.head.command(words), env=self.head.environment(), capture_output=True, text=True, timeout=120
        )
        return done.stdout + done.stderr

    def submit(self, folder: Path, script: str, *options: str) -> int:
        """Submit a job in its folder; return its number."""
        folder.mkdir(parents=True)
        (folder / "job.sh").write_text(script)
        found = self.call("sbatch", "--parsable", f"--chdir={folder}", f"--output={LOG}", *options, f"{folder}/job.sh")
        if not re.fullmatch(r"\d+\s*", found):
            raise UserError(f"sbatch failed: {found.strip()}; see {self.folder}")
        return int(found)

    def jobs(self, number: int) -> list[dict[str, str]]:
        """Return the fields of `scontrol show job`, such as JobState and Restarts, for each task if it is an array."""
        shown = self.call("scontrol", "-o", "show", "job", str(number))
        return [dict(re.findall(r"(\w+)=(\S*)", line)) for line in shown.splitlines() if line.startswith("JobId=")]

    def rank_processes(self, node: str | None = None) -> list[int]:
        """Return the running ranks, or those of a node, without the processes that they started."""
        found = []
        for name in [node] if node else NODES:
            for process in self.machines[name].processes():
                is_rank = "SLURM_PROCID" in (own := environment_of(process)) and "SLURM_STEP_NODELIST" in own
                if is_rank and "SLURM_PROCID" not in environment_of(parent_of(process)) and is_alive(process):
                    found.append(process)
        return found

    def daemon(self, node: str) -> int:
        """Return the process id of a node's slurmd."""
        names = {process: Path(f"/proc/{process}/comm") for process in self.machines[node].processes()}
        return min(process for process, path in names.items() if path.exists() and path.read_text() == "slurmd\n")

    def lose(self, node: str) -> None:
        self.machines[node].host.plug(is_in=False)  # the kernel would close its connections
        self.machines[node].end()

    def restore(self, node: str) -> None:
        self.machines[node].host.plug(is_in=True)
        self.machines[node].boot()
        self.machines[node].start(["slurmd", "-D"])

    def end(self) -> None:
        for machine in reversed(self.machines.values()):
            machine.end()


def wait_for(holds: Callable[[], bool], at_most_s: float, problem: str) -> None:
    deadline_s = time.monotonic() + at_most_s
    while not holds():
        if time.monotonic() > deadline_s:
            raise UserError(f"{problem} within {at_most_s:g} s")
        time.sleep(POLL_S)


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[Slurm]:
    """Start a cluster; its configuration, state and logs are in `folder`."""
    require_slurm()
    most = MOST_CHARACTERS - len(f"/{LONGEST_SOCKET}")
    if len(str(folder)) > most:
        raise UserError(f"{folder} is too long for Slurm's sockets (at most {most} characters); set TMPDIR to /tmp")
    folder.mkdir()
    with namespaces(1 + len(NODES)) as hosts:
        slurm = Slurm(folder, hosts)
        try:
            slurm.boot()
            yield slurm
        finally:
            slurm.end()
