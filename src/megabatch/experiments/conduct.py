"""Conduct a study: search the learning rate of each arm on held-out images, then train every arm with every seed.

Arms of criteria come first, then the others.  All learning rates of a search round, and then all seeds, are trials in
one queue, so a core is idle only at the end of a queue.  The final runs train on all training images and are evaluated
once, after their last epoch, on the test images, which no learning rate was chosen by.  Results so far are written
whenever a run ends.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from megabatch.config.loading import load_config, silent
from megabatch.config.resolve import decisive_settings
from megabatch.config.schema import FIELDS
from megabatch.errors import UserError
from megabatch.experiments.design import ArmDesign, Design
from megabatch.experiments.evidence import Arm, Curve, SearchRun, SeedRun, Study
from megabatch.experiments.plan import (
    Planned,
    Results,
    SearchPoint,
    chosen_point,
    is_searched,
    search_so_far,
    search_trial,
    seed_trial,
    seeds_of,
)
from megabatch.experiments.trials import Trial, score_of
from megabatch.ranks.machine import cpu_name, usable_cores
from megabatch.runs.reader import epoch_losses, read_environment
from megabatch.runs.records import Summary

LENGTH = 16  # characters of a fingerprint


def fingerprint(trial: Trial) -> str:
    """Return a hash of the settings that affect results and are not defaults.  New settings do not change it."""
    config = load_config(trial.recipe, trial.overrides, report=silent)
    chosen = {key: value for key, value in sorted(decisive_settings(config).items()) if value != default_of(key)}
    return hashlib.sha256(msgspec.json.encode(chosen)).hexdigest()[:LENGTH]


def default_of(key: str) -> object:
    member = FIELDS.get(key)
    if member is None:
        return msgspec.NODEFAULT
    return member.default if member.default_factory is msgspec.NODEFAULT else member.default_factory()


def earlier_results(design: Design, before: Study, where: str) -> dict[str, SearchRun | SeedRun]:
    """Return the results of `before` by trial.

    Raise UserError if a result is not of this study, since writing the study would lose it.
    """
    results: dict[str, SearchRun | SeedRun] = {}
    remedy = "pass another --out, or move that file"
    for arm in before.arms:
        runs: list[SearchRun | SeedRun] = [*arm.tuned, *arm.runs]
        if runs and arm.name not in [ours.name for ours in design.arms]:
            raise UserError(f"{where} has runs of arm {arm.name!r}, which is not in the study; {remedy}")
        for run in runs:
            trial = trial_of(design, arm, run)
            if trial is None or trial.name != run.trial or fingerprint(trial) != run.fingerprint:
                raise UserError(f"{where} has run {run.trial!r} with settings that differ from the study's; {remedy}")
            results[run.trial] = run
    return results


def trial_of(design: Design, arm: Arm, run: SearchRun | SeedRun) -> Trial | None:
    """Return the trial of the study that corresponds to an earlier run, or None."""
    ours = design.arm(arm.name)
    if isinstance(run, SearchRun):
        point = SearchPoint(run.learning_rate, run.momentum)
        return search_trial(design, ours, point) if ours.learning_rates else None
    if arm.learning_rate is None or not 1 <= run.seed <= design.num_seeds(ours):
        return None
    return seed_trial(design, ours, SearchPoint(arm.learning_rate, arm.momentum), run.seed)


LOSS = "training loss"
End = Callable[[Trial, Summary], None]
Run = Callable[[Sequence[Trial], End], object]
Probes = Mapping[str, Callable[[Path], Curve]]  # curves of a run's folder, by name


class Conductor:
    """A study in progress.  `run` runs trials in `folder` and calls back when each ends."""

    def __init__(
        self,
        design: Design,
        folder: Path,
        command: str,
        run: Run,
        probes: Probes,
        write: Callable[[Study], object],
        before: Study | None = None,
        where: str = "",  # the file of `before`
    ) -> None:
        self.design, self.folder, self.command = design, folder, command
        self.run, self.probes, self.write = run, probes, write
        self.results: dict[str, SearchRun | SeedRun] = earlier_results(design, before, where) if before else {}
        self.took_s = before.took_s if before else 0.0
        self.versions = dict(before.versions) if before else {}
        self.machine = before.machine if before else ""

    def conduct(self) -> Study:
        for stage in self.design.stages():
            while rates := [
                planned for arm in stage for planned in search_so_far(self.design, arm, self.results).wanted
            ]:
                self.run_all(rates)
            self.run_all(missing_seeds(self.design, stage, self.results))
        return self.study()

    def run_all(self, wanted: Sequence[Planned]) -> None:
        if not wanted:
            return
        by_name = {planned.trial.name: planned for planned in wanted}

        def keep(trial: Trial, summary: Summary) -> None:
            self.results[trial.name] = self.result(by_name[trial.name], summary)
            self.took_s += summary.wall_s
            environment = read_environment(self.folder / trial.name)
            for name in ("megabatch", "torch", "python"):
                self.versions[name] = joined(self.versions.get(name, ""), str(environment.get(name, "unknown")))
            self.machine = joined(self.machine, f"{len(usable_cores())} cores of {cpu_name()}")
            self.write(self.study())

        self.run([planned.trial for planned in wanted], keep)

    def result(self, planned: Planned, summary: Summary) -> SearchRun | SeedRun:
        trial, point = planned.trial, planned.point
        if planned.seed is None:
            return SearchRun(
                trial=trial.name,
                fingerprint=fingerprint(trial),
                learning_rate=point.learning_rate,
                momentum=point.momentum,
                top1=score_of(summary),
            )
        folder = self.folder / trial.name
        curves: dict[str, Curve] = {LOSS: [(float(epoch), loss) for epoch, loss in epoch_losses(folder).items()]}
        return SeedRun(
            trial=trial.name,
            fingerprint=fingerprint(trial),
            seed=planned.seed,
            top1=score_of(summary),
            test_loss=summary.test_loss,
            wall_s=summary.wall_s,
            curves=curves | {name: probe(folder) for name, probe in self.probes.items()},
        )

    def study(self) -> Study:
        """Return the study with the results so far."""
        design = self.design
        return Study(
            name=design.name,
            title=design.title,
            question=design.question,
            command=self.command,
            setup=design.setup,
            baseline=design.baseline,
            paired=design.paired,
            arms=[arm_so_far(design, arm, self.results) for arm in design.arms],
            criteria=list(design.criteria),
            took_s=self.took_s,
            versions=self.versions,
            machine=self.machine,
            samples=design.samples,
            claims=list(design.claims),
            curve_claims=list(design.curve_claims),
        )


def missing_seeds(design: Design, arms: Sequence[ArmDesign], results: Results) -> list[Planned]:
    """Return the missing seeds in order of seed, so that partial results cover all arms."""
    wanted = [planned for arm in arms for planned in seeds_of(design, arm, results)]
    return sorted(
        (planned for planned in wanted if planned.trial.name not in results), key=lambda planned: planned.seed or 0
    )


def arm_so_far(design: Design, arm: ArmDesign, results: Results) -> Arm:
    search = search_so_far(design, arm, results)
    is_found = is_searched(design, arm, results)
    point = chosen_point(design, arm, results) if is_found else None
    found = [results.get(planned.trial.name) for planned in seeds_of(design, arm, results)]
    most = design.search.trials if design.search and arm.learning_rates else 0
    return Arm(
        name=arm.name,
        about=arm.about,
        settings=list(arm.settings),
        baseline=arm.baseline,
        published=arm.published,
        learning_rate=point.learning_rate if point else None,
        momentum=point.momentum if point else None,
        num_trials=most if search.wanted else len(search.tried),  # a search may not use its whole budget
        num_seeds=0 if is_found and point is None else design.num_seeds(arm),
        tuned=sorted(search.tried.values(), key=lambda run: (run.learning_rate, run.momentum or 0.0)),
        runs=[run for run in found if isinstance(run, SeedRun)],
    )


def joined(before: str, now: str) -> str:
    """Add a version or machine to those of earlier runs."""
    return " and ".join(sorted({*before.split(" and "), now} - {""}))
