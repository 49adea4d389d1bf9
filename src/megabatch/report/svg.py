"""Inline SVG charts: scales, marks, and the heading, legend and table around each chart.

x positions are percentages and heights are pixels, so text keeps its size at any page width.  Curves are drawn in an
inner SVG of WIDTH x HEIGHT units that is stretched, with lines of constant width.  Colours are CSS classes
(report.css), so light, dark and print share one drawing.  `plot` gives every chart a title and a description, makes it
focusable, and embeds the values that report.js shows under the pointer.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from megabatch.io import numbers as fmt
from megabatch.report.html import Child, Markup, join, json_block, tag
from megabatch.report.view import Curve, finite, finite_runs

CLIP = 4.0  # an axis ends at this multiple of the CLIP_QUANTILE value: a spike would flatten the other values
CLIP_QUANTILE = 0.98
LARGEST = 1e290  # values are clamped to this magnitude, so that their differences stay finite
MIN_RELATIVE_RANGE = 1e-9


class Scale(NamedTuple):
    """An axis from `low` to `high`, with ticks and their labels."""

    low: float
    high: float
    ticks: Sequence[tuple[float, str]]

    def share(self, value: float) -> float:
        """Return the position of a value on the axis, from 0 to 1."""
        return min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))


def nice_step(length: float, most: int) -> float:
    """Return the smallest of 1, 2, 2.5 and 5 times a power of ten that divides `length` into at most `most` parts."""
    raw = length / most
    power = 10.0 ** math.floor(math.log10(raw))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10, 20) if factor * power >= raw * 0.999999)


def scale_of(
    values: Sequence[float],
    *,
    most_ticks: int = 5,
    zero: bool = False,
    clip: bool = False,
    label: Callable[[float], str] = fmt.number,
) -> Scale:
    """Return a scale for all finite values.  `zero` includes 0; `clip` cuts off spikes."""
    known = [min(max(value, -LARGEST), LARGEST) for value in finite(values)] or [0.0, 1.0]
    low, high = min(known), max(known)
    if clip:
        usual = sorted(known)[int(CLIP_QUANTILE * (len(known) - 1))]
        high = max(low, min(high, CLIP * usual)) if usual > 0 else high
    if zero:
        low, high = min(0.0, low), max(0.0, high)
    largest = max(abs(low), abs(high))
    if high - low <= max(MIN_RELATIVE_RANGE * largest, 1 / LARGEST):  # no two ticks would differ
        around = 0.1 * largest if largest > 1 / LARGEST else 0.5
        low, high = low - around if low < 0 else max(0.0, low - around), high + around
    step = nice_step(high - low, most_ticks)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = [place * step for place in range(first, last + 1)]
    return Scale(ticks[0], ticks[-1], [(tick, label(tick)) for tick in ticks])


def along(low: float, high: float, label: Callable[[float], str] = fmt.count, most_ticks: int = 5) -> Scale:
    """Return an x axis that ends where the data end.  Only its ticks are round numbers."""
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        high = low + 1.0
    step = nice_step(high - low, most_ticks)
    if label is fmt.count:
        step = max(1.0, step)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return Scale(low, high, [(place * step, label(place * step)) for place in range(first, last + 1)])


TIME_STEPS_S = (
    *(factor * 10.0**power for power in range(-6, 1) for factor in (1, 2, 5)),
    *(10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 10_800, 21_600, 43_200, 86_400, 172_800, 604_800),
)


def along_time(end_s: float, most_ticks: int = 5) -> Scale:
    """Return an x axis of wall time with ticks at round times."""
    if not math.isfinite(end_s) or end_s <= 0:
        end_s = 1.0
    step = next((s for s in TIME_STEPS_S if end_s / s <= most_ticks), 0.0) or nice_step(end_s, most_ticks)
    return Scale(0.0, end_s, [(place * step, short_time(place * step, step)) for place in range(int(end_s / step) + 1)])


def up_to_time(high_s: float, most_ticks: int = 4) -> Scale:
    """Return a y axis of times, from 0 to the first tick at or above `high_s`."""
    scale = along_time(high_s, most_ticks)
    step = scale.ticks[1][0] if len(scale.ticks) > 1 else high_s or 1.0
    count = max(1, math.ceil(high_s / step - 1e-9))
    return Scale(0.0, count * step, [(place * step, short_time(place * step, step)) for place in range(count + 1)])


def short_time(value_s: float, step_s: float) -> str:
    """Return a tick label such as 0, 30 s, 5 min, 1:30 h or 2 d."""
    if value_s == 0:
        return "0"
    if step_s < 1:
        unit_s, unit = (1.0, "s") if value_s >= 1 else (1e-3, "ms") if value_s >= 1e-3 else (1e-6, "us")
        return f"{fmt.number(value_s / unit_s)} {unit}"
    if step_s < 60:
        return f"{value_s:,.0f} s"
    if step_s < 3600:
        hours, minutes = divmod(round(value_s / 60), 60)
        return f"{hours}:{minutes:02d} h" if hours else f"{minutes} min"
    if step_s < 86_400:
        return f"{value_s / 3600:,.0f} h"
    return f"{value_s / 86_400:,.0f} d"


def along_powers(values: Sequence[float]) -> Scale:
    """Return a y axis for loss scales: the axis values are exponents of two."""
    known = [value for value in finite(values) if value > 0] or [1.0]
    low, high = math.floor(math.log2(min(known))), math.ceil(math.log2(max(known)))
    if high - low < 2:
        low, high = low - 1, high + 1
    step = max(1, round(nice_step(high - low, 4)))
    ticks = list(range(low - low % step, high + step, step))
    return Scale(ticks[0], ticks[-1], [(tick, f"2^{tick}") for tick in ticks])


WIDTH, HEIGHT = 10_000, 1_000  # of the inner SVG
FOOT_PX = 26  # below a plot, for tick labels
HEIGHT_PX = 200
SHARES = Scale(0.0, 1.0, [(tick / 4, f"{25 * tick} %") for tick in range(5)])


class Frame(NamedTuple):
    x: Scale
    y: Scale
    height_px: int = HEIGHT_PX


# Text on a filled box: on `mid` colours it is white on light pages and black on dark ones.
DEEP = ("part-read", "part-update")
MID = ("part-backward", "part-comm", "part-evaluation", "bucket-0", "bucket-2")


def text_on(style: str) -> str:
    """Return the CSS class of text on a box of this style."""
    if style.endswith("waits"):
        return "strong"
    return "on-deep" if style in DEEP else "on-mid" if style in MID else "on-pale"


def percent(share: float) -> str:
    return f"{100 * share:.2f}".rstrip("0").rstrip(".") + "%"


def at_y(frame: Frame, value: float) -> float:
    return round(frame.height_px * (1 - frame.y.share(value)), 1)


def path_of(frame: Frame, curve: Curve) -> str:
    """Return straight segments with gaps at values that are not finite.  A single point is a segment of length 0."""
    return "".join(polyline(frame, part) for part in finite_runs(curve))


def polyline(frame: Frame, curve: Curve) -> str:
    points = [place(frame, x, y) for x, y in zip(curve.x, curve.y, strict=True)]
    (left, top), rest = points[0], points[1:] or [points[0]]
    steps = []
    for x, y in rest:  # relative coordinates take half the bytes
        steps.append(f"{x - left} {y - top}".replace(" -", "-"))
        left, top = x, y
    return f"M{points[0][0]} {points[0][1]}l{' '.join(steps).replace(' -', '-')}"


def place(frame: Frame, x: float, y: float) -> tuple[int, int]:
    return round(WIDTH * frame.x.share(x)), round(HEIGHT * (1 - frame.y.share(y)))


def line(frame: Frame, curve: Curve, style: str) -> Markup:
    return tag("path", class_=f"line {style}", d=path_of(frame, curve))


def area(frame: Frame, x: Sequence[float], low: Sequence[float], high: Sequence[float], style: str) -> Markup:
    """Return the area between two curves over the same x."""
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
    return join(
        tag("circle", class_=f"dot {style}", cx=percent(frame.x.share(x)), cy=at_y(frame, y), r=3)
        for part in finite_runs(curve)
        for x, y in zip(part.x, part.y, strict=True)
    )


def box(x: float, y_px: float, width: float, height_px: float, style: str, tip: str | None = None) -> Markup:
    """Return a rectangle; `x` and `width` are shares of the plot's width."""
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


