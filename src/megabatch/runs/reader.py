"""What a run has left, read without torch: by `megabatch runs`, by whoever resumes, by sweeps and studies."""

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
from megabatch.planning.tuning import Tuning
from megabatch.planning.validate import MAX_BYTES, decode_tuning
from megabatch.runs import files
from megabatch.runs.records import Count, EvaluationRecord, Mistakes, Record, Status, StepRecord, StepTrace, Summary
from megabatch.text import one_line

Content = TypeVar("Content")
TAIL_BYTES = 16 << 10  # of metrics.jsonl, which mostly holds its last row: one that skipped images is longer
MAX_JSON_BYTES = 64 << 20  # of a row or a file: a row that skipped half a million images
MAX_CONFIG_BYTES = 4 << 20
MAX_LOG_BYTES = 4 << 20
LOG_LINE = re.compile(r"^(?P<at>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (?P<text>.*(?:\n  .*)*)", re.MULTILINE)
BEGINS = "begins at step "  # as folder.py logs it
LOG_STEP = re.compile(r"\bstep (\d{1,15})\b")
LONGEST_NAME = 60  # letters of a recipe's
YEAR_9999_S = 253_402_300_800  # since 1970
ROW: "msgspec.json.Decoder[Record]" = msgspec.json.Decoder(StepRecord | EvaluationRecord)


class Listing(Struct, frozen=True):
    """A run in a folder of runs."""

    path: Path
    status: Status | Literal["running", "killed", "damaged"]
    summary: Summary | None  # None while it runs, after a kill, and where it cannot be read
    recipe: str | None = None  # None where config.toml cannot be read
    batch: int | None = None
    written_s: float | None = None  # when it was last heard of, in seconds since 1970


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
    """The name of a run's recipe and its global batch, from its config.toml; None for what that does not say."""
    try:
        settings = read_toml(path / files.CONFIG)
    except (OSError, NotToml):
        return None, None
    name, section = settings.get("name"), settings.get("batch")
    batch = section.get("global") if isinstance(section, dict) else None
    is_number = isinstance(batch, int) and 0 < batch < 2**63
    return one_line(name, LONGEST_NAME) if isinstance(name, str) else None, batch if is_number else None


def read_source(path: Path) -> str:
    """data.source of a run, as its config.toml has it; nothing where that does not say."""
    try:
        section = read_toml(path / files.CONFIG).get("data")
    except (OSError, NotToml):
        return ""  # whoever loads the recipe says so
    source = section.get("source") if isinstance(section, dict) else None
    return source if isinstance(source, str) and "\0" not in source else ""


def last_written_s(path: Path) -> float | None:
    """When a run ended, or while it runs its newest row: what a copy of the folder keeps too."""
    for name in (files.SUMMARY, files.METRICS, files.CONFIG):
        try:
            written_s = (path / name).stat().st_mtime
        except OSError:
            continue
        return written_s if 0 <= written_s < YEAR_9999_S else None
    return None


def is_run(path: Path) -> bool:
    """One that this user can read."""
    try:
        return (path / files.CONFIG).is_file()
    except OSError:  # a name that is too long, a folder that may not be entered
        return False


def is_running(path: Path) -> bool:
    """True while some process holds the folder."""
    return is_locked(path / files.LOCK)


def read_summary(path: Path) -> Summary | None:
    """None for a run that runs, that was killed, or whose summary is damaged."""
    return read_if_sound(path / files.SUMMARY, Summary)


def read_records(path: Path) -> Iterator[Record]:
    """Every whole row; the last may be being written."""
    name = str(path / files.METRICS)
    with reading(name) as file:
        for number, row in enumerate(lines_of(file), 1):
            where = f"{name}, row {number}"
            if len(row) > MAX_JSON_BYTES:
                raise UserError(f"{where}: more than {MAX_JSON_BYTES:,} bytes; it is damaged: remove the run")
            if row.endswith(b"\n"):
                yield decode_row(row, where)


