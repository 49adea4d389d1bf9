"""What a rule of the verdict says of a run, and what it looks at."""

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

from megabatch.report import figures
from megabatch.report.shares import Seconds
from megabatch.report.view import RunView

Kind = Literal["problem", "limit", "good"]
WORTH = 0.05  # of the wall time, from which on a change is worth it
LIMITS = 0.10  # from which on it limits the run


class Finding(NamedTuple):
    kind: Kind
    share: float  # of the wall time that it is about; 0: it is about none
    figure: str
    title: str
    advice: str


class Facts(NamedTuple):
    view: RunView
    shares: Seconds

    def share(self, *keys: str) -> float:
        return math.fsum(self.shares.get(key, 0.0) for key in keys)


Rule = Callable[[Facts], Finding | None]


def takes_time(kind: Kind, share: float, title: str, advice: str) -> Finding:
    return Finding(kind, share, f"{figures.percent(share)} of the time", title, advice)


def saving(share: float, what: str = "it") -> str:
    return f"without {what} the run would be {1 / (1 - min(share, 0.95)):.2f} times as fast"
