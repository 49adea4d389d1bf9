"""The faults of each run and their times, as functions of the seed and the run's number, so that a run can be repeated.

A block of faults is a shuffled deck.  Times are spread evenly over the wall time of the undisturbed run, including
start-up and end.  Some faults wait for the next write of a checkpoint instead.
"""

import random
from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

Kind = Literal["rank", "launcher", "all", "stop", "term", "disk", "disk to end", "host", "link"]

TITLES: dict[Kind, str] = {
    "rank": "kill -9 rank",
    "launcher": "kill -9 launcher",
    "all": "kill -9 all",
    "stop": "SIGSTOP rank",
    "term": "SIGTERM launcher",
    "disk": "disk full",
    "disk to end": "disk stays full",
    "host": "kill -9 host",
    "link": "link severed",
}
ONE_HOST: tuple[Kind, ...] = (
    *("rank",) * 6,
    *("launcher",) * 4,
    *("all",) * 3,
    *("stop",) * 2,
    *("term",) * 2,
    *("disk",) * 2,
    "disk to end",
)
TWO_HOSTS: tuple[Kind, ...] = (*("rank",) * 3, *("host",) * 4, *("link",) * 3)
NEED_DISK: tuple[Kind, ...] = ("disk", "disk to end")
LASTING: tuple[Kind, ...] = ("disk", "link")  # temporary; the run continues or is started again
WRITE_SHARE = 0.2  # of the faults that wait for a write
FAULTS_A_RUN = 3
LAST_FULL = 0.6  # share of the steps in which disks fill up: they must have space again before the run ends


class Fault(Struct, frozen=True, kw_only=True):
    kind: Kind
    share: float  # its time, as a share of the undisturbed run's wall time
    at_write: bool  # waits for the next write of a checkpoint instead
    victim: float  # position of the rank or host among all, from 0 to 1
    hold: float  # duration of a temporary fault, from 0 (shortest) to 1


def draw(seed: int, number: int, deck: Sequence[Kind]) -> list[Fault]:
    """Return the faults of run `number`, counted from 1."""
    first = (number - 1) * FAULTS_A_RUN
    return [draw_one(seed, place, deck) for place in range(first, first + FAULTS_A_RUN)]


def draw_one(seed: int, place: int, deck: Sequence[Kind]) -> Fault:
    block, place = divmod(place, len(deck))
    generator = random.Random(f"{seed}/{block}")
    kinds, strata = list(deck), list(range(len(deck)))
    at_write = [index < round(WRITE_SHARE * len(deck)) for index in strata]
    for cards in (kinds, strata, at_write):
        generator.shuffle(cards)
    details = random.Random(f"{seed}/{block}/{place}")
    return Fault(
        kind=kinds[place],
        share=(strata[place] + details.random()) / len(deck),
        at_write=at_write[place],
        victim=details.random(),
        hold=details.random(),
    )


class Timeline(Struct, frozen=True, kw_only=True):
    """Times of an undisturbed run, in seconds since its command started."""

    ranks_s: float  # when its ranks were running
    steps_s: list[tuple[float, int]]  # when the row of a step was first seen, and the step
    total_s: float

    @property
    def startup_s(self) -> float:
        return self.steps_s[0][0]

    @property
    def num_steps(self) -> int:
        return self.steps_s[-1][1]


class Trigger(Struct, frozen=True):
    """The time of a fault, relative to the progress of the disturbed run."""

    startup: float | None  # share of start-up, from 0 to 1; None: in a step
    step: int = 0  # after its row was written
    delay_s: float = 0.0  # after that


def locate(fault: Fault, timeline: Timeline) -> Trigger:
    at_s = fault.share * timeline.total_s
    if fault.kind in LASTING:  # early enough to end before the run
        room_s = timeline.startup_s + LAST_FULL * (timeline.steps_s[-1][0] - timeline.startup_s)
        at_s = fault.share * room_s
    if at_s < timeline.startup_s:
        return Trigger(at_s / timeline.startup_s)
    seen_s, step = max(point for point in timeline.steps_s if point[0] <= at_s)
    return Trigger(None, step, at_s - seen_s)


def arrange(faults: Sequence[Fault], timeline: Timeline) -> list[tuple[Fault, Trigger]]:
    """Return the faults in the order drawn, but with those in steps sorted by step, since a run only moves forward."""
    placed = [(fault, locate(fault, timeline)) for fault in faults]
    in_steps = iter(
        sorted((pair for pair in placed if pair[1].startup is None), key=lambda pair: (pair[1].step, pair[1].delay_s))
    )
    return [pair if pair[1].startup is not None else next(in_steps) for pair in placed]
