"""Checks of a disturbed run: its results, the processes and files it leaves, and its progress.

Results are compared bitwise with the undisturbed run: weights, last checkpoint, rows and summary, except times.
"""

import json
import re
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from megabatch.errors import UserError
from megabatch.io.disk import WRITING
from megabatch.runs.files import CHECKPOINTS, LOG, METRICS, SUMMARY, WEIGHTS
from megabatch.runs.reader import last_record, read_summary
from megabatch.runs.records import Record, StepRecord
from megabatch.training.checkpoint.format import STATE
from megabatch.training.checkpoint.save import LAST
from megabatch_lab.chaos.processes import (
    POLL_S,
    PROC,
    all_processes,
    environment_of,
    listening_ports,
    marked,
    open_files,
)

# Fields of a row that hold times or memory.  All other fields are compared, including future ones.
TIMES = ("data_wait", "straggler", "times")
TIME_SUFFIXES = ("_s", "_mb")
SUMMED_UP = ("status", "steps", "skipped_steps", "top1", "top5", "best_top1", "test_loss", "samples_evaluated")

Tensor = tuple[str, list[int], bytes]  # type, shape, content


def differences(expected: Path, found: Path) -> list[str]:
    """Return a line for each difference between two run folders."""
    return [
        *compare_tensors(expected, found, Path(WEIGHTS)),
        *compare_tensors(expected, found, Path(CHECKPOINTS) / LAST / STATE),
        *compare_rows(expected / METRICS, found / METRICS),
        *compare_summaries(expected / SUMMARY, found / SUMMARY),
    ]


def compare_tensors(expected: Path, found: Path, name: Path) -> list[str]:
    try:
        theirs, ours = read_tensors(expected / name), read_tensors(found / name)
    except (OSError, ValueError, struct.error) as error:
        return [f"{name} cannot be read ({error})"]
    wrong = [tensor for tensor in sorted(theirs.keys() | ours.keys()) if theirs.get(tensor) != ours.get(tensor)]
    return [f"{name}: {len(wrong)} of {len(theirs)} tensors differ, first {wrong[0]}"] if wrong else []


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file without its metadata."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header: dict[str, Any] = json.loads(content[8 : 8 + length])
    tensors = {}
    for name, about in header.items():
        if name != "__metadata__":
            begin, end = (8 + length + offset for offset in about["data_offsets"])
            if end > len(content):
                raise ValueError(f"{name} is truncated")
            tensors[name] = (about["dtype"], about["shape"], content[begin:end])
    return tensors


def compare_rows(expected: Path, found: Path) -> list[str]:
    try:
        theirs, ours = read_rows(expected), read_rows(found)
    except (OSError, ValueError) as error:
        return [f"{METRICS} cannot be read ({error})"]
    for number, (their, our) in enumerate(zip(theirs, ours, strict=False), 1):
        wrong = [key for key in sorted(their.keys() | our.keys()) if their.get(key) != our.get(key)]
        if wrong:
            key = wrong[0]
            return [f"{METRICS}, row {number}: {key} is {our.get(key)}; undisturbed: {their.get(key)}"]
    return [f"{METRICS} has {len(ours)} rows; undisturbed: {len(theirs)}"] if len(theirs) != len(ours) else []


def read_rows(path: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{key: value for key, value in row.items() if not is_time(key)} for row in rows]


def is_time(key: str) -> bool:
    return key in TIMES or key.endswith(TIME_SUFFIXES)


def compare_summaries(expected: Path, found: Path) -> list[str]:
    try:
        theirs, ours = (json.loads(path.read_text()) for path in (expected, found))
    except (OSError, ValueError) as error:
        return [f"{SUMMARY} cannot be read ({error})"]
    return [
        f"{SUMMARY}: {key} is {ours.get(key)}; undisturbed: {theirs.get(key)}"
        for key in SUMMED_UP
        if theirs.get(key) != ours.get(key)
    ]


SHARED_MEMORY = Path("/dev/shm")
LINGER_S = 5.0  # for the kernel to end a killed process on a busy machine


