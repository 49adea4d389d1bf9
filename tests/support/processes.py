"""Processes, observed from outside."""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def wait_until(holds: Callable[[], bool], at_most_s: float = 60.0) -> None:
    deadline = time.monotonic() + at_most_s
    while not holds():
        assert time.monotonic() < deadline, "condition not met in time"
        time.sleep(0.05)


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def descendants(process: int) -> list[int]:
    """Return the descendants of a process, started by any of its threads."""
    children = []
    for listed in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # the process exited
            children += [int(child) for child in listed.read_text().split()]
    return children + [other for child in children for other in descendants(child)]
