"""Processes, as chaos sees them from outside: found by a mark in their environment, which children inherit."""

import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

MARK = "MEGABATCH_CHAOS"
PROC = Path("/proc")
LISTENS = "0A"  # the state of a socket in /proc/net/tcp
LOOK_S = 0.02


def environment_of(process: int) -> dict[str, str]:
    """Empty for one that is no more, or not ours to look at."""
    with suppress(OSError):
        words = (PROC / str(process) / "environ").read_bytes().decode(errors="replace").split("\0")
        return dict(word.split("=", 1) for word in words if "=" in word)
    return {}


def status_of(process: int) -> list[str]:
    """State, parent and so on, as in /proc/PID/stat after the name; empty for one that is no more."""
    with suppress(OSError):
        return (PROC / str(process) / "stat").read_text().rpartition(")")[2].split()
    return []


def is_alive(process: int) -> bool:
    """A zombie is not: it waits for its parent to look, and holds nothing."""
    return status_of(process)[:1] not in ([], ["Z"], ["X"])


def parent_of(process: int) -> int:
    return int((status_of(process) or ["", "0"])[1])


def all_processes() -> list[int]:
    return [int(path.name) for path in PROC.iterdir() if path.name.isdecimal()]


def marked(mark: str) -> list[int]:
    """The living processes that carry this mark."""
    wanted = f"{MARK}={mark}\0".encode()
    found = []
    for process in all_processes():
        with suppress(OSError):
            if wanted in (PROC / str(process) / "environ").read_bytes() and is_alive(process):
                found.append(process)
    return found


def ranks_of(mark: str) -> dict[int, int]:
    """Process ids of the ranks among the marked, by rank: what a rank starts inherits RANK, and is none."""
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
    """Kills them, and waits until they are gone: some may just be starting others."""
    deadline_s = time.monotonic() + patience_s
    while (found := marked(mark)) and time.monotonic() < deadline_s:
        send(found, signal.SIGKILL)
        time.sleep(LOOK_S)


def open_files(process: int) -> Iterator[str]:
    """Their names; of sockets socket:[NUMBER]."""
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
