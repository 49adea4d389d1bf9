"""What a run is doing, by what lies in its folder."""

import re
from pathlib import Path
from typing import Literal

from msgspec import Struct

from megabatch.disk import WRITING
from megabatch.errors import UserError
from megabatch.runs.files import CHECKPOINTS, LOG, WEIGHTS
from megabatch.runs.reader import last_record, read_summary
from megabatch.runs.records import Record, StepRecord

Phase = Literal["start-up", "step", "evaluation", "write", "end"]
PHASES: tuple[Phase, ...] = ("start-up", "step", "evaluation", "write", "end")
BEGINS = re.compile(r"^.* begins at step (\d+)$", re.MULTILINE)  # of the run's log, once for each attempt


class Progress(Struct, frozen=True):
    begun_at: tuple[int, ...]  # the step at which each attempt has begun, so far
    record: Record | None  # the newest row

    @property
    def step(self) -> int:
        return self.record.step if self.record else 0

    @property
    def is_at_work(self) -> bool:
        """The newest attempt has taken a step."""
        return bool(self.begun_at) and self.step > self.begun_at[-1]


class Watch:
    """Looks at a run's folder many times a second."""

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
            pass  # not yet
        try:
            record = last_record(self.folder)
        except UserError:  # cut off at this moment
            record = None
        return Progress(self.begun_at, record)

    def is_writing(self) -> bool:
        """A checkpoint or the final weights."""
        patterns = (f"{CHECKPOINTS}/{WRITING}*", f"{WRITING}{WEIGHTS}*")
        return any(next(self.folder.glob(pattern), None) for pattern in patterns)

    def is_finished(self) -> bool:
        summary = read_summary(self.folder)
        return summary is not None and summary.status == "finished"


def phase_of(progress: Progress, is_starting: bool, is_writing: bool, num_steps: int) -> Phase:
    """Without a row of the attempt under way it is starting; what a killed one was writing lies there until then."""
    if is_starting or not progress.is_at_work:
        return "start-up"
    if is_writing:
        return "write"
    if isinstance(progress.record, StepRecord) and progress.record.evaluated:
        return "evaluation"
    return "end" if progress.step == num_steps else "step"
