"""What every chart of the page has around it: a heading, a legend, and a table of its numbers."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from megabatch.report.html import Child, Markup, join, tag

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
