"""Error types. Messages state the value, the rule and the remedy on one line."""

import re
from collections.abc import Iterable
from difflib import get_close_matches

from megabatch.text import one_line

LONGEST_QUOTED = 120  # characters of an invalid value, so that the rule and the remedy stay visible


class UserError(ValueError):
    """An error that only the user can fix. Its message is printed as one line, without a traceback."""

    def __init__(self, text: str = "") -> None:
        super().__init__(one_line(text))


class Diverged(UserError):
    """The loss or gradients are inf or NaN, although the images are finite."""


class NotSaved(UserError):
    """Training finished, but its result could not be written."""


class NotRepeated(RuntimeError):
    """A wrong result that is correct when computed again: a transient fault, which a restart fixes."""


class RanksDiffer(RuntimeError):
    """Weights differ between ranks, although they are identical by construction."""


def nearest(value: str, choices: Iterable[str]) -> str:
    """Return the choice that is most similar to `value`."""
    return get_close_matches(value[:LONGEST_QUOTED], list(choices), n=1, cutoff=0.0)[0]


def require_one_of(key: str, value: str, choices: Iterable[str]) -> None:
    choices = list(choices)
    if value not in choices:
        shown = one_line(repr(value), LONGEST_QUOTED)
        raise UserError(f"{key}={shown} is not one of {', '.join(choices)}; nearest: {key}={nearest(value, choices)}")


TYPES = {
    "int": "an integer",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "object": "a table",
    "array": "a list",
}


def plain_rule(message: str) -> str:
    """Turn msgspec's "Expected `float | null` <= 1.0, got `str`" into "expected a number <= 1, got text"."""

    def words(found: re.Match[str]) -> str:
        return " or ".join(TYPES.get(name, name) for name in found[1].split(" | ") if name != "null")

    rule = re.sub(r"(\d)\.0\b", r"\1", re.sub(r"`([^`]*)`", words, message))
    return rule[:1].lower() + rule[1:]
