"""Several runs side by side: in which settings they differ, what came of each, and what their seeds say.

Runs that differ in nothing but the seed, and in what decides no number, are a group.  Its mean is over the seeds of
runs that have finished: what an unfinished one has reached is not what it would have come to.  A seed that was run
twice counts once, since a repetition tells nothing of other seeds; and where one diverged there is no mean, since that
of the others would flatter the group.  `megabatch compare` prints this, and the report draws it.
"""

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from megabatch.errors import UserError
from megabatch.intervals import Interval, Spread, gap, paired_gap, spread
from megabatch.runs.outcome import RunOutcome, read_outcome
from megabatch.runs.settings import (
    SEED,
    SOURCE,
    TARGET,
    Value,
    is_decisive,
    is_same,
    is_same_source,
    read_settings,
)

FORMAT = 1
# Of no setting: words about the recipe, and the folder, which is what the user has given.
UNLISTED = ("about", "provenance", "run.dir")
NOT_OF_A_GROUP = (SEED, TARGET)  # the target is only what is reported


class Difference(Struct, frozen=True):
    """Something in which the runs differ."""

    name: str
    values: list[Value | None]  # of each run; None: it has none


class GapToFirst(Struct, frozen=True):
    size: float  # mean of the group minus that of the first: positive where the group is better
    interval: Interval | None  # of 95 %; None: a side has one seed only
    is_paired: bool  # by seed, as both have the same ones; else Welch's


class SeedGroup(Struct, frozen=True, kw_only=True):
    runs: list[int]  # their places among the runs, from 0
    settings: dict[str, Value | None]  # in which groups differ
    seeds: list[int]  # of the runs that have finished, ascending
    num_unfinished: int  # runs that are in no mean
    num_diverged: int
    top1: Spread | None  # over the seeds; None: none has finished, or one diverged
    gap_to_first: GapToFirst | None  # None in the first group, and where one of the two has no mean


class RunComparison(Struct, frozen=True, kw_only=True):
    format: int = FORMAT
    runs: list[RunOutcome]
    settings: list[Difference]
    environment: list[Difference]
    groups: list[SeedGroup]


def compare(paths: Sequence[Path], target: float | None = None) -> RunComparison:
    """One line where one of them is no run, or is damaged.  A run that is given twice is there once."""
    given: dict[str, Path] = {}
    for path in paths:
        given.setdefault(os.path.realpath(path), path)
    paths = list(given.values())
    if not paths:
        raise UserError("no run is given; for example runs/fashion-001 runs/fashion-002, or runs/*")
    settings = [read_settings(path) for path in paths]
    outcomes = [read_outcome(path, found, target) for path, found in zip(paths, settings, strict=True)]
    listed = [{key: value for key, value in found.items() if is_listed(key)} for found in settings]
    members = group_by_settings(paths, settings)
    return RunComparison(
        runs=outcomes,
        settings=differences(listed),
        environment=differences([outcome.environment for outcome in outcomes]),
        groups=make_groups(members, settings, outcomes),
    )


def is_listed(key: str) -> bool:
    return not {key, key.partition(".")[0]} & {*UNLISTED}


def differences(found: Sequence[Mapping[str, Value]]) -> list[Difference]:
    """In the order in which the runs have them."""
    names = dict.fromkeys(name for one in found for name in one)
    listed = [Difference(name, [one.get(name) for one in found]) for name in names]
    return [one for one in listed if not all(is_same(value, one.values[0]) for value in one.values)]


def group_by_settings(paths: Sequence[Path], settings: Sequence[Mapping[str, Value]]) -> list[list[int]]:
    """The places of runs that differ in the seed alone, in the order of their first ones."""
    deciding = [
        {key: value for key, value in found.items() if is_decisive(key) and key not in NOT_OF_A_GROUP}
        for found in settings
    ]

    def are_alike(one: int, other: int) -> bool:
        source, other_source = deciding[one].get(SOURCE), deciding[other].get(SOURCE)
        return all(
            key == SOURCE or is_same(deciding[one].get(key), deciding[other].get(key))
            for key in deciding[one].keys() | deciding[other].keys()
        ) and is_same_source(paths[one], source, paths[other], other_source)

    groups: list[list[int]] = []
    for place in range(len(paths)):
        group = next((group for group in groups if are_alike(group[0], place)), None)
        if group is None:
            groups.append([place])
        else:
            group.append(place)
    return groups


def make_groups(
    members: Sequence[list[int]], settings: Sequence[Mapping[str, Value]], outcomes: Sequence[RunOutcome]
) -> list[SeedGroup]:
    differing = differences([{k: v for k, v in settings[group[0]].items() if is_decisive(k)} for group in members])
    named = [one for one in differing if one.name not in NOT_OF_A_GROUP]
    of_first = top1_by_seed([outcomes[place] for place in members[0]])
    groups = []
    for number, places in enumerate(members):
        found = [outcomes[place] for place in places]
        values = top1_by_seed(found)
        groups.append(
            SeedGroup(
                runs=places,
                settings={one.name: one.values[number] for one in named},
                seeds=sorted(values or {}),
                num_unfinished=sum(outcome.status not in ("finished", "diverged") for outcome in found),
                num_diverged=sum(outcome.status == "diverged" for outcome in found),
                top1=spread(list(values.values())) if values else None,
                gap_to_first=gap_between(values, of_first) if number and values and of_first else None,
            )
        )
    return groups


def top1_by_seed(outcomes: Sequence[RunOutcome]) -> dict[int, float] | None:
    """Of every seed that has finished, the mean over its runs; None if one diverged."""
    if any(outcome.status == "diverged" for outcome in outcomes):
        return None
    found: defaultdict[int, list[float]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.status == "finished" and outcome.top1 is not None and outcome.seed is not None:
            found[outcome.seed].append(outcome.top1)
    return {seed: spread(found[seed]).mean for seed in sorted(found)}


def gap_between(values: Mapping[int, float], first: Mapping[int, float]) -> GapToFirst:
    """Paired where both have the same seeds: then each pair began from the same random numbers."""
    is_paired = values.keys() == first.keys() and len(values) > 1
    # Both measure how far an arm lies below its baseline: here the first group is the arm.
    found = (paired_gap if is_paired else gap)(
        arm=[first[seed] for seed in sorted(first)], baseline=[values[seed] for seed in sorted(values)]
    )
    return GapToFirst(found.size, found.interval, is_paired)
