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
from megabatch.sweep.search import best_learning_rate, next_learning_rates
from megabatch.sweep.trials import Trial, score_of, scores_of

SEARCH_SEED = 1_000  # none of those that count
Run = Callable[[Sequence[Trial]], list[Summary]]
Tried = dict[float, Summary]  # by rate


def conduct(design: Design, folder: Path, command: str, run: Run, follow: Callable[[Path, str], Curve]) -> Study:
    """`run` runs trials in `folder`; `follow` has the variance of a layer's output in a run's checkpoints."""
    found = search_all(design, run)
    rates = choose_learning_rates(design, found)
    trials = {  # seed by seed: whoever looks in before the end sees all arms
        (arm.name, seed): seed_trial(design, arm, rate, seed)
        for seed in range(1, design.seeds + 1)
        for arm in design.arms
        if (rate := rates[arm.name]) is not None
    }
    summaries = run_all(run, list(trials.values()))
    arms = [
        Arm(
            name=arm.name,
            about=arm.about,
            settings=list(arm.overrides),
            learning_rate=rates[arm.name],
            tuned=sorted(scores_of(found.get(arm.name, {})).items()),
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


def search_all(design: Design, run: Run) -> dict[str, Tried]:
    """For every arm that searches: the rates it has tried, and what came of them."""
    searching = [arm for arm in design.arms if arm.grid]
    found: dict[str, Tried] = {arm.name: {} for arm in searching}
    wanted = {arm.name: list(arm.grid) for arm in searching}
    while any(wanted.values()):
        trials = {(arm.name, rate): search_trial(design, arm, rate) for arm in searching for rate in wanted[arm.name]}
        summaries = run_all(run, list(trials.values()))
        for (name, rate), trial in trials.items():
            found[name][rate] = summaries[trial.name]
        wanted = {name: next_learning_rates(scores_of(tried), design.trials) for name, tried in found.items()}
    return found


def choose_learning_rates(design: Design, found: Mapping[str, Tried]) -> dict[str, float | None]:
    """None where all rates diverged."""
    rates: dict[str, float | None] = {}
    for name, tried in found.items():
        scores = scores_of(tried)
        rates[name] = best_learning_rate(scores) if any(score is not None for score in scores.values()) else None
    for arm in design.arms:
        if arm.learning_rate_of:
            rate = rates[arm.learning_rate_of]
            rates[arm.name] = None if rate is None else float(f"{rate * arm.learning_rate_times:.4g}")
    return rates


def run_all(run: Run, trials: Sequence[Trial]) -> dict[str, Summary]:
    return {trial.name: summary for trial, summary in zip(trials, run(trials), strict=True)}


def search_trial(design: Design, arm: ArmDesign, rate: float) -> Trial:
    overrides = trial_overrides(arm, rate, SEARCH_SEED)
    held_out = f"data.validation={design.validation!r}"
    return Trial(f"search-{slug(arm.name)}-{rate:g}", design.recipe, (*design.overrides, *overrides, held_out))


def seed_trial(design: Design, arm: ArmDesign, rate: float, seed: int) -> Trial:
    overrides = trial_overrides(arm, rate, seed)
    return Trial(
        f"seed-{seed}-{slug(arm.name)}", design.recipe, (*design.overrides, *overrides, *design.final_overrides)
    )


def trial_overrides(arm: ArmDesign, rate: float, seed: int) -> tuple[str, ...]:
    """Tested once, after the last epoch."""
    return (*arm.overrides, f"seed={seed}", f"optim.learning_rate={rate:g}", "train.evaluate_every=0")


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
