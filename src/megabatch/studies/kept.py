"""Results of earlier runs, from a study's JSON: they are taken if they are of the same settings, and run no more."""

import hashlib

import msgspec

from megabatch.config.loading import load_config, silent
from megabatch.config.resolve import decisive_settings
from megabatch.config.schema import FIELDS
from megabatch.errors import UserError
from megabatch.studies.design import Design
from megabatch.studies.evidence import Arm, SearchRun, SeedRun, Study
from megabatch.studies.plan import search_trial, seed_trial
from megabatch.studies.points import Point
from megabatch.sweep.trials import Trial

LENGTH = 16  # letters of a fingerprint


def fingerprint(trial: Trial) -> str:
    """Of the settings that determine the run and are not their defaults: one more setting leaves it as it is."""
    config = load_config(trial.recipe, trial.overrides, report=silent)
    chosen = {key: value for key, value in sorted(decisive_settings(config).items()) if value != default_of(key)}
    return hashlib.sha256(msgspec.json.encode(chosen)).hexdigest()[:LENGTH]


def default_of(key: str) -> object:
    member = FIELDS.get(key)
    if member is None:
        return msgspec.NODEFAULT
    return member.default if member.default_factory is msgspec.NODEFAULT else member.default_factory()


def take_over(design: Design, before: Study, where: str) -> dict[str, SearchRun | SeedRun]:
    """All results of `before`, by trial; UserError if one is not of this study: it would be lost when it is written."""
    results: dict[str, SearchRun | SeedRun] = {}
    remedy = "give another --out, or move that file away"
    for arm in before.arms:
        runs: list[SearchRun | SeedRun] = [*arm.tuned, *arm.runs]
        if runs and arm.name not in [ours.name for ours in design.arms]:
            raise UserError(f"{where} has runs of an arm {arm.name!r}, which the study has not; {remedy}")
        for run in runs:
            trial = trial_of(design, arm, run)
            if trial is None or trial.name != run.trial or fingerprint(trial) != run.fingerprint:
                raise UserError(f"{where} has a run {run.trial!r} of other settings than the study's; {remedy}")
            results[run.trial] = run
    return results


def trial_of(design: Design, arm: Arm, run: SearchRun | SeedRun) -> Trial | None:
    """What the study would run in its place; None if it has no such run."""
    ours = design.arm(arm.name)
    if isinstance(run, SearchRun):
        point = Point(run.learning_rate, run.momentum)
        return search_trial(design, ours, point) if ours.learning_rates else None
    if arm.learning_rate is None or not 1 <= run.seed <= design.num_seeds(ours):
        return None
    return seed_trial(design, ours, Point(arm.learning_rate, arm.momentum), run.seed)
