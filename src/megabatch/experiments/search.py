"""Coarse-to-fine search of the learning rate of a recipe, within a budget of trials.

A geometric grid is tried first.  Then, until the budget is used up: if the best learning rate is at an end of the
tried range, the next step beyond it; otherwise the geometric midpoints between it and its neighbours.  If accuracy has
one peak over the learning rates, the peak is between the neighbours of the best as soon as the best is not at an end.

A score is an accuracy, or None for a learning rate that diverged.  Trials are full runs, evaluated on images held out
of the training images.  The search never uses test images, since that would bias their accuracy.
"""

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from megabatch.config.loading import load_config, silent
from megabatch.config.resolve import plan_run
from megabatch.config.schema import RunConfig
from megabatch.data.catalog import infer_shape
from megabatch.data.sources.shapes import DataShape
from megabatch.errors import UserError
from megabatch.experiments.trials import SweepScreen, Trial, run_trials, scores_of
from megabatch.runs.records import Summary

DIGITS = 3  # of a learning rate
HELD_OUT = 1 / 12  # share of the training images: 5,000 of Fashion-MNIST's
SPAN = 8.0  # factor below and above the recipe's learning rate
MOST_TRIALS = 1000
RATE = "optim.learning_rate"


def coarse_grid(low: float, high: float, num: int) -> list[float]:
    """Return `num` learning rates from `low` to `high` in geometric progression."""
    shares = [index / (num - 1) for index in range(num)]
    return [rounded(low ** (1 - share) * high**share) for share in shares]


def next_learning_rates(scores: Mapping[float, float | None], budget: int) -> list[float]:
    """Return at most two learning rates to try next; [] if the budget is used up or the range is exhausted."""
    assert len(scores) > 1, "a grid has at least two learning rates"
    rates, best = sorted(scores), best_learning_rate(scores)
    if is_at_end(best, scores):
        inner = rates[1] if best == rates[0] else rates[-2]
        wanted = [best * (best / inner)]
    else:
        place = rates.index(best)
        neighbours = [rates[place - 1], rates[place + 1]]
        # The better side first, in case only one trial is left.
        neighbours.sort(key=lambda rate: rank_of(scores[rate]), reverse=True)
        wanted = [math.sqrt(best) * math.sqrt(rate) for rate in neighbours]
    new = [rate for rate in map(rounded, wanted) if rate not in scores and 0 < rate < math.inf]
    return new[: max(0, budget - len(scores))]


def best_learning_rate(scores: Mapping[float, float | None]) -> float:
    """Return the best learning rate, the lowest of equals and if all diverged."""
    return max(sorted(scores), key=lambda rate: rank_of(scores[rate]))


def is_at_end(rate: float, scores: Mapping[float, float | None]) -> bool:
    return rate in (min(scores), max(scores))


def rank_of(score: float | None) -> float:
    return -math.inf if score is None else score


def rounded(rate: float) -> float:
    return float(f"{rate:.{DIGITS}g}")


class LearningRateSearch(Struct, frozen=True, kw_only=True):
    recipe: str
    overrides: tuple[str, ...]  # of the user
    held_out: tuple[str, ...]  # an override of data.validation, unless it is set already
    config: RunConfig  # of the trials, except for their learning rate
    shape: DataShape  # with held-out images in place of test images
    grid: list[float]
    num_trials: int
    folder: Path


