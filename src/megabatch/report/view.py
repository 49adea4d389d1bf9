"""The data of the report: one run, read in a single pass over its records.

Missing files are left out, since a run may be running or killed.  A damaged row of metrics.jsonl is an error; other
damaged files become notes on the page.
"""

import math
import time
from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import count, pairwise
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
    GpuUse,
    Mistakes,
    NoiseRecord,
    Record,
    StepRecord,
    StepTimes,
    StepTrace,
    Summary,
    TimeBreakdown,
)
from megabatch.runs.settings import Value, flatten, require_run

# The time breakdown of rank 0.
#
# Every row of metrics.jsonl has the parts of the time since the previous row.  The wall time takes precedence: time
# that the parts of a row do not cover is `other`, and parts that exceed the wall time are scaled down.  The parts of a
# run therefore add up to its wall time, as do those of any interval.


class Part(NamedTuple):
    key: str
    name: str
    meaning: str


PARTS = (
    Part("read", "data: read", "waiting for images that were being read"),
    Part("decode", "data: decode", "waiting for images that were being decoded"),
    Part("augment", "data: augment", "waiting for images that were being cropped, resized or flipped"),
    Part("copy", "data: copy", "waiting for images that were being copied to the device"),
    Part("data", "data", "waiting for images; the stage was not recorded"),
    Part("forward", "forward", "forward pass and loss"),
    Part("backward", "backward", "gradients, overlapped with all-reduces"),
    Part("comm", "exposed communication", "waiting for other ranks and the network after backward"),
    Part("update", "update", "optimizer step"),
    Part("evaluation", "evaluation", "evaluation on test images"),
    Part("checkpoint", "checkpoints", "training stalled by checkpoints"),
    Part("other", "other", "records, terminal output, comparison of ranks, unrecorded time"),
)
KEYS = tuple(part.key for part in PARTS)
DATA = ("read", "decode", "augment", "copy", "data")
COMPUTE = ("forward", "backward", "update")
STAGES = ("read", "decode", "augment", "copy")
NUM_BINS = 60
ROUNDING = 1e-12  # relative error of a wall time

Seconds = dict[str, float]  # by part


class TimeColumns:
    """The end of each row and the seconds of its parts."""

    def __init__(self) -> None:
        self.end_s = array("d")
        self.rows = array("d")  # row by row: appending to many columns takes longer

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
        parts_s = math.fsum(parts.values())
        if parts_s > duration_s:
            parts = {key: seconds * duration_s / parts_s for key, seconds in parts.items()}
        elif duration_s - parts_s > ROUNDING * end_s:
            parts["other"] = parts.get("other", 0.0) + duration_s - parts_s
        self.rows.extend([parts.get(key, 0.0) for key in KEYS])
        self.end_s.append(end_s)

    def end(self, wall_s: float) -> None:
        """Add the time after the last row, which only the summary has."""
        if wall_s > self.wall_s:
            self.append({}, wall_s)

    def totals(self) -> Seconds:
        return {key: math.fsum(self.column(key)) for key in KEYS}


def parts_of(times: StepTimes, data_wait: TimeBreakdown) -> Seconds:
    parts = {key: max(0.0, getattr(times, key)) for key in times.__struct_fields__}
    return {**parts, "data": 0.0, **by_stage(parts["data"], data_wait)}


def by_stage(data_s: float, data_wait: TimeBreakdown) -> Seconds:
    """Divide a wait for images in proportion to the time that each stage was busy meanwhile."""
    stages = {stage: max(0.0, getattr(data_wait, stage)) for stage in STAGES}
    total_s = math.fsum(stages.values())
    if total_s <= 0:
        return {"data": data_s}
    return {stage: data_s * stage_s / total_s for stage, stage_s in stages.items()}


def shares_of(totals: Mapping[str, float]) -> Seconds:
    """Return the positive parts as shares of their sum, or {} if the sum is 0."""
    total_s = math.fsum(totals.values())
    return {key: value / total_s for key, value in totals.items() if value > 0} if total_s > 0 else {}


class Bins(NamedTuple):
    """Intervals of equal wall time, and the seconds of each part in each interval."""

    edges_s: list[float]
    parts: dict[str, list[float]]  # only parts that took time