class Traces:
    """Processes and files that a launcher leaves, compared with the state before its first start."""

    def __init__(self, mark: str, temporary: Path, shared_memory: Path = SHARED_MEMORY) -> None:
        self.mark, self.temporary, self.shared_memory = mark, temporary, shared_memory
        self.known = self.files()

    def files(self) -> set[Path]:
        return names_in(self.shared_memory) | names_in(self.temporary)

    def left(self) -> list[str]:
        """Return a line for each remaining process and file.  A file is reported once."""
        found = [describe_process(process) for process in wait_for_end(self.mark)]
        new = self.files() - self.known
        used = in_use({path for path in new if path.parent == self.shared_memory})  # by other processes on this machine
        left = (new - used) & self.files()  # without files that another process has removed meanwhile
        self.known |= left
        return found + [f"{path} remains" for path in sorted(left)]


def names_in(folder: Path) -> set[Path]:
    with suppress(OSError):
        return set(folder.iterdir())
    return set()


def wait_for_end(mark: str) -> list[int]:
    """Wait for the processes to end and return those that do not."""
    deadline_s = time.monotonic() + LINGER_S
    while (found := marked(mark)) and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
    return found


def describe_process(process: int) -> str:
    rank = environment_of(process).get("RANK")
    ports = listening_ports(process)
    return (
        f"process {process}{f' (rank {rank})' if rank else ''} remains"
        + f", listening on {', '.join(map(str, ports))}" * bool(ports)
    )


def in_use(files: set[Path]) -> set[Path]:
    """Return the files that a running process has mapped or open."""
    used: set[str] = set()
    for process in all_processes() if files else ():
        used |= set(open_files(process))
        with suppress(OSError):
            used |= {line.split(maxsplit=5)[-1] for line in (PROC / str(process) / "maps").read_text().splitlines()}
    return {path for path in files if str(path) in used}


def unfinished(run: Path) -> list[str]:
    """Return a line for each partial file in the folder of a finished run."""
    return [f"{path} remains" for path in sorted(run.rglob(f"{WRITING}*"))]


Phase = Literal["start-up", "step", "evaluation", "write", "end"]
PHASES: tuple[Phase, ...] = ("start-up", "step", "evaluation", "write", "end")
BEGINS = re.compile(r"^.* begins at step (\d+)$", re.MULTILINE)  # in the run's log, once per attempt


class Progress(Struct, frozen=True):
    begun_at: tuple[int, ...]  # the first step of each attempt so far
    record: Record | None  # the newest row

    @property
    def step(self) -> int:
        return self.record.step if self.record else 0

    @property
    def is_at_work(self) -> bool:
        """Return True if the newest attempt has taken a step."""
        return bool(self.begun_at) and self.step > self.begun_at[-1]


class Watch:
    """Reads the progress of a run from its folder, many times per second."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log_bytes, self.begun_at = 0, ()

    log_bytes: int
    begun_at: tuple[int, ...]

    def look(self) -> Progress:
        log = self.folder / LOG
        try:
            log_bytes = log.stat().st_size
            if log_bytes != self.log_bytes:
                self.begun_at = tuple(map(int, BEGINS.findall(log.read_text(errors="replace"))))
                self.log_bytes = log_bytes
        except OSError:
            pass  # not created yet
        try:
            record = last_record(self.folder)
        except UserError:  # truncated at this moment
            record = None
        return Progress(self.begun_at, record)

    def is_writing(self) -> bool:
        """Return True if a checkpoint or the final weights are being written."""
        patterns = (f"{CHECKPOINTS}/{WRITING}*", f"{WRITING}{WEIGHTS}*")
        return any(next(self.folder.glob(pattern), None) for pattern in patterns)

    def is_finished(self) -> bool:
        summary = read_summary(self.folder)
        return summary is not None and summary.status == "finished"


def phase_of(progress: Progress, is_starting: bool, is_writing: bool, num_steps: int) -> Phase:
    """Return the phase of a run, which is start-up until its newest attempt has a row: files may be of an older one."""
    if is_starting or not progress.is_at_work:
        return "start-up"
    if is_writing:
        return "write"
    if isinstance(progress.record, StepRecord) and progress.record.evaluated:
        return "evaluation"
    return "end" if progress.step == num_steps else "step"
