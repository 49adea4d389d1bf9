"""The failure report of a rank, for the launcher that started it."""

import json
import os
import signal
import time
from pathlib import Path

from msgspec import Struct

FAILURE = "failure"  # a key of the launcher's store


def joined_key(rank: int) -> str:
    """Return the key that a rank sets in the launcher's store when it connects."""
    return f"joined/{rank}"


class RankFailureReport(Struct, frozen=True):
    rank: int
    exit_code: int
    message: str  # one line
    trace: str = ""  # empty if it is in the log


class PeerFailed(RuntimeError):
    """Another rank failed, which reports the cause."""


class RankFailed(Exception):
    """The failure of the first rank that failed: its exit code, message, and traceback unless that is in the log."""

    def __init__(self, rank: int, exit_code: int, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.rank, self.exit_code, self.trace = rank, exit_code, trace


def describe_exit(exit_code: int, when: str = "") -> str:
    """Describe the exit of a process that left no report; `when` is, for example, " while it was starting"."""
    if exit_code >= 0:
        return f"ended with exit code {exit_code}{when}"
    name = signal.Signals(-exit_code).name
    hint = "; killed manually or by the OOM killer: see dmesg" if -exit_code == signal.SIGKILL else ""
    return f"was ended by {name}{when}{hint}"


def report_to_torchrun(report: RankFailureReport) -> None:
    """Write the error file that torchelastic reads; other launchers do not name one."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        for_torch = {"message": report.message, "timestamp": int(time.time())}
        ours = {"rank": report.rank, "exit_code": report.exit_code, "trace": report.trace}
        Path(path).write_text(json.dumps(for_torch | ours))
