"""The small writer of charts: inline SVG that is as wide as the page lets it be.

Places along x are percentages and heights are pixels, so letters keep their size at any width; curves lie in an inner
drawing of WIDTH x HEIGHT units that is stretched, with lines of constant width.  Colours are classes (report.css), so
that light, dark and print share one drawing.  `plot` puts a title and a description into every chart, makes it
focusable, and keeps beside it the numbers that report.js shows under the pointer.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from megabatch.report.html import Markup, join, json_block, tag
from megabatch.report.scales import Scale
from megabatch.report.thin import Curve, runs_of_numbers

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
