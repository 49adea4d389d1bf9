"""Outcomes of runs, and their comparison.

Runs that differ only in their seed, or in settings that do not affect results, form a group.  The mean of a group is
over the seeds of its finished runs, since an unfinished run may still improve.  A seed that was run twice counts once.
If a run diverged, the group has no mean, since the mean of the other runs would be too good.
"""

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from msgspec import Struct

from megabatch.errors import UserError
from megabatch.planning.topology import Topology
from megabatch.runs import files
from megabatch.runs.intervals import Interval, Spread, gap, paired_gap, spread
from megabatch.runs.reader import (
    is_running,
    read_environment,
    read_if_valid,
    read_log,
    read_records,
    read_summary,
)
from megabatch.runs.records import EvaluationRecord, Record, Status, StepRecord, Straggler, Summary
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
from megabatch.runs.totals import RunTotals

OutcomeStatus = Status | Literal["running", "killed"]
VERSIONS = ("megabatch", "torch", "python", "system", "host")  # of env.json


class RunOutcome(Struct, frozen=True, kw_only=True):
    """The outcome of a run, as `--json` prints it.  None stands for values that are not known or not recorded.

    The summary of a running or killed run is computed from its rows.
    """

    path: str  # as passed by the user
    status: OutcomeStatus
    recipe: str | None
    seed: int | None
    global_batch: int | None
    ranks: int | None
    hosts: int | None
    steps: int
    skipped_steps: int
    top1: float | None
    top5: float | None
    best_top1: float | None
    training_top1: float | None
    test_loss: float | None
    target_top1: float | None  # requested, or else the run's setting
    time_to_target_s: float | None  # wall time of the first evaluation that reached it
    ended_early: str | None
    steps_to_target: int | None  # only for a requested target, or a run without a summary
    wall_s: float | None
    images_per_s: float | None
    data_wait_share: float | None  # of the time of training steps
    comm_wait_share: float | None
    straggler: Straggler | None
    resumed_from_step: int | None
    skipped_images: int
    resident_mb: float | None
    device_mb: float | None
    environment: dict[str, str]  # megabatch, torch, python, system, host, gpus


class TargetReached(Struct, frozen=True):
    wall_s: float
    step: int | None = None  # None: not in the summary


def read_outcome(path: Path, settings: Mapping[str, Value], target: float | None = None) -> RunOutcome:
    """Return the outcome of a run.  `target` replaces the run's own target accuracy."""
    batch, seed = whole(settings.get("batch.global")), whole(settings.get(SEED))
    own_target = settings.get(TARGET)
    own_target = float(own_target) if isinstance(own_target, int | float) else None
    asked = own_target if target is None else target
    is_live = is_running(path)
    summary = None if is_live else read_summary(path)
    if summary is None and not is_live and os.path.lexists(path / files.SUMMARY):
        raise UserError(f"{path / files.SUMMARY} is damaged; delete the run or train it again")
    status: OutcomeStatus = summary.status if summary else "running" if is_live else "killed"
    reached, wall_s = None, summary.wall_s if summary else None
    if summary is None:
        summary, reached, wall_s = add_up(path, batch, asked)
    elif target is not None and target != own_target:
        reached = first_to_reach(rows_of(path), target)
    elif summary.time_to_target_s is not None:
        reached = TargetReached(summary.time_to_target_s)
    ranks, hosts = read_ranks_and_hosts(path)
    name = settings.get("name")
    return RunOutcome(
        path=os.fsencode(path).decode(errors="replace"),
        status=status,
        recipe=name if isinstance(name, str) else None,
        seed=seed,
        global_batch=batch,
        ranks=ranks,
        hosts=hosts,
        steps=summary.steps,
        skipped_steps=summary.skipped_steps,
        top1=summary.top1,
        top5=summary.top5,
        best_top1=summary.best_top1,
        training_top1=summary.training_top1,
        test_loss=summary.test_loss,
        target_top1=asked,
        time_to_target_s=reached.wall_s if reached else None,
        ended_early=summary.ended_early,
        steps_to_target=reached.step if reached else None,
        wall_s=wall_s,
        images_per_s=summary.images_per_s,
        data_wait_share=summary.data_wait_share,
        comm_wait_share=summary.comm_wait_share,
        straggler=summary.straggler,
        resumed_from_step=summary.resumed_from_step,
        skipped_images=summary.skipped_images,
        resident_mb=summary.resident_mb,
        device_mb=summary.device_mb,
        environment=read_versions(path),
    )


def whole(value: Value | None) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63 else None


def add_up(path: Path, batch: int | None, target: float | None) -> tuple[Summary, TargetReached | None, float | None]:
    """Return the summary of the rows so far, when the target was reached, and the wall time so far."""
    totals = RunTotals(global_batch=batch or 0, target_top1=None, resumed_from_step=resumed_from(path))
    reached, wall_s = None, None
    for record in rows_of(path):
        if isinstance(record, StepRecord) and not (batch and record.images_per_s):
            raise UserError(f"{path} is damaged: it has a step without images; delete the run or train it again")
        totals.add(record, record.wall_s)
        wall_s = record.wall_s
        reached = reached or first_to_reach([record], target)
    return totals.summary("stopped"), reached, wall_s


