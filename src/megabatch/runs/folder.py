"""The folder of a run, as the run writes it.  `files.py` lists its files, and `reader.py` reads them.

The run holds the folder's lock.  A full, read-only or failing disk does not end the run: rows wait in memory, and only
the end of the run checks that its result was written.  If the folder is removed or moved during the run, the next
checkpoint creates it again with its recipe, environment, plan, card and all rows.  Earlier checkpoints, the log and
TensorBoard events are lost.
"""

import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Self, TextIO

import msgspec

from megabatch.errors import NotSaved, UserError
from megabatch.io.disk import (
    CHUNK_BYTES,
    Locked,
    make_private,
    open_private,
    open_to_append,
    private,
    remedy,
    remove_unfinished,
    take_lock,
    write_file,
    writing,
)
from megabatch.runs.files import CONFIG, ENVIRONMENT, LOCK, LOG, METRICS, SUMMARY
from megabatch.runs.reader import length_up_to
from megabatch.runs.records import Record, Summary
from megabatch.text import lines_of, print_line

# Reports of files that cannot be written: once for each reason, and again when all of them are written.

ReportLine = Callable[[str, str], None]  # called with a name of at most nine characters and a line
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0  # before the next attempt


def report_on_stderr(name: str, text: str) -> None:
    print_line(f"megabatch: {name}: {text}", to_stderr=True)


def pause_s(num_failures: int) -> float:
    """Return the pause before the next attempt, after `num_failures` failures in a row."""
    return min(FIRST_PAUSE_S * 2.0 ** min(num_failures - 1, 20), LONGEST_PAUSE_S)


class Outage:
    """Files that cannot be written at the moment.  Thread-safe."""

    def __init__(self, report: ReportLine = report_on_stderr) -> None:
        self.report = report
        self.reasons: dict[str, str] = {}  # by the thing that is not written
        self.lock = threading.Lock()

    def begin(self, what: str, reason: str, text: str) -> None:
        """Report `text`, unless this reason was reported already."""
        with self.lock:
            is_known = reason in self.reasons.values()
            self.reasons[what] = reason
        if not is_known:
            self.report("warning", text)

    def failed(self, what: str, path: Path, error: OSError) -> None:
        reason = error.strerror or str(error)
        text = f"{what} cannot be written to {error.filename or path}: {reason}; training continues and retries"
        self.begin(what, reason, f"{text}; {remedy(error)}")

    def worked(self, what: str) -> None:
        with self.lock:
            has_ended = self.reasons.pop(what, None) is not None and not self.reasons
        if has_ended:
            self.report("saved", "all pending data is written")

    @contextmanager
    def survived(self, what: str, path: Path) -> Iterator[None]:
        """Report an OSError of the block instead of raising it."""
        try:
            yield
        except OSError as error:
            self.failed(what, path, error)
        else:
            self.worked(what)


ROWS = "rows of metrics"
MOST_WAITING_BYTES = 256 << 20  # of rows: half a million steps


class RowFile:
    """metrics.jsonl.  One thread appends, and another may sync.

    Rows that the disk does not accept wait in memory, in order.  No row is lost or duplicated, though one may be
    incomplete in the file for a while.  If the file was removed, or a sync failed, the rows are written again from the
    open descriptor, which keeps a removed file readable.
    """

    def __init__(self, path: Path, step: int) -> None:
        """Open the file and drop the rows after `step`."""
        self.path = path
        self.lock = threading.Lock()
        self.waiting = bytearray()
        self.is_suspect = False  # a sync failed: the kernel may have dropped data
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
        """Write all waiting rows to the file."""
        with self.lock:
            while self.waiting:
                count = os.write(self.descriptor, self.waiting)
                del self.waiting[:count]

    def sync(self) -> None:
        """Write all rows to the disk.  Rows may be appended meanwhile."""
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


