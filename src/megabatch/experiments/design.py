"""The designs of studies, as read from their TOML files.

A `Design` compares accuracies: arms, learning-rate search, seeds, criteria and claims.  A `TimeDesign`, which has a
`target`, compares the times until arms reach a top-1.
"""

import re
from collections.abc import Iterable, Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct, field

from megabatch.errors import UserError, nearest
from megabatch.experiments.evidence import Claim, Criterion, CurveClaim, slug
from megabatch.io.toml import NotToml, parse_toml, read_toml
from megabatch.plugins import find_plugins
from megabatch.text import one_line

Rate = Annotated[float, Meta(gt=0, le=1e6)]
Momentum = Annotated[float, Meta(ge=0, lt=1)]
Text = Annotated[str, Meta(max_length=10_000)]
Name = Annotated[str, Meta(min_length=1, max_length=80)]
Seeds = Annotated[int, Meta(ge=1, le=1_000)]


class ArmDesign(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One way to train.  Its learning rate is fixed, searched from a coarse grid, or derived from another arm's."""

    name: Name
    about: Text = ""
    settings: tuple[str, ...] = ()  # section.key=value, specific to the arm
    learning_rates: tuple[Rate, ...] = ()  # the coarse grid of its search
    momenta: tuple[Momentum, ...] = ()  # searched within the same budget; the grid uses the first
    learning_rate: Rate | None = None
    learning_rate_of: str = ""  # the arm whose learning rate it uses
    learning_rate_times: Rate = 1.0
    seeds: Seeds | None = None  # default: the study's
    baseline: str = ""  # the arm to compare with; default: the study's
    published: Annotated[float, Meta(gt=0, le=1)] | None = None  # the mean top-1 of a published result


class SearchDesign(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    trials: Annotated[int, Meta(ge=1, le=1_000)]  # of every arm that searches
    held_out: Annotated[float, Meta(gt=0, lt=1)]  # share of the training images to evaluate learning rates on


class Design(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: Annotated[str, Meta(min_length=1, max_length=80)]
    title: Text
    question: Text
    setup: Text
    recipe: str
    settings: tuple[str, ...] = ()  # of all arms
    final_settings: tuple[str, ...] = ()  # of the final runs only
    arms: Annotated[tuple[ArmDesign, ...], Meta(min_length=1, max_length=100)] = field(name="arm")
    baseline: str
    search: SearchDesign | None = None
    seeds: Seeds
    paired: bool = False  # by seed: arms start with the same weights and see the same images
    criteria: tuple[Criterion, ...] = field(name="criterion", default=())
    claims: tuple[Claim, ...] = field(name="claim", default=())
    curve_claims: tuple[CurveClaim, ...] = field(name="curve_claim", default=())
    # Name to package.module:function, which computes a curve from a run's folder.
    curves: dict[Name, str] = field(default_factory=dict)
    samples: Annotated[int, Meta(ge=0)] = 0  # per epoch, if the page needs it

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", self.name):
            raise UserError(
                f"name={self.name!r}: expected only a-z, 0-9 and hyphens; for example name={slug(self.name)!r}"
            )
        self.check_names()
        for arm in self.arms:
            self.check_rates(arm)
        for criterion in self.criteria:
            if criterion.max_gap_points is None and criterion.max_upper_points is None:
                raise UserError(f"the criterion of {criterion.arm!r} has no bound; for example max_gap_points=0.3")

    def check_names(self) -> None:
        names = [arm.name for arm in self.arms]
        check_folder_names(names)
        if "training loss" in self.curves:
            raise UserError("curves: 'training loss' is reserved; use another name")
        compared = [claim.better for claim in self.claims] + [claim.worse for claim in self.claims]
        compared += [claim.more for claim in self.curve_claims] + [claim.less for claim in self.curve_claims]
        compared += [name for criterion in self.criteria for name in (criterion.arm, criterion.baseline)]
        compared += [arm.baseline for arm in self.arms if arm.baseline]
        compared += [arm.learning_rate_of for arm in self.arms if arm.learning_rate_of]
        for name in [self.baseline, *compared]:
            if name not in names:
                raise UserError(f"{name!r} is not an arm; the arms are {', '.join(map(repr, names))}")

    def check_rates(self, arm: ArmDesign) -> None:
        given = [bool(arm.learning_rates), arm.learning_rate is not None, bool(arm.learning_rate_of)]
        if sum(given) != 1:
            raise UserError(
                f"arm {arm.name!r}: expected one of learning_rates, learning_rate, learning_rate_of; "
                "for example learning_rates=[0.1, 0.3, 0.9]"
            )
        if arm.learning_rate_of and self.arm(arm.learning_rate_of).learning_rate_of:
            raise UserError(
                f"arm {arm.name!r}: learning_rate_of={arm.learning_rate_of!r} refers to another arm; name that arm"
            )
        if arm.momenta and not arm.learning_rates:
            raise UserError(f"arm {arm.name!r}: momenta need learning_rates; add learning_rates or remove momenta")
        if not arm.learning_rates:
            return
        if self.search is None:
            raise UserError(
                f"arm {arm.name!r} has learning_rates, which need trials and held_out; add them in [search]"
            )
        if (
            not is_ascending(arm.learning_rates)
            or len(arm.learning_rates) < 2
            or len({*arm.momenta}) < len(arm.momenta)
        ):
            raise UserError(f"arm {arm.name!r}: expected at least two learning_rates, ascending, and distinct momenta")
        least = len(arm.learning_rates) + max(0, len(arm.momenta) - 1)
        if self.search.trials < least:
            raise UserError(
                f"search.trials={self.search.trials}: arm {arm.name!r} starts with {least} trials; nearest: {least}"
            )

    def arm(self, name: str) -> ArmDesign:
        return next(arm for arm in self.arms if arm.name == name)

    @property
    def num_trials(self) -> int:
        """Return the number of all trials of searches and seeds."""
        trials = self.search.trials if self.search else 0
        return sum(trials * bool(arm.learning_rates) + self.num_seeds(arm) for arm in self.arms)

    def num_seeds(self, arm: ArmDesign) -> int:
        return self.seeds if arm.seeds is None else arm.seeds

    def stages(self) -> list[tuple[ArmDesign, ...]]:
        """Return the arms in running order: first those of criteria and the arms whose learning rates they use.

        Partial results then already answer the question of the study.
        """
        named = {name for criterion in self.criteria for name in (criterion.arm, criterion.baseline)}
        named |= {arm.learning_rate_of for arm in self.arms if arm.name in named}
        judged = tuple(arm for arm in self.arms if arm.name in named)
        others = tuple(arm for arm in self.arms if arm.name not in named)
        return [stage for stage in (judged, others) if stage]


class TimeArm(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: Name
    about: Text = ""
    recipe: str = ""  # default: the study's
    settings: tuple[str, ...] = ()


class TimeCriterion(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The arm is at least `least_ratio` times as fast as the baseline, or seeds of the baseline miss the target."""

    arm: Name
    baseline: Name
    least_ratio: Annotated[float, Meta(ge=1, le=1000)]


class TimeDesign(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: Annotated[str, Meta(min_length=1, max_length=80)]
    title: Text
    question: Text = ""
    setup: Text = ""
    recipe: str = ""
    settings: tuple[str, ...] = ()  # of all arms
    arms: Annotated[tuple[TimeArm, ...], Meta(min_length=1, max_length=100)] = field(name="arm")  # first: the baseline
    target: Annotated[float, Meta(gt=0, le=1)]  # top-1
    seeds: Annotated[int, Meta(ge=2, le=1_000)]
    # Steps of the separate runs that measure the time of a step and of an evaluation; 0: compare wall times only.
    quiet_steps: Annotated[int, Meta(ge=0, le=100_000)] = 0
    criteria: tuple[TimeCriterion, ...] = field(name="criterion", default=())

    def __post_init__(self) -> None:
        check_folder_names([arm.name for arm in self.arms])
        names = [arm.name for arm in self.arms]
        for name in [name for criterion in self.criteria for name in (criterion.arm, criterion.baseline)]:
            if name not in names:
                raise UserError(f"{name!r} is not an arm; the arms are {', '.join(map(repr, names))}")

    @property
    def num_trials(self) -> int:
        return self.seeds * len(self.arms)


def check_folder_names(names: Sequence[str]) -> None:
    slugs = [slug(name) for name in names]
    for name, folder in zip(names, slugs, strict=True):
        if not folder or slugs.count(folder) > 1:
            raise UserError(f"arm {name!r}: its folder name {folder!r} is empty or used by another arm; rename it")


def is_ascending(values: Iterable[float]) -> bool:
    return all(low < high for low, high in pairwise(values))


LONGEST_PATH = 300  # characters shown


def known_studies() -> dict[str, Traversable]:
    """Return the designs that installed packages provide (entry points `megabatch.studies`), by name."""
    folders = [resources.files(entry.value) / entry.name for entry in find_plugins("megabatch.studies").values()]
    found = [design for folder in folders for design in folder.iterdir() if design.name.endswith(".toml")]
    return {design.name.removesuffix(".toml"): design for design in sorted(found, key=lambda design: design.name)}


def read_design(study: str) -> Design:
    """Read the design of a study of accuracies."""
    design = read_any_design(study)
    if isinstance(design, TimeDesign):
        raise UserError(f"study {design.name} compares times; run it with: megabatch study {study}")
    return design


def read_any_design(study: str) -> Design | TimeDesign:
    """Read the design of a known study or of a TOML file; one with a `target` is about time."""
    shown, known = one_line(study, LONGEST_PATH), known_studies()
    try:
        tables = parse_toml(known[study].read_text("utf-8")) if study in known else read_toml(study)
    except NotToml as error:
        raise UserError(f"{shown} is not TOML: {error}") from None
    except OSError as error:
        if not known:
            raise UserError(
                f"study {shown!r} is not a readable TOML file ({error.strerror}); see docs/studies.md"
            ) from None
        raise UserError(
            f"study {shown!r} is neither one of {', '.join(known)} nor a readable TOML file "
            f"({error.strerror}); nearest: {nearest(study, list(known))}"
        ) from None
    try:
        kind: type[Design | TimeDesign] = TimeDesign if "target" in tables else Design
        return msgspec.convert({"name": slug(Path(study).stem) or "study"} | tables, kind)
    except msgspec.ValidationError as error:
        reason = error.__cause__ if isinstance(error.__cause__, UserError) else f"{error}; see docs/studies.md"
        raise UserError(one_line(f"{shown}: {reason}", 2 * LONGEST_PATH)) from None
