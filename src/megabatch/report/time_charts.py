"""Where the time of a run goes: on average, and as the run went on.  An area is a time."""

from collections.abc import Mapping, Sequence

from megabatch.report import numbers as figures
from megabatch.report import svg
from megabatch.report.events import RunEvent
from megabatch.report.html import Markup, join, tag
from megabatch.report.learning import WALL_TIME, event_marks, rounded
from megabatch.report.svg import Frame, Key, Scale, along_time, figure, legend, swatch, table
from megabatch.report.view import NUM_BINS, PARTS, Part, RunView, bins_of, shares_of

BAR_PX = 44
FEWEST_BINS = 20
SHOWN_SHARE = 0.005  # of less, the legend says nothing
STEPS_OF_BIN = 4
NAMED_SHARE = 0.09  # of the bar, from which on there is room for a part's figure
PERCENT = Scale(0.0, 1.0, [(tick / 4, f"{25 * tick} %") for tick in range(5)])


def present(seconds: Mapping[str, float]) -> list[Part]:
    return [part for part in PARTS if seconds.get(part.key, 0.0) > 0]


def mean_bar(key: str, title: str, seconds: Mapping[str, float], num_steps: int) -> Markup:
    """One bar that is all of the wall time."""
    shares, boxes, left = shares_of(seconds), [], 0.0
    for part in present(seconds):
        share = shares[part.key]
        boxes.append(
            svg.box(left, 0, share, BAR_PX, f"part-{part.key}", tip_of(part, share, seconds[part.key], num_steps))
        )
        if share >= NAMED_SHARE:
            text = figures.percent(share)
            boxes.append(svg.label(left + share / 2, BAR_PX / 2 + 5, text, style=svg.text_on(f"part-{part.key}")))
        left += share
    told = ", ".join(f"{part.name} {figures.percent(shares[part.key], 1)}" for part in present(seconds))
    return svg.plot(key, title, f"Shares of the wall time: {told}.", BAR_PX, *boxes, style="flush")


def tip_of(part: Part, share: float, part_s: float, num_steps: int) -> str:
    each = f", {figures.milliseconds(part_s / num_steps)} a step" if num_steps else ""
    return f"{part.name}: {figures.percent(share, 1)}, {figures.seconds(part_s)}{each}"


def share_table(seconds: Mapping[str, float], num_steps: int) -> Markup:
    """The legend of both charts, and the numbers behind the bar."""
    shares = shares_of(seconds)
    rows: list[Sequence[str]] = []
    for part in present(seconds):
        name = join((swatch(Key(f"part-{part.key}", "", form="box")), " ", part.name))
        rows.append(
            (
                tag("span", name, class_="named"),
                figures.percent(shares[part.key], 1),
                figures.seconds(seconds[part.key]),
                figures.milliseconds(seconds[part.key] / num_steps) if num_steps else figures.NOTHING,
                part.meaning,
            )
        )
    total_s = sum(seconds.values())
    each = figures.milliseconds(total_s / num_steps) if num_steps else figures.NOTHING
    rows.append((tag("b", "wall time"), tag("b", "100 %"), tag("b", figures.seconds(total_s)), tag("b", each), ""))
    return table(("rank 0", "share", "time", "a step", ""), rows, left=(0, 4), hints=(2, 4))


def summary_bar(view: RunView) -> Markup | None:
    """The bar, with its legend."""
    seconds = view.times.totals()
    if not present(seconds):
        return None
    shares = shares_of(seconds)
    keys = [
        Key(f"part-{part.key}", part.name, figures.percent(shares[part.key]), form="box")
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


def num_bins(view: RunView) -> int:
    """With many evaluations a stretch for each, so that what is drawn is no comb of them; else of a few steps each."""
    num_evaluations = len(view.evaluations)
    if num_evaluations >= FEWEST_BINS:
        return min(NUM_BINS, num_evaluations)
    return min(NUM_BINS, max(FEWEST_BINS, len(view.steps) // STEPS_OF_BIN))


def over_time_chart(view: RunView, events: Sequence[RunEvent]) -> Markup | None:
    """Stacked shares of stretches of equal wall time."""
    bins = bins_of(view.times, num_bins(view))
    parts = [part for part in PARTS if part.key in bins.parts]
    if not parts or view.wall_s <= 0:
        return None
    frame = Frame(along_time(view.wall_s), PERCENT, 240)
    length = len(bins.edges_s) - 1
    totals = [sum(bins.parts[part.key][place] for part in parts) or 1.0 for place in range(length)]
    shares = {part.key: [s / total for s, total in zip(bins.parts[part.key], totals, strict=True)] for part in parts}
    # Each stretch is a step of the drawing: its two edges.
    x = [edge for place in range(length) for edge in bins.edges_s[place : place + 2]]
    low, areas = [0.0] * length, []
    for part in parts:
        high = [below + share for below, share in zip(low, shares[part.key], strict=True)]
        areas.append(svg.area(frame, x, doubled(low), doubled(high), f"part-{part.key}"))
        low = high
    middles = [(begin + end) / 2 for begin, end in zip(bins.edges_s, bins.edges_s[1:], strict=False)]
    drawing = svg.plot(
        "time-over",
        "Where the time goes as the run goes on",
        f"Shares of {length} stretches of {figures.seconds(bins.edges_s[1])} each.",
        frame.height_px + svg.FOOT_PX,
        svg.stretched(frame, areas),
        svg.y_axis(frame),
        svg.x_axis(frame.x, frame.height_px),
        event_marks(frame, events, WALL_TIME),
        data={
            "along": "time",
            "unit": "%",
            "foot": svg.FOOT_PX,
            "low": 0,
            "high": view.wall_s,
            "time": True,
            "series": [
                {
                    "name": part.name,
                    "style": f"part-{part.key}",
                    "x": rounded(middles),
                    "y": [round(100 * share, 1) for share in shares[part.key]],
                }
                for part in reversed(parts)  # as they lie on each other
            ],
        },
    )
    rows = [
        (figures.seconds(middles[place]), *(figures.percent(shares[part.key][place], 1) for part in parts))
        for place in range(0, length, max(1, length // 25))
    ]
    return figure(
        "time-over-figure",
        "As the run went on",
        f"Along x is wall time, so an area is a time. Each stretch is {figures.seconds(bins.edges_s[1])}.",
        drawing,
        keys=[Key(f"part-{part.key}", part.name, form="box") for part in parts],
        numbers=table(("at", *(part.name for part in parts)), rows),
        wide=True,
    )


def doubled(values: Sequence[float]) -> list[float]:
    return [value for value in values for _ in range(2)]
