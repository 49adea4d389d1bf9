"""One run as the page sees it, from one pass over its records.

Whatever is missing is left out, since a run may be running or killed; what is damaged in metrics.jsonl is one
line for the user.
"""

import math
import time
from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from megabatch.errors import UserError
from megabatch.io.reading import read_regular
from megabatch.io.toml import NotToml, parse_toml
from megabatch.planning.tuning import Tuning
from megabatch.report.html import shown_path
from megabatch.runs import files
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
from megabatch.runs.records import (
    EvaluationRecord,
    Mistakes,
    Record,
    StepRecord,
    StepTimes,
    StepTrace,
    Summary,
    TimeBreakdown,
)
from megabatch.runs.settings import Value, flatten, require_run

# Where the time of a run goes, by what rank 0 spent it on.
#
# Every row of metrics.jsonl says how the time since the row before was spent.  The wall time is the authority: what
# the parts of a row leave of it is `other`, and parts that claim more than there was are scaled down.  So the parts
# of a run add up to its wall time, and so do those of any stretch of it.


class Part(NamedTuple):
    key: str
    name: str
    meaning: str


PARTS = (
    Part("read", "data: read", "waited for images that were being read"),
    Part("decode", "data: decode", "waited for images that were being decoded"),
    Part("augment", "data: augment", "waited for images that were being cropped, resized or flipped"),
    Part("copy", "data: copy", "waited for images on their way to the device"),
    Part("data", "data", "waited for images; at which stage was not recorded"),
    Part("forward", "forward", "computed the loss"),
    Part("backward", "backward", "computed gradients, with all-reduces running beside it"),
    Part("comm", "exposed communication", "waited for other ranks and the network after the own backward"),
    Part("update", "update", "optimizer step"),
    Part("evaluation", "evaluation", "tested the model"),
    Part("checkpoint", "checkpoints", "training was held by a checkpoint"),
    Part("other", "other", "records, the screen, comparing ranks, and what was not recorded"),
)
KEYS = tuple(part.key for part in PARTS)
DATA = ("read", "decode", "augment", "copy", "data")
COMPUTE = ("forward", "backward", "update")
STAGES = ("read", "decode", "augment", "copy")
NUM_BINS = 60
ROUNDING = 1e-12  # of a wall time

Seconds = dict[str, float]  # by the key of a part


class TimeColumns:
    """When each row ended, and the seconds of its parts."""

    def __init__(self) -> None:
        self.end_s = array("d")
        self.rows = array("d")  # the parts of one row after another: to append to many columns takes longer

    @property
    def wall_s(self) -> float:
        return self.end_s[-1] if self.end_s else 0.0

    def column(self, key: str) -> Sequence[float]:
        return self.rows[KEYS.index(key) :: len(KEYS)]

    def add(self, record: Record) -> None:
        data_wait = record.data_wait if isinstance(record, StepRecord) else TimeBreakdown()
        self.append(parts_of(record.times, data_wait), max(self.wall_s, record.wall_s))

    def append(self, parts: Seconds, end_s: float) -> None:
        duration_s = end_s - self.wall_s
        told_s = math.fsum(parts.values())
        if told_s > duration_s:
            parts = {key: seconds * duration_s / told_s for key, seconds in parts.items()}
        elif duration_s - told_s > ROUNDING * end_s:
            parts["other"] = parts.get("other", 0.0) + duration_s - told_s
        self.rows.extend([parts.get(key, 0.0) for key in KEYS])
        self.end_s.append(end_s)

    def end(self, wall_s: float) -> None:
        """The summary knows of time after the last row."""
        if wall_s > self.wall_s:
            self.append({}, wall_s)

    def totals(self) -> Seconds:
        return {key: math.fsum(self.column(key)) for key in KEYS}


