"""Compare how much time and how many epochs training methods need to reach a top-1.

Every arm is trained with the same seeds.  A seed reaches the target at its first evaluation with at least that top-1;
its time is the run's wall time then, as `time_to_target_s` of the summary.  Means are over seeds, with 95 % intervals
(Student's t).  The ratio of two arms is that of their geometric means, with Welch's interval of the difference of
logarithms.  If a seed does not reach the target, its arm has no mean: a mean of the others would be too good.

Other load on the machine changes wall times.  A design can therefore use quiet times:

    quiet time = sum over sides of (steps with images of that side) x (seconds of such a step)
                 + evaluations x (seconds of an evaluation)

The seconds are medians over steps of separate short runs, and the least of three of them, since other load only adds
to it.  These runs take turns before all others, and only they need an otherwise idle machine.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct, field

from megabatch.config.loading import load_config, silent
from megabatch.errors import UserError
from megabatch.experiments.conduct import fingerprint
from megabatch.experiments.design import TimeArm, TimeCriterion, TimeDesign
from megabatch.experiments.drawing import color_of, dash_of, label_ends, to_svg
from megabatch.experiments.evidence import slug
from megabatch.experiments.page import bullets, table
from megabatch.experiments.trials import Trial
from megabatch.io.disk import write_file
from megabatch.io.numbers import duration, plural
from megabatch.planning.sizes import sides_of
from megabatch.runs.intervals import Interval, gap, spread
from megabatch.runs.reader import read_records
from megabatch.runs.records import EvaluationRecord, StepRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "time-to-accuracy"
WIDTH_INCHES, HEIGHT_INCHES = 8.0, 4.0
QUIET_ROUNDS = 3
WARM_UP_STEPS = 5  # of a quiet run, not counted
NONE = "-"


class Evaluated(Struct, frozen=True):
    wall_s: float
    epoch: float
    top1: float
    steps: dict[int, int] = field(default_factory=dict)  # so far, by the side of their images


class SeedTime(Struct, frozen=True):
    seed: int
    evaluations: list[Evaluated]

    def reached(self, target: float) -> int | None:
        """Return the place of the first evaluation that reached the target."""
        return next((place for place, each in enumerate(self.evaluations) if each.top1 >= target), None)


class QuietTimes(Struct, frozen=True):
    """Measured seconds with images of one side, one value per separate run."""

    side: int
    step_s: list[float]  # medians
    evaluation_s: list[float]


class ArmTimes(Struct, frozen=True):
    name: str
    about: str
    settings: list[str]
    quiet: list[QuietTimes]
    runs: list[SeedTime]

    def quiet_s(self, run: SeedTime, place: int) -> float:
        """Return the quiet time of a run until an evaluation."""
        step_s = {each.side: min(each.step_s) for each in self.quiet}
        evaluation_s = min(value for each in self.quiet for value in each.evaluation_s)
        steps = run.evaluations[place].steps
        return math.fsum(count * step_s[side] for side, count in steps.items()) + (place + 1) * evaluation_s


class TimeStudy(Struct, frozen=True, kw_only=True):
    name: str
    title: str
    question: str
    setup: str
    command: str
    target: float
    num_seeds: int
    settings: list[str]  # of all arms
    machine: str
    arms: list[ArmTimes]
    criteria: list[TimeCriterion] = field(default_factory=list)

    def arm(self, name: str) -> ArmTimes:
        return next(arm for arm in self.arms if arm.name == name)

    @property
    def is_quiet(self) -> bool:
        return all(arm.quiet for arm in self.arms)

    def seconds(self, arm: ArmTimes, run: SeedTime, place: int) -> float:
        """Return the time that arms are compared by: the quiet one if it was measured."""
        return arm.quiet_s(run, place) if self.is_quiet else run.evaluations[place].wall_s


def design_of_recipes(recipes: Sequence[str], overrides: Sequence[str], target: float, num_seeds: int) -> TimeDesign:
    """Return the design that compares recipes."""
    names = [slug(Path(recipe).stem) for recipe in recipes]
    for name, recipe in zip(names, recipes, strict=True):
        if not name or names.count(name) > 1:
            raise UserError(f"{NAME}: recipe {recipe!r} is given twice, or has no name; give each recipe once")
    return TimeDesign(
        name=NAME,
        title=f"Time to a top-1 of {target:g}",
        settings=tuple(overrides),
        arms=tuple(TimeArm(name=name, recipe=recipe) for name, recipe in zip(names, recipes, strict=True)),
        target=target,
        seeds=num_seeds,
    )


class TimeTrials(Struct, frozen=True):
    """The runs of a design.  A quiet run may serve several arms."""

    quiet: dict[str, dict[int, list[Trial]]]  # by arm and side, one per round
    seeds: dict[str, list[Trial]]  # by arm

    def in_turns(self) -> list[Trial]:
        """Return all trials: the quiet ones by round, then by seed, so that a slow hour affects all arms."""
        of_sides = [trials for of_arm in self.quiet.values() for trials in of_arm.values()]
        rounds = [*zip(*of_sides, strict=True), *zip(*self.seeds.values(), strict=True)]
        return list(dict.fromkeys(trial for turn in rounds for trial in turn))


def trials_of(design: TimeDesign) -> TimeTrials:
    quiet: dict[str, dict[int, list[Trial]]] = {}
    seeds: dict[str, list[Trial]] = {}
    known: dict[str, Trial] = {}
    for arm in design.arms:
        recipe = arm.recipe or design.recipe
        settings = (*design.settings, *arm.settings)
        config = load_config(recipe, settings, report=silent)  # raises before hours of training
        target = f"train.target_top1={design.target:g}"
        seeds[arm.name] = [
            Trial(f"seed-{seed}-{slug(arm.name)}", recipe, (*settings, f"seed={seed}", target))
            for seed in range(1, design.seeds + 1)
        ]
        sides = dict.fromkeys(sides_of(config.data.sizes) or [config.data.image_size])
        quiet[arm.name] = {}
        for side in sides if design.quiet_steps else ():
            fixed = (
                *("data.sizes=[]", f"data.image_size={side}", f"data.test_image_size={config.data.test_side}"),
                *(f"data.crop_padding={config.data.padding_at(side)}", f"train.steps={design.quiet_steps}"),
                *("schedule.warmup_epochs=0", "seed=1"),
            )
            trial = Trial(f"{slug(arm.name)}-{side}", recipe, (*settings, *fixed))
            alike = known.setdefault(fingerprint(trial), trial)
            quiet[arm.name][side] = [
                Trial(f"quiet-{number}-{alike.name}", alike.recipe, alike.overrides)
                for number in range(1, QUIET_ROUNDS + 1)
            ]
    return TimeTrials(quiet, seeds)


def read_seed(folder: Path, seed: int) -> SeedTime:
    steps, evaluations = Counter[int](), []
    for row in read_records(folder):
        if isinstance(row, EvaluationRecord):
            evaluations.append(Evaluated(row.wall_s, row.epoch, row.top1, dict(steps)))
        else:
            steps[row.image_size] += 1
    return SeedTime(seed, evaluations)


def read_quiet(folders: Sequence[Path], side: int) -> QuietTimes:
    step_s, evaluation_s = [], []
    for folder in folders:
        rows = list(read_records(folder))
        steps = [row.times for row in rows if isinstance(row, StepRecord)]
        step_s.append(median([times.total - times.evaluation - times.checkpoint for times in steps[WARM_UP_STEPS:]]))
        evaluation_s.append(median([row.times.evaluation for row in rows if isinstance(row, EvaluationRecord)]))
    return QuietTimes(side, step_s, evaluation_s)


def study_so_far(
    design: TimeDesign, trials: TimeTrials, folder: Path, done: set[str], about: Mapping[str, str]
) -> TimeStudy:
    """Return the results of the trials that are `done`."""
    arms = [
        ArmTimes(
            arm.name,
            arm.about,
            list(arm.settings),
            [
                read_quiet([folder / trial.name for trial in of_side], side)
                for side, of_side in trials.quiet[arm.name].items()
                if {trial.name for trial in of_side} <= done
            ],
            [
                read_seed(folder / trial.name, seed)
                for seed, trial in enumerate(trials.seeds[arm.name], 1)
                if trial.name in done
            ],
        )
        for arm in design.arms
    ]
    return TimeStudy(
        name=design.name,
        title=design.title,
        question=design.question,
        setup=design.setup,
        command=about["command"],
        target=design.target,
        num_seeds=design.seeds,
        settings=list(design.settings),
        machine=about["machine"],
        arms=arms,
        criteria=list(design.criteria),
    )


def reached(study: TimeStudy, arm: ArmTimes) -> list[tuple[SeedTime, int]]:
    """Return the seeds that reached the target, and the evaluation at which they did."""
    return [(run, place) for run in arm.runs if (place := run.reached(study.target)) is not None]


def is_complete(study: TimeStudy, arm: ArmTimes) -> bool:
    return len(reached(study, arm)) == study.num_seeds


def head(study: TimeStudy) -> list[str]:
    columns = ["arm", "seeds at the target", "epochs", "minutes", "last top-1, %"]
    return [*columns, *["quiet minutes"] * study.is_quiet, f"times as fast as {study.arms[0].name}"]


def summarize(study: TimeStudy) -> list[list[str]]:
    """Return a row per arm, as in `head`."""
    first = study.arms[0]
    rows = []
    for arm in study.arms:
        row = [
            arm.name,
            f"{len(reached(study, arm))} of {len(arm.runs)}",
            mean_words(study, arm, lambda run, place: run.evaluations[place].epoch, "{:.1f}"),
            mean_words(study, arm, lambda run, place: run.evaluations[place].wall_s / 60, "{:.2f}"),
            last_words(arm),
        ]
        if study.is_quiet:
            row.append(mean_words(study, arm, partial(quiet_minutes, arm), "{:.2f}"))
        rows.append([*row, "1" if arm is first else ratio_words(time_ratio(study, arm, first))])
    return rows


def quiet_minutes(arm: ArmTimes, run: SeedTime, place: int) -> float:
    return arm.quiet_s(run, place) / 60


def last_words(arm: ArmTimes) -> str:
    """Return the mean top-1 after the last step."""
    found = [100 * run.evaluations[-1].top1 for run in arm.runs if run.evaluations]
    return spread_words(found, "{:.1f}") if found else NONE


def mean_words(study: TimeStudy, arm: ArmTimes, value: Callable[[SeedTime, int], float], shape: str) -> str:
    if not is_complete(study, arm):
        return NONE
    return spread_words([value(*found) for found in reached(study, arm)], shape)


def spread_words(values: Sequence[float], shape: str) -> str:
    found = spread(values)
    return shape.format(found.mean) + interval_words(found.interval, shape)


def interval_words(interval: Interval | None, shape: str) -> str:
    return f" ({shape.format(interval.low)} to {shape.format(interval.high)})" if interval else ""


class Ratio(Struct, frozen=True):
    """How many times as fast as another arm this one reaches the target."""

    size: float
    interval: Interval | None


def time_ratio(study: TimeStudy, arm: ArmTimes, other: ArmTimes) -> Ratio | None:
    """Return None if a seed of one of them did not reach the target."""
    if not (is_complete(study, arm) and is_complete(study, other)):
        return None
    logs = [[math.log(study.seconds(each, *found)) for found in reached(study, each)] for each in (arm, other)]
    found = gap(*logs)
    return Ratio(
        math.exp(found.size), found.interval and Interval(math.exp(found.interval.low), math.exp(found.interval.high))
    )


def ratio_words(found: Ratio | None) -> str:
    return NONE if found is None else f"{found.size:.2f}{interval_words(found.interval, '{:.2f}')}"


def judge_time(study: TimeStudy, criterion: TimeCriterion) -> tuple[bool | None, str]:
    """Return whether the criterion holds, or None before all its seeds are complete, and a sentence."""
    arm, other = study.arm(criterion.arm), study.arm(criterion.baseline)
    rule = f"expected: at least {criterion.least_ratio:g} times as fast, and an interval above 1"
    if min(len(arm.runs), len(other.runs)) < study.num_seeds:
        return None, f"{arm.name} against {other.name}: not judged before all seeds are complete"
    for each in (arm, other):
        if not is_complete(study, each):
            count = f"{len(reached(study, each))} of {plural(study.num_seeds, 'seed')}"
            holds = each is other
            result = "holds" if holds else "does not hold"
            return holds, f"{arm.name} against {other.name}: {count} of {each.name} reach the target; {result}"
    found = time_ratio(study, arm, other)
    assert found is not None
    holds = found.size >= criterion.least_ratio and found.interval is not None and found.interval.low > 1
    result = "holds" if holds else "does not hold"
    return holds, f"{arm.name} is {ratio_words(found)} times as fast as {other.name}; {rule}: {result}"


def page(study: TimeStudy) -> str:
    with_settings = f" with {', '.join(f'`{each}`' for each in study.settings)}" if study.settings else ""
    took_s = math.fsum(run.evaluations[-1].wall_s for arm in study.arms for run in arm.runs if run.evaluations)
    parts = [
        f"# {study.title}",
        study.question,
        bullets([f"{judge_time(study, criterion)[1]}." for criterion in study.criteria]),
        f"`{study.command}`, on {study.machine}{with_settings}. Target: a top-1 of {study.target:g}. Every evaluation "
        f"of every seed is in [{study.name}.json]({study.name}.json).",
        table(head(study), summarize(study)),
        "Means over seeds with 95 % intervals. Minutes are the wall time of the run, evaluations included, at the "
        f"first evaluation with this top-1. Runs planned: {plural(study.num_seeds, 'seed')} for each arm; they took "
        f"{duration(took_s)}.",
        f"![top-1 against minutes]({study.name}.svg)",
    ]
    if study.is_quiet:
        parts += [
            "Quiet minutes are the number of steps at each image size times the seconds of such a step, plus the "
            "number of evaluations times the seconds of one. These seconds are medians of short runs on an otherwise "
            "idle machine, before all other runs; of the runs in the table, the shortest time is used. Ratios are "
            "those of quiet minutes.",
            quiet_table(study),
        ]
    if study.setup:
        parts += ["## Setup", study.setup]
    if any(arm.settings for arm in study.arms):
        rows = [[arm.name, arm.about or NONE, " ".join(f"`{each}`" for each in arm.settings)] for arm in study.arms]
        parts.append(table(("arm", "description", "settings"), rows))
    return "\n\n".join(part for part in parts if part) + "\n"


def quiet_table(study: TimeStudy) -> str:
    rows = [
        [arm.name, str(each.side), in_turns_ms(each.step_s), in_turns_ms(each.evaluation_s)]
        for arm in study.arms
        for each in arm.quiet
    ]
    return table(("arm", "side, pixels", "ms per step", "ms per evaluation"), rows)


def in_turns_ms(values: Sequence[float]) -> str:
    return ", ".join(f"{1e3 * value:.1f}" for value in values)


def draw(study: TimeStudy, figure: "Figure") -> None:
    """Draw the top-1 of every seed against time, and the target."""
    figure.set_size_inches(WIDTH_INCHES, HEIGHT_INCHES)
    axes = figure.subplots()
    ends = []
    for index, arm in enumerate(study.arms):
        color, dash = color_of(index), dash_of(index)
        for run in arm.runs:
            points = [
                (study.seconds(arm, run, place) / 60, 100 * each.top1) for place, each in enumerate(run.evaluations)
            ]
            axes.plot(*zip(*points, strict=True), color=color, ls=dash, lw=1, alpha=0.7)
            if (place := run.reached(study.target)) is not None:
                axes.plot(*([value] for value in points[place]), "o", color=color, ms=4)
        if arm.runs:
            ends.append((*points[-1], arm.name, color))
    axes.axhline(100 * study.target, color="#222222", lw=1, ls=(0, (2, 1.5)))
    kind = "quiet minutes" if study.is_quiet else "minutes"
    axes.set_xlabel(f"{kind}; dots: the first evaluation at the target")
    axes.set_ylabel("top-1, %")
    axes.set_xlim(left=0)
    label_ends(axes, ends, HEIGHT_INCHES)


def write_time_study(study: TimeStudy, folder: Path) -> list[Path]:
    """Write the JSON, the figure and the page."""
    folder.mkdir(parents=True, exist_ok=True)
    contents = {
        "json": msgspec.json.format(msgspec.json.encode(study), indent=1) + b"\n",
        "svg": to_svg(partial(draw, study)).encode(),
        "md": page(study).encode(),
    }
    return [write_file(folder / f"{study.name}.{suffix}", content) for suffix, content in contents.items()]
