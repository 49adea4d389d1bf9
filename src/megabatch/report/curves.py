"""Charts of what changes as a run trains: loss, accuracy, learning rate, throughput, loss scale, memory.

One run has its steps along x.  Several have epochs, since their batches may differ, a colour and a line style each.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from megabatch.report import figures, svg
from megabatch.report.events import RunEvent
from megabatch.report.figure import Key, figure, table
from megabatch.report.html import Markup, join
from megabatch.report.scales import LARGEST, Scale, along, along_time, scale_of
from megabatch.report.svg import Frame
from megabatch.report.thin import Curve, finite, thin

TABLE_POINTS = 40
MOST_DOTS = 60  # of evaluations: more would hide the line
MOST_MARKS = 100
FOOT_MARK_PX = 12


class Series(NamedTuple):
    name: str
    style: str
    curve: Curve  # what is drawn and shown under the pointer
    faint: Curve | None = None  # every step, behind it
    dotted: bool = False  # its points are few, and shown
    value: str = ""  # in the legend


class Along(NamedTuple):
    """What lies along x."""

    field: str  # of the columns: step, epoch or end_s
    name: str
    label: Callable[[float], str]


STEPS = Along("step", "step", figures.count)
EPOCHS = Along("epoch", "epoch", lambda value: figures.number(value, 4))
WALL_TIME = Along("end_s", "time", figures.seconds)


def x_scale(x: Along, series: Sequence[Series]) -> Scale:
    """From 0 on, so that neighbouring charts have the same x at the same place."""
    ends = [max(known) for known in (finite((one.faint or one.curve).x) for one in series) if known]
    high = max(ends, default=1.0)
    return along_time(high) if x is WALL_TIME else along(0.0, high, x.label)


def line_chart(
    key: str,
    title: str,
    about: str,
    series: Sequence[Series],
    *,
    x: Along = STEPS,
    y_label: Callable[[float], str] = figures.number,
    zero: bool = False,
    clip: bool = False,
    events: Sequence[RunEvent] = (),
    target: tuple[float, str] | None = None,
    y_scale: Scale | None = None,
    ticks: Sequence[float] = (),  # places along x that are marked at the foot
    unit: str = "",
    note: str = "",
) -> Markup | None:
    """None where no series has a number."""
    series = [one for one in series if finite(one.curve.y)]
    if not series:
        return None
    values = [value for one in series for value in (*one.curve.y, *(one.faint.y if one.faint else ()))]
    values += [target[0]] if target else []
    y = y_scale or scale_of(values, zero=zero, clip=clip, label=y_label)
    frame = Frame(x_scale(x, series), y)
    above = [value for value in finite(values) if value > y.high * (1 + 1e-9)]
    gaps = sum(1 for one in series for value in (one.faint or one.curve).y if not math.isfinite(value))
    notes = [note] if note else []
    if above:
        notes.append(f"The axis is cut: values go up to {figures.number(max(above))}.")
    if gaps:
        notes.append("Gaps: the value was not a number there.")
    lines = [svg.line(frame, thin(one.faint), f"faint {one.style}") for one in series if one.faint]
    lines += [svg.line(frame, thin(one.curve), one.style) for one in series]
    drawing = svg.plot(
        key,
        title,
        describe(title, series, x, y_label),
        frame.height_px + svg.FOOT_PX,
        svg.y_axis(frame),
        svg.x_axis(frame.x, frame.height_px),
        event_marks(frame, events, x),
        svg.stretched(frame, lines),
        foot_marks(frame, ticks),
        *(svg.dots(frame, one.curve, one.style) for one in series if one.dotted and len(one.curve.y) <= MOST_DOTS),
        target_line(frame, *target) if target else join(()),
        data=data_of(frame, series, x, unit),
    )
    keys = [Key(one.style, one.name, one.value) for one in series]
    keys += [Key("target", target[1])] if target else []
    return figure(key, title, about, drawing, keys=keys, numbers=numbers_of(series, x, y_label), note=" ".join(notes))


def target_line(frame: Frame, value: float, name: str) -> Markup:
    return svg.horizontal(svg.at_y(frame, value), "line target")


def event_marks(frame: Frame, events: Sequence[RunEvent], x: Along) -> Markup:
    """Vertical lines where the run resumed or something failed."""
    marks = []
    for event in events[:MOST_MARKS]:
        where = event.wall_s if x is WALL_TIME else event.step
        if where is not None and x is not EPOCHS:
            marks.append(svg.vertical(frame.x.share(where), 0, frame.height_px, f"event {event.kind}"))
    return join(marks)


def foot_marks(frame: Frame, places: Sequence[float]) -> Markup:
    """As many as can be told apart."""
    shares = dict.fromkeys(round(frame.x.share(place), 3) for place in places)
    return join(svg.vertical(share, frame.height_px - FOOT_MARK_PX, frame.height_px, "skip") for share in shares)


def data_of(frame: Frame, series: Sequence[Series], x: Along, unit: str) -> dict[str, object]:
    """For report.js: for each series its places along x, from 0 to 1, its values, and how to write them."""
    return {
        "along": x.name,
        "unit": unit,
        "foot": svg.FOOT_PX,
        "low": frame.x.low,
        "high": frame.x.high,
        "time": x is WALL_TIME,
        "series": [
            {"name": one.name, "style": one.style, "x": rounded(shown.x), "y": rounded(shown.y)}
            for one, shown in ((one, thin(one.curve)) for one in series)
        ],
    }


def rounded(values: Sequence[float]) -> list[float | None]:
    """Five digits are more than a screen can show; JSON has no NaN."""
    return [whole(float(f"{value:.5g}")) if abs(value) < LARGEST else None for value in values]


def whole(value: float) -> float:
    return int(value) if value.is_integer() and abs(value) < 1e15 else value


def numbers_of(series: Sequence[Series], x: Along, y_label: Callable[[float], str]) -> Markup:
    rows = []
    for one in series:
        shown = thin(one.curve, TABLE_POINTS)
        rows += [(one.name, x.label(at), y_label(value)) for at, value in zip(shown.x, shown.y, strict=True)]
    return table(("", x.name, "value"), rows)


def describe(title: str, series: Sequence[Series], x: Along, y_label: Callable[[float], str]) -> str:
    """What a reader who cannot see the chart is told."""
    told = []
    for one in series:
        known = finite(one.curve.y)
        told.append(
            f"{one.name}: from {y_label(known[0])} to {y_label(known[-1])}, "
            f"between {y_label(min(known))} and {y_label(max(known))}"
        )
    return f"{title} by {x.name}. " + "; ".join(told) + "."
