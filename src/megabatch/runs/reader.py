"""Read the files of a run, without torch."""

import math
import os
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import BinaryIO, Literal, TypeVar

import msgspec
from msgspec import Struct

from megabatch.errors import UserError
from megabatch.io.disk import is_locked
from megabatch.io.reading import Undecodable, decode_json, decode_with, read_regular, reading
from megabatch.io.toml import NotToml, read_toml
from megabatch.planning.tuning import MAX_BYTES, Tuning, decode_tuning
from megabatch.runs import files
from megabatch.runs.records import Count, EvaluationRecord, Mistakes, Record, Status, StepRecord, StepTrace, Summary
from megabatch.text import one_line

Content = TypeVar("Content")
TAIL_BYTES = 16 << 10  # enough for most last rows of metrics.jsonl; a row that lists skipped images is longer
MAX_JSON_BYTES = 64 << 20  # of a row or a file: a row that skipped half a million images
MAX_CONFIG_BYTES = 4 << 20
MAX_LOG_BYTES = 4 << 20
LOG_LINE = re.compile(r"^(?P<at>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (?P<text>.*(?:\n  .*)*)", re.MULTILINE)
BEGINS = "begins at step "  # as folder.py logs it
LOG_STEP = re.compile(r"\bstep (\d{1,15})\b")
LONGEST_NAME = 60  # characters of a recipe's name
YEAR_9999_S = 253_402_300_800  # since 1970
ROW: "msgspec.json.Decoder[Record]" = msgspec.json.Decoder(StepRecord | EvaluationRecord)


class Listing(Struct, frozen=True):
    """A run in a folder of runs."""

    path: Path
    status: Status | Literal["running", "killed", "damaged"]
    summary: Summary | None  # None if the run is running, was killed, or its summary is damaged
    recipe: str | None = None  # None if config.toml cannot be read
    batch: int | None = None
    written_s: float | None = None  # time of the last write, in seconds since 1970


def list_runs(folder: Path) -> list[Listing]:
    return [listing_of(path) for path in sorted(folder.glob("*")) if is_run(path)]


def listing_of(path: Path) -> Listing:
    recipe, batch = read_recipe_and_batch(path)
    if is_running(path):
        return Listing(path, "running", None, recipe, batch, last_written_s(path))
    summary = read_summary(path)
    without: Literal["killed", "damaged"] = "damaged" if os.path.lexists(path / files.SUMMARY) else "killed"
    return Listing(path, summary.status if summary else without, summary, recipe, batch, last_written_s(path))


def read_recipe_and_batch(path: Path) -> tuple[str | None, int | None]:
    """Return the recipe and global batch of a run's config.toml, each None if missing."""
    try:
        settings = read_toml(path / files.CONFIG)
    except (OSError, NotToml):
        return None, None
    name, section = settings.get("name"), settings.get("batch")
    batch = section.get("global") if isinstance(section, dict) else None
    is_number = isinstance(batch, int) and 0 < batch < 2**63
    return one_line(name, LONGEST_NAME) if isinstance(name, str) else None, batch if is_number else None


def read_source(path: Path) -> str:
    """Return data.source of a run's config.toml, or "" if it is missing."""
    try:
        section = read_toml(path / files.CONFIG).get("data")
    except (OSError, NotToml):
        return ""  # loading the recipe reports the error
    source = section.get("source") if isinstance(section, dict) else None
    return source if isinstance(source, str) and "\0" not in source else ""


def last_written_s(path: Path) -> float | None:
    """Return when a run ended or wrote its newest row.  A copy of the folder keeps this time."""
    for name in (files.SUMMARY, files.METRICS, files.CONFIG):
        try:
            written_s = (path / name).stat().st_mtime
        except OSError:
            continue
        return written_s if 0 <= written_s < YEAR_9999_S else None
    return None


def is_run(path: Path) -> bool:
    """Return whether a folder is a run that this user can read."""
    try:
        return (path / files.CONFIG).is_file()
    except OSError:  # name too long, permission denied
        return False


def is_running(path: Path) -> bool:
    """Return whether a process holds the folder's lock."""
    return is_locked(path / files.LOCK)


def read_summary(path: Path) -> Summary | None:
    """Return the summary; None if the run is running, was killed, or its summary is damaged."""
    return read_if_valid(path / files.SUMMARY, Summary)


def read_records(path: Path) -> Iterator[Record]:
    """Yield every complete row.  The last row may still be incomplete."""
    name = str(path / files.METRICS)
    with reading(name) as file:
        for number, row in enumerate(lines_of(file), 1):
            where = f"{name}, row {number}"
            if len(row) > MAX_JSON_BYTES:
                raise UserError(f"{where}: more than {MAX_JSON_BYTES:,} bytes; it is damaged: delete the run")
            if row.endswith(b"\n"):
                yield decode_row(row, where)


