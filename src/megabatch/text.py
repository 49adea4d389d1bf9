"""Text from files, archives and command lines, which may hold anything, where it is printed or listed."""

import sys
import unicodedata

UNLISTED = ("Cc", "Cs", "Zl", "Zp")  # controls, what is no text, line and paragraph separators
LONGEST_SHOWN = 2_000  # letters of a message
CUT = " [...] "


def is_plain(name: str) -> bool:
    """Whether it can stand in a list of one name a line: no controls, no bytes that are no text."""
    return not any(unicodedata.category(letter) in UNLISTED for letter in name)


def one_line(text: str, longest: int = LONGEST_SHOWN) -> str:
    """What a terminal can be given: no line breaks, escapes or bytes that are no text; cut in its middle if long."""
    if len(text) > longest:
        kept = (longest - len(CUT)) // 2
        text = text[:kept] + CUT + text[-kept:]
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def lines_of(text: str) -> str:
    """The same for what has several lines, such as a traceback: none is cut."""
    return "\n".join(one_line(line, sys.maxsize) for line in text.split("\n"))


def print_line(text: str, to_stderr: bool = False) -> None:
    """The one place, beside `terminal`, from which something is printed: whatever is in it, it is one line."""
    print(one_line(text), file=sys.stderr if to_stderr else sys.stdout, flush=True)


def print_text(text: str, to_stderr: bool = False) -> None:
    """As it stands, but for what a terminal would take for a command."""
    print(lines_of(text), file=sys.stderr if to_stderr else sys.stdout, flush=True)
