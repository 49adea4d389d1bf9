"""The run's folder, as its run writes it: `files.py` lists what lies there, `reader.py` reads it.

It belongs to one run at a time, which holds its lock.  A disk that is full, read-only or failing does not end the run:
rows wait in memory, and whether the result could be written is asked at the end.  A folder that is removed or moved
away under the run is made again at the next checkpoint, with its recipe, environment, plan, card and all rows; the
checkpoints, the log and TensorBoard's events that were in it are gone.
"""

import json
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

import msgspec

from megabatch.errors import NotSaved, UserError
from megabatch.io.disk import (
    CHUNK_BYTES,
    Locked,
    make_private,
    open_own,
    open_to_append,
    private,
    remove_unfinished,
    take_lock,
    write_file,
    writing,
)
from megabatch.runs.files import CONFIG, ENVIRONMENT, LOCK, LOG, METRICS, SUMMARY
from megabatch.runs.outage import FIRST_PAUSE_S, Outage
from megabatch.runs.reader import length_up_to
from megabatch.runs.records import Record, Summary
from megabatch.text import lines_of

# metrics.jsonl, as it is appended to.
#
# What the disk does not take waits in memory, in order, and follows when it does: no row is lost or there twice,
# though one may be cut in two for a while.  A file that is not in its place any more, or that the disk has failed to
# keep, is written again from the descriptor that is still open: a removed file is there until that is closed.


class RowFile:
    """One thread appends, and another may sync."""

    def __init__(self, path: Path, step: int) -> None:
        """Keeps the rows up to `step`."""
        self.path = path
        self.lock = threading.Lock()
        self.waiting = bytearray()
        self.is_suspect = False  # a sync has failed: the kernel may have forgotten what it was to write
        self.descriptor = open_to_append(path)
        try:
            os.ftruncate(self.descriptor, length_up_to(path, step))
        except OSError:
            os.close(self.descriptor)
            raise

    def append(self, row: bytes) -> None:
        with self.lock:
            self.waiting += row

    def flush(self) -> None:
        """What waits is in the file when this returns."""
        with self.lock:
            while self.waiting:
                count = os.write(self.descriptor, self.waiting)
                del self.waiting[:count]

    def sync(self) -> None:
        """Every row so far is on the disk when this returns.  Rows may be appended meanwhile."""
        self.flush()
        try:
            os.fsync(self.descriptor)
        except OSError:
            self.is_suspect = True
            raise

    def is_in_place(self) -> bool:
        try:
            return not self.is_suspect and os.path.samestat(self.path.stat(), os.fstat(self.descriptor))
        except FileNotFoundError:
            return False

    def write_again(self) -> None:
        with self.lock:
            with writing(self.path) as new, open(new, "xb", opener=private) as file:
                begin = 0
                while chunk := os.pread(self.descriptor, CHUNK_BYTES, begin):
                    file.write(chunk)
                    begin += len(chunk)
            before, self.descriptor = self.descriptor, open_to_append(self.path)
            os.close(before)
            self.is_suspect = False

    def close(self) -> None:
        os.close(self.descriptor)


ROWS = "rows of metrics"
MOST_WAITING_BYTES = 256 << 20  # of rows: half a million steps


