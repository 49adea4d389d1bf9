"""What the first rank that fails leaves for whoever has started it."""

import json
import os
import signal
import time
from pathlib import Path

from msgspec import Struct

FAILURE = "failure"  # a key of our launcher's store


class Report(Struct, frozen=True):
    rank: int
    exit_code: int
    message: str  # one line
    trace: str = ""  # if no log has it


class RankFailed(Exception):
    """The first rank that failed: its exit code, its one line, and its traceback if no log has that."""

    def __init__(self, rank: int, exit_code: int, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.rank, self.exit_code, self.trace = rank, exit_code, trace


def describe_end(exit_code: int) -> str:
    """Of a process that has said nothing."""
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    name = signal.Signals(-exit_code).name
    hint = "; by hand, or for want of memory: see dmesg" if -exit_code == signal.SIGKILL else ""
    return f"was ended by {name}{hint}"


def report_to_torchrun(report: Report) -> None:
    """Where and as torchelastic looks for it; other launchers ask for nothing."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        for_torch = {"message": report.message, "timestamp": int(time.time())}
        ours = {"rank": report.rank, "exit_code": report.exit_code, "trace": report.trace}
        Path(path).write_text(json.dumps(for_torch | ours))