def bins_of(times: TimeColumns, num_bins: int = NUM_BINS) -> Bins:
    """Divide the wall time into `num_bins` intervals.  A row in several intervals is divided among them."""
    wall_s = times.wall_s
    num_bins = max(1, min(num_bins, len(times.end_s)))
    edges = [*(wall_s * place / num_bins for place in range(num_bins)), wall_s]
    columns = {key: column for key in KEYS if any(column := times.column(key))}
    return Bins(edges, {key: spread(times.end_s, column, edges) for key, column in columns.items()})


def spread(end_s: Sequence[float], amounts: Sequence[float], edges: Sequence[float]) -> list[float]:
    """Sum amounts by bin.  Each amount is uniform between the previous end and its own end."""
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


# Stragglers.
#
# An all-reduce makes every rank look equally slow, but the slowest rank waits least.  Between two evaluations, the
# delay caused by a rank is the longest wait of any rank minus its own wait.


class RankDelay(NamedTuple):
    rank: int
    delay_s: float
    wait_s: float
    num_last: int  # intervals between evaluations in which it was the slowest


class RankDelays:
    """Delays of the ranks at the last evaluation.  A resume may change the number of ranks, which starts again."""

    def __init__(self) -> None:
        self.delay_s = array("d")
        self.wait_s = array("d")
        self.num_last: list[int] = []
        self.num_intervals = 0
        self.first_step, self.last_step = 0, 0  # of the intervals
        self.straggler: tuple[int, float] | None = None  # of the newest step: the rank and its delay per step
        self.gpus: list[GpuUse | None] = []  # of the newest evaluation that has them

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
        self.gpus = record.rank_gpus if any(record.rank_gpus) else self.gpus
        waits = record.rank_waits_s
        if len(waits) > 1 and all(map(math.isfinite, waits)):
            if len(waits) != len(self.delay_s):
                self.delay_s, self.wait_s = array("d", bytes(8 * len(waits))), array("d", bytes(8 * len(waits)))
                self.num_last, self.num_intervals = [0] * len(waits), 0
                self.first_step = self.last_step
            most = max(waits)
            for rank, wait_s in enumerate(waits):
                self.delay_s[rank] += most - wait_s
                self.wait_s[rank] += wait_s
            self.num_last[waits.index(min(waits))] += 1
            self.num_intervals += 1
        self.last_step = record.step

    def by_delay(self) -> list[RankDelay]:
        """Return all ranks, the largest delay first."""
        rows = [RankDelay(*row) for row in zip(count(), self.delay_s, self.wait_s, self.num_last, strict=False)]
        return sorted(rows, key=lambda row: -row.delay_s)


