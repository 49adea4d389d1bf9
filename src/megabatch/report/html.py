"""Build HTML with every text escaped.

A `str` is text and is always escaped.  `Markup` is HTML already, and only `tag`, `join`, `raw` and `json_block` create
it.  A class named <script> therefore stays a name everywhere on the page.
"""

import html
import json
from collections.abc import Iterable
from pathlib import Path

from megabatch.text import lines_of

VOID = {"meta", "img", "br", "link"}  # elements without an end tag
Attribute = str | int | float | bool | None


class Markup(str):
    """HTML or SVG that needs no escaping."""

    __slots__ = ()


Child = str | None  # text, or markup, which is a str too


def escape(text: str) -> Markup:
    """Escape a text, and replace invisible characters and those that change the text direction."""
    return text if isinstance(text, Markup) else Markup(html.escape(lines_of(text)))


def join(children: Iterable[Child], between: str = "") -> Markup:
    return Markup(escape(between).join(escape(child) for child in children if child is not None))


def raw(name: str, /, content: str, **attributes: Attribute) -> Markup:
    """Return a style or script element with our own content, unescaped."""
    assert "</" not in content
    return Markup(f"<{name}{attributes_of(attributes)}>{content}</{name}>")


def tag(name: str, /, *children: Child, **attributes: Attribute) -> Markup:
    """Return an element: tag("p", "a < b", class_="note", data_tip="...").  Attributes of None or False are omitted."""
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
    """Return data for the page's script.  It has no `<`, so no text in it can end the element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    safe = text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return Markup(f'<script type="application/json">{safe}</script>')


def shown_path(path: Path) -> str:
    """Return a path as one line of text.  A path may hold bytes that are not valid text."""
    return lines_of(str(path)).replace("\n", "?")
