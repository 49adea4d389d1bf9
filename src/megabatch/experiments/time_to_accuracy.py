"""megabatch study time-to-accuracy: the time and the epochs that recipes need to reach a top-1.

Every recipe is trained with the same seeds.  A seed reaches the target at its first evaluation with at least that
top-1; its time is the run's wall time then, as `time_to_target_s` of the summary.  Means are over seeds, with 95 %
intervals (Student's t).  The ratio of two recipes is that of their geometric means, with Welch's interval of the
difference of logarithms.  If a seed does not reach the target, its recipe has no mean: that of the others would be too
good.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from megabatch.config.loading import load_config, silent
from megabatch.errors import UserError
from megabatch.experiments.drawing import color_of, dash_of, label_ends, to_svg
from megabatch.experiments.evidence import slug
from megabatch.experiments.page import table
from megabatch.experiments.trials import Trial
from megabatch.io.disk import write_file
from megabatch.io.numbers import duration, plural
from megabatch.runs.intervals import Interval, gap, spread
from megabatch.runs.reader import read_records
from megabatch.runs.records import EvaluationRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "time-to-accuracy"
WIDTH_INCHES, HEIGHT_INCHES = 8.0, 4.0


class Evaluated(Struct, frozen=True):
    wall_s: float
    epoch: float
    top1: float


class SeedTime(Struct, frozen=True):
    seed: int
    evaluations: list[Evaluated]

    def reached(self, target: float) -> Evaluated | None:
        return next((each for each in self.evaluations if each.top1 >= target), None)


class RecipeTimes(Struct, frozen=True):
    recipe: str
    runs: list[SeedTime]

    def reached(self, target: float) -> list[Evaluated]:
        """Return the first evaluation of each seed that reached the target."""
        return [found for run in self.runs if (found := run.reached(target))]


class TimeStudy(Struct, frozen=True, kw_only=True):
    command: str
    target: float
    num_seeds: int
    overrides: list[str]
    machine: str
    recipes: list[RecipeTimes]


def trials_of(
    recipes: Sequence[str], overrides: Sequence[str], target: float, num_seeds: int
) -> dict[str, list[Trial]]:
    """Return the trials of each recipe, by its name."""
    found: dict[str, list[Trial]] = {}
    for recipe in recipes:
        name = slug(Path(recipe).stem)
        if not name or name in found:
            raise UserError(f"{NAME}: recipe {recipe!r} is given twice, or has no name; give each recipe once")
        found[name] = [
            Trial(f"seed-{seed}-{name}", recipe, (*overrides, f"seed={seed}", f"train.target_top1={target:g}"))
            for seed in range(1, num_seeds + 1)
        ]
        load_config(recipe, found[name][0].overrides, report=silent)  # before hours of training
    return found


def in_turns(trials: dict[str, list[Trial]]) -> list[Trial]:
    """Order by seed, so that a slow hour of the machine affects all recipes."""
    return [trial for turn in zip(*trials.values(), strict=True) for trial in turn]


def read_seed(folder: Path, seed: int) -> SeedTime:
    rows = [record for record in read_records(folder) if isinstance(record, EvaluationRecord)]
    return SeedTime(seed, [Evaluated(row.wall_s, row.epoch, row.top1) for row in rows])


def times_so_far(trials: dict[str, list[Trial]], folder: Path, done: set[str]) -> list[RecipeTimes]:
    return [
        RecipeTimes(
            name,
            [read_seed(folder / trial.name, seed) for seed, trial in enumerate(of, 1) if trial.name in done],
        )
        for name, of in trials.items()
    ]


def summarize(study: TimeStudy) -> list[list[str]]:
    """Return a row per recipe: seeds that reached the target, time, epochs, and time relative to the first recipe."""
    first = study.recipes[0]
    return [
        [
            times.recipe,
            f"{len(times.reached(study.target))} of {len(times.runs)}",
            mean_words(study, times, lambda found: found.wall_s / 60, "{:.2f}"),
            mean_words(study, times, lambda found: found.epoch, "{:.1f}"),
            "1" if times is first else ratio_words(study, times, first),
        ]
        for times in study.recipes
    ]


def is_complete(study: TimeStudy, times: RecipeTimes) -> bool:
    return len(times.reached(study.target)) == study.num_seeds


def mean_words(study: TimeStudy, times: RecipeTimes, value: Callable[[Evaluated], float], shape: str) -> str:
    if not is_complete(study, times):
        return "-"
    found = spread([value(each) for each in times.reached(study.target)])
    return shape.format(found.mean) + interval_words(found.interval, shape)


def interval_words(interval: Interval | None, shape: str) -> str:
    return f" ({shape.format(interval.low)} to {shape.format(interval.high)})" if interval else ""


def time_ratio(study: TimeStudy, times: RecipeTimes, first: RecipeTimes) -> tuple[float, Interval | None] | None:
    """Return how many times as fast as the first recipe this one reaches the target; None if a seed did not."""
    if not (is_complete(study, times) and is_complete(study, first)):
        return None
    logs = [[math.log(found.wall_s) for found in each.reached(study.target)] for each in (times, first)]
    found = gap(*logs)
    interval = found.interval and Interval(math.exp(found.interval.low), math.exp(found.interval.high))
    return math.exp(found.size), interval


def ratio_words(study: TimeStudy, times: RecipeTimes, first: RecipeTimes) -> str:
    found = time_ratio(study, times, first)
    return "-" if found is None else f"{found[0]:.2f}{interval_words(found[1], '{:.2f}')}"


def page(study: TimeStudy) -> str:
    head = ["recipe", "seeds at the target", "minutes", "epochs", f"times as fast as {study.recipes[0].recipe}"]
    overrides = f" with {', '.join(f'`{each}`' for each in study.overrides)}" if study.overrides else ""
    took_s = math.fsum(run.evaluations[-1].wall_s for times in study.recipes for run in times.runs if run.evaluations)
    return "\n".join(
        [
            f"# Time to a top-1 of {study.target:g}",
            f"`{study.command}`, on {study.machine}{overrides}.",
            "",
            table(head, summarize(study)),
            "",
            "Means over seeds with 95 % intervals. The time is the wall time of the run, evaluations included, at the "
            f"first evaluation with this top-1. Runs planned: {plural(study.num_seeds, 'seed')} for each recipe; "
            f"they took {duration(took_s)}.",
            "",
            f"![top-1 against minutes]({NAME}.svg)",
            "",
        ]
    )


def draw(study: TimeStudy, figure: "Figure") -> None:
    """Draw the top-1 of every seed against time, and the target."""
    figure.set_size_inches(WIDTH_INCHES, HEIGHT_INCHES)
    axes = figure.subplots()
    ends = []
    for place, times in enumerate(study.recipes):
        color, dash = color_of(place), dash_of(place)
        for run in times.runs:
            points = [(each.wall_s / 60, 100 * each.top1) for each in run.evaluations]
            axes.plot(*zip(*points, strict=True), color=color, ls=dash, lw=1, alpha=0.7)
            if found := run.reached(study.target):
                axes.plot([found.wall_s / 60], [100 * found.top1], "o", color=color, ms=4)
        if times.runs:
            ends.append((*points[-1], times.recipe, color))
    axes.axhline(100 * study.target, color="#222222", lw=1, ls=(0, (2, 1.5)))
    axes.set_xlabel("minutes; dots: the first evaluation at the target")
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
    return [write_file(folder / f"{NAME}.{suffix}", content) for suffix, content in contents.items()]
