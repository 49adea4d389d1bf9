"""The small writer of charts: inline SVG that is as wide as the page lets it be.

Places along x are percentages and heights are pixels, so letters keep their size at any width; curves lie in an inner
drawing of WIDTH x HEIGHT units that is stretched, with lines of constant width.  Colours are classes (report.css), so
that light, dark and print share one drawing.  `plot` puts a title and a description into every chart, makes it
focusable, and keeps beside it the numbers that report.js shows under the pointer.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from megabatch.report import numbers as figures
from megabatch.report.html import Child, Markup, join, json_block, tag
from megabatch.report.view import Curve, finite, runs_of_numbers

# Axes: which part of the numbers a chart shows, and round numbers along it.

CLIP = 4.0  # times what nearly all values stay below: more is a spike, which would flatten the rest
NEARLY_ALL = 0.98
LARGEST = 1e290  # beyond which numbers are taken for it
ALIKE = 1e-9


class Scale(NamedTuple):
    """From `low` to `high`; ticks with their labels."""

    low: float
    high: float
    ticks: Sequence[tuple[float, str]]

    def share(self, value: float) -> float:
        """How far along it a value is, from 0 to 1."""
        return min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))


def nice_step(length: float, most: int) -> float:
    """The least of 1, 2, 2.5 and 5 times a power of ten that divides a length into at most so many parts."""
    raw = length / most
    power = 10.0 ** math.floor(math.log10(raw))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10, 20) if factor * power >= raw * 0.999999)


def scale_of(
    values: Sequence[float],
    *,
    most_ticks: int = 5,
    zero: bool = False,
    clip: bool = False,
    label: Callable[[float], str] = figures.number,
) -> Scale:
    """Over all values that are numbers.  `zero`: from 0 on.  `clip`: without the spikes."""
    known = [min(max(value, -LARGEST), LARGEST) for value in finite(values)] or [0.0, 1.0]
    low, high = min(known), max(known)
    if clip:
        usual = sorted(known)[int(NEARLY_ALL * (len(known) - 1))]
        high = max(low, min(high, CLIP * usual)) if usual > 0 else high
    if zero:
        low, high = min(0.0, low), max(0.0, high)
    largest = max(abs(low), abs(high))
    if high - low <= max(ALIKE * largest, 1 / LARGEST):  # no two ticks would differ
        around = 0.1 * largest if largest > 1 / LARGEST else 0.5
        low, high = low - around if low < 0 else max(0.0, low - around), high + around
    step = nice_step(high - low, most_ticks)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = [place * step for place in range(first, last + 1)]
    return Scale(ticks[0], ticks[-1], [(tick, label(tick)) for tick in ticks])


def along(low: float, high: float, label: Callable[[float], str] = figures.count, most_ticks: int = 5) -> Scale:
    """An x axis: it ends where the data end, and only its ticks are round."""
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        high = low + 1.0
    step = nice_step(high - low, most_ticks)
    if label is figures.count:
        step = max(1.0, step)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return Scale(low, high, [(place * step, label(place * step)) for place in range(first, last + 1)])


TIME_STEPS_S = (
    *(factor * 10.0**power for power in range(-6, 1) for factor in (1, 2, 5)),
    *(10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 10_800, 21_600, 43_200, 86_400, 172_800, 604_800),
)


def along_time(end_s: float, most_ticks: int = 5) -> Scale:
    """Wall time, with ticks at round times."""
    if not math.isfinite(end_s) or end_s <= 0:
        end_s = 1.0
    step = next((s for s in TIME_STEPS_S if end_s / s <= most_ticks), 0.0) or nice_step(end_s, most_ticks)
    return Scale(0.0, end_s, [(place * step, short_time(place * step, step)) for place in range(int(end_s / step) + 1)])


def up_to_time(high_s: float, most_ticks: int = 4) -> Scale:
    """A y axis of times, from 0 to the next tick above."""
    scale = along_time(high_s, most_ticks)
    step = scale.ticks[1][0] if len(scale.ticks) > 1 else high_s or 1.0
    count = max(1, math.ceil(high_s / step - 1e-9))
    return Scale(0.0, count * step, [(place * step, short_time(place * step, step)) for place in range(count + 1)])


def short_time(value_s: float, step_s: float) -> str:
    """0, 30 s, 5 min, 1:30 h, 2 d: no longer than a tick's label may be."""
    if value_s == 0:
        return "0"
    if step_s < 1:
        return (
            f"{figures.number(value_s)} s"
            if value_s >= 1
            else f"{figures.number(1e3 * value_s)} ms"
            if value_s >= 1e-3
            else f"{figures.number(1e6 * value_s)} us"
        )
    if step_s < 60:
        return f"{value_s:,.0f} s"
    if step_s < 3600:
        hours, minutes = divmod(round(value_s / 60), 60)
        return f"{hours}:{minutes:02d} h" if hours else f"{minutes} min"
    if step_s < 86_400:
        return f"{value_s / 3600:,.0f} h"
    return f"{value_s / 86_400:,.0f} d"


