"""The charts of one run as it trains, from its columns."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from megabatch.report import numbers as figures
from megabatch.report import svg
from megabatch.report.events import RunEvent
from megabatch.report.html import Markup, join
from megabatch.report.svg import LARGEST, Frame, Key, Scale, along, along_powers, along_time, figure, scale_of, table
from megabatch.report.view import Curve, RunView, finite, means, thin

# Charts of what changes as a run trains: loss, accuracy, learning rate, throughput, loss scale, memory.
#
# One run has its steps along x.  Several have epochs, since their batches may differ, a colour and a line style each.

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


SMOOTHED = 200  # steps, from which on a mean is drawn over the noise


def smooth(name: str, style: str, curve: Curve, value: str = "") -> Series:
    """A mean, with every step behind it, where there are many."""
    if len(curve.y) < SMOOTHED:
        return Series(name, style, curve, value=value)
    return Series(name, style, means(curve), faint=curve, value=value)


def loss_chart(view: RunView, events: Sequence[RunEvent]) -> Markup | None:
    losses, tests = view.steps.curve("loss"), view.evaluations.curve("test_loss")
    series = [smooth("training", "series-0", losses), Series("test", "series-1", tests, dotted=True)]
    about = "Mean cross-entropy of the global batch, and of the test images."
    if len(losses.y) >= SMOOTHED:
        about += " Strong: mean; faint: every step."
    return line_chart("loss", "Loss", about, series, clip=True, events=events)


def accuracy_chart(view: RunView, events: Sequence[RunEvent]) -> Markup | None:
    last = view.last_evaluation
    target = view.setting("train.target_top1")
    is_target = isinstance(target, float) and 0 < target <= 1
    return line_chart(
        "accuracy",
        "Accuracy",
        "Test images whose class is the first guess, or among the first five.",
        [
            Series(
                "top-1",
                "series-0",
                in_percent(view.evaluations.curve("top1")),
                dotted=True,
                value=figures.accuracy(last.top1 if last else None),
            ),
            Series(
                "top-5",
                "series-1",
                in_percent(view.evaluations.curve("top5")),
                dotted=True,
                value=figures.accuracy(last.top5 if last else None),
            ),
        ],
        y_label=percent_label,
        events=events,
        target=(100 * target, f"target {figures.percent(target, 1)}") if is_target else None,
        unit="%",
    )


def in_percent(curve: Curve) -> Curve:
    return Curve(curve.x, [100 * value for value in curve.y])


def percent_label(value: float) -> str:
    return f"{figures.number(value, 4)} %"


def learning_rate_chart(view: RunView, events: Sequence[RunEvent]) -> Markup | None:
    curve = view.steps.curve("lr")
    return line_chart("lr", "Learning rate", "", [Series("learning rate", "series-0", curve)], zero=True, events=events)


def throughput_chart(view: RunView, events: Sequence[RunEvent]) -> Markup | None:
    """Of steps; evaluations and checkpoints are not in it."""
    curve = view.steps.curve("images_per_s")
    mean_text = ""
    if view.summary and view.summary.images_per_s:
        mean_text = f"{figures.count(view.summary.images_per_s)} on average"
    return line_chart(
        "throughput",
        "Throughput",
        "Images a second, over all ranks, while training.",
        [smooth("images/s", "series-0", curve, mean_text)],
        y_label=figures.count,
        zero=True,
        clip=True,
        events=events,
    )


def loss_scale_chart(view: RunView, events: Sequence[RunEvent]) -> Markup | None:
    """Where there is one: without fp16 it is 1 throughout."""
    scales = view.steps.of["loss_scale"]
    if all(scale == 1 for scale in scales) and not view.skipped_steps:
        return None
    curve = Curve(view.steps.of["step"], [math.log2(scale) if scale > 0 else math.nan for scale in scales])
    skipped = figures.plural(len(view.skipped_steps), "step")
    return line_chart(
        "loss-scale",
        "Loss scale",
        f"{skipped} skipped, since gradients overflowed: the red marks at the foot." if view.skipped_steps else "",
        [Series("loss scale", "series-0", curve, value=figures.count(scales[-1]))],
        y_label=lambda exponent: figures.number(2.0**exponent) if abs(exponent) < 1000 else figures.NOTHING,
        y_scale=along_powers(scales),
        events=events,
        ticks=view.skipped_steps,
        unit="2^",
    )


def memory_chart(view: RunView, events: Sequence[RunEvent]) -> Markup | None:
    resident, device = view.evaluations.curve("resident_mb"), view.evaluations.curve("device_mb")
    return line_chart(
        "memory",
        "Memory",
        "Of rank 0's process, and the most that it has taken of its accelerator, at evaluations.",
        [
            Series("process", "series-0", resident, dotted=True, value=last_of(resident)),
            Series("accelerator", "series-1", device, dotted=True, value=last_of(device)),
        ],
        y_label=lambda value: figures.megabytes(value),
        zero=True,
        events=events,
        unit="MB",
    )


def last_of(curve: Curve) -> str:
    known = finite(curve.y)
    return figures.megabytes(known[-1]) if known else ""