def vertical(x: float, top_px: float, bottom_px: float, style: str) -> Markup:
    return tag("line", class_=style, x1=percent(x), x2=percent(x), y1=top_px, y2=bottom_px)


def horizontal(y_px: float, style: str) -> Markup:
    return tag("line", class_=style, x1="0", x2="100%", y1=y_px, y2=y_px)


def x_axis(scale: Scale, y_px: float) -> Markup:
    return join(
        join((vertical(share, y_px, y_px + 4, "tick"), label(share, y_px + 18, text, anchor_at(share))))
        for share, text in ((scale.share(value), text) for value, text in scale.ticks)
    )


def anchor_at(share: float) -> str:
    """Return the anchor that keeps a label inside the plot at the ends of an axis."""
    return "start" if share < 0.03 else "end" if share > 0.95 else "middle"


def y_axis(frame: Frame) -> Markup:
    rows = []
    for value, text in frame.y.ticks:
        y_px = at_y(frame, value)
        rows.append(horizontal(y_px, "grid"))
        rows.append(tag("text", text, x=-8, y=y_px + 4, text_anchor="end"))
    return join(rows)


def plot(
    key: str,  # unique on the page
    title: str,
    description: str,
    height_px: float,
    *children: Markup,
    data: Any = None,  # `hover_data` for report.js; None: the marks have tips
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


def hover_data(x: Scale, x_name: str, is_time: bool, unit: str, series: Iterable[tuple[str, str, Curve]]) -> object:
    """Return the values that report.js shows under the pointer: each series has a name, a style and a curve."""
    return {
        "along": x_name,
        "unit": unit,
        "foot": FOOT_PX,
        "low": x.low,
        "high": x.high,
        "time": is_time,
        "series": [
            {"name": name, "style": style, "x": rounded(curve.x), "y": rounded(curve.y)}
            for name, style, curve in series
        ],
    }


def rounded(values: Sequence[float]) -> list[float | None]:
    """Round to five digits, more than a screen can show.  JSON has no NaN, so None stands for it."""
    return [whole(float(f"{value:.5g}")) if abs(value) < LARGEST else None for value in values]


def whole(value: float) -> float:
    return int(value) if value.is_integer() and abs(value) < 1e15 else value


MOST_ROWS = 256
LONG = 24  # a table with more rows scrolls


class Key(NamedTuple):
    """A legend entry."""

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
    """Return a table of at most `most` rows.

    Columns in `left` are left-aligned text, the others numbers.  Columns in `hints` are hidden on a phone.
    """
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


def chart(
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
    """Return a section, or None if it has no content."""
    present = [child for child in content if child is not None]
    if not present:
        return None
    return tag(
        "section",
        tag("h2", title, id=f"{key}-heading"),
        tag("p", about, class_="about") if about else None,
        *present,
        id=key,
        aria_labelledby=f"{key}-heading",
    )


def histogram_chart(
    key: str,
    title: str,
    about: str,
    frame: Frame,
    counts: Sequence[int],
    bins: Sequence[str],  # the range of each bin in words
    head: tuple[str, str],  # of the table: the quantity, and the counted thing
) -> Markup:
    """Return a chart with one bar per bin."""
    width = 1 / len(counts)
    tops = [at_y(frame, number) for number in counts]
    boxes = [
        box(
            place * width + width / 20,
            top,
            0.9 * width,
            frame.height_px - top,
            "rank",
            f"{head[1]}: {number:,}; {span}",
        )
        for place, (top, number, span) in enumerate(zip(tops, counts, bins, strict=True))
    ]
    height_px = frame.height_px + FOOT_PX
    drawing = plot(f"{key}-plot", title, about, height_px, y_axis(frame), *boxes, x_axis(frame.x, frame.height_px))
    rows = [(span, f"{number:,}") for span, number in zip(bins, counts, strict=True)]
    return chart(key, title, about, drawing, numbers=table(head, rows))


def grid(*charts: Markup | None) -> Markup | None:
    present = [one for one in charts if one is not None]
    return tag("div", join(present), class_="grid") if present else None
