"""Which trials a study has, and which of them are next: a function of its design and of the results that are there."""

from collections.abc import Mapping

from msgspec import Struct

from megabatch.studies.design import ArmDesign, Design
from megabatch.studies.evidence import SearchRun, SeedRun, slug
from megabatch.studies.points import Point, best_point, next_points
from megabatch.sweep.trials import Trial

SEARCH_SEED = 1_000  # none of those that count
Results = Mapping[str, SearchRun | SeedRun]  # by the name of the trial


class Planned(Struct, frozen=True):
    trial: Trial
    point: Point
    seed: int | None  # None: of the search


class Search(Struct, frozen=True):
    tried: dict[Point, SearchRun]
    wanted: list[Planned]  # of its next round, those without a result; none if it is complete

    @property
    def best(self) -> Point | None:
        """None where all diverged."""
        scores = {point: run.top1 for point, run in self.tried.items()}
        return best_point(scores) if any(score is not None for score in scores.values()) else None


def search_so_far(design: Design, arm: ArmDesign, results: Results) -> Search:
    """The search again, round by round, as far as its results are there."""
    tried: dict[Point, SearchRun] = {}
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


def chosen_point(design: Design, arm: ArmDesign, results: Results) -> Point | None:
    """What the arm is trained with, when `is_searched`; None where all diverged."""
    if arm.learning_rate is not None:
        return Point(arm.learning_rate)
    if arm.learning_rates:
        return search_so_far(design, arm, results).best
    point = chosen_point(design, design.arm(arm.learning_rate_of), results)
    return point and Point(float(f"{point.learning_rate * arm.learning_rate_times:.4g}"), point.momentum)


def seeds_of(design: Design, arm: ArmDesign, results: Results) -> list[Planned]:
    """All that the arm has, with or without a result; none before its search is complete."""
    point = chosen_point(design, arm, results) if is_searched(design, arm, results) else None
    seeds = range(1, design.num_seeds(arm) + 1) if point else ()
    return [Planned(seed_trial(design, arm, point, seed), point, seed) for seed in seeds if point]


def search_trial(design: Design, arm: ArmDesign, point: Point) -> Trial:
    assert design.search
    overrides = trial_overrides(arm, point, SEARCH_SEED)
    held_out = f"data.validation={design.search.held_out!r}"
    name = f"search-{slug(arm.name)}-{point.learning_rate:g}"
    if point.momentum is not None:
        name += f"-momentum-{point.momentum:g}"
    return Trial(name, design.recipe, (*design.settings, *overrides, held_out))


def seed_trial(design: Design, arm: ArmDesign, point: Point, seed: int) -> Trial:
    overrides = trial_overrides(arm, point, seed)
    return Trial(f"seed-{seed}-{slug(arm.name)}", design.recipe, (*design.settings, *overrides, *design.final_settings))


def trial_overrides(arm: ArmDesign, point: Point, seed: int) -> tuple[str, ...]:
    """Tested once, after the last epoch."""
    searched = [f"optim.learning_rate={point.learning_rate:g}"]
    if point.momentum is not None:
        searched.append(f"optim.momentum={point.momentum:g}")
    return (*arm.settings, f"seed={seed}", *searched, "train.evaluate_every=0")
