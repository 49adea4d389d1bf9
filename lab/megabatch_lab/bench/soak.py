"""megabatch bench soak: check that memory, threads, files and speed stay flat in a long run.

A tiny network trains on a folder of JPEGs with ranks of this machine, which covers reader threads, the all-reduce in
shared memory, and an evaluation and a checkpoint every 100 steps.  At POINTS points, evenly spread over the steps, the
bench reads from /proc for every process (ranks and launcher):
    memory_mb      private memory, without file pages
    shared_mb      proportional share of shared memory
    shared_maps    mappings of files in /dev/shm
    threads, descriptors, and for the launcher processes: its descendants
    shm_files      files in /dev/shm that the processes created or hold; after the end: the remaining ones
The first tenth of the steps is a warm-up for caches and allocators.  `first` is from the second tenth, `last` from the
last.  Memory is flat if its median grew by at most GROWTH (relative, per 10,000 steps) or NOISE_MB.  Every other value
is flat if the minimum of the last tenth is not above the minimum of the second: a file that is opened and closed again,
such as a checkpoint, is not a leak.
    steps_per_s    the median rate between points, with evaluations and checkpoints, in the first tenth without its
                   first point (start-up) and in the last.  The last may be slower by SLOWER, or by the interquartile
                   range of either tenth if that is larger.  The load of other processes is reported.
"""

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from megabatch.data.catalog import load_data_set
from megabatch.data.settings import DataSettings
from megabatch.errors import UserError
from megabatch.runs.reader import last_record
from megabatch_lab.bench.report import print_lines, show, write

POINTS = 100
GROWTH, NOISE_MB, SLOWER = 0.01, 2.0, 0.05
BUSY_CORES = 0.2  # used by other processes; above it, speeds cannot be compared
CLASSES, IMAGES_PER_CLASS = 4, 50
POLL_S = 0.02
OVERRIDES = [
    "model.name=tiny_cnn",
    "model.options.hidden=32",
    "data.image_size=16",
    "data.validation=0.2",
    "batch.global=16",
    "batch.micro=8",
    "train.evaluate_every=10",  # epochs of 10 steps
    "checkpoint.every_steps=100",
]


class SoakSample(NamedTuple):
    step: int
    seconds: float
    other_s: float  # CPU seconds of other processes since boot
    stats: dict[tuple[str, str], float]  # by process and name


def run(num_steps: int, num_ranks: int, json_file: Path | None) -> bool:
    """Run the bench and return True if nothing grew or slowed down."""
    if not Path("/proc/self/smaps_rollup").exists():
        raise UserError("bench soak reads /proc/PID/smaps_rollup, which this system lacks; run it on Linux")
    with TemporaryDirectory() as name:
        folder = Path(name)
        make_photos(folder / "photos")
        points, left = watch(folder, num_steps, num_ranks)
    if any(len(tenth(points, num_steps, number)) < 3 for number in (0, 1, 9)):
        raise UserError(f"--steps {num_steps} is too short to measure; try --steps {10 * num_steps}")
    rows = [*compare(points, num_steps), compare_speed(points, num_steps)]
    rows.append(row_of("after the end", "shm_files", 0.0, float(len(left)), 0.0))
    print_lines([{name: shown(value) for name, value in row.items()} for row in rows])
    write([{"steps": num_steps, "ranks": num_ranks, "points": len(points), **row} for row in rows], json_file)
    others = cores_of_others(points, num_steps)
    if others > BUSY_CORES:
        print(f"other processes used {others:.1f} cores, so the speed is not reliable; measure on an idle machine")
    changed = [f"{row['process']}: {row['figure']}" for row in rows if not row["flat"]]
    print(f"not flat: {', '.join(changed)}" if changed else f"flat over {num_steps:,} steps on {num_ranks} ranks")
    return not changed


def make_photos(folder: Path) -> None:
    images = load_data_set(DataSettings(source="fashion-mnist-10k", image_size=28)).train
    pixels = images.read(np.arange(CLASSES * IMAGES_PER_CLASS))[:, 0].numpy()
    for number, grey in enumerate(pixels):
        path = folder / f"class{number % CLASSES}" / f"{number:03d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(grey).resize((48, 40)).convert("RGB").save(path, quality=90)