class RunFolder:
    """A run's folder, locked by this process until the end of the `with` block."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.outage = Outage()
        self.texts: dict[str, str] = {}  # small files, by name, to write again if they are lost
        self.texts_lock = threading.Lock()  # the run writes texts while a checkpoint restores the folder
        self.rows: RowFile | None = None
        self.retry_s = 0.0  # time of the next attempt to write rows
        make_private(path)
        self.lock = hold(path)

    def begin(self, config: str, environment: Mapping[str, object], step: int) -> None:
        """Write the config and environment, and keep the rows up to `step`, the step to start from."""
        (self.path / SUMMARY).unlink(missing_ok=True)  # of an earlier attempt
        remove_unfinished(self.path)
        self.write_text(CONFIG, config)
        self.write_text(ENVIRONMENT, json.dumps(environment, indent=2) + "\n")
        self.rows = RowFile(self.path / METRICS, step)
        self.log(f"begins at step {step}")

    def write(self, record: Record) -> None:
        """Append a row.  Unless the disk fails, it is in the file before the next step starts."""
        assert self.rows is not None
        self.rows.append(msgspec.json.encode(record) + b"\n")
        if len(self.rows.waiting) > MOST_WAITING_BYTES:
            raise NotSaved(
                f"{self.path / METRICS} cannot be written: {len(self.rows.waiting):,} bytes of rows wait in memory, "
                f"the limit is {MOST_WAITING_BYTES:,}; check the disk and resume the run"
            )
        now_s = time.monotonic()
        if ROWS in self.outage.reasons and now_s < self.retry_s:
            return
        self.retry_s = now_s + FIRST_PAUSE_S
        with self.outage.survived(ROWS, self.path):
            self.rows.flush()

    def sync_rows(self) -> None:
        """Write all rows to the disk; restore the folder first if it was removed."""
        assert self.rows is not None
        try:
            if not self.rows.is_in_place():
                self.restore(self.rows)
            self.rows.sync()
        except OSError as error:
            self.outage.failed(ROWS, self.path, error)
            raise
        self.outage.worked(ROWS)

    def restore(self, rows: RowFile) -> None:
        is_removed = not (self.path / LOCK).exists()
        make_private(self.path)
        if is_removed:
            lock = take_lock(self.path / LOCK)
            self.lock.close()
            self.lock = lock
        with self.texts_lock:
            for name, text in self.texts.items():
                if not (self.path / name).exists():
                    write_file(self.path / name, text, is_private=True)
        rows.write_again()
        if is_removed:
            lost = "earlier checkpoints and the log are lost"
            self.outage.report("warning", f"{self.path} was removed during the run; it was created again, but {lost}")

    def finish(self, summary: Summary) -> None:
        text = msgspec.json.format(msgspec.json.encode(summary), indent=2).decode() + "\n"
        write_file(self.path / SUMMARY, text, is_private=True)
        self.log(f"{summary.status} after step {summary.steps}")

    def write_text(self, name: str, text: str) -> None:
        """Write a small file, which is written again if the folder is lost."""
        with self.texts_lock:
            self.texts[name] = text
            write_file(self.path / name, text, is_private=True)

    def log(self, text: str) -> None:
        append_to_log(self.path, text)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self.rows:
            self.rows.close()
        self.lock.close()


def append_to_log(folder: Path, text: str) -> bool:
    """Append to the log and return whether it worked.  A failing log never ends a run."""
    try:
        with open_private(folder / LOG) as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {indent(text)}\n")
        return True
    except OSError:
        return False


def indent(text: str) -> str:
    """Indent all lines but the first, so that each line that starts with a date is a new entry."""
    return lines_of(text.rstrip()).replace("\n", "\n  ")


def hold(folder: Path, setting: str = "run.dir") -> TextIO:
    """Lock the folder until the returned file is closed.  `setting` is the name of the folder in messages."""
    try:
        return take_lock(folder / LOCK)
    except Locked as locked:
        raise UserError(
            f"{setting}={str(folder)!r} is in use by process {locked.holder}; wait for it, or set another {setting}"
        ) from None


# Default folders: runs/<recipe>-<nnn>.

RUNS = Path("runs")


@contextmanager
def numbering_lock() -> Iterator[None]:
    """Let only one starting run at a time choose its number and lock its folder."""
    RUNS.mkdir(exist_ok=True)
    with take_lock(RUNS / LOCK, wait=True):
        yield


def numbered_runs(name: str) -> list[Path]:
    """Return the folders runs/<name>-<nnn> in the order of their numbers."""
    return sorted(
        (path for path in RUNS.glob(f"{name}-*") if re.fullmatch(r"\d{3,}", path.name[len(name) + 1 :])), key=number_of
    )


def next_folder(name: str) -> Path:
    earlier = numbered_runs(name)
    return RUNS / f"{name}-{number_of(earlier[-1]) + 1 if earlier else 1:03d}"


def number_of(path: Path) -> int:
    return int(path.name.rpartition("-")[2])
