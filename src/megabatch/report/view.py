"""One run as the page sees it, from one pass over its records.

Whatever is missing is left out, since a run may be running or killed; what is damaged in metrics.jsonl is one
line for the user.
"""

import math
import time
from array import array
from pathlib import Path
from typing import Any

from megabatch.errors import UserError
from megabatch.planning.tuning import Tuning
from megabatch.regular_files import read_regular
from megabatch.report.html import shown_path
from megabatch.report.ranks import RankDelays
from megabatch.report.shares import TimeColumns
from megabatch.report.thin import Curve
from megabatch.runs import files
from megabatch.runs.mistakes import Mistakes
from megabatch.runs.model_card import decode_card
from megabatch.runs.reader import (
    MAX_CONFIG_BYTES,
    MAX_JSON_BYTES,
    LogEntry,
    listing_of,
    read_environment,
    read_log,
    read_mistakes,
    read_plan,
    read_records,
    read_step_trace,
)
from megabatch.runs.records import EvaluationRecord, StepRecord, Summary
from megabatch.runs.settings import Value, flatten, require_run
from megabatch.runs.step_trace import StepTrace
from megabatch.toml import NotToml, parse_toml

STEP_COLUMNS = ("step", "epoch", "loss", "lr", "loss_scale", "images_per_s")
EVALUATION_COLUMNS = ("step", "epoch", "top1", "top5", "test_loss", "resident_mb", "device_mb")


class Columns:
    """Numbers of rows, by the name of their field; what a row has not is NaN."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.of = {name: array("d") for name in names}
        self.end_s = array("d")  # wall time

    def add(self, record: object, end_s: float) -> None:
        for name, column in self.of.items():
            value = getattr(record, name)
            column.append(math.nan if value is None else value)
        self.end_s.append(end_s)

    def __len__(self) -> int:
        return len(self.end_s)

    def curve(self, name: str, along: str = "step") -> Curve:
        return Curve(self.of.get(along, self.end_s), self.of[name])


class RunView:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = shown_path(Path(path.resolve().name))
        self.notes: list[str] = []  # what could not be read
        self.steps = Columns(STEP_COLUMNS)
        self.evaluations = Columns(EVALUATION_COLUMNS)
        self.times = TimeColumns()
        self.ranks = RankDelays()
        self.skipped_steps: list[float] = []
        self.skipped_images = 0
        self.last_step: StepRecord | None = None
        self.last_evaluation: EvaluationRecord | None = None
        self.status = "killed"
        self.summary: Summary | None = None
        self.recipe: str | None = None
        self.global_batch: int | None = None
        self.written_s: float | None = None
        self.config_text = ""
        self.config: dict[str, Value] = {}  # by dotted names
        self.environment: dict[str, object] = {}
        self.log: list[LogEntry] = []
        self.tuning: Tuning | None = None
        self.trace: StepTrace | None = None
        self.mistakes: Mistakes | None = None
        self.classes: list[str] = []

    @property
    def wall_s(self) -> float:
        return self.times.wall_s

    @property
    def num_steps(self) -> int:
        return self.last_step.step if self.last_step else 0

    @property
    def num_ranks(self) -> int | None:
        if self.tuning:
            return self.tuning.topology.num_ranks
        return self.ranks.num_ranks or None

    @property
    def written(self) -> str | None:
        return None if self.written_s is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(self.written_s))

    def class_name(self, number: int) -> str:
        return self.classes[number] if number < len(self.classes) else f"class {number}"

    def setting(self, key: str) -> Any:
        return self.config.get(key)


def read_run(path: Path) -> RunView:
    require_run(path)
    view = RunView(path)
    listing = listing_of(path)
    view.status, view.summary, view.written_s = listing.status, listing.summary, listing.written_s
    view.recipe, view.global_batch = listing.recipe, listing.batch
    if view.status == "damaged":
        view.notes.append(f"{files.SUMMARY} is damaged: what it says is left out")
    read_rows(view)
    read_config(view)
    view.environment, view.log = read_environment(path), read_log(path)
    view.mistakes, view.trace = read_mistakes(path), read_step_trace(path)
    for name, found in ((files.MISTAKES, view.mistakes), (files.STEP_TRACE, view.trace)):
        if found is None and (path / name).exists():
            view.notes.append(f"{name} is damaged: what it says is left out")
    if (path / files.PLAN).exists():
        try:
            view.tuning = read_plan(path)
        except UserError:
            view.notes.append(f"{files.PLAN} is damaged: what it says is left out")
    if (path / files.MODEL).exists():
        try:
            view.classes = decode_card(read_regular(path / files.MODEL, MAX_JSON_BYTES), files.MODEL).classes
        except (UserError, OSError):
            view.notes.append(f"{files.MODEL} is damaged: classes have numbers instead of names")
    return view


def read_rows(view: RunView) -> None:
    try:
        for record in read_records(view.path):
            view.times.add(record)
            if isinstance(record, StepRecord):
                view.steps.add(record, view.times.wall_s)
                view.last_step = record
                view.ranks.add_step(record)
                view.skipped_images += len(record.skipped_images)
                if record.skipped:
                    view.skipped_steps.append(record.step)
            else:
                view.evaluations.add(record, view.times.wall_s)
                view.last_evaluation = record
                view.ranks.add_evaluation(record)
    except FileNotFoundError:
        return  # killed before its first row
    except OSError as error:
        raise UserError(f"{view.path / files.METRICS} cannot be read ({error.strerror}); restore it") from None
    if view.summary:
        view.times.end(view.summary.wall_s)


def read_config(view: RunView) -> None:
    try:
        view.config_text = read_regular(view.path / files.CONFIG, MAX_CONFIG_BYTES).decode(errors="replace")
        view.config = dict(flatten(parse_toml(view.config_text)))
    except (OSError, NotToml):
        view.notes.append(f"{files.CONFIG} cannot be read: settings are left out")
