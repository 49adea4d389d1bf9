"""Find processes by a mark in their environment, which children inherit, and read their state from /proc."""

import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

MARK = "MEGABATCH_CHAOS"
PROC = Path("/proc")
LISTENS = "0A"  # the state of a socket in /proc/net/tcp
POLL_S = 0.02


def environment_of(process: int) -> dict[str, str]:
    """Return the environment; empty if the process has ended or may not be read."""
    with suppress(OSError):
        words = (PROC / str(process) / "environ").read_bytes().decode(errors="replace").split("\0")
        return dict(word.split("=", 1) for word in words if "=" in word)
    return {}


def status_of(process: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name (state, parent, ...); empty if the process has ended."""
    with suppress(OSError):
        return (PROC / str(process) / "stat").read_text().rpartition(")")[2].split()
    return []


def is_alive(process: int) -> bool:
    """Return True if the process runs.  A zombie does not: it only waits for its parent and holds nothing."""
    return status_of(process)[:1] not in ([], ["Z"], ["X"])


def parent_of(process: int) -> int:
    return int((status_of(process) or ["", "0"])[1])


def all_processes() -> list[int]:
    return [int(path.name) for path in PROC.iterdir() if path.name.isdecimal()]


def marked(mark: str) -> list[int]:
    """Return the running processes with this mark."""
    wanted = f"{MARK}={mark}\0".encode()
    found = []
    for process in all_processes():
        with suppress(OSError):
            if wanted in (PROC / str(process) / "environ").read_bytes() and is_alive(process):
                found.append(process)
    return found


def ranks_of(mark: str) -> dict[int, int]:
    """Return the process ids of the marked ranks, by rank.  Children of a rank inherit RANK but are not ranks."""
    environments = {process: environment_of(process) for process in marked(mark)}
    return {
        int(environment["RANK"]): process
        for process, environment in environments.items()
        if environment.get("RANK", "").isdecimal() and "RANK" not in environment_of(parent_of(process))
    }


def send(processes: Iterable[int], number: signal.Signals) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)


def end_marked(mark: str, patience_s: float = 10.0) -> None:
    """Kill marked processes until none remains: some may be starting others."""
    deadline_s = time.monotonic() + patience_s
    while (found := marked(mark)) and time.monotonic() < deadline_s:
        send(found, signal.SIGKILL)
        time.sleep(POLL_S)


def open_files(process: int) -> Iterator[str]:
    """Yield the names of open files; sockets are socket:[NUMBER]."""
    with suppress(OSError):
        for descriptor in (PROC / str(process) / "fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                yield str(descriptor.readlink())


def listening_ports(process: int) -> list[int]:
    sockets = {name.removeprefix("socket:[").removesuffix("]") for name in open_files(process)}
    ports = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in (PROC / str(process) / "net" / table).read_text().splitlines()[1:]:
                _, address, _, state, *_, inode = line.split()[:10]
                if state == LISTENS and inode in sockets:
                    ports.add(int(address.rpartition(":")[2], 16))
    return sorted(ports)
