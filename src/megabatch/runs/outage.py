"""What cannot be written for now: said when it begins, for each reason once, and when all is written again."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from megabatch.io.disk import remedy
from megabatch.text import print_line

Say = Callable[[str, str], None]  # a name of at most nine letters, and one line
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0  # before the next attempt


def say_on_stderr(name: str, text: str) -> None:
    print_line(f"megabatch: {name}: {text}", to_stderr=True)


def pause_s(num_failures: int) -> float:
    """Before the next attempt, after so many in a row have failed."""
    return min(FIRST_PAUSE_S * 2.0 ** min(num_failures - 1, 20), LONGEST_PAUSE_S)


class Outage:
    """Threads share it."""

    def __init__(self, say: Say = say_on_stderr) -> None:
        self.say = say
        self.reasons: dict[str, str] = {}  # by what is not written
        self.lock = threading.Lock()

    def begin(self, what: str, reason: str, text: str) -> None:
        """`text` is said, unless something else is not written for the same reason."""
        with self.lock:
            is_known = reason in self.reasons.values()
            self.reasons[what] = reason
        if not is_known:
            self.say("warning", text)

    def failed(self, what: str, path: Path, error: OSError) -> None:
        reason = error.strerror or str(error)
        begun = f"{what} cannot be written to {error.filename or path}: {reason}"
        self.begin(what, reason, f"{begun}; training goes on, and tries again; {remedy(error)}")

    def worked(self, what: str) -> None:
        with self.lock:
            has_ended = self.reasons.pop(what, None) is not None and not self.reasons
        if has_ended:
            self.say("saved", "again, with all that waited")

    @contextmanager
    def survived(self, what: str, path: Path) -> Iterator[None]:
        """Around an attempt to write it."""
        try:
            yield
        except OSError as error:
            self.failed(what, path, error)
        else:
            self.worked(what)
