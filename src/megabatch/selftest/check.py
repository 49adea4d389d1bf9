"""What a self-test reports: one row for each law or figure."""

from collections.abc import Callable
from typing import Any

from msgspec import Struct, field


class Check(Struct, frozen=True, kw_only=True):
    name: str
    passed: bool | None  # None: a figure, which nothing is asked of
    found: str  # for people
    figures: dict[str, Any] = field(default_factory=dict)


class Report(Struct, frozen=True, kw_only=True):
    """What is sent back.  It holds no names of hosts, users, paths or data."""

    megabatch: str
    torch: str
    device: str  # its name
    backend: str
    num_ranks: int
    hosts_of: list[int]  # ranks, as the plans were given them
    seconds: float = 0.0
    checks: list[Check] = []

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if check.passed is False]


Note = Callable[[Check], None]  # hears of each check, on rank 0
