"""What a study found, as it stands in its JSON.  Every figure of its page is computed from this.

Top-1 is a share of 1 here.  What is not finite becomes null in JSON, and is read back as None.
"""

import re

from msgspec import Struct, field

Curve = list[tuple[float, float | None]]  # epoch, and the value there; None: not finite


class SeedRun(Struct, frozen=True, kw_only=True):
    seed: int
    top1: float | None  # None: diverged
    test_loss: float | None
    wall_s: float
    curves: dict[str, Curve]  # by name: the training loss, the variance of a layer's output


class Arm(Struct, frozen=True, kw_only=True):
    name: str
    about: str
    settings: list[str]  # that distinguish it: section.key=value
    learning_rate: float | None  # of its runs; None: none was found
    tuned: list[tuple[float, float | None]] = field(default_factory=list)  # rate, held-out top-1; None: diverged
    runs: list[SeedRun] = field(default_factory=list)

    @property
    def top1s(self) -> list[float]:
        """Of the seeds that did not diverge."""
        return [run.top1 for run in self.runs if run.top1 is not None]

    @property
    def num_diverged(self) -> int:
        return len(self.runs) - len(self.top1s)


class Criterion(Struct, frozen=True, kw_only=True):
    """What a study set out to show: the arm's mean top-1 lies at most so far below the baseline's."""

    arm: str
    baseline: str
    max_gap_points: float  # percentage points


class Claim(Struct, frozen=True, kw_only=True):
    """What somebody has found elsewhere: that one arm is better than another, or (by 0 points) that it is not."""

    text: str  # a sentence
    better: str
    worse: str
    points: float | None = None  # by which, there; None: not told


class Study(Struct, frozen=True, kw_only=True):
    name: str  # of its files
    title: str
    question: str
    command: str  # that ran it
    setup: str  # data set, network, epochs, held-out images: in prose
    baseline: str  # the arm that gaps are taken to
    arms: list[Arm]
    criteria: list[Criterion]
    took_s: float  # core seconds
    versions: dict[str, str]
    machine: str  # cores and the like, no names of hosts
    claims: list[Claim] = field(default_factory=list)  # of the paper and others

    def __post_init__(self) -> None:
        names = [arm.name for arm in self.arms]
        if len(set(names)) != len(names):
            raise ValueError(f"two arms have one name: {names}")
        of_criteria = [name for criterion in self.criteria for name in (criterion.arm, criterion.baseline)]
        of_claims = [name for claim in self.claims for name in (claim.better, claim.worse)]
        for name in [self.baseline, *of_criteria, *of_claims]:
            if name not in names:
                raise ValueError(f"{name!r} is not an arm: {names}")

    def arm(self, name: str) -> Arm:
        return next(arm for arm in self.arms if arm.name == name)


def slug(name: str) -> str:
    """As part of a file's name."""
    return re.sub("[^a-z0-9]+", "-", name.lower().replace("'", "")).strip("-")