def parts_of(times: StepTimes, data_wait: TimeBreakdown) -> Seconds:
    parts = {key: max(0.0, getattr(times, key)) for key in times.__struct_fields__}
    return {**parts, "data": 0.0, **by_stage(parts["data"], data_wait)}


def by_stage(data_s: float, data_wait: TimeBreakdown) -> Seconds:
    """A wait for images, shared out as the stages were busy meanwhile."""
    stages = {stage: max(0.0, getattr(data_wait, stage)) for stage in STAGES}
    total_s = math.fsum(stages.values())
    if total_s <= 0:
        return {"data": data_s}
    return {stage: data_s * stage_s / total_s for stage, stage_s in stages.items()}


def shares_of(totals: Mapping[str, float]) -> Seconds:
    """Of 1.  Of nothing, nothing."""
    total_s = math.fsum(totals.values())
    return {key: value / total_s for key, value in totals.items() if value > 0} if total_s > 0 else {}


class Bins(NamedTuple):
    """Stretches of equal wall time, and the seconds of each part in each."""

    edges_s: list[float]
    parts: dict[str, list[float]]  # only those that took any time


def bins_of(times: TimeColumns, num_bins: int = NUM_BINS) -> Bins:
    """A row that lies in several stretches is shared out among them."""
    wall_s = times.wall_s
    num_bins = max(1, min(num_bins, len(times.end_s)))
    edges = [*(wall_s * place / num_bins for place in range(num_bins)), wall_s]
    binned = {}
    for key in KEYS:
        column = times.column(key)
        if any(column):
            binned[key] = spread(times.end_s, column, edges)
    return Bins(edges, binned)


def spread(end_s: Sequence[float], amounts: Sequence[float], edges: Sequence[float]) -> list[float]:
    """Amounts that are each even over (the end before, their end], cut at the edges."""
    bins = [0.0] * (len(edges) - 1)
    begin, last = 0.0, len(bins) - 1
    for end, amount in zip(end_s, amounts, strict=True):
        if amount:
            first = min(last, max(0, bisect_right(edges, begin) - 1))
            if end <= edges[first + 1] or first == last:
                bins[first] += amount
            else:
                place = first
                while place <= last and edges[place] < end:
                    inside = min(end, edges[place + 1]) - max(begin, edges[place])
                    bins[place] += amount * inside / (end - begin)
                    place += 1
        begin = end
    return bins


# Which ranks the others waited for, and how long.
#
# An all-reduce makes every rank look equally slow.  But who comes last waits least: between two evaluations, a rank
# has delayed the others by the wait of the rank that waited most, less its own.


class RankDelay(NamedTuple):
    rank: int
    delay_s: float
    wait_s: float
    num_last: int  # stretches between evaluations in which it was the last


class RankDelays:
    """Of the ranks that the run had when it was last evaluated: their number may change where it resumes."""

    def __init__(self) -> None:
        self.delay_s = array("d")
        self.wait_s = array("d")
        self.num_last: list[int] = []
        self.num_stretches = 0
        self.first_step, self.last_step = 0, 0  # that they cover
        self.straggler: tuple[int, float] | None = None  # of the newest step: the rank, and its delay a step

    @property
    def num_ranks(self) -> int:
        return len(self.delay_s)

    @property
    def num_steps(self) -> int:
        return self.last_step - self.first_step

    def add_step(self, record: StepRecord) -> None:
        if record.straggler_delay_s:
            self.straggler = (record.straggler, record.straggler_delay_s)

    def add_evaluation(self, record: EvaluationRecord) -> None:
        waits = record.rank_waits_s
        if len(waits) > 1 and all(map(math.isfinite, waits)):
            if len(waits) != len(self.delay_s):
                self.delay_s, self.wait_s = array("d", bytes(8 * len(waits))), array("d", bytes(8 * len(waits)))
                self.num_last, self.num_stretches = [0] * len(waits), 0
                self.first_step = self.last_step
            most = max(waits)
            for rank, wait_s in enumerate(waits):
                self.delay_s[rank] += most - wait_s
                self.wait_s[rank] += wait_s
            self.num_last[waits.index(min(waits))] += 1
            self.num_stretches += 1
        self.last_step = record.step

    def by_delay(self) -> list[RankDelay]:
        """The one that was waited for most first."""
        rows = [RankDelay(*row) for row in zip(count(), self.delay_s, self.wait_s, self.num_last, strict=False)]
        return sorted(rows, key=lambda row: -row.delay_s)


