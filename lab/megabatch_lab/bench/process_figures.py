"""What a process holds, as the kernel counts it (Linux)."""

import os
from pathlib import Path

MB = 1e6
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def read_figures(pid: int) -> dict[str, float]:
    """memory_mb is its own: heap, stacks, what it has written to.  Pages of files are left out: they are shared with
    whoever else maps them, and the kernel takes them back."""
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
    """What the cores of this machine have computed since it was started, or what was stolen from them."""
    user, nice, system, _, _, irq, softirq, steal, *_ = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    return sum(map(int, (user, nice, system, irq, softirq, steal))) / TICKS_PER_S


def cpu_s(pid: int) -> float:
    """What a process has computed, by its own clock."""
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(after_name[11]) + int(after_name[12])) / TICKS_PER_S


def descendants(pid: int) -> list[int]:
    """Of all its threads: any of them may have started a process."""
    children: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        children += [int(child) for child in task.read_text().split()]
    return children + [other for child in children for other in descendants(child)]


def environment(pid: int) -> dict[str, str]:
    entries = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return {name: value for name, _, value in (entry.partition("=") for entry in entries)}


def shared_memory_files(pids: set[int]) -> set[str]:
    """Files of /dev/shm that these processes have made: torch names them torch_PID_NUMBER, others are held open."""
    found = set()
    for path in Path("/dev/shm").glob("torch_*"):
        made_by = path.name.split("_")[1]
        if made_by.isdecimal() and int(made_by) in pids:
            found.add(path.name)
    for pid in pids:
        found |= {name.removeprefix("/dev/shm/") for name in held_names(pid) if name.startswith("/dev/shm/")}
    return found


def held_names(pid: int) -> list[str]:
    """Of the files that it has open or mapped and that still have a name."""
    names = []
    for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
        try:
            names.append(str(descriptor.readlink()))
        except FileNotFoundError:  # closed by now
            continue
    maps = Path(f"/proc/{pid}/maps")
    names += [line.split(maxsplit=5)[-1] for line in maps.read_text().splitlines()] if maps.exists() else []
    return [name for name in names if not name.endswith(" (deleted)")]
