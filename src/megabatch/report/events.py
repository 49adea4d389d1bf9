"""Starts, resumes and failures of a run, read from its log and placed on its time axis.

The log uses the clock of rank 0's host, and rows use the wall time of training.  The two are aligned at every start: a
line logged n seconds after a start at step s is placed n seconds after the wall time of step s.  Some of these seconds
are start-up, so the position is approximate.  A line that names its step is placed at that step.
"""

import re
from bisect import bisect_left
from collections.abc import Sequence
from datetime import datetime
from typing import Literal, NamedTuple

from megabatch.io import numbers as fmt
from megabatch.report import svg
from megabatch.report.html import Markup, tag
from megabatch.report.svg import Key, along_time, chart, table
from megabatch.report.view import RunView
from megabatch.runs.reader import LogEntry
from megabatch.text import one_line

Kind = Literal["start", "resumed", "fault", "warning", "note", "end"]
LONGEST_TEXT = 300
LANE_PX = 34
MOST_ROWS = 100
ENDS = re.compile(r"(finished|stopped|diverged|failed) after step (\d+)$")
FAULT = re.compile(r"^(rank \d+: |diverged|failed )|Error|Traceback|does not answer|killed|stuck|hangs", re.IGNORECASE)
WARNING = re.compile(r"^(warning|drift|corrupt|unsaved)\b", re.IGNORECASE)
NAMES: dict[Kind, str] = {
    "start": "started",
    "resumed": "resumed",
    "fault": "failure",
    "warning": "warning",
    "note": "note",
    "end": "ended",
}


class RunEvent(NamedTuple):
    kind: Kind
    at: str  # by the clock of rank 0's host
    step: float | None
    wall_s: float | None
    text: str


def events_of(view: RunView) -> list[RunEvent]:
    events: list[RunEvent] = []
    start_at: datetime | None = None
    start_s = 0.0
    for entry in view.log:
        kind, at = kind_of(entry), clock(entry.at)
        if entry.begins_at is not None:
            start_at, start_s = at, wall_at_step(view, entry.begins_at)
        if entry.step is not None and (entry.begins_at is not None or entry.step <= view.num_steps):
            wall_s: float | None = wall_at_step(view, entry.step)
        elif start_at and at:
            wall_s = min(view.wall_s, start_s + max(0.0, (at - start_at).total_seconds()))
        else:
            wall_s = None
        step = entry.step if entry.step is not None else (None if wall_s is None else step_at_wall(view, wall_s))
        events.append(RunEvent(kind, entry.at, step, wall_s, first_and_last_line(entry.text)))
    return events


def kind_of(entry: LogEntry) -> Kind:
    ends = ENDS.search(entry.text)
    if entry.begins_at is not None:
        return "resumed" if entry.begins_at else "start"
    if ends:
        return "fault" if ends[1] in ("diverged", "failed") else "end"
    if FAULT.search(entry.text):
        return "fault"
    return "warning" if WARNING.search(entry.text) else "note"


def first_and_last_line(text: str) -> str:
    """Return the first line and the last one.  The last line of a traceback is the error."""
    first, *rest = text.split("\n")
    both = f"{first} ... {rest[-1].strip()}" if rest and rest[-1].strip() not in first else first
    return one_line(both, LONGEST_TEXT)


def clock(at: str) -> datetime | None:
    try:
        return datetime.strptime(at, "%Y-%m-%d %H:%M:%S")
    except ValueError:
        return None


def wall_at_step(view: RunView, step: int) -> float:
    steps = view.steps.of["step"]
    place = bisect_left(steps, step + 0.5) - 1  # the last row at or before that step
    return view.steps.end_s[place] if place >= 0 else 0.0


def step_at_wall(view: RunView, wall_s: float) -> float:
    if not len(view.steps):
        return 0.0
    place = min(len(view.steps) - 1, bisect_left(view.steps.end_s, wall_s))
    return view.steps.of["step"][place]


def marked(events: list[RunEvent]) -> list[RunEvent]:
    """Return the events that are drawn on time axes."""
    return [event for event in events if event.kind in ("resumed", "fault", "warning") and event.wall_s is not None]


def event_chart(view: RunView, events: Sequence[RunEvent]) -> Markup | None:
    """Draw the events as marks along the wall time, or return None if the run only started and ended."""
    if all(event.kind in ("start", "end") for event in events):
        return None
    scale = along_time(view.wall_s)
    marks = []
    for event in [event for event in events if event.wall_s is not None][:MOST_ROWS]:
        at = scale.share(event.wall_s or 0.0)
        tip = f"{NAMES[event.kind]} at {event.at}, {where(event)}: {event.text}"
        marks.append(
            tag(
                "circle",
                class_=f"mark {style_of(event)}",
                cx=svg.percent(at),
                cy=LANE_PX / 2,
                r=6 if event.kind in ("fault", "resumed") else 4,
                data_tip=tip,
            )
        )
    drawing = svg.plot(
        "events-plot",
        "Events",
        f"{len(events)} log lines over {fmt.duration(view.wall_s)} of training.",
        LANE_PX + svg.FOOT_PX,
        svg.box(0, 0, 1, LANE_PX, "lane"),
        *marks,
        svg.x_axis(scale, LANE_PX),
        style="flush",
    )
    styles = dict.fromkeys(map(style_of, events))
    names = {**NAMES, "note": "start, end or note"}
    rows = [(NAMES[event.kind], event.at, where(event), event.text) for event in events]
    listed = table(("", "at", "step", "log"), rows, left=(0, 1, 2, 3), most=MOST_ROWS, hints=(1,))
    return chart(
        "events-figure",
        "Events",
        "From train.log, over the wall time of training. Steps repeated after a resume are counted once.",
        tag("div", drawing, listed),
        keys=[Key(f"mark {style}", names[style], form="box") for style in styles],
        wide=True,
    )


def style_of(event: RunEvent) -> Kind:
    return "note" if event.kind in ("start", "end") else event.kind


def where(event: RunEvent) -> str:
    return fmt.MISSING if event.step is None else f"step {event.step:,.0f}"
