"""Skipped tests: a count per reason at the end of a run, and an error if a reason is not expected.

A reason reads "needs X", with details after a colon: "needs g++", "needs root and mount: permission denied".
"""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest


def reason_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return the reason of a skipped test without its details."""
    assert isinstance(report.longrepr, tuple), report.longrepr  # file, line, "Skipped: reason"
    return report.longrepr[2].removeprefix("Skipped: ").partition(":")[0]


def count_reasons(reports: Iterable[pytest.TestReport | pytest.CollectReport]) -> Counter[str]:
    return Counter(map(reason_of, reports))


def read_allowed(path: Path) -> set[str]:
    """Read the allowed reasons: one per line, comments after #."""
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return {line for line in lines if line}
