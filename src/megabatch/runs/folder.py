"""The run's folder, as its run writes it: `files.py` lists what lies there, `reader.py` reads it.

It belongs to one run at a time, which holds its lock.
"""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

import msgspec

from megabatch.disk import Locked, remove_unfinished, take_lock, write_file
from megabatch.errors import UserError
from megabatch.runs.files import CONFIG, ENVIRONMENT, LOCK, LOG, METRICS, SUMMARY
from megabatch.runs.reader import length_up_to
from megabatch.runs.records import Record, Summary


class RunFolder:
    """A folder that this process holds until it leaves the `with`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        self.lock = hold(path)

    def begin(self, config: str, environment: Mapping[str, object], step: int) -> None:
        """Writes what describes the run, and keeps the rows up to `step`, where it begins or resumes."""
        (self.path / SUMMARY).unlink(missing_ok=True)  # of the attempt before
        remove_unfinished(self.path)
        self.write_text(CONFIG, config)
        self.write_text(ENVIRONMENT, json.dumps(environment, indent=2) + "\n")
        rows = self.path / METRICS
        self.metrics = rows.open("ab")
        self.metrics.truncate(length_up_to(rows, step))
        self.log(f"begins at step {step}")

    def write(self, record: Record) -> None:
        """One row, flushed: what has happened is in the file before the next step begins."""
        self.metrics.write(msgspec.json.encode(record) + b"\n")
        self.metrics.flush()

    def sync_rows(self) -> None:
        os.fsync(self.metrics.fileno())

    def finish(self, summary: Summary) -> None:
        self.write_text(SUMMARY, msgspec.json.format(msgspec.json.encode(summary), indent=2).decode() + "\n")
        self.log(f"{summary.status} after step {summary.steps}")

    def write_text(self, name: str, text: str) -> None:
        write_file(self.path / name, text)

    def log(self, text: str) -> None:
        append_to_log(self.path, text)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if hasattr(self, "metrics"):
            self.metrics.close()
        self.lock.close()


def append_to_log(folder: Path, text: str) -> None:
    with (folder / LOG).open("a") as file:
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text.rstrip()}\n")


def hold(folder: Path, setting: str = "run.dir") -> TextIO:
    """Takes the folder for this process, until what is returned is closed; `setting` is what a user gives it by."""
    try:
        return take_lock(folder / LOCK)
    except Locked as locked:
        raise UserError(
            f"{setting}={str(folder)!r} is in use by process {locked.holder}; wait for it, or give another {setting}"
        ) from None
