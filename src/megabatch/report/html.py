"""The one place where text becomes HTML.

A `str` is text and is escaped wherever it is put; what is markup already has the type `Markup`, and only `tag`, `join`
and `raw` make it.  So a class that is called <script> stays a class, wherever its name ends up.
"""

import html
import json
from collections.abc import Iterable
from pathlib import Path

from megabatch.text import lines_of

VOID = {"meta", "img", "br", "link"}  # elements without an end
Attribute = str | int | float | bool | None


class Markup(str):
    """HTML or SVG that needs no escaping."""

    __slots__ = ()


Child = str | None  # text, or markup, which is a str too


def escape(text: str) -> Markup:
    """Also without letters that cannot be seen, or that turn the direction of what follows."""
    return text if isinstance(text, Markup) else Markup(html.escape(lines_of(text)))


def join(children: Iterable[Child], between: str = "") -> Markup:
    return Markup(escape(between).join(escape(child) for child in children if child is not None))


def raw(name: str, /, content: str, **attributes: Attribute) -> Markup:
    """An element whose content is our own, and no HTML: a style or a script."""
    assert "</" not in content
    return Markup(f"<{name}{attributes_of(attributes)}>{content}</{name}>")


def tag(name: str, /, *children: Child, **attributes: Attribute) -> Markup:
    """tag("p", "a < b", class_="note", data_tip="...").  None and False leave an attribute out."""
    opened = f"<{name}{attributes_of(attributes)}>"
    return Markup(opened) if name in VOID else Markup(f"{opened}{join(children)}</{name}>")


def attributes_of(attributes: dict[str, Attribute]) -> str:
    return "".join(
        f' {key.rstrip("_").replace("_", "-")}="{attribute(value)}"'
        for key, value in attributes.items()
        if value is not None and value is not False
    )


def attribute(value: Attribute) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return "" if value is True else escape(str(value))


def json_block(value: object) -> Markup:
    """Data for the page's script.  `<` never stands in it, so nothing in it ends the element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    safe = text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return Markup(f'<script type="application/json">{safe}</script>')


def shown_path(path: Path) -> str:
    """A path may hold bytes that are no text."""
    return lines_of(str(path)).replace("\n", "?")
