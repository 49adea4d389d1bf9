"""What a user sees when something is wrong: the value, the rule, the remedy, on one line."""

from collections.abc import Iterable
from difflib import get_close_matches

from megabatch.text import one_line

LONGEST_QUOTED = 120  # letters of a wrong value, so that the rule and the remedy after it are read


class UserError(ValueError):
    """Something only the user can fix. Its text is the one line the user sees, whatever was quoted in it."""

    def __init__(self, text: str = "") -> None:
        super().__init__(one_line(text))


class Diverged(UserError):
    """Training has left the numbers: a loss or gradients are inf or NaN, though the images are not."""


class NotSaved(UserError):
    """Training has come to its end, and what it was for could not be written."""


class NotRepeated(RuntimeError):
    """What was computed is wrong, and is not when it is computed again: a fault that a restart cures."""


class RanksDiffer(RuntimeError):
    """Ranks have drifted apart: weights that are the same on all of them by construction are not."""


def nearest(value: str, choices: Iterable[str]) -> str:
    """The choice that looks most like `value`."""
    return get_close_matches(value[:LONGEST_QUOTED], list(choices), n=1, cutoff=0.0)[0]


def require_one_of(key: str, value: str, choices: Iterable[str]) -> None:
    choices = list(choices)
    if value not in choices:
        shown = one_line(repr(value), LONGEST_QUOTED)
        raise UserError(f"{key}={shown} is not one of {', '.join(choices)}; nearest: {key}={nearest(value, choices)}")
