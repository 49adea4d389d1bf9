"""Report files that cannot be written: once for each reason, and again when all of them are written."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from megabatch.io.disk import remedy
from megabatch.text import print_line

ReportLine = Callable[[str, str], None]  # called with a name of at most nine characters and a line
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0  # before the next attempt


def report_on_stderr(name: str, text: str) -> None:
    print_line(f"megabatch: {name}: {text}", to_stderr=True)


def pause_s(num_failures: int) -> float:
    """Return the pause before the next attempt, after `num_failures` failures in a row."""
    return min(FIRST_PAUSE_S * 2.0 ** min(num_failures - 1, 20), LONGEST_PAUSE_S)


class Outage:
    """Files that cannot be written at the moment.  Thread-safe."""

    def __init__(self, report: ReportLine = report_on_stderr) -> None:
        self.report = report
        self.reasons: dict[str, str] = {}  # by the thing that is not written
        self.lock = threading.Lock()

    def begin(self, what: str, reason: str, text: str) -> None:
        """Report `text`, unless this reason was reported already."""
        with self.lock:
            is_known = reason in self.reasons.values()
            self.reasons[what] = reason
        if not is_known:
            self.report("warning", text)

    def failed(self, what: str, path: Path, error: OSError) -> None:
        reason = error.strerror or str(error)
        text = f"{what} cannot be written to {error.filename or path}: {reason}; training continues and retries"
        self.begin(what, reason, f"{text}; {remedy(error)}")

    def worked(self, what: str) -> None:
        with self.lock:
            has_ended = self.reasons.pop(what, None) is not None and not self.reasons
        if has_ended:
            self.report("saved", "all pending data is written")

    @contextmanager
    def survived(self, what: str, path: Path) -> Iterator[None]:
        """Report an OSError of the block instead of raising it."""
        try:
            yield
        except OSError as error:
            self.failed(what, path, error)
        else:
            self.worked(what)
