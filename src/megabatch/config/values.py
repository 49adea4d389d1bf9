"""What every value of a recipe is, whatever it is of: a finite number, plain text, a list or table of those."""

import math
import os
from collections.abc import Iterator
from datetime import date, time
from typing import Any

from megabatch.config.messages import example, remedy, show_key, show_value
from megabatch.config.schema import FIELDS, Settings
from megabatch.errors import UserError
from megabatch.text import is_plain

PATHS = ("data.source", "data.also", "model.weights", "run.dir")
LONGEST_FILE_NAME = 255  # bytes, of what lies between slashes
LONGEST_TEXT = 4096  # letters: as long as a path may be


def check_values(settings: Settings, prefix: str = "") -> None:
    """Before anything is computed or printed with them."""
    for name, value in settings.items():
        key = prefix + name
        if not is_plain(name):
            raise UserError(
                f"{show_key(key)}: a name of a setting holds control characters or bytes that are no text; "
                "remove them, or the setting"
            )
        for found, leaf in leaves(key, value):
            check_leaf(found, leaf)


def leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What is no table, with its dotted name, and the names of tables in lists; at most `toml.DEEPEST` deep."""
    if isinstance(value, dict):
        check_values(value, f"{key}.")
    elif isinstance(value, list):
        for member in value:
            yield from leaves(key, member)
    else:
        yield key, value


def check_leaf(key: str, value: Any) -> None:
    shown = f"{show_key(key)}={show_value(value)}"
    if isinstance(value, str) and not is_plain(value):
        raise UserError(f"{shown}: expected one line of text without control characters; leave them out")
    if isinstance(value, str) and len(value) > LONGEST_TEXT:
        raise UserError(f"{shown}: {len(value):,} letters are more than {LONGEST_TEXT:,}; shorten it")
    if isinstance(value, str) and key in PATHS and max(map(len, os.fsencode(value).split(b"/"))) > LONGEST_FILE_NAME:
        raise UserError(f"{shown}: the name of a file or folder has at most {LONGEST_FILE_NAME} bytes; give another")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise UserError(f"{shown}: expected a whole number of 64 bits; {remedy(key, value)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{shown}: expected a finite number; {example(show_key(key))}")
    if isinstance(value, date | time) and key not in FIELDS:  # else its type is said
        raise UserError(f"{shown}: expected text, a number, true or false, and not a date; write it in quotes")