def lines_of(file: BinaryIO) -> Iterator[bytes]:
    """Yield lines.  A line longer than any valid row is divided, so that it need not fit into memory."""
    return iter(lambda: file.readline(MAX_JSON_BYTES + 1), b"")


def last_record(path: Path) -> Record | None:
    """Return the newest complete row, or None if there is none."""
    rows = path / files.METRICS
    try:
        with reading(rows) as file:
            row = last_line(file)
    except OSError:
        return None
    return decode_row(row, f"{rows}, the last row") if row else None


def last_line(file: BinaryIO) -> bytes:
    """Return the last complete line, reading as little of the file as possible."""
    size, tail_bytes = file.seek(0, os.SEEK_END), TAIL_BYTES
    while True:
        file.seek(max(0, size - tail_bytes))
        *lines, _ = file.read(tail_bytes).split(b"\n")
        if len(lines) > 1 or tail_bytes >= min(size, MAX_JSON_BYTES):
            return lines[-1] if lines else b""
        tail_bytes *= 4


def decode_row(row: bytes, where: str) -> Record:
    try:
        return decode_with(ROW, row)
    except Undecodable as error:
        raise UserError(f"{where}: {error}; it is damaged: delete the run or train it again") from None


def epoch_losses(path: Path) -> dict[int, float]:
    """Return the mean training loss of the steps that ended in each epoch; epochs count from 1."""
    losses: defaultdict[int, list[float]] = defaultdict(list)
    for record in read_records(path):
        if isinstance(record, StepRecord):
            losses[math.ceil(record.epoch)].append(record.loss)
    return {epoch: mean_of(found) for epoch, found in losses.items()}


def mean_of(values: list[float]) -> float:
    try:
        return fmean(values)
    except OverflowError:  # the sum is not a float
        return math.inf


def read_environment(path: Path) -> dict[str, object]:
    """Return the recorded environment of a run, or {} if it cannot be read."""
    try:
        return decode_json(read_regular(path / files.ENVIRONMENT, MAX_JSON_BYTES), dict[str, object])
    except (OSError, Undecodable):
        return {}


def started_in(path: Path) -> Path:
    """Return the working directory of the run, to which its relative paths refer."""
    directory = read_environment(path).get("directory")
    return Path(directory) if isinstance(directory, str) and "\0" not in directory else Path()


def read_plan(path: Path) -> Tuning:
    """Return the communication plan of a run, from its folder or a plan.json."""
    path = path / files.PLAN if path.is_dir() else path
    try:
        return decode_tuning(read_regular(path, MAX_BYTES))
    except (OSError, Undecodable) as error:
        raise UserError(f"{path} is not a plan ({error}); pass a recipe or a run's folder") from None


def read_mistakes(path: Path) -> Mistakes | None:
    return read_if_valid(path / files.MISTAKES, Mistakes)


def read_step_trace(path: Path) -> StepTrace | None:
    return read_if_valid(path / files.STEP_TRACE, StepTrace)


def read_if_valid(path: Path, kind: type[Content]) -> Content | None:
    """Return the content of a JSON file, or None if it is missing or damaged."""
    try:
        return decode_json(read_regular(path, MAX_JSON_BYTES), kind)
    except (OSError, Undecodable):
        return None


class LogEntry(Struct, frozen=True):
    """A line of train.log with the indented lines below it."""

    at: str  # 2026-11-17 20:15:03, by the clock of rank 0's host
    step: int | None  # the step that it names
    text: str

    @property
    def begins_at(self) -> int | None:
        """Return the step at which the run started or resumed, if this line reports a start."""
        return self.step if self.text.startswith(BEGINS) else None


def read_log(path: Path) -> list[LogEntry]:
    """Return starts, resumes, warnings and failures in order: at most the last MAX_LOG_BYTES of the log."""
    try:
        with reading(path / files.LOG) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - MAX_LOG_BYTES))
            text = file.read(MAX_LOG_BYTES).decode(errors="replace")
    except OSError:
        return []
    entries = []
    for match in LOG_LINE.finditer(text):
        step = LOG_STEP.search(match["text"])
        entries.append(LogEntry(match["at"], int(step[1]) if step else None, match["text"]))
    return entries


class RowStep(Struct):
    step: Count


def length_up_to(rows: Path, step: int) -> int:
    """Return the length in bytes of the rows up to `step`.  A killed run may leave later or incomplete rows."""
    length = 0
    with reading(rows) as file:
        for line in lines_of(file):
            try:
                if not line.endswith(b"\n") or decode_json(line, RowStep).step > step:
                    break
            except Undecodable:
                break
            length += len(line)
    return length
