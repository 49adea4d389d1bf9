"""Charts of values that change during training: loss, accuracy, learning rate, throughput, loss scale, memory.

The x axis of a single run is its steps.  The page of several runs uses epochs, since their batches may differ.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from megabatch.io import numbers as fmt
from megabatch.report import svg
from megabatch.report.events import RunEvent
from megabatch.report.html import Markup, join
from megabatch.report.svg import Frame, Key, Scale, along, along_powers, along_time, chart, scale_of, table
from megabatch.report.view import Curve, RunView, downsample, epoch_means, finite, means
from megabatch.runs.noise import describe_noise, round_off

TABLE_POINTS = 40
MOST_DOTS = 60  # more would hide the line
MOST_MARKS = 100
FOOT_MARK_PX = 12


class Series(NamedTuple):
    name: str
    style: str
    curve: Curve
    faint: Curve | None = None  # every step, drawn behind the curve
    dotted: bool = False  # draw each point
    value: str = ""  # in the legend


class Along(NamedTuple):
    """The quantity of the x axis."""

    field: str  # a column: step, epoch or end_s
    name: str
    label: Callable[[float], str]


STEPS = Along("step", "step", fmt.count)
EPOCHS = Along("epoch", "epoch", lambda value: fmt.number(value, 4))
WALL_TIME = Along("end_s", "time", fmt.duration)


def x_scale(x: Along, series: Sequence[Series]) -> Scale:
    """Return an x axis that starts at 0, so that the x axes of neighbouring charts match."""
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
    y_label: Callable[[float], str] = fmt.number,
    zero: bool = False,
    clip: bool = False,
    events: Sequence[RunEvent] = (),
    target: tuple[float, str] | None = None,
    y_scale: Scale | None = None,
    foot_marks: Sequence[float] = (),  # x values marked at the bottom
    unit: str = "",
) -> Markup | None:
    """Return a chart of the series that have a finite value, or None if there are none."""
    series = [one for one in series if finite(one.curve.y)]
    if not series:
        return None
    values = [value for one in series for value in (*one.curve.y, *(one.faint.y if one.faint else ()))]
    values += [target[0]] if target else []
    y = y_scale or scale_of(values, zero=zero, clip=clip, label=y_label)
    frame = Frame(x_scale(x, series), y)
    above = [value for value in finite(values) if value > y.high * (1 + 1e-9)]
    gaps = sum(1 for one in series for value in (one.faint or one.curve).y if not math.isfinite(value))
    notes = []
    if above:
        notes.append(f"The axis is clipped; the largest value is {fmt.number(max(above))}.")
    if gaps:
        notes.append("Gaps mark values that are not finite.")
    lines = [svg.line(frame, downsample(one.faint), f"faint {one.style}") for one in series if one.faint]
    lines += [svg.line(frame, downsample(one.curve), one.style) for one in series]
    drawing = svg.plot(
        key,
        title,
        summarise(title, series, x, y_label),
        frame.height_px + svg.FOOT_PX,
        svg.y_axis(frame),
        svg.x_axis(frame.x, frame.height_px),
        event_marks(frame, events, x),
        svg.stretched(frame, lines),
        draw_foot_marks(frame, foot_marks),
        *(svg.dots(frame, one.curve, one.style) for one in series if one.dotted and len(one.curve.y) <= MOST_DOTS),
        *([svg.horizontal(svg.at_y(frame, target[0]), "line target")] if target else []),
        data=svg.hover_data(
            frame.x, x.name, x is WALL_TIME, unit, [(one.name, one.style, downsample(one.curve)) for one in series]
        ),
    )
    keys = [Key(one.style, one.name, one.value) for one in series]
    keys += [Key("target", target[1])] if target else []
    return chart(key, title, about, drawing, keys=keys, numbers=numbers_of(series, x, y_label), note=" ".join(notes))


def event_marks(frame: Frame, events: Sequence[RunEvent], x: Along) -> Markup:
    """Draw vertical lines where the run resumed or failed."""
    marks = []
    for event in events[:MOST_MARKS]:
        where = event.wall_s if x is WALL_TIME else event.step
        if where is not None and x is not EPOCHS:
            marks.append(svg.vertical(frame.x.share(where), 0, frame.height_px, f"event {event.kind}"))
    return join(marks)


def draw_foot_marks(frame: Frame, values: Sequence[float]) -> Markup:
    """Draw short marks at the bottom, one for each position that can be distinguished."""
    shares = dict.fromkeys(round(frame.x.share(value), 3) for value in values)
    return join(svg.vertical(share, frame.height_px - FOOT_MARK_PX, frame.height_px, "skip") for share in shares)


def numbers_of(series: Sequence[Series], x: Along, y_label: Callable[[float], str]) -> Markup:
    rows = []
    for one in series:
        shown = downsample(one.curve, TABLE_POINTS)
        rows += [(one.name, x.label(at), y_label(value)) for at, value in zip(shown.x, shown.y, strict=True)]
    return table(("", x.name, "value"), rows)


def summarise(title: str, series: Sequence[Series], x: Along, y_label: Callable[[float], str]) -> str:
    """Return the text of the chart for screen readers."""
    parts = []
    for one in series:
        known = finite(one.curve.y)
        parts.append(
            f"{one.name}: from {y_label(known[0])} to {y_label(known[-1])}, "
            f"between {y_label(min(known))} and {y_label(max(known))}"
        )
    return f"{title} by {x.name}. " + "; ".join(parts) + "."


SMOOTHED = 200  # a curve of at least this many steps is drawn as means over faint values


def smooth(name: str, style: str, curve: Curve, value: str = "") -> Series:
    """Return a series of means over faint values if the curve has many steps."""
    if len(curve.y) < SMOOTHED:
        return Series(name, style, curve, value=value)
    return Series(name, style, means(curve), faint=curve, value=value)


def loss_chart(view: RunView, events: Sequence[RunEvent]) -> Markup | None:
    losses, tests = view.steps.curve("loss"), view.evaluations.curve("test_loss")
    series = [smooth("training", "series-0", losses), Series("test", "series-1", tests, dotted=True)]
    about = "Mean cross-entropy of the global batch and of the test images."
    if len(losses.y) >= SMOOTHED:
        about += " Solid: mean; faint: each step."
    return line_chart("loss", "Loss", about, series, clip=True, events=events)


def accuracy_chart(view: RunView, events: Sequence[RunEvent]) -> Markup | None:
    last = view.last_evaluation
    target = view.setting("train.target_top1")
    is_target = isinstance(target, float) and 0 < target <= 1

    def series(name: str, column: str, style: str) -> Series:
        value = fmt.accuracy(getattr(last, column) if last else None)
        return Series(name, style, in_percent(view.evaluations.curve(column)), dotted=True, value=value)

    about = "Share of test images whose class is the first prediction (top-1) or among the first five (top-5)."
    shown = [series("top-1", "top1", "series-0"), series("top-5", "top5", "series-1")]
    if finite(view.evaluations.of["raw_top1"]):
        about += " They are those of the averaged weights; raw is top-1 of the weights themselves."
        shown.append(series("raw top-1", "raw_top1", "series-2"))
    if finite(view.evaluations.of["mean_average_precision"]):
        about += " mAP is the mean over classes of the average precision."
        shown.append(series("mAP", "mean_average_precision", "series-3"))
    training = epoch_means(view.steps, "top1")
    if finite(training.y):
        about += " Training: top-1 of the augmented training images, the mean of each epoch."
        value = fmt.accuracy(view.training_top1)
        shown.append(Series("training, augmented", "series-3", in_percent(training), dotted=True, value=value))
    return line_chart(
        "accuracy",
        "Accuracy",
        about,
        shown,
        y_label=percent_label,
        events=events,
        target=(100 * target, f"target {fmt.percent(target, 1)}") if is_target else None,
        unit="%",
    )


def in_percent(curve: Curve) -> Curve:
    return Curve(curve.x, [100 * value for value in curve.y])


def percent_label(value: float) -> str:
    return f"{fmt.number(value, 4)} %"


def learning_rate_chart(view: RunView, events: Sequence[RunEvent]) -> Markup | None:
    curve = view.steps.curve("lr")
    return line_chart("lr", "Learning rate", "", [Series("learning rate", "series-0", curve)], zero=True, events=events)


def throughput_chart(view: RunView, events: Sequence[RunEvent]) -> Markup | None:
    """Draw the images per second of steps, without evaluations and checkpoints."""
    curve = view.steps.curve("images_per_s")
    mean_text = ""
    if view.summary and view.summary.images_per_s:
        mean_text = f"{fmt.count(view.summary.images_per_s)} on average"
    return line_chart(
        "throughput",
        "Throughput",
        "Images per second over all ranks, during training steps.",
        [smooth("images/s", "series-0", curve, mean_text)],
        y_label=fmt.count,
        zero=True,
        clip=True,
        events=events,
    )


def loss_scale_chart(view: RunView, events: Sequence[RunEvent]) -> Markup | None:
    """Draw the loss scale.  Without fp16 it is always 1, and there is no chart."""
    scales = view.steps.of["loss_scale"]
    if all(scale == 1 for scale in scales) and not view.skipped_steps:
        return None
    curve = Curve(view.steps.of["step"], [math.log2(scale) if scale > 0 else math.nan for scale in scales])
    skipped = fmt.plural(len(view.skipped_steps), "step")
    return line_chart(
        "loss-scale",
        "Loss scale",
        f"{skipped} skipped because gradients overflowed: red marks at the bottom." if view.skipped_steps else "",
        [Series("loss scale", "series-0", curve, value=fmt.count(scales[-1]))],
        y_label=lambda exponent: fmt.number(2.0**exponent) if abs(exponent) < 1000 else fmt.MISSING,
        y_scale=along_powers(scales),
        events=events,
        foot_marks=view.skipped_steps,
        unit="2^",
    )


def noise_chart(view: RunView, events: Sequence[RunEvent]) -> Markup | None:
    """Draw the gradient noise scale with its interval."""
    steps = [step for step, _ in view.noise]

    def series(name: str, field: str, style: str) -> Series:
        values = [getattr(noise, field) for _, noise in view.noise]
        known = [value for value in values if value is not None]
        curve = Curve(steps, [math.nan if value is None else value for value in values])
        return Series(name, style, curve, value=round_off(known[-1]) if known else "")

    return line_chart(
        "noise",
        "Gradient noise scale",
        f"The batch that needs twice the epochs of a small one: {describe_noise(view.noise[-1][1])}."
        if view.noise
        else "",
        [
            series("noise scale", "scale", "series-0"),
            series("at least", "low", "series-1"),
            series("at most", "high", "series-2"),
        ],
        y_label=fmt.count,
        zero=True,
        clip=True,
        events=events,
        unit="images",
    )


def memory_chart(view: RunView, events: Sequence[RunEvent]) -> Markup | None:
    resident, device = view.evaluations.curve("resident_mb"), view.evaluations.curve("device_mb")
    return line_chart(
        "memory",
        "Memory",
        "Memory of rank 0's process and peak memory of its accelerator, at each evaluation.",
        [
            Series("process", "series-0", resident, dotted=True, value=last_of(resident)),
            Series("accelerator", "series-1", device, dotted=True, value=last_of(device)),
        ],
        y_label=fmt.megabytes,
        zero=True,
        events=events,
        unit="MB",
    )


def last_of(curve: Curve) -> str:
    known = finite(curve.y)
    return fmt.megabytes(known[-1]) if known else ""