class RunFolder:
    """A folder that this process holds until it leaves the `with`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.outage = Outage()
        self.texts: dict[str, str] = {}  # what describes the run, by the names of its files
        self.describing = threading.Lock()  # the run describes itself while a checkpoint makes the folder again
        self.rows: RowFile | None = None
        self.retry_s = 0.0  # when rows are tried again
        make_private(path)
        self.lock = hold(path)

    def begin(self, config: str, environment: Mapping[str, object], step: int) -> None:
        """Writes what describes the run, and keeps the rows up to `step`, where it begins or resumes."""
        (self.path / SUMMARY).unlink(missing_ok=True)  # of the attempt before
        remove_unfinished(self.path)
        self.describe(CONFIG, config)
        self.describe(ENVIRONMENT, json.dumps(environment, indent=2) + "\n")
        self.rows = RowFile(self.path / METRICS, step)
        self.log(f"begins at step {step}")

    def write(self, record: Record) -> None:
        """One row: what has happened is in the file before the next step begins, if the disk takes it."""
        assert self.rows is not None
        self.rows.append(msgspec.json.encode(record) + b"\n")
        if len(self.rows.waiting) > MOST_WAITING_BYTES:
            raise NotSaved(
                f"{self.path / METRICS} could not be written to for long: {len(self.rows.waiting):,} bytes of rows "
                "wait in memory; see that it can be, and start the run again"
            )
        now_s = time.monotonic()
        if ROWS in self.outage.reasons and now_s < self.retry_s:
            return
        self.retry_s = now_s + FIRST_PAUSE_S
        with self.outage.survived(ROWS, self.path):
            self.rows.flush()

    def sync_rows(self) -> None:
        """Every row so far is on the disk when this returns."""
        assert self.rows is not None
        try:
            if not self.rows.is_in_place():
                self.make_again(self.rows)
            self.rows.sync()
        except OSError as error:
            self.outage.failed(ROWS, self.path, error)
            raise
        self.outage.worked(ROWS)

    def make_again(self, rows: RowFile) -> None:
        is_removed = not (self.path / LOCK).exists()
        make_private(self.path)
        if is_removed:
            lock = take_lock(self.path / LOCK)
            self.lock.close()
            self.lock = lock
        with self.describing:
            for name, text in self.texts.items():
                if not (self.path / name).exists():
                    write_file(self.path / name, text, is_private=True)
        rows.write_again()
        if is_removed:
            lost = "earlier checkpoints and the log are gone"
            self.outage.say("warning", f"{self.path} was removed under this run; it is made again, but {lost}")

    def finish(self, summary: Summary) -> None:
        text = msgspec.json.format(msgspec.json.encode(summary), indent=2).decode() + "\n"
        write_file(self.path / SUMMARY, text, is_private=True)
        self.log(f"{summary.status} after step {summary.steps}")

    def describe(self, name: str, text: str) -> None:
        """A file that says what the run is, which is written again if it is lost."""
        with self.describing:
            self.texts[name] = text
            write_file(self.path / name, text, is_private=True)

    def log(self, text: str) -> None:
        append_to_log(self.path, text)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.rows:
            self.rows.close()
        self.lock.close()


def append_to_log(folder: Path, text: str) -> bool:
    """Whether it is there: nobody fails for the sake of the log."""
    try:
        with open_own(folder / LOG) as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {as_record(text)}\n")
        return True
    except OSError:
        return False


def as_record(text: str) -> str:
    """Its further lines are set in: a line that begins with a date is a record of its own, whatever a name holds."""
    return lines_of(text.rstrip()).replace("\n", "\n  ")


def hold(folder: Path, setting: str = "run.dir") -> TextIO:
    """Takes the folder for this process, until what is returned is closed; `setting` is what a user gives it by."""
    try:
        return take_lock(folder / LOCK)
    except Locked as locked:
        raise UserError(
            f"{setting}={str(folder)!r} is in use by process {locked.holder}; wait for it, or give another {setting}"
        ) from None


# Folders of runs that were given none: runs/<recipe>-<nnn>.

RUNS = Path("runs")


@contextmanager
def numbering_lock() -> Iterator[None]:
    """Of runs that start at the same moment, one after the other chooses its number and takes its folder."""
    RUNS.mkdir(exist_ok=True)
    with take_lock(RUNS / LOCK, wait=True):
        yield


def numbered_runs(name: str) -> list[Path]:
    """The folders runs/<name>-<nnn>, in the order of their numbers."""
    return sorted(
        (path for path in RUNS.glob(f"{name}-*") if re.fullmatch(r"\d{3,}", path.name[len(name) + 1 :])), key=number_of
    )


def next_folder(name: str) -> Path:
    earlier = numbered_runs(name)
    return RUNS / f"{name}-{number_of(earlier[-1]) + 1 if earlier else 1:03d}"


def number_of(path: Path) -> int:
    return int(path.name.rpartition("-")[2])
