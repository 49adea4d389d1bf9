"""Conducts a study: searches the arms' learning rates on held-out images, then trains every arm with every seed.

All rates of one round of the search, and then all seeds of all arms, are trials in one queue, so that no core waits.
The runs that count are trained on all training images and tested once, after their last epoch, on the test images, by
which no rate was chosen.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from megabatch.ranks.machine import cpu_name, usable_cores
from megabatch.runs.reader import epoch_losses, read_environment
from megabatch.runs.records import Summary
from megabatch.studies.design import ArmDesign, Design
from megabatch.studies.evidence import Arm, Curve, SeedRun, Study, slug
from megabatch.studies.points import Point, best_point, next_points
from megabatch.sweep.trials import Trial, score_of, scores_of

SEARCH_SEED = 1_000  # none of those that count
Run = Callable[[Sequence[Trial]], list[Summary]]
Tried = dict[Point, Summary]


def conduct(design: Design, folder: Path, command: str, run: Run, follow: Callable[[Path, str], Curve]) -> Study:
    """`run` runs trials in `folder`; `follow` has the variance of a layer's output in a run's checkpoints."""
    found: dict[str, Tried] = {}
    chosen: dict[str, Point | None] = {}
    trials: dict[tuple[str, int], Trial] = {}
    summaries: dict[str, Summary] = {}
    for stage in design.stages():
        found |= search_all(design, stage, run)
        chosen |= choose_points(stage, found, chosen)
        wanted = seed_trials(design, stage, chosen)
        summaries |= run_all(run, list(wanted.values()))
        trials |= wanted
    arms = [
        Arm(
            name=arm.name,
            about=arm.about,
            settings=list(arm.overrides),
            learning_rate=point.learning_rate if (point := chosen[arm.name]) else None,
            tuned=sorted((p.learning_rate, score) for p, score in scores_of(found.get(arm.name, {})).items()),
            runs=[
                seed_run(seed, folder / trial.name, summaries[trial.name], follow, design.layer)
                for (name, seed), trial in trials.items()
                if name == arm.name
            ],
        )
        for arm in design.arms
    ]
    spent = [*summaries.values(), *(summary for tried in found.values() for summary in tried.values())]
    return Study(
        name=design.name,
        title=design.title,
        question=design.question,
        command=command,
        setup=design.setup,
        baseline=design.baseline,
        arms=arms,
        criteria=list(design.criteria),
        took_s=sum(summary.wall_s for summary in spent),
        versions=versions_of([folder / trial.name for trial in trials.values()]),
        machine=f"{len(usable_cores())} cores of {cpu_name()}",
        claims=list(design.claims),
    )


def versions_of(folders: Sequence[Path]) -> dict[str, str]:
    """Those that the runs were made with, which may have been begun long ago."""
    environments = [read_environment(folder) for folder in folders]
    return {
        name: " and ".join(sorted({str(environment.get(name, "unknown")) for environment in environments}))
        for name in ("megabatch", "torch", "python")
    }


def search_all(design: Design, arms: Sequence[ArmDesign], run: Run) -> dict[str, Tried]:
    """For every arm that searches: where it has, and what came of it."""
    searching = [arm for arm in arms if arm.grid]
    found: dict[str, Tried] = {arm.name: {} for arm in searching}
    while True:
        trials = {
            (arm.name, point): search_trial(design, arm, point)
            for arm in searching
            for point in next_points(scores_of(found[arm.name]), arm.grid, arm.momenta, design.trials)
        }
        if not trials:
            return found
        summaries = run_all(run, list(trials.values()))
        for (name, point), trial in trials.items():
            found[name][point] = summaries[trial.name]


def choose_points(
    arms: Sequence[ArmDesign], found: Mapping[str, Tried], before: Mapping[str, Point | None]
) -> dict[str, Point | None]:
    """None where all diverged."""
    chosen: dict[str, Point | None] = {}
    for arm in arms:
        if arm.grid:
            scores = scores_of(found[arm.name])
            chosen[arm.name] = best_point(scores) if any(score is not None for score in scores.values()) else None
    for arm in arms:
        if arm.learning_rate_of:
            point = {**before, **chosen}[arm.learning_rate_of]
            rate = point and float(f"{point.learning_rate * arm.learning_rate_times:.4g}")
            chosen[arm.name] = Point(rate, point.momentum) if point and rate else None
    return chosen


def seed_trials(
    design: Design, arms: Sequence[ArmDesign], chosen: Mapping[str, Point | None]
) -> dict[tuple[str, int], Trial]:
    """Seed by seed: whoever looks in before the end sees all arms."""
    most = max(design.num_seeds(arm) for arm in arms)
    return {
        (arm.name, seed): seed_trial(design, arm, point, seed)
        for seed in range(1, most + 1)
        for arm in arms
        if seed <= design.num_seeds(arm) and (point := chosen[arm.name]) is not None
    }


def run_all(run: Run, trials: Sequence[Trial]) -> dict[str, Summary]:
    return {trial.name: summary for trial, summary in zip(trials, run(trials), strict=True)}


def search_trial(design: Design, arm: ArmDesign, point: Point) -> Trial:
    overrides = trial_overrides(arm, point, SEARCH_SEED)
    held_out = f"data.validation={design.validation!r}"
    name = f"search-{slug(arm.name)}-{point.learning_rate:g}"
    if point.momentum is not None:
        name += f"-momentum-{point.momentum:g}"
    return Trial(name, design.recipe, (*design.overrides, *overrides, held_out))


def seed_trial(design: Design, arm: ArmDesign, point: Point, seed: int) -> Trial:
    overrides = trial_overrides(arm, point, seed)
    return Trial(
        f"seed-{seed}-{slug(arm.name)}", design.recipe, (*design.overrides, *overrides, *design.final_overrides)
    )


def trial_overrides(arm: ArmDesign, point: Point, seed: int) -> tuple[str, ...]:
    """Tested once, after the last epoch."""
    searched = [f"optim.learning_rate={point.learning_rate:g}"]
    if point.momentum is not None:
        searched.append(f"optim.momentum={point.momentum:g}")
    return (*arm.overrides, f"seed={seed}", *searched, "train.evaluate_every=0")


def seed_run(seed: int, folder: Path, summary: Summary, follow: Callable[[Path, str], Curve], layer: str) -> SeedRun:
    curves: dict[str, Curve] = {"training loss": [(float(epoch), loss) for epoch, loss in epoch_losses(folder).items()]}
    if layer:
        curves[f"variance of {layer}'s output"] = follow(folder, layer)
    return SeedRun(
        seed=seed,
        top1=score_of(summary),
        test_loss=summary.test_loss,
        wall_s=summary.wall_s,
        curves=curves,
    )
