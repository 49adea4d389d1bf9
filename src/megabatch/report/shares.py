"""Where the time of a run goes, by what rank 0 spent it on.

Every row of metrics.jsonl says how the time since the row before was spent.  The wall time is the authority: what the
parts of a row leave of it is `other`, and parts that claim more than there was are scaled down.  So the parts of a run
add up to its wall time, and so do those of any stretch of it.
"""

import math
from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megabatch.runs.records import Record, StepRecord, StepTimes
from megabatch.runs.time_breakdown import TimeBreakdown


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
