"""TOML that a user gives: in a file or as the value of an override.  Bounded before tomllib sees it and after.

tomllib calls itself for every bracket, and keeps a list of every beginning of a dotted key: ten thousand parts of one
take gigabytes.  What comes out of here is at most DEEPEST tables and arrays deep, so that whoever walks it can recurse.
"""

import re
import tomllib
from pathlib import Path
from typing import Any

from megabatch.io.reading import NotText, read_text

Tables = dict[str, Any]

LONGEST_BYTES = 1 << 20  # of a file: a recipe is a page
DEEPEST = 32  # tables and arrays within each other, and parts of a dotted key

# From the beginning of a part, and never back into one: linear in the text.
PART = r"""(?:[A-Za-z0-9_-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')"""
LONG_KEY = re.compile(rf"(?<![A-Za-z0-9_\\-]){PART}(?:[ \t]*+\.[ \t]*+{PART}){{{DEEPEST}}}")


class NotToml(ValueError):
    """What is wrong with it, for "x is not TOML: ..."."""


class TooMuch(NotToml):
    """It may be TOML, but is deeper or longer than anything that is read here."""


def read_toml(path: str | Path) -> Tables:
    """OSError if it cannot be read, NotToml if it is something else."""
    try:
        return parse_toml(read_text(path, LONGEST_BYTES))
    except NotText as error:
        raise NotToml(str(error)) from None


def parse_toml(text: str) -> Tables:
    if len(text) > LONGEST_BYTES:
        raise TooMuch(f"{len(text):,} letters are more than the {LONGEST_BYTES:,} that are read")
    if LONG_KEY.search(text):
        raise TooMuch(f"a dotted key has more than {DEEPEST} parts")
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise NotToml(str(error)) from None
    except ValueError:  # of int(), where a number has thousands of digits
        raise TooMuch("a whole number has too many digits; those of TOML have 64 bits") from None
    except RecursionError:
        raise TooMuch(f"more than {DEEPEST} brackets within each other") from None
    if is_deep(tables):
        raise TooMuch(f"more than {DEEPEST} tables and arrays within each other")
    return tables


def is_deep(value: Any) -> bool:
    """Whether there is more than DEEPEST levels of it; level by level, and not by recursion."""
    level = [value]
    for _ in range(DEEPEST + 1):
        level = [member for outer in level if isinstance(outer, dict | list) for member in members(outer)]
        if not level:
            return False
    return True


def members(outer: dict[str, Any] | list[Any]) -> Any:
    return outer.values() if isinstance(outer, dict) else outer
