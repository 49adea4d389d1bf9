"""The trials of a study and the next ones to run, as functions of its design and results.

An arm searches learning rates, and momenta if its design lists them, within one budget of trials.  With learning rate
eta and momentum mu, a weight moves by about eta / (1 - mu) times its gradient in the long run, so that

    eta (1 - mu_0) / (1 - mu)

with mu_0 is as fast as eta with mu.  The grid of learning rates is tried with the first momentum.  Then the best
learning rate is tried with each other momentum, at the same speed.  Finally, the best momentum is kept and the learning
rates are refined, on the axis of equal speed with the first momentum.  All arms have the same budget, so momenta leave
fewer trials for the refinement.
"""

from collections.abc import Mapping, Sequence

from msgspec import Struct

from megabatch.experiments.design import ArmDesign, Design
from megabatch.experiments.evidence import SearchRun, SeedRun, slug
from megabatch.experiments.search import next_learning_rates, rank_of, rounded
from megabatch.experiments.trials import Trial

Score = float | None  # None: diverged


class SearchPoint(Struct, frozen=True, order=True):
    learning_rate: float
    momentum: float | None = None  # None: the recipe's


def next_points(
    scores: Mapping[SearchPoint, Score], grid: Sequence[float], momenta: Sequence[float], budget: int
) -> list[SearchPoint]:
    """Return the points to try next, or [] if the budget is used up."""
    if not scores:
        return [SearchPoint(rate, momenta[0] if momenta else None) for rate in grid]
    best, left = best_point(scores), budget - len(scores)
    tried = {point.momentum for point in scores}
    if others := [momentum for momentum in momenta if momentum not in tried]:
        return [as_fast_as(best, momentum) for momentum in others][: max(0, left)]
    first = momenta[0] if momenta else None
    along: dict[float, Score] = {}
    for point, score in scores.items():
        rate = as_fast_as(point, first).learning_rate
        along[rate] = max(along.get(rate), score, key=rank_of)
    # A learning rate may have been tried with several momenta, so there may be fewer rates than trials.
    rates = next_learning_rates(along, len(along) + left)
    return [as_fast_as(SearchPoint(rate, first), best.momentum) for rate in rates]


def best_point(scores: Mapping[SearchPoint, Score]) -> SearchPoint:
    """Return the point with the best score, the lowest of equals."""
    return max(sorted(scores), key=lambda point: rank_of(scores[point]))


def as_fast_as(point: SearchPoint, momentum: float | None) -> SearchPoint:
    if point.momentum is None or momentum is None or momentum == point.momentum:
        return point
    return SearchPoint(rounded(point.learning_rate * (1 - momentum) / (1 - point.momentum)), momentum)


SEARCH_SEED = 1_000  # not a seed of final runs
Results = Mapping[str, SearchRun | SeedRun]  # by the name of the trial


class Planned(Struct, frozen=True):
    trial: Trial
    point: SearchPoint
    seed: int | None  # None: a trial of the search


class Search(Struct, frozen=True):
    tried: dict[SearchPoint, SearchRun]
    wanted: list[Planned]  # trials of the next round without a result; [] if the search is complete

    @property
    def best(self) -> SearchPoint | None:
        """Return the best point, or None if all diverged."""
        scores = {point: run.top1 for point, run in self.tried.items()}
        return best_point(scores) if any(score is not None for score in scores.values()) else None


def search_so_far(design: Design, arm: ArmDesign, results: Results) -> Search:
    """Replay the search round by round with the results so far."""
    tried: dict[SearchPoint, SearchRun] = {}
    while arm.learning_rates:
        assert design.search
        scores = {point: run.top1 for point, run in tried.items()}
        points = next_points(scores, arm.learning_rates, arm.momenta, design.search.trials)
        if not points:
            break
        trials = {point: search_trial(design, arm, point) for point in points}
        for point, trial in trials.items():
            if isinstance(run := results.get(trial.name), SearchRun):
                tried[point] = run
        if wanted := [Planned(trial, point, None) for point, trial in trials.items() if point not in tried]:
            return Search(tried, wanted)
    return Search(tried, [])


def is_searched(design: Design, arm: ArmDesign, results: Results) -> bool:
    source = design.arm(arm.learning_rate_of) if arm.learning_rate_of else arm
    return not search_so_far(design, source, results).wanted


def chosen_point(design: Design, arm: ArmDesign, results: Results) -> SearchPoint | None:
    """Return the point that the arm trains with, once it `is_searched`; None if all diverged."""
    if arm.learning_rate is not None:
        return SearchPoint(arm.learning_rate)
    if arm.learning_rates:
        return search_so_far(design, arm, results).best
    point = chosen_point(design, design.arm(arm.learning_rate_of), results)
    return point and SearchPoint(float(f"{point.learning_rate * arm.learning_rate_times:.4g}"), point.momentum)


def seeds_of(design: Design, arm: ArmDesign, results: Results) -> list[Planned]:
    """Return the seeds of the arm, with or without a result; [] before its search is complete."""
    point = chosen_point(design, arm, results) if is_searched(design, arm, results) else None
    seeds = range(1, design.num_seeds(arm) + 1) if point else ()
    return [Planned(seed_trial(design, arm, point, seed), point, seed) for seed in seeds if point]


def search_trial(design: Design, arm: ArmDesign, point: SearchPoint) -> Trial:
    assert design.search
    overrides = trial_overrides(arm, point, SEARCH_SEED)
    held_out = f"data.validation={design.search.held_out!r}"
    name = f"search-{slug(arm.name)}-{point.learning_rate:g}"
    if point.momentum is not None:
        name += f"-momentum-{point.momentum:g}"
    return Trial(name, design.recipe, (*design.settings, *overrides, held_out))


def seed_trial(design: Design, arm: ArmDesign, point: SearchPoint, seed: int) -> Trial:
    overrides = trial_overrides(arm, point, seed)
    return Trial(f"seed-{seed}-{slug(arm.name)}", design.recipe, (*design.settings, *overrides, *design.final_settings))


def trial_overrides(arm: ArmDesign, point: SearchPoint, seed: int) -> tuple[str, ...]:
    """Return the overrides of a trial, which trains for all epochs and is evaluated once, at the end."""
    searched = [f"optim.learning_rate={point.learning_rate:g}"]
    if point.momentum is not None:
        searched.append(f"optim.momentum={point.momentum:g}")
    whole = ("train.evaluate_every=0", "train.patience=0", "train.stop_at_target=false")
    return (*arm.settings, f"seed={seed}", *searched, *whole)