def along_powers(values: Sequence[float]) -> Scale:
    """A loss scale: in powers of two, with their exponents as values."""
    known = [value for value in finite(values) if value > 0] or [1.0]
    low, high = math.floor(math.log2(min(known))), math.ceil(math.log2(max(known)))
    if high - low < 2:
        low, high = low - 1, high + 1
    step = max(1, round(nice_step(high - low, 4)))
    ticks = list(range(low - low % step, high + step, step))
    return Scale(ticks[0], ticks[-1], [(tick, f"2^{tick}") for tick in ticks])


WIDTH, HEIGHT = 10_000, 1_000  # of the inner drawing
FOOT_PX = 26  # under a plot, for the labels of its ticks
HEIGHT_PX = 200


class Frame(NamedTuple):
    x: Scale
    y: Scale
    height_px: int = HEIGHT_PX


# What letters on a filled colour are: `mid` is white on light pages and black on dark ones.
DEEP = ("part-read", "part-update")
MID = ("part-backward", "part-comm", "part-evaluation", "bucket-0", "bucket-2")


def text_on(style: str) -> str:
    """The class of letters on a box of this style."""
    if style.endswith("waits"):
        return "strong"
    return "on-deep" if style in DEEP else "on-mid" if style in MID else "on-pale"


def percent(share: float) -> str:
    return f"{100 * share:.2f}".rstrip("0").rstrip(".") + "%"


def at_x(frame: Frame, value: float) -> str:
    return percent(frame.x.share(value))


def at_y(frame: Frame, value: float) -> float:
    return round(frame.height_px * (1 - frame.y.share(value)), 1)


def path_of(frame: Frame, curve: Curve) -> str:
    """Straight lines, with a gap where there is no number.  A lone point is a line of no length, with round ends."""
    return "".join(polyline(frame, part) for part in runs_of_numbers(curve))


def polyline(frame: Frame, curve: Curve) -> str:
    points = [place(frame, x, y) for x, y in zip(curve.x, curve.y, strict=True)]
    (left, top), rest = points[0], points[1:] or [points[0]]
    steps = []
    for x, y in rest:  # relative, which is shorter by half
        steps.append(f"{x - left} {y - top}".replace(" -", "-"))
        left, top = x, y
    return f"M{points[0][0]} {points[0][1]}l{' '.join(steps).replace(' -', '-')}"


def place(frame: Frame, x: float, y: float) -> tuple[int, int]:
    return round(WIDTH * frame.x.share(x)), round(HEIGHT * (1 - frame.y.share(y)))


def line(frame: Frame, curve: Curve, style: str) -> Markup:
    return tag("path", class_=f"line {style}", d=path_of(frame, curve))


def area(frame: Frame, x: Sequence[float], low: Sequence[float], high: Sequence[float], style: str) -> Markup:
    """Between two curves over the same x."""
    corners = [place(frame, *point) for point in zip(x, high, strict=True)]
    corners += [place(frame, *point) for point in zip(reversed(x), reversed(low), strict=True)]
    return tag("path", class_=f"area {style}", d="M" + " ".join(f"{x},{y}" for x, y in corners) + "z")


def stretched(frame: Frame, children: Iterable[Markup]) -> Markup:
    return tag(
        "svg",
        join(children),
        class_="stretched",
        width="100%",
        height=frame.height_px,
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        preserveAspectRatio="none",
    )


def dots(frame: Frame, curve: Curve, style: str) -> Markup:
    parts = runs_of_numbers(curve)
    return join(
        tag("circle", class_=f"dot {style}", cx=at_x(frame, x), cy=at_y(frame, y), r=3)
        for part in parts
        for x, y in zip(part.x, part.y, strict=True)
    )


def box(x: float, y_px: float, width: float, height_px: float, style: str, tip: str | None = None) -> Markup:
    """A rectangle; x and width are shares of the plot's."""
    return tag(
        "rect",
        class_=f"box {style}",
        x=percent(x),
        y=round(y_px, 1),
        width=percent(width),
        height=round(height_px, 1),
        data_tip=tip,
    )


def label(x: float, y_px: float, text: str, anchor: str = "middle", style: str = "") -> Markup:
    return tag("text", text, x=percent(x), y=round(y_px, 1), text_anchor=anchor, class_=style or None)


def vertical(x: float, top_px: float, bottom_px: float, style: str, tip: str | None = None) -> Markup:
    return tag("line", class_=style, x1=percent(x), x2=percent(x), y1=top_px, y2=bottom_px, data_tip=tip)


def horizontal(y_px: float, style: str) -> Markup:
    return tag("line", class_=style, x1="0", x2="100%", y1=y_px, y2=y_px)


def x_axis(scale: Scale, y_px: float) -> Markup:
    return join(
        join((vertical(share, y_px, y_px + 4, "tick"), label(share, y_px + 18, text, anchor_at(share))))
        for share, text in ((scale.share(value), text) for value, text in scale.ticks)
    )


def anchor_at(share: float) -> str:
    """At the ends of an axis a label stays inside."""
    return "start" if share < 0.03 else "end" if share > 0.95 else "middle"


