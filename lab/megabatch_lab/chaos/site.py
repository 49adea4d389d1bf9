"""The site of a disturbed run: its launchers on one or two hosts, its folder and its disk, and the faults on them.

A small disk is a tmpfs in a separate mount namespace, which disappears with the processes in it.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

from megabatch_lab.chaos.faults import LASTING, Fault, Kind
from megabatch_lab.chaos.launcher import TRAIN, Launcher
from megabatch_lab.chaos.namespaces import Host
from megabatch_lab.chaos.processes import is_alive, send

FILLING = "filling"
BLOCK = bytes(1 << 16)
# Holds the namespace until its input is closed, which also happens when this process ends.
HOLD = 'mount -t tmpfs -o size="$1" chaos "$2" && echo mounted && exec cat'


class SmallDisk(NamedTuple):
    path: Path  # inside its namespace
    seen: Path  # the same folder from outside
    prefix: list[str]  # of commands that run in its namespace

    def fill(self) -> None:
        """Fill the disk to the last byte."""
        with (self.seen / FILLING).open("ab", buffering=0) as file:
            size = len(BLOCK)
            while size:
                try:
                    file.write(BLOCK[:size])
                except OSError:
                    size //= 2

    def free(self) -> None:
        (self.seen / FILLING).unlink(missing_ok=True)


@contextmanager
def small_disk(path: Path, num_bytes: int) -> Iterator[SmallDisk]:
    """Mount a small disk.  Raises OSError if that is not possible here."""
    path.mkdir(parents=True)
    as_root = os.geteuid() == 0
    unshare = ["unshare", "--mount", *([] if as_root else ["--user", "--map-root-user"])]
    with subprocess.Popen(
        [*unshare, "sh", "-c", HOLD, "sh", str(num_bytes), str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as holder:
        assert holder.stdout
        if holder.stdout.readline() != b"mounted\n":
            raise OSError("cannot mount in a namespace")
        enter = ["nsenter", f"--target={holder.pid}", "--mount", f"--wd={Path.cwd()}"]
        enter += [] if as_root else ["--user", "--preserve-credentials"]
        yield SmallDisk(path, Path(f"/proc/{holder.pid}/root{path}"), enter)


def why_no_disk(folder: Path) -> str | None:
    """Return the reason why a small disk cannot be mounted, or None."""
    missing = [tool for tool in ("mount", "unshare", "nsenter") if not shutil.which(tool)]
    if missing:
        return f"no {missing[0]}"
    try:
        with small_disk(folder, 1 << 20) as disk:
            disk.fill()
    except OSError as error:
        return str(error)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return None


MASTER_PORT = 29_400
HOLD_S: dict[Kind, tuple[float, float]] = {"disk": (0.3, 1.5), "link": (1.0, 25.0)}
SIGNALS = {"stop": signal.SIGSTOP, "term": signal.SIGTERM}  # all other kinds: SIGKILL
ON_RANKS: tuple[Kind, ...] = ("rank", "stop", "host", "link")  # need running ranks


class Site(Struct, frozen=True):
    launchers: list[Launcher]
    run: Path  # the run's folder, seen from outside
    max_restarts: int
    hosts: Sequence[Host] = ()
    disk: SmallDisk | None = None

    def ranks(self) -> dict[int, int]:
        return {rank: process for launcher in self.launchers for rank, process in launcher.ranks().items()}

    def strike(self, fault: Fault, ranks: dict[int, int]) -> str | None:
        """Inject the fault and return the victim's name, or None if the victim has ended."""
        if fault.kind in ("rank", "stop") and not ranks:
            return None
        place = int(fault.victim * (len(ranks) if fault.kind in ("rank", "stop") else len(self.launchers)))
        launcher = self.launchers[min(place, len(self.launchers) - 1)]
        match fault.kind:
            case "rank" | "stop":
                rank = sorted(ranks)[place]
                return self.hit([ranks[rank]], fault.kind, f"rank {rank}")
            case "launcher" | "term":
                return self.hit([launcher.process_id], fault.kind, "the launcher")
            case "all":
                processes = [process for each in self.launchers for process in each.processes()]
                return self.hit(processes, fault.kind, f"{len(processes)} processes")
            case "host":
                return self.hit(launcher.processes(), fault.kind, launcher.name)
            case "link":
                self.hosts[place].plug(is_in=False)
                return f"the link of {launcher.name}"
            case "disk" | "disk to end":
                assert self.disk
                self.disk.fill()
                return "the disk"

    def hit(self, processes: Sequence[int], kind: Kind, victim: str) -> str | None:
        living = [process for process in processes if is_alive(process)]
        send(living, SIGNALS.get(kind, signal.SIGKILL))
        return victim if living else None

    def relieve(self) -> None:
        """Free the disk and restore the links."""
        if self.disk:
            self.disk.free()
        for host in self.hosts:
            host.plug(is_in=True)

    def end(self) -> None:
        for launcher in self.launchers:
            launcher.end()


def hold_s(fault: Fault) -> float:
    """Return the duration of a temporary fault."""
    if fault.kind not in LASTING:
        return 0.0
    least, most = HOLD_S[fault.kind]
    return least + fault.hold * (most - least)


def one_host(
    folder: Path, recipe: Path, num_ranks: int, max_restarts: int, mark: str, disk: SmallDisk | None = None
) -> Site:
    run = (disk.path if disk else folder) / "run"
    options = ["--ranks", str(num_ranks), "--max-restarts", str(max_restarts)]
    command = [*(disk.prefix if disk else ()), *TRAIN, str(recipe), f"run.dir={run}", *options]
    launcher = Launcher("megabatch train", command, mark, folder / "launcher")
    return Site([launcher], (disk.seen / "run") if disk else run, max_restarts, disk=disk)


def several_hosts(
    folder: Path, recipe: Path, num_ranks: int, max_restarts: int, mark: str, hosts: Sequence[Host]
) -> Site:
    """Return a site with torchrun on each host, as a user would start it."""
    launchers = []
    for place, host in enumerate(hosts):
        own = folder / f"host{place}"
        options = {
            "nnodes": len(hosts),
            "nproc-per-node": num_ranks // len(hosts),
            "node-rank": place,
            "rdzv-backend": "static",  # the other backends unpickle data from a port
            "master-addr": hosts[0].address,
            "master-port": MASTER_PORT,
            "max-restarts": max_restarts,
            "log-dir": own / "torchrun",
        }
        torchrun = [sys.executable, "-P", "-m", "torch.distributed.run", *(f"--{k}={v}" for k, v in options.items())]
        command = host.command([*torchrun, "-m", "megabatch", "train", str(recipe), f"run.dir={folder / 'run'}"])
        settings = {"PYTHONSAFEPATH": "1"}
        settings["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
        launchers.append(Launcher(f"host {place}", command, f"{mark}-{place}", own, settings))
    return Site(launchers, folder / "run", max_restarts, hosts)