def rows_of(path: Path) -> Iterator[Record]:
    try:
        yield from read_records(path)
    except FileNotFoundError:  # the run ended before its first row
        return
    except OSError as error:
        raise UserError(f"{path / files.METRICS} cannot be read ({error.strerror}); check its permissions") from None


def first_to_reach(rows: Iterable[Record], target: float | None) -> TargetReached | None:
    for record in rows:
        if target is not None and isinstance(record, EvaluationRecord) and record.top1 >= target:
            return TargetReached(record.wall_s, record.step)
    return None


def resumed_from(path: Path) -> int | None:
    """Return the step of the last resume in the log."""
    starts = [entry.begins_at for entry in read_log(path) if entry.begins_at is not None]
    return (starts[-1] or None) if starts else None


class PlanTopology(Struct):
    """The part of plan.json that holds the topology."""

    topology: Topology


def read_ranks_and_hosts(path: Path) -> tuple[int | None, int | None]:
    plan = read_if_valid(path / files.PLAN, PlanTopology)
    if plan:
        return plan.topology.num_ranks, plan.topology.num_nodes
    variables = read_environment(path).get("variables")
    size = variables.get("WORLD_SIZE") if isinstance(variables, dict) else None
    return int(size) if isinstance(size, str) and size.isdecimal() and len(size) < 10 else None, None


def read_versions(path: Path) -> dict[str, str]:
    """Return versions and hardware, which may explain different results of equal settings."""
    found = read_environment(path)
    versions: dict[str, object] = {key: found[key] for key in VERSIONS if key in found}
    gpus = found.get("gpus")
    if isinstance(gpus, list) and gpus:
        versions["gpus"] = ", ".join(f"{count} x {name}" for name, count in Counter(map(str, gpus)).items())
    return {key: str(value) for key, value in versions.items()}


FORMAT = 1
# Not listed as differences: descriptions of the recipe, and the folder, which the user passed.
UNLISTED = ("about", "provenance", "run.dir")
NOT_OF_A_GROUP = (SEED, TARGET)  # the target only affects reporting


class Difference(Struct, frozen=True):
    """A setting or part of the environment in which the runs differ."""

    name: str
    values: list[Value | None]  # of each run; None: not set


class GapToFirst(Struct, frozen=True):
    size: float  # mean of the group minus that of the first: positive if the group is better
    interval: Interval | None  # of 95 %; None: a side has only one seed
    is_paired: bool  # by seed, if both have the same seeds; else Welch's


class SeedGroup(Struct, frozen=True, kw_only=True):
    runs: list[int]  # indices of its runs
    settings: dict[str, Value | None]  # in which the groups differ
    seeds: list[int]  # of finished runs, ascending
    num_unfinished: int  # runs that are not in the mean
    num_diverged: int
    top1: Spread | None  # over the seeds; None: no run finished, or one diverged
    gap_to_first: GapToFirst | None  # None in the first group, and if a mean is missing


class RunComparison(Struct, frozen=True, kw_only=True):
    format: int = FORMAT
    runs: list[RunOutcome]
    settings: list[Difference]
    environment: list[Difference]
    groups: list[SeedGroup]


def compare(paths: Sequence[Path], target: float | None = None) -> RunComparison:
    """Compare runs; a run passed twice counts once.  Raise UserError if one is not a run or is damaged."""
    unique: dict[str, Path] = {}
    for path in paths:
        unique.setdefault(os.path.realpath(path), path)
    paths = list(unique.values())
    if not paths:
        raise UserError("no runs to compare; for example runs/fashion-001 runs/fashion-002, or runs/*")
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
    """Return the names whose values differ, in the order of the runs' settings."""
    names = dict.fromkeys(name for one in found for name in one)
    listed = [Difference(name, [one.get(name) for one in found]) for name in names]
    return [one for one in listed if not all(is_same(value, one.values[0]) for value in one.values)]


def group_by_settings(paths: Sequence[Path], settings: Sequence[Mapping[str, Value]]) -> list[list[int]]:
    """Return the indices of runs that differ only in the seed, in the order of their first runs."""
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
    """Return the mean top-1 of each seed over its finished runs; None if a run diverged."""
    if any(outcome.status == "diverged" for outcome in outcomes):
        return None
    found: defaultdict[int, list[float]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.status == "finished" and outcome.top1 is not None and outcome.seed is not None:
            found[outcome.seed].append(outcome.top1)
    return {seed: spread(found[seed]).mean for seed in sorted(found)}


def gap_between(values: Mapping[int, float], first: Mapping[int, float]) -> GapToFirst:
    """Return the gap to the first group, paired if both have the same seeds and so the same initial weights."""
    is_paired = values.keys() == first.keys() and len(values) > 1
    # Both functions measure how far an arm is below its baseline.  Here the first group is the arm.
    found = (paired_gap if is_paired else gap)(
        arm=[first[seed] for seed in sorted(first)], baseline=[values[seed] for seed in sorted(values)]
    )
    return GapToFirst(found.size, found.interval, is_paired)
