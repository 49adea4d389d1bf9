"""Which ranks the others waited for, and how long.

An all-reduce makes every rank look equally slow.  But who comes last waits least: between two evaluations, a rank has
delayed the others by the wait of the rank that waited most, less its own.
"""

import math
from array import array
from itertools import count
from typing import NamedTuple

from megabatch.runs.records import EvaluationRecord, StepRecord


class RankDelay(NamedTuple):
    rank: int
    delay_s: float
    wait_s: float
    num_last: int  # stretches between evaluations in which it was the last


class RankDelays:
    """Of the ranks that the run had when it was last evaluated: their number may change where it resumes."""

    def __init__(self) -> None:
        self.delay_s = array("d")
        self.wait_s = array("d")
        self.num_last: list[int] = []
        self.num_stretches = 0
        self.first_step, self.last_step = 0, 0  # that they cover
        self.straggler: tuple[int, float] | None = None  # of the newest step: the rank, and its delay a step

    @property
    def num_ranks(self) -> int:
        return len(self.delay_s)

    @property
    def num_steps(self) -> int:
        return self.last_step - self.first_step

    def add_step(self, record: StepRecord) -> None:
        if record.straggler_delay_s:
            self.straggler = (record.straggler, record.straggler_delay_s)

    def add_evaluation(self, record: EvaluationRecord) -> None:
        waits = record.rank_waits_s
        if len(waits) > 1 and all(map(math.isfinite, waits)):
            if len(waits) != len(self.delay_s):
                self.delay_s, self.wait_s = array("d", bytes(8 * len(waits))), array("d", bytes(8 * len(waits)))
                self.num_last, self.num_stretches = [0] * len(waits), 0
                self.first_step = self.last_step
            most = max(waits)
            for rank, wait_s in enumerate(waits):
                self.delay_s[rank] += most - wait_s
                self.wait_s[rank] += wait_s
            self.num_last[waits.index(min(waits))] += 1
            self.num_stretches += 1
        self.last_step = record.step

    def by_delay(self) -> list[RankDelay]:
        """The one that was waited for most first."""
        rows = [RankDelay(*row) for row in zip(count(), self.delay_s, self.wait_s, self.num_last, strict=False)]
        return sorted(rows, key=lambda row: -row.delay_s)


def excess_s(delays: RankDelays) -> float:
    """By how much the first delayed the others more than the median rank did: what is its own, and not the noise."""
    ordered = delays.by_delay()
    return ordered[0].delay_s - ordered[len(ordered) // 2].delay_s if ordered else 0.0