def y_axis(frame: Frame) -> Markup:
    rows = []
    for value, text in frame.y.ticks:
        y_px = at_y(frame, value)
        rows.append(horizontal(y_px, "grid"))
        rows.append(tag("text", text, x=-8, y=y_px + 4, text_anchor="end"))
    return join(rows)


def plot(
    key: str,  # no other chart of the page has it
    title: str,
    description: str,
    height_px: float,
    *children: Markup,
    data: Any = None,  # for report.js: {"x": [...], ...}; None: its marks have tips
    style: str = "",
) -> Markup:
    drawing = tag(
        "svg",
        tag("title", title, id=f"{key}-title"),
        tag("desc", description, id=f"{key}-text"),
        *children,
        width="100%",
        height=height_px,
        role="img",
        aria_labelledby=f"{key}-title",
        aria_describedby=f"{key}-text",
    )
    return tag(
        "div",
        drawing,
        json_block(data) if data is not None else None,
        class_=f"plot {style}".rstrip(),
        tabindex="0",
        role="group",
        aria_label=f"{title}: arrow keys show values",
    )


def histogram(name: str, title: str, about: str, frame: Frame, counts: Sequence[int], tips: Sequence[str]) -> Markup:
    """A bar for each of the counts, side by side along x."""
    width = 1 / len(counts)
    tops = [at_y(frame, number) for number in counts]
    bars = [
        box(place * width + width / 20, top, 0.9 * width, frame.height_px - top, "rank", tip)
        for place, (top, tip) in enumerate(zip(tops, tips, strict=True))
    ]
    return plot(name, title, about, frame.height_px + FOOT_PX, y_axis(frame), *bars, x_axis(frame.x, frame.height_px))


# What every chart of the page has around it: a heading, a legend, and a table of its numbers.

MOST_ROWS = 256
LONG = 24  # rows, from which on a table scrolls


class Key(NamedTuple):
    """An entry of a legend."""

    style: str
    name: str
    value: str = ""
    form: str = "line"  # or box


def legend(keys: Iterable[Key]) -> Markup:
    return tag(
        "ul",
        *(
            tag("li", swatch(key), tag("span", key.name), tag("b", key.value) if key.value else None, class_="key")
            for key in keys
        ),
        class_="legend",
    )


def swatch(key: Key) -> Markup:
    inner = (
        tag("rect", class_=f"box {key.style}", width="12", height="12", rx="2")
        if key.form == "box"
        else tag("line", class_=f"line {key.style}", x1="1", x2="21", y1="6", y2="6")
    )
    width = "12" if key.form == "box" else "22"
    return tag("svg", inner, width=width, height="12", aria_hidden="true", class_="swatch")


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[Child]],
    left: Sequence[int] = (0,),
    most: int = MOST_ROWS,
    hints: Sequence[int] = (),
) -> Markup:
    """The columns `left` are text, the others numbers.  Of a long one, its beginning.  A phone leaves out `hints`."""
    rows = list(rows)

    def cell(place: int, content: Child, kind: str = "td", **attributes: str) -> Markup:
        style = " hint" * (place in hints) if place in left else "number" + " hint" * (place in hints)
        return tag(kind, content, class_=style.strip() or None, **attributes)

    body = [tag("tr", *(cell(place, content) for place, content in enumerate(row))) for row in rows[:most]]
    if len(rows) > most:
        body.append(tag("tr", tag("td", f"and {len(rows) - most:,} more", colspan=len(head), class_="more")))
    names = tag("tr", *(cell(place, name, "th", scope="col") for place, name in enumerate(head)))
    return tag(
        "div",
        tag("table", tag("thead", names) if any(head) else None, tag("tbody", *body)),
        class_="scroll long" if len(rows) > LONG else "scroll",
        tabindex="0",
        role="region",
        aria_label="Table",
    )


def folded(summary: str, *content: Child) -> Markup:
    return tag("details", tag("summary", summary), *content)


def figure(
    key: str,
    title: str,
    about: Child,
    drawing: Markup,
    *,
    keys: Sequence[Key] = (),
    numbers: Markup | None = None,
    note: str = "",
    wide: bool = False,
) -> Markup:
    return tag(
        "figure",
        tag("figcaption", tag("h3", title), tag("p", about) if about else None),
        legend(keys) if keys else None,
        drawing,
        tag("p", note, class_="note") if note else None,
        folded("Numbers", numbers) if numbers is not None else None,
        id=key,
        class_="chart wide" if wide else "chart",
    )


def section(key: str, title: str, *content: Child, about: Child = None) -> Markup | None:
    """None where nothing is in it."""
    present = [child for child in content if child is not None]
    if not present:
        return None
    heading = tag("h2", title, id=f"{key}-heading")
    return tag(
        "section",
        heading,
        tag("p", about, class_="about") if about else None,
        *present,
        id=key,
        aria_labelledby=f"{key}-heading",
    )


def grid(*figures: Markup | None) -> Markup | None:
    present = [chart for chart in figures if chart is not None]
    return tag("div", join(present), class_="grid") if present else None
