"""Read TOML from users: files and `section.key=value` overrides, with limits before and after tomllib parses them.

tomllib recurses at every bracket and stores every prefix of a dotted key: a key of ten thousand parts takes gigabytes.
The result is at most DEEPEST tables and arrays deep, so callers can recurse into it.
"""

import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from megabatch.errors import LONGEST_QUOTED, UserError
from megabatch.io.reading import NotText, read_text
from megabatch.text import is_plain, one_line

Tables = dict[str, Any]

LONGEST_BYTES = 1 << 20  # of a file; a recipe takes a few KB
DEEPEST = 32  # tables and arrays within each other, and parts of a dotted key

# Matches from the start of a part and never backtracks into one: linear in the length of the text.
PART = r"""(?:[A-Za-z0-9_-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')"""
LONG_KEY = re.compile(rf"(?<![A-Za-z0-9_\\-]){PART}(?:[ \t]*+\.[ \t]*+{PART}){{{DEEPEST}}}")


class NotToml(ValueError):
    """Error for a text that is not TOML; the message is the reason in "x is not TOML: reason"."""


class TooMuch(NotToml):
    """Error for a text that exceeds a limit of depth or length."""


def read_toml(path: str | Path) -> Tables:
    """Read a file; raise OSError if it cannot be read and NotToml if it is not TOML."""
    try:
        return parse_toml(read_text(path, LONGEST_BYTES))
    except NotText as error:
        raise NotToml(str(error)) from None


def parse_toml(text: str) -> Tables:
    if len(text) > LONGEST_BYTES:
        raise TooMuch(f"{len(text):,} characters; the limit is {LONGEST_BYTES:,}")
    if LONG_KEY.search(text):
        raise TooMuch(f"a dotted key has more than {DEEPEST} parts")
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise NotToml(str(error)) from None
    except ValueError:  # raised by int() for thousands of digits
        raise TooMuch("an integer has too many digits for 64 bits") from None
    except RecursionError:
        raise TooMuch(f"brackets are nested more than {DEEPEST} deep") from None
    if is_deep(tables):
        raise TooMuch(f"tables and arrays are nested more than {DEEPEST} deep")
    return tables


def is_deep(value: Any) -> bool:
    """Return whether a value is nested more than DEEPEST deep; iterates by level, because recursion could overflow."""
    level = [value]
    for _ in range(DEEPEST + 1):
        level = [member for outer in level if isinstance(outer, dict | list) for member in members(outer)]
        if not level:
            return False
    return True


def members(outer: dict[str, Any] | list[Any]) -> Any:
    return outer.values() if isinstance(outer, dict) else outer


class Override(NamedTuple):
    """One `section.key=value`."""

    text: str
    key: str
    value: Any


def parse_override(text: str, is_string: Callable[[str], bool], example: str) -> Override:
    """Parse the value as TOML; a value that is not TOML is a string.

    Args:
        text: `section.key=value`.
        is_string: whether the setting of this key takes a string, so that `run.dir=2026` is not a number.
        example: an override that the error message shows.
    """
    key, equals, value_text = text.partition("=")
    shown = f"{one_line(key, LONGEST_QUOTED)}={one_line(repr(value_text), LONGEST_QUOTED)}"
    if not equals:
        quoted = one_line(repr(text), LONGEST_QUOTED)
        raise UserError(f"{quoted} is not an override; expected section.key=value, for example {example}")
    if not is_plain(text):
        raise UserError(f"{shown}: control characters and line breaks are not allowed; remove them")
    try:
        return Override(text, key, parse_value(value_text, is_string(key)))
    except TooMuch as error:
        raise UserError(f"{shown}: {error}; shorten it") from None


def parse_value(text: str, is_string: bool = False) -> Any:
    try:
        value = parse_toml(f"value = {text}")["value"]
    except NotToml as error:
        if isinstance(error, TooMuch) and not is_string:
            raise
        return text
    return text if is_string and not isinstance(value, str) else value


def set_dotted(tables: Tables, key: str, value: Any) -> str | None:
    """Set the value at a dotted key, adding tables on the way.

    Returns:
        None, or the first part of the key that is not a table; then nothing is set.
    """
    *sections, name = key.split(".")
    for section in sections:
        tables = tables.setdefault(section, {})
        if not isinstance(tables, dict):
            return section
    tables[name] = value
    return None