def excess_s(delays: RankDelays) -> float:
    """Return how much more the slowest rank delayed the others than the median rank did, which is noise."""
    ordered = delays.by_delay()
    return ordered[0].delay_s - ordered[len(ordered) // 2].delay_s if ordered else 0.0


# Curves, downsampled to as many points as a screen can show.
#
# The steps are divided into spans of equal length.  Each span keeps its smallest and largest value and the first
# that is not finite.  No spike, dip or gap is lost, and the drawing covers the same pixels as the whole curve.  The
# first and the last point are kept too.

MOST_POINTS = 1_000
MOST_MEANS, FEWEST_MEANS, STEPS_OF_MEAN = 160, 20, 8  # of the smoothed line of a noisy curve


class Curve(NamedTuple):
    """Points with ascending x.  A y that is not finite is a gap."""

    x: Sequence[float]
    y: Sequence[float]


def downsample(curve: Curve, most: int = MOST_POINTS) -> Curve:
    """Return at most `most` points, and one more for each span that has a gap."""
    length = len(curve.y)
    if length <= most:
        return curve
    places = {0, length - 1}
    num_spans = max(1, (most - 2) // 2)
    for span in range(num_spans):
        places.update(extremes(curve.y, span * length // num_spans, (span + 1) * length // num_spans))
    ordered = sorted(places)
    return Curve([curve.x[place] for place in ordered], [curve.y[place] for place in ordered])


def extremes(values: Sequence[float], begin: int, end: int) -> list[int]:
    """Return where [begin, end) has its smallest and largest finite value, and its first that is not finite."""
    part = values[begin:end]
    if all(map(math.isfinite, part)):  # the usual case, without a Python loop
        return [begin + part.index(min(part)), begin + part.index(max(part))]
    places = range(begin, end)
    found = [next(place for place in places if not math.isfinite(values[place]))]
    if known := [place for place in places if math.isfinite(values[place])]:
        found += [min(known, key=values.__getitem__), max(known, key=values.__getitem__)]
    return found


def means(curve: Curve, num_spans: int | None = None) -> Curve:
    """Return the mean of each span at its middle step.  A span without a finite value is a gap."""
    length = len(curve.y)
    if num_spans is None:
        num_spans = min(MOST_MEANS, max(FEWEST_MEANS, length // STEPS_OF_MEAN))
    num_spans = min(num_spans, length)
    x, y = [], []
    for span in range(num_spans):
        begin, end = span * length // num_spans, (span + 1) * length // num_spans
        x.append(curve.x[(begin + end - 1) // 2])
        y.append(mean(finite(curve.y[begin:end])))
    return Curve(x, y)


def mean(values: Sequence[float]) -> float:
    """Return the mean; NaN if there are no values, and inf if the sum overflows."""
    try:
        return math.fsum(values) / len(values) if values else math.nan
    except OverflowError:
        return math.inf


def finite_runs(curve: Curve) -> list[Curve]:
    """Return the parts of a curve between its gaps."""
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


STEP_COLUMNS = ("step", "epoch", "loss", "top1", "lr", "loss_scale", "image_size", "images_per_s")
EVALUATION_COLUMNS = (
    *("step", "epoch", "top1", "raw_top1", "top5", "mean_average_precision", "test_loss", "resident_mb", "device_mb"),
)


class Columns:
    """Values of rows by field.  A missing value is NaN."""

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


def epoch_means(steps: Columns, name: str) -> Curve:
    """Return the mean of a column over each epoch, at the epoch's last step.  An epoch without a value is a gap."""
    epochs = [math.ceil(epoch) for epoch in steps.of["epoch"]]
    ends = [place for place, (one, following) in enumerate(pairwise([*epochs, -1]), 1) if one != following]
    spans = pairwise([0, *ends])
    means = [mean(finite(steps.of[name][begin:end])) for begin, end in spans]
    return Curve([steps.of["step"][end - 1] for end in ends], means)


class RunView:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = shown_path(Path(path.resolve().name))
        self.notes: list[str] = []  # about unreadable files
        self.steps = Columns(STEP_COLUMNS)
        self.evaluations = Columns(EVALUATION_COLUMNS)
        self.times = TimeColumns()
        self.ranks = RankDelays()
        self.noise: list[tuple[int, NoiseRecord]] = []  # of measured steps
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

    @property
    def training_top1(self) -> float | None:
        """Mean top-1 of the training steps in the epoch of the last evaluation, as in the summary."""
        last = self.last_evaluation
        if last is None:
            return None
        rows = zip(self.steps.of["step"], self.steps.of["epoch"], self.steps.of["top1"], strict=True)
        epoch = math.ceil(last.epoch)
        found = [top1 for step, at, top1 in rows if step <= last.step and epoch - 1 < at <= epoch]
        return mean(known) if (known := finite(found)) else None

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
        view.notes.append(f"{files.SUMMARY} is damaged and left out")
    read_rows(view)
    read_config(view)
    view.environment, view.log = read_environment(path), read_log(path)
    view.mistakes, view.trace = read_mistakes(path), read_step_trace(path)
    for name, found in ((files.MISTAKES, view.mistakes), (files.STEP_TRACE, view.trace)):
        if found is None and (path / name).exists():
            view.notes.append(f"{name} is damaged and left out")
    if (path / files.PLAN).exists():
        try:
            view.tuning = read_plan(path)
        except UserError:
            view.notes.append(f"{files.PLAN} is damaged and left out")
    if (path / files.MODEL).exists():
        try:
            view.classes = decode_card(read_regular(path / files.MODEL, MAX_JSON_BYTES), files.MODEL).classes
        except (UserError, OSError):
            view.notes.append(f"{files.MODEL} is damaged: classes are shown by number")
    return view


def read_rows(view: RunView) -> None:
    try:
        for record in read_records(view.path):
            view.times.add(record)
            if isinstance(record, StepRecord):
                view.steps.add(record, view.times.wall_s)
                view.last_step = record
                if record.noise:
                    view.noise.append((record.step, record.noise))
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
        raise UserError(
            f"{view.path / files.METRICS} cannot be read ({error.strerror}); check its permissions"
        ) from None
    if view.summary:
        view.times.end(view.summary.wall_s)


def read_config(view: RunView) -> None:
    try:
        view.config_text = read_regular(view.path / files.CONFIG, MAX_CONFIG_BYTES).decode(errors="replace")
        view.config = dict(flatten(parse_toml(view.config_text)))
    except (OSError, NotToml):
        view.notes.append(f"{files.CONFIG} cannot be read; settings are left out")
