"""Memory, threads, files and CPU time of processes, from /proc (Linux)."""

import os
from pathlib import Path

MB = 1e6
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def read_stats(pid: int) -> dict[str, float]:
    """Return the memory, threads and descriptors of a process.

    memory_mb counts private memory only.  File pages are shared with other processes, and the kernel reclaims them.
    """
    process = Path(f"/proc/{pid}")
    kb = {}
    for line in (process / "smaps_rollup").read_text().splitlines()[1:]:
        name, value, *_ = line.split()
        kb[name.rstrip(":")] = int(value)
    maps = (process / "maps").read_text().splitlines()
    return {
        "memory_mb": (kb["Anonymous"] + kb["Swap"]) * 1024 / MB,
        "shared_mb": kb.get("Pss_Shmem", 0) * 1024 / MB,
        "shared_maps": sum("/dev/shm/" in line for line in maps),
        "threads": len(list((process / "task").iterdir())),
        "descriptors": len(list((process / "fd").iterdir())),
    }


def busy_s() -> float:
    """Return the busy CPU seconds of this machine since boot, including stolen time."""
    user, nice, system, _, _, irq, softirq, steal, *_ = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    return sum(map(int, (user, nice, system, irq, softirq, steal))) / TICKS_PER_S


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process."""
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(after_name[11]) + int(after_name[12])) / TICKS_PER_S


def descendants(pid: int) -> list[int]:
    """Return the pids of all descendants.  Any thread may have started a process, so all threads are read."""
    children: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        children += [int(child) for child in task.read_text().split()]
    return children + [other for child in children for other in descendants(child)]


def environment(pid: int) -> dict[str, str]:
    entries = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return {name: value for name, _, value in (entry.partition("=") for entry in entries)}


def shared_memory_files(pids: set[int]) -> set[str]:
    """Return the files in /dev/shm that these processes created (torch_PID_NUMBER) or hold open."""
    found = set()
    for path in Path("/dev/shm").glob("torch_*"):
        made_by = path.name.split("_")[1]
        if made_by.isdecimal() and int(made_by) in pids:
            found.add(path.name)
    for pid in pids:
        found |= {name.removeprefix("/dev/shm/") for name in held_names(pid) if name.startswith("/dev/shm/")}
    return found


def held_names(pid: int) -> list[str]:
    """Return the names of the open or mapped files of a process, without deleted files."""
    names = []
    for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
        try:
            names.append(str(descriptor.readlink()))
        except FileNotFoundError:  # closed by now
            continue
    maps = Path(f"/proc/{pid}/maps")
    names += [line.split(maxsplit=5)[-1] for line in maps.read_text().splitlines()] if maps.exists() else []
    return [name for name in names if not name.endswith(" (deleted)")]