def plan_search(
    recipe: str,
    overrides: Sequence[str],
    *,
    low: float | None,
    high: float | None,
    num_coarse: int,
    num_trials: int,
    folder: Path | None,
) -> LearningRateSearch:
    """Check the options and settings, and return the search."""
    for override in overrides:
        if override.partition("=")[0] == "run.dir":
            raise UserError(f"{override}: each trial has its own folder; use --folder for all of them")
    config = load_config(recipe, overrides)
    grid = plan_grid(low, high, config.optim.learning_rate, num_coarse, num_trials)
    held_out = () if config.data.held_out(has_tests=True) else (f"data.validation={HELD_OUT!r}",)
    config = load_config(recipe, [*overrides, *held_out], report=silent)
    shape = infer_shape(config.data)
    plan_run(config, shape, num_ranks=1)
    return LearningRateSearch(
        recipe=recipe,
        overrides=tuple(overrides),
        held_out=held_out,
        config=config,
        shape=shape,
        grid=grid,
        num_trials=num_trials,
        folder=folder or Path("runs") / f"lr-range-{config.name}",
    )


def plan_grid(low: float | None, high: float | None, rate: float, num_coarse: int, num_trials: int) -> list[float]:
    low = rate / SPAN if low is None else low
    high = rate * SPAN if high is None else high
    if num_trials > MOST_TRIALS:
        raise UserError(f"--trials {num_trials}: expected at most {MOST_TRIALS:,}; nearest: --trials {MOST_TRIALS}")
    if not 0 < low < math.inf:
        raise UserError(f"--low {low:g}: a learning rate is above 0 and finite; for example --low {rate / SPAN:g}")
    if not low < high < math.inf:
        raise UserError(f"--high {high:g}: expected above --low {low:g} and finite; for example --high {low * 64:g}")
    if num_coarse < 2:
        raise UserError(f"--coarse {num_coarse}: expected at least 2; nearest: --coarse 2")
    if num_trials < num_coarse:
        raise UserError(
            f"--trials {num_trials}: expected at least --coarse {num_coarse}, the first trials; "
            f"nearest: --trials {num_coarse}"
        )
    grid = coarse_grid(low, high, num_coarse)
    if len({*grid}) < num_coarse:
        raise UserError(
            f"--low {low:g} --high {high:g}: too close for {num_coarse} learning rates of three digits; "
            f"for example --high {low * 64:g}"
        )
    return grid


def search_learning_rates(search: LearningRateSearch, jobs: int, screen: SweepScreen) -> dict[float, Summary]:
    """Run all trials; return the summary of each learning rate."""

    def run(rates: Sequence[float]) -> dict[float, Summary]:
        # Includes earlier trials: run_trials checks each time that their recipe is unchanged.
        trials = [trial_of(search, rate) for rate in rates]
        return dict(zip(rates, run_trials(trials, search.folder, jobs, screen), strict=True))

    results = run(search.grid)
    while more := next_learning_rates(scores_of(results), search.num_trials):
        results = run([*results, *more])
    return results


def trial_of(search: LearningRateSearch, rate: float) -> Trial:
    return Trial(f"rate-{rate:g}", search.recipe, (*search.overrides, *search.held_out, f"{RATE}={rate:g}"))


def command_for(search: LearningRateSearch, rate: float) -> str:
    """Return the command that trains with this learning rate."""
    overrides = [override for override in search.overrides if override.partition("=")[0] != RATE]
    return shlex.join(["megabatch", "train", search.recipe, *overrides, f"{RATE}={rate:g}"])


def conclude(results: Mapping[float, Summary]) -> tuple[float, str]:
    """Return the best learning rate and a sentence about it."""
    scores = scores_of(results)
    best = best_learning_rate(scores)
    if scores[best] is None:
        raise UserError(
            f"all {len(scores)} learning rates from {min(scores):g} to {max(scores):g} diverged; for example "
            f"--low {best / SPAN**2:.3g} --high {best:g}"
        )
    if not is_at_end(best, scores):
        below, above = max(rate for rate in scores if rate < best), min(rate for rate in scores if rate > best)
        return best, f"{best:g}, between {below:g} and {above:g}"
    end, side = ("lowest", "below") if best == min(scores) else ("highest", "above")
    return best, (
        f"{best:g}, the {end} that was tried: a value {side} it may be better; "
        f"run the same command with --trials {len(scores) + 4} to continue there"
    )
