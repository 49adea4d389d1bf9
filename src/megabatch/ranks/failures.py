"""What the first rank that fails leaves for whoever has started it."""

import json
import os
import signal
import time
from pathlib import Path

from msgspec import Struct

FAILURE = "failure"  # a key of our launcher's store


def joined_key(rank: int) -> str:
    """Return the key that a rank sets in our launcher's store when it joins it."""
    return f"joined/{rank}"


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


def describe_end(exit_code: int, when: str = "") -> str:
    """Describe the end of a process that reported nothing; `when` is such as " while it was starting"."""
    if exit_code >= 0:
        return f"ended with exit code {exit_code}{when}"
    name = signal.Signals(-exit_code).name
    hint = "; killed manually or by the OOM killer: see dmesg" if -exit_code == signal.SIGKILL else ""
    return f"was ended by {name}{when}{hint}"


def report_to_torchrun(report: Report) -> None:
    """Where and as torchelastic looks for it; other launchers ask for nothing."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        for_torch = {"message": report.message, "timestamp": int(time.time())}
        ours = {"rank": report.rank, "exit_code": report.exit_code, "trace": report.trace}
        Path(path).write_text(json.dumps(for_torch | ours))
