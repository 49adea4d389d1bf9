"""Folders of runs that were given none: runs/<recipe>-<nnn>."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megabatch.disk import take_lock
from megabatch.runs.files import LOCK

RUNS = Path("runs")


@contextmanager
def numbering_lock() -> Iterator[None]:
    """Of runs that start at the same moment, one after the other chooses its number and takes its folder."""
    RUNS.mkdir(exist_ok=True)
    with take_lock(RUNS / LOCK, wait=True):
        yield


def numbered_runs(name: str) -> list[Path]:
    """The folders runs/<name>-<nnn>, in the order of their numbers."""
    return sorted(
        (path for path in RUNS.glob(f"{name}-*") if re.fullmatch(r"\d{3,}", path.name[len(name) + 1 :])), key=number_of
    )


def next_folder(name: str) -> Path:
    earlier = numbered_runs(name)
    return RUNS / f"{name}-{number_of(earlier[-1]) + 1 if earlier else 1:03d}"


def number_of(path: Path) -> int:
    return int(path.name.rpartition("-")[2])
