"""Printing of text from files, archives and command lines, which may contain any characters."""

import os
import sys
import unicodedata
from collections.abc import Sequence

UNLISTED = ("Cc", "Cs", "Zl", "Zp")  # controls, surrogates, line and paragraph separators
LONGEST_SHOWN = 2_000  # characters of a message
CUT = " [...] "
MOST_RANKS = 8  # named in a message


def is_plain(name: str) -> bool:
    """Return whether a name has no control characters, line breaks or undecodable bytes."""
    return not any(unicodedata.category(character) in UNLISTED for character in name)


def expand_home(path: str | os.PathLike[str]) -> str:
    """Return a path with `~` at its start replaced by the home folder. That of an unknown user stays as it is."""
    return os.path.expanduser(os.fspath(path))  # noqa: PTH111  # Path raises for unknown users, and drops a trailing /


def one_line(text: str, longest: int = LONGEST_SHOWN) -> str:
    """Return text that is safe for a terminal, without line breaks and escapes, cut in the middle if it is long."""
    if len(text) > longest:
        half = (longest - len(CUT)) // 2
        text = text[:half] + CUT + text[-half:]
    return "".join(character if character.isprintable() else "?" for character in text)


def listed(names: Sequence[object], most: int, count: int | None = None) -> str:
    """Return "a, b and 3 more": at most `most` names. `count`: of all, if it is more than `names` has."""
    shown = names[:most]
    left = (len(names) if count is None else count) - len(shown)
    return ", ".join(map(str, shown)) + (f" and {left:,} more" if left > 0 else "")


def name_ranks(ranks: Sequence[int], count: int | None = None) -> str:
    """Return "rank 3" or "ranks 3, 5 and 7 more", or only the number of ranks if none of the `count` is known."""
    count = len(ranks) if count is None else count
    noun = "rank" if count == 1 else "ranks"
    return f"{noun} {listed(ranks, MOST_RANKS, count)}" if ranks else f"{count:,} {noun}"


def lines_of(text: str) -> str:
    """Return text of several lines, such as a traceback, without escapes and uncut."""
    return "\n".join(one_line(line, sys.maxsize) for line in text.split("\n"))


def print_line(text: str, to_stderr: bool = False) -> None:
    """Print one line. All output goes through this function, `print_text` or `Terminal`."""
    print(one_line(text), file=sys.stderr if to_stderr else sys.stdout, flush=True)


def print_text(text: str, to_stderr: bool = False) -> None:
    """Print text of several lines without escape sequences."""
    print(lines_of(text), file=sys.stderr if to_stderr else sys.stdout, flush=True)