def excess_s(delays: RankDelays) -> float:
    """By how much the first delayed the others more than the median rank did: what is its own, and not the noise."""
    ordered = delays.by_delay()
    return ordered[0].delay_s - ordered[len(ordered) // 2].delay_s if ordered else 0.0


# Curves of a long run, with as many points as a screen can show.
#
# The run's steps are cut into spans of equal length.  Of each span stay its least and its greatest value, and the
# first that is no number: no spike, no dip and no gap is lost, and what is drawn covers the same pixels as the whole
# curve. The first and the last point stay too.

MOST_POINTS = 1_000
MOST_MEANS, FEWEST_MEANS, STEPS_OF_MEAN = 160, 20, 8  # of the line through a noisy curve


class Curve(NamedTuple):
    """Points, x ascending.  A y that is not finite is a gap."""

    x: Sequence[float]
    y: Sequence[float]


def thin(curve: Curve, most: int = MOST_POINTS) -> Curve:
    """At most so many points, and one more for each span that has a gap."""
    length = len(curve.y)
    if length <= most:
        return curve
    kept = {0, length - 1}
    num_spans = max(1, (most - 2) // 2)
    for span in range(num_spans):
        kept.update(extremes(curve.y, span * length // num_spans, (span + 1) * length // num_spans))
    return at(curve, sorted(kept))


def extremes(values: Sequence[float], begin: int, end: int) -> list[int]:
    """Where in [begin, end) the least and the greatest value are, and the first that is no number."""
    part = values[begin:end]
    if not all(map(math.isfinite, part)):
        places = range(begin, end)
        gap = next(place for place in places if not math.isfinite(values[place]))
        finite = [place for place in places if math.isfinite(values[place])]
        if not finite:
            return [gap]
        return [gap, min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)]
    return [begin + part.index(min(part)), begin + part.index(max(part))]


def at(curve: Curve, places: Sequence[int]) -> Curve:
    return Curve([curve.x[place] for place in places], [curve.y[place] for place in places])


def means(curve: Curve, num_spans: int | None = None) -> Curve:
    """The mean of each span, at its middle step; a span without a number is a gap."""
    length = len(curve.y)
    if num_spans is None:
        num_spans = min(MOST_MEANS, max(FEWEST_MEANS, length // STEPS_OF_MEAN))
    num_spans = min(num_spans, length)
    x, y = [], []
    for span in range(num_spans):
        begin, end = span * length // num_spans, (span + 1) * length // num_spans
        found = [value for value in curve.y[begin:end] if math.isfinite(value)]
        x.append(curve.x[(begin + end - 1) // 2])
        y.append(mean(found))
    return Curve(x, y)


def mean(values: Sequence[float]) -> float:
    """NaN of nothing, and inf where the sum is beyond all numbers."""
    try:
        return math.fsum(values) / len(values) if values else math.nan
    except OverflowError:
        return math.inf


def runs_of_numbers(curve: Curve) -> list[Curve]:
    """The parts of a curve between its gaps."""
    parts: list[Curve] = []
    x: list[float] = []
    y: list[float] = []
    for place, value in zip(curve.x, curve.y, strict=True):
        if math.isfinite(value) and math.isfinite(place):
            x.append(place)
            y.append(value)
        elif x:
            parts.append(Curve(x, y))
            x, y = [], []
    return [*parts, Curve(x, y)] if x else parts


def finite(values: Sequence[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


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