def watch(folder: Path, num_steps: int, num_ranks: int) -> tuple[list[SoakSample], set[str]]:
    """Return the points of a run, and its files that remain in /dev/shm."""
    points: list[SoakSample] = []
    pids: set[int] = set()
    files: set[str] = set()
    due = 1
    with training(folder, num_steps, num_ranks) as process:
        while process.poll() is None:
            time.sleep(POLL_S)
            record = last_record(folder / "run")
            if record and record.step >= due:
                # A process may have just ended after its last step.
                with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                    alive = {process.pid: "launcher"} | ranks_below(process.pid)
                    pids |= set(alive)
                    if len(alive) == 1 + num_ranks:
                        points.append(read_point(record.step, alive, files))
                due = max(due, record.step) + num_steps // POINTS
    left = {name for name in files | shared_memory_files(pids) if Path("/dev/shm", name).exists()}
    return points, left


@contextmanager
def training(folder: Path, num_steps: int, num_ranks: int) -> Iterator["subprocess.Popen[bytes]"]:
    words = ["train", "photos", f"data.source={folder / 'photos'}", f"run.dir={folder / 'run'}", *OVERRIDES]
    command = [sys.executable, "-m", "megabatch", *words, f"train.steps={num_steps}", "--ranks", str(num_ranks)]
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
        before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        try:
            yield process
        finally:
            signal.signal(signal.SIGTERM, before)
            process.terminate()
            process.wait()
    if process.returncode:
        *_, line = ["", *log.read_text().splitlines()]
        raise UserError(f"the training ended with exit code {process.returncode}: {line}; run its command by itself")


def ranks_below(launcher: int) -> dict[int, str]:
    ranks: dict[int, str] = {}
    for pid in descendants(launcher):
        with suppress(FileNotFoundError, ProcessLookupError):
            rank = environment(pid).get("RANK")
            ranks |= {pid: f"rank {rank}"} if rank else {}
    return ranks


def read_point(step: int, names: dict[int, str], files: set[str]) -> SoakSample:
    stats: dict[tuple[str, str], float] = {}
    for pid, process in names.items():
        stats |= {(process, name): float(value) for name, value in read_stats(pid).items()}
        if process == "launcher":
            stats[process, "processes"] = float(len(descendants(pid)))
    found = shared_memory_files(set(names))
    files |= found
    stats["all", "shm_files"] = float(len(found))
    return SoakSample(step, time.perf_counter(), busy_s() - sum(map(cpu_s, [*names, os.getpid()])), stats)


def compare(points: Sequence[SoakSample], num_steps: int) -> list[dict[str, Any]]:
    """Return a row for each value of each process."""
    before, after = tenth(points, num_steps, 1), tenth(points, num_steps, 9)
    apart = statistics.median(p.step for p in after) - statistics.median(p.step for p in before)
    rows = []
    for process, name in before[0].stats:
        earlier, later = ([point.stats[process, name] for point in part] for part in (before, after))
        if name == "memory_mb":
            first, last = statistics.median(earlier), statistics.median(later)
            allowed = max(NOISE_MB, GROWTH * first * apart / 10_000)
        else:
            first, last, allowed = min(earlier), min(later), 0.0
        rows.append(row_of(process, name, first, last, allowed))
    return rows


def compare_speed(points: Sequence[SoakSample], num_steps: int) -> dict[str, Any]:
    early, late = (rates(tenth(points, num_steps, number)) for number in (0, 9))
    first, last = statistics.median(early), statistics.median(late)
    allowed = max(SLOWER * first, *(spread(part) for part in (early, late)))
    return row_of("all", "steps_per_s", first, last, allowed, worse=first - last)


def cores_of_others(points: Sequence[SoakSample], num_steps: int) -> float:
    """Return the cores that other processes used in the first or last tenth, the larger of the two."""
    parts = [tenth(points, num_steps, number) for number in (0, 9)]
    return max((part[-1].other_s - part[0].other_s) / (part[-1].seconds - part[0].seconds) for part in parts)


def rates(points: Sequence[SoakSample]) -> list[float]:
    return [(b.step - a.step) / (b.seconds - a.seconds) for a, b in pairwise(points)]


def spread(values: Sequence[float]) -> float:
    """Return the interquartile range."""
    low, _, high = statistics.quantiles(values, n=4)
    return high - low


def tenth(points: Sequence[SoakSample], num_steps: int, number: int) -> list[SoakSample]:
    return [point for point in points if (point.step - 1) * 10 // num_steps == number]


def shown(value: Any) -> str:
    return str(int(value)) if isinstance(value, float) and value.is_integer() else show(value)


def row_of(
    process: str, figure: str, first: float, last: float, allowed: float, worse: float | None = None
) -> dict[str, Any]:
    worse = last - first if worse is None else worse
    return {
        "process": process,
        "figure": figure,
        "first": first,
        "last": last,
        "change": last - first,
        "allowed": allowed,
        "flat": worse <= allowed,
    }


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
