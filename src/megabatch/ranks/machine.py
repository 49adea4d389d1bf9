"""What a process knows of its machine: its host, its cores, its memory."""

import os
import platform
from collections.abc import Sequence
from pathlib import Path


def host_identity() -> str:
    """Ranks with the same share a memory, and see each other's processes.

    Test hosts on one machine differ in their network namespace only, containers of one rank each in that of processes.
    """
    links = [Path("/proc/self/ns/net"), Path("/proc/self/ns/pid")]
    boot = Path("/proc/sys/kernel/random/boot_id")
    known = [boot.read_text().strip(), *(str(link.readlink()) for link in links)] if boot.exists() else []
    return " ".join([platform.node(), *known])


def is_stopped(process: int) -> bool:
    """By a signal such as SIGSTOP; one that a debugger holds is in good hands."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:  # it has ended, or the system does not say
        return False


def usable_cores() -> frozenset[int]:
    """The cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def fair_threads(rank: int, cores: Sequence[tuple[str, frozenset[int]]]) -> int:
    """This rank's share of the cores, given every rank's host and usable cores.

    srun gives each of its tasks cores of its own, torchrun lets all ranks of a host share all of them.
    """
    host, mine = cores[rank]
    here = [theirs for other, theirs in cores if other == host]
    share = sum(1 / sum(core in theirs for theirs in here) for core in mine)
    return max(1, int(share + 1e-6))


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def resident_mb() -> float | None:
    """What this process has in memory; None where the system does not say."""
    try:
        _, pages, *_ = Path("/proc/self/statm").read_text().split()
    except OSError:
        return None
    return int(pages) * os.sysconf("SC_PAGE_SIZE") / 1e6