def lines_of(file: BinaryIO) -> Iterator[bytes]:
    """One that is longer than any row of ours comes in pieces: it need not fit into memory."""
    return iter(lambda: file.readline(MAX_JSON_BYTES + 1), b"")


def last_record(path: Path) -> Record | None:
    """The newest whole row; None before the first."""
    rows = path / files.METRICS
    try:
        with reading(rows) as file:
            row = last_line(file)
    except OSError:
        return None
    return decode_row(row, f"{rows}, the last row") if row else None


def last_line(file: BinaryIO) -> bytes:
    """The last one that ends, from as little of the file's end as holds it."""
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
        raise UserError(f"{where}: {error}; it is damaged: remove the run, or train it again") from None


def epoch_losses(path: Path) -> dict[int, float]:
    """For every epoch that a run has come to, from 1 on, the mean training loss of the steps that ended in it."""
    losses: defaultdict[int, list[float]] = defaultdict(list)
    for record in read_records(path):
        if isinstance(record, StepRecord):
            losses[math.ceil(record.epoch)].append(record.loss)
    return {epoch: mean_of(found) for epoch, found in losses.items()}


def mean_of(values: list[float]) -> float:
    try:
        return fmean(values)
    except OverflowError:  # of numbers that have a sum beyond all numbers
        return math.inf


def read_environment(path: Path) -> dict[str, object]:
    """What the run has said of the machine that it was made on; {} where that cannot be read."""
    try:
        return decode_json(read_regular(path / files.ENVIRONMENT, MAX_JSON_BYTES), dict[str, object])
    except (OSError, Undecodable):
        return {}


def started_in(path: Path) -> Path:
    """The folder in which the run was started: what its relative paths are relative to."""
    directory = read_environment(path).get("directory")
    return Path(directory) if isinstance(directory, str) and "\0" not in directory else Path()


def read_plan(path: Path) -> Tuning:
    """How a run all-reduces its gradients, from its folder or from the file itself."""
    path = path / files.PLAN if path.is_dir() else path
    try:
        return decode_tuning(read_regular(path, MAX_BYTES))
    except (OSError, Undecodable) as error:
        raise UserError(f"{path} is not a plan ({error}); give a recipe, or the folder of a run") from None


def read_mistakes(path: Path) -> Mistakes | None:
    """What the newest evaluation took for what; None where that was not recorded, or cannot be read."""
    return read_if_sound(path / files.MISTAKES, Mistakes)


def read_step_trace(path: Path) -> StepTrace | None:
    """One step in detail; None where that was not recorded, or cannot be read."""
    return read_if_sound(path / files.STEP_TRACE, StepTrace)


def read_if_sound(path: Path, kind: type[Content]) -> Content | None:
    try:
        return decode_json(read_regular(path, MAX_JSON_BYTES), kind)
    except (OSError, Undecodable):
        return None


class LogEntry(Struct, frozen=True):
    """A line of train.log, and the lines that are set in below it."""

    at: str  # 2026-11-17 20:15:03, by the clock of rank 0's host
    step: int | None  # after which it was written, if it says so
    text: str

    @property
    def begins_at(self) -> int | None:
        """The step at which the run was begun or resumed, where this is the line of that."""
        return self.step if self.text.startswith(BEGINS) else None


def read_log(path: Path) -> list[LogEntry]:
    """Starts, resumptions, warnings and failures, in order; [] where there is no log.  Of a long one, its end."""
    try:
        with reading(path / files.LOG) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - MAX_LOG_BYTES))
            text = file.read(MAX_LOG_BYTES).decode(errors="replace")
    except OSError:
        return []
    entries = []
    for match in LOG_LINE.finditer(text):
        at, said = match["at"], match["text"]
        step = LOG_STEP.search(said)
        entries.append(LogEntry(at, int(step[1]) if step else None, said))
    return entries


class RowStep(Struct):
    step: Count


def length_up_to(rows: Path, step: int) -> int:
    """The bytes of the rows that a checkpoint knows.  A kill may have left later ones, or half of one."""
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
