"""The results of a study, as stored in its JSON.  Every value on its page is computed from them.

They include every finished run, by the name of its trial and a fingerprint of its settings, so that a later start on
any machine does not repeat it.  Top-1 is a share of 1.  Values that are not finite are null in JSON and read as None.
"""

import re

from msgspec import Struct, field

Curve = list[tuple[float, float | None]]  # epoch and value; None: not finite


class SearchRun(Struct, frozen=True, kw_only=True):
    trial: str
    fingerprint: str  # of its settings
    learning_rate: float
    momentum: float | None = None  # None: not searched
    top1: float | None  # on held-out images; None: diverged


class SeedRun(Struct, frozen=True, kw_only=True):
    trial: str
    fingerprint: str
    seed: int
    top1: float | None  # None: diverged
    test_loss: float | None
    wall_s: float
    curves: dict[str, Curve]  # by name: the training loss and the curves of the design


class Arm(Struct, frozen=True, kw_only=True):
    name: str
    about: str
    settings: list[str]  # section.key=value, specific to the arm
    baseline: str = ""  # the arm to compare with, if not the study's
    published: float | None = None  # the mean top-1 of a published result
    learning_rate: float | None  # of its runs; None: not found, or not yet
    momentum: float | None = None  # None: the recipe's
    num_trials: int = 0  # of the complete search
    num_seeds: int  # of the complete arm
    tuned: list[SearchRun] = field(default_factory=list)
    runs: list[SeedRun] = field(default_factory=list)

    @property
    def top1s(self) -> list[float]:
        """Return the top-1 of the seeds that did not diverge."""
        return [run.top1 for run in self.runs if run.top1 is not None]

    @property
    def num_diverged(self) -> int:
        return len(self.runs) - len(self.top1s)

    @property
    def is_searched(self) -> bool:
        return len(self.tuned) >= self.num_trials

    @property
    def is_complete(self) -> bool:
        return self.is_searched and len(self.runs) >= self.num_seeds


class Criterion(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A bound on how far the arm's mean top-1 may be below the baseline's, in percentage points."""

    arm: str
    baseline: str
    max_gap_points: float | None = None
    max_upper_points: float | None = None  # exclusive bound on the upper end of the 95 % interval


class Claim(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A published result: one arm is better than another, or (by 0 points) equally good."""

    text: str  # a sentence
    better: str
    worse: str
    points: float | None = None  # published gap; None: not published


class CurveClaim(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A published result: a curve grows by a larger factor, from first to last value, in one arm than in another."""

    text: str
    curve: str
    more: str
    less: str


class Study(Struct, frozen=True, kw_only=True):
    name: str  # of its files
    title: str
    question: str
    command: str  # that ran it
    setup: str  # data set, network, epochs, held-out images: in prose
    baseline: str  # the arm to compare with
    paired: bool = False  # by seed
    arms: list[Arm]
    criteria: list[Criterion]
    took_s: float  # core seconds
    versions: dict[str, str]
    machine: str  # cores and the like, no names of hosts
    samples: int = 0  # per epoch; 0: not stored
    claims: list[Claim] = field(default_factory=list)  # of the paper and others
    curve_claims: list[CurveClaim] = field(default_factory=list)

    def __post_init__(self) -> None:
        names = [arm.name for arm in self.arms]
        if len(set(names)) != len(names):
            raise ValueError(f"duplicate arm names: {names}")
        of_criteria = [name for criterion in self.criteria for name in (criterion.arm, criterion.baseline)]
        of_claims = [name for claim in self.claims for name in (claim.better, claim.worse)]
        of_claims += [name for claim in self.curve_claims for name in (claim.more, claim.less)]
        of_arms = [arm.baseline for arm in self.arms if arm.baseline]
        for name in [self.baseline, *of_criteria, *of_claims, *of_arms]:
            if name not in names:
                raise ValueError(f"{name!r} is not an arm: {names}")

    def arm(self, name: str) -> Arm:
        return next(arm for arm in self.arms if arm.name == name)

    def baseline_of(self, arm: Arm) -> Arm:
        return self.arm(arm.baseline or self.baseline)

    @property
    def num_runs(self) -> int:
        return sum(len(arm.tuned) + len(arm.runs) for arm in self.arms)

    @property
    def num_planned(self) -> int:
        return sum(arm.num_trials + arm.num_seeds for arm in self.arms)


def slug(name: str) -> str:
    """Return a name as part of a file name."""
    return re.sub("[^a-z0-9]+", "-", name.lower().replace("'", "")).strip("-")
