"""Charts of the time breakdown of a run: on average, and over wall time."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter

from megabatch.io import numbers as fmt
from megabatch.planning.sizes import BASE
from megabatch.report import svg
from megabatch.report.events import RunEvent
from megabatch.report.html import Markup, join, tag
from megabatch.report.learning import WALL_TIME, event_marks
from megabatch.report.svg import SHARES, Frame, Key, along_time, chart, legend, swatch, table
from megabatch.report.view import NUM_BINS, PARTS, Curve, Part, RunView, bins_of, finite, mean, shares_of

BAR_PX = 44
FEWEST_BINS = 20
SHOWN_SHARE = 0.005  # smaller shares are not in the legend
STEPS_OF_BIN = 4
NAMED_SHARE = 0.09  # a part of at least this share of the bar has room for its percentage


def present(seconds: Mapping[str, float]) -> list[Part]:
    return [part for part in PARTS if seconds.get(part.key, 0.0) > 0]


def mean_bar(key: str, title: str, seconds: Mapping[str, float], num_steps: int) -> Markup:
    """Draw one bar that represents the whole wall time."""
    shares, boxes, left = shares_of(seconds), [], 0.0
    for part in present(seconds):
        share = shares[part.key]
        boxes.append(
            svg.box(left, 0, share, BAR_PX, f"part-{part.key}", tip_of(part, share, seconds[part.key], num_steps))
        )
        if share >= NAMED_SHARE:
            text = fmt.percent(share)
            boxes.append(svg.label(left + share / 2, BAR_PX / 2 + 5, text, style=svg.text_on(f"part-{part.key}")))
        left += share
    listed = ", ".join(f"{part.name} {fmt.percent(shares[part.key], 1)}" for part in present(seconds))
    return svg.plot(key, title, f"Shares of the wall time: {listed}.", BAR_PX, *boxes, style="flush")


def tip_of(part: Part, share: float, part_s: float, num_steps: int) -> str:
    each = f", {fmt.milliseconds(part_s / num_steps)} per step" if num_steps else ""
    return f"{part.name}: {fmt.percent(share, 1)}, {fmt.duration(part_s)}{each}"


def share_table(seconds: Mapping[str, float], num_steps: int) -> Markup:
    """Return a table that is the legend of both charts and holds the values of the bar."""
    shares = shares_of(seconds)
    rows: list[Sequence[str]] = []
    for part in present(seconds):
        name = join((swatch(Key(f"part-{part.key}", "", form="box")), " ", part.name))
        rows.append(
            (
                tag("span", name, class_="named"),
                fmt.percent(shares[part.key], 1),
                fmt.duration(seconds[part.key]),
                fmt.milliseconds(seconds[part.key] / num_steps) if num_steps else fmt.MISSING,
                part.meaning,
            )
        )
    total_s = sum(seconds.values())
    each = fmt.milliseconds(total_s / num_steps) if num_steps else fmt.MISSING
    rows.append((tag("b", "wall time"), tag("b", "100 %"), tag("b", fmt.duration(total_s)), tag("b", each), ""))
    return table(("rank 0", "share", "time", "per step", ""), rows, left=(0, 4), hints=(2, 4))


def summary_bar(view: RunView) -> Markup | None:
    """Return the bar with its legend."""
    seconds = view.times.totals()
    if not present(seconds):
        return None
    shares = shares_of(seconds)
    keys = [
        Key(f"part-{part.key}", part.name, fmt.percent(shares[part.key]), form="box")
        for part in present(seconds)
        if shares[part.key] >= SHOWN_SHARE
    ]
    bar = mean_bar("time-bar", "Where the time goes", seconds, view.num_steps)
    return tag("figure", bar, legend(keys), class_="summary", id="time-mean")


def mean_table(view: RunView) -> Markup | None:
    seconds = view.times.totals()
    if not present(seconds):
        return None
    return tag("div", tag("h3", "On average"), share_table(seconds, view.num_steps), class_="block")


def sizes_table(view: RunView) -> Markup | None:
    """Return the steps, speed and memory of each size of the training images, if there are several."""
    steps, sides = view.steps.of["step"], view.steps.of["image_size"]
    stages = [(side, [place for place, _ in found]) for side, found in groupby(enumerate(sides), itemgetter(1))]
    if len(stages) < 2:
        return None
    rows = []
    for side, places in stages:
        first, last = steps[places[0]], steps[places[-1]]
        speed = mean([1 / rate for place in places if (rate := view.steps.of["images_per_s"][place]) > 0])
        epochs = view.steps.of["epoch"][places[-1]] - (view.steps.of["epoch"][places[0] - 1] if places[0] else 0.0)
        rows.append(
            (
                fmt.count(side),
                f"{fmt.count(first)} to {fmt.count(last)}",
                fmt.number(epochs, 3),
                fmt.number(epochs * (side / BASE) ** 2, 3),
                fmt.count(1 / speed) if speed > 0 else fmt.MISSING,
                memory_until(view, first, last),
            )
        )
    heads = ("side", "steps", "epochs", f"epochs of {BASE} pixels", "images/s", "memory")
    about = tag("p", "Training images grow during the run. Memory is the peak of the accelerator, or of the process.")
    return tag("div", tag("h3", "Image sizes"), about, table(heads, rows), class_="block")


def memory_until(view: RunView, first: float, last: float) -> str:
    """Return the memory at the last evaluation in these steps."""
    found = fmt.MISSING
    columns = view.evaluations.of
    for step, device_mb, resident_mb in zip(columns["step"], columns["device_mb"], columns["resident_mb"], strict=True):
        known = finite([device_mb, resident_mb])
        if first <= step <= last and known:
            found = fmt.megabytes(known[0])
    return found


def num_bins(view: RunView) -> int:
    """Return the number of intervals.

    With many evaluations there is one interval for each, since shorter ones would alternate between training and
    evaluation.  Otherwise an interval has a few steps.
    """
    num_evaluations = len(view.evaluations)
    if num_evaluations >= FEWEST_BINS:
        return min(NUM_BINS, num_evaluations)
    return min(NUM_BINS, max(FEWEST_BINS, len(view.steps) // STEPS_OF_BIN))


def over_time_chart(view: RunView, events: Sequence[RunEvent]) -> Markup | None:
    """Draw stacked shares of intervals of equal wall time."""
    bins = bins_of(view.times, num_bins(view))
    parts = [part for part in PARTS if part.key in bins.parts]
    if not parts or view.wall_s <= 0:
        return None
    frame = Frame(along_time(view.wall_s), SHARES, 240)
    length = len(bins.edges_s) - 1
    totals = [sum(bins.parts[part.key][place] for part in parts) or 1.0 for place in range(length)]
    shares = {part.key: [s / total for s, total in zip(bins.parts[part.key], totals, strict=True)] for part in parts}
    # Each interval has two points, at its edges.
    x = [edge for place in range(length) for edge in bins.edges_s[place : place + 2]]
    low, areas = [0.0] * length, []
    for part in parts:
        high = [below + share for below, share in zip(low, shares[part.key], strict=True)]
        areas.append(svg.area(frame, x, doubled(low), doubled(high), f"part-{part.key}"))
        low = high
    middles = [(begin + end) / 2 for begin, end in zip(bins.edges_s, bins.edges_s[1:], strict=False)]
    each = fmt.duration(bins.edges_s[1])
    curves = [
        (part.name, f"part-{part.key}", Curve(middles, [round(100 * share, 1) for share in shares[part.key]]))
        for part in reversed(parts)  # top to bottom, as drawn
    ]
    drawing = svg.plot(
        "time-over",
        "Where the time goes over the run",
        f"Shares of {length} intervals of {each} each.",
        frame.height_px + svg.FOOT_PX,
        svg.stretched(frame, areas),
        svg.y_axis(frame),
        svg.x_axis(frame.x, frame.height_px),
        event_marks(frame, events, WALL_TIME),
        data=svg.hover_data(frame.x, "time", True, "%", curves),
    )
    rows = [
        (fmt.duration(middles[place]), *(fmt.percent(shares[part.key][place], 1) for part in parts))
        for place in range(0, length, max(1, length // 25))
    ]
    return chart(
        "time-over-figure",
        "Over the run",
        f"The x axis is wall time, so areas are proportional to time. Each interval is {each}.",
        drawing,
        keys=[Key(f"part-{part.key}", part.name, form="box") for part in parts],
        numbers=table(("at", *(part.name for part in parts)), rows),
        wide=True,
    )


def doubled(values: Sequence[float]) -> list[float]:
    return [value for value in values for _ in range(2)]
