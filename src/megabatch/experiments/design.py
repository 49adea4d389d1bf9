"""What a study is going to do, as its TOML file says it: arms that differ in a few settings, how each finds its
learning rate, how many seeds, criteria and claims."""

import re
from collections.abc import Iterable
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
    """One way to train.  Its rate is given, or searched from a coarse grid on, or follows from another arm's."""

    name: Name
    about: Text = ""
    settings: tuple[str, ...] = ()  # section.key=value, which distinguish it
    learning_rates: tuple[Rate, ...] = ()  # the coarse grid of its search
    momenta: tuple[Momentum, ...] = ()  # searched within the same budget; the grid is tried with the first
    learning_rate: Rate | None = None
    learning_rate_of: str = ""  # the arm whose rate it takes
    learning_rate_times: Rate = 1.0
    seeds: Seeds | None = None  # by default the study's
    baseline: str = ""  # the arm that its gap is taken to; by default the study's


class SearchDesign(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    trials: Annotated[int, Meta(ge=1, le=1_000)]  # of every arm that searches
    held_out: Annotated[float, Meta(gt=0, lt=1)]  # share of the training images that rates are judged by


class Design(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: Annotated[str, Meta(min_length=1, max_length=80)]
    title: Text
    question: Text
    setup: Text
    recipe: str
    settings: tuple[str, ...] = ()  # of all arms
    final_settings: tuple[str, ...] = ()  # of the runs that count, beside those of the search
    arms: Annotated[tuple[ArmDesign, ...], Meta(min_length=1, max_length=100)] = field(name="arm")
    baseline: str
    search: SearchDesign | None = None
    seeds: Seeds
    paired: bool = False  # by seed: arms begin with the same weights and see the same images
    criteria: tuple[Criterion, ...] = field(name="criterion", default=())
    claims: tuple[Claim, ...] = field(name="claim", default=())
    curve_claims: tuple[CurveClaim, ...] = field(name="curve_claim", default=())
    # By name: package.module:function, which makes a curve of a run's folder.
    curves: dict[Name, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", self.name):
            raise UserError(f"name={self.name!r} is no part of a file's name; for example name={slug(self.name)!r}")
        self.check_names()
        for arm in self.arms:
            self.check_rates(arm)
        for criterion in self.criteria:
            if criterion.max_gap_points is None and criterion.max_upper_points is None:
                raise UserError(f"the criterion of {criterion.arm!r} has no bound; for example max_gap_points=0.3")

    def check_names(self) -> None:
        names = [arm.name for arm in self.arms]
        slugs = [slug(name) for name in names]
        for name, own in zip(names, slugs, strict=True):
            if not own or slugs.count(own) > 1:
                raise UserError(f"arm {name!r} is in a folder's name {own!r}, as no other arm may be; give another")
        if "training loss" in self.curves:
            raise UserError("curves: every run has a 'training loss'; give another name")
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
                f"arm {arm.name!r}: learning_rate_of={arm.learning_rate_of!r}, which takes another's itself; name that"
            )
        if arm.momenta and not arm.learning_rates:
            raise UserError(f"arm {arm.name!r}: momenta are searched where learning_rates are; leave them out")
        if not arm.learning_rates:
            return
        if self.search is None:
            raise UserError(f"arm {arm.name!r} has learning_rates; [search] must say trials and held_out")
        if (
            not is_ascending(arm.learning_rates)
            or len(arm.learning_rates) < 2
            or len({*arm.momenta}) < len(arm.momenta)
        ):
            raise UserError(f"arm {arm.name!r}: expected two learning_rates or more, ascending, and no momentum twice")
        least = len(arm.learning_rates) + max(0, len(arm.momenta) - 1)
        if self.search.trials < least:
            raise UserError(
                f"search.trials={self.search.trials}: arm {arm.name!r} begins with {least}; nearest: {least}"
            )

    def arm(self, name: str) -> ArmDesign:
        return next(arm for arm in self.arms if arm.name == name)

    @property
    def num_trials(self) -> int:
        """With every search and every seed."""
        trials = self.search.trials if self.search else 0
        return sum(trials * bool(arm.learning_rates) + self.num_seeds(arm) for arm in self.arms)

    def num_seeds(self, arm: ArmDesign) -> int:
        return self.seeds if arm.seeds is None else arm.seeds

    def stages(self) -> list[tuple[ArmDesign, ...]]:
        """Arms in the order in which they are run: first those that a criterion is about, and whose rates they take.

        Whoever looks in before the end sees what the study set out to show.
        """
        named = {name for criterion in self.criteria for name in (criterion.arm, criterion.baseline)}
        named |= {arm.learning_rate_of for arm in self.arms if arm.name in named}
        judged = tuple(arm for arm in self.arms if arm.name in named)
        others = tuple(arm for arm in self.arms if arm.name not in named)
        return [stage for stage in (judged, others) if stage]


def is_ascending(values: Iterable[float]) -> bool:
    return all(low < high for low, high in pairwise(values))


# The studies that come with megabatch, and those of a user: TOML files.

LONGEST_PATH = 300  # letters of one that are shown


def known_studies() -> dict[str, Traversable]:
    """Return the designs that installed packages provide (entry points `megabatch.studies`), by name."""
    folders = [resources.files(entry.value) / entry.name for entry in find_plugins("megabatch.studies").values()]
    found = [design for folder in folders for design in folder.iterdir() if design.name.endswith(".toml")]
    return {design.name.removesuffix(".toml"): design for design in sorted(found, key=lambda design: design.name)}


def read_design(study: str) -> Design:
    """Of a name, or of a user's file; UserError."""
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
        return msgspec.convert({"name": slug(Path(study).stem) or "study"} | tables, Design)
    except msgspec.ValidationError as error:
        reason = error.__cause__ if isinstance(error.__cause__, UserError) else f"{error}; see docs/studies.md"
        raise UserError(one_line(f"{shown}: {reason}", 2 * LONGEST_PATH)) from None
