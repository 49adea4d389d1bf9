"""The curve of epochs against batch that the noise scale of one run predicts."""

from pathlib import Path
from typing import NamedTuple

from megabatch.errors import UserError
from megabatch.planning.epochs import EpochCurve, curve_of_noise
from megabatch.runs.folder import numbered_runs
from megabatch.runs.noise import describe_noise, round_off
from megabatch.runs.reader import listing_of, read_records
from megabatch.runs.records import EvaluationRecord, NoiseRecord, StepRecord
from megabatch.runs.settings import TARGET, read_settings

MOST_EARLIER = 10  # runs of the recipe to look at


class RunToTarget(NamedTuple):
    """A run until it reached its target, or all of it if it did not."""

    target: float | None
    reached: bool
    epochs: float
    noise: NoiseRecord | None  # on the last measured step


def read_training(path: Path) -> RunToTarget:
    target = read_settings(path).get(TARGET)
    target = target if isinstance(target, float) else None
    epochs, noise = 0.0, None
    for record in read_records(path):
        epochs = record.epoch
        if isinstance(record, StepRecord):
            noise = record.noise or noise
        elif isinstance(record, EvaluationRecord) and target is not None and record.top1 >= target:
            return RunToTarget(target, True, epochs, noise)
    return RunToTarget(target, False, epochs, noise)


def warn_of_noise(recipe: str, batch: int, microbatch: int) -> str | None:
    """Return a warning if the batch is beyond the noise scale of the newest earlier run of the recipe."""
    for path in numbered_runs(recipe)[: -MOST_EARLIER - 1 : -1]:
        try:
            before, run = listing_of(path).batch, read_training(path)
        except (UserError, OSError):
            continue
        critical = run.noise.over_run if run.noise else None
        if critical and before:
            if batch <= max(critical, before):
                return None
            nearest = max(1, round(critical / microbatch)) * microbatch
            factor = (1 + batch / critical) / (1 + before / critical)
            goal = f" to {TARGET}={run.target:g}" if run.reached else ""
            return (
                f"batch.global={batch} is beyond the critical batch {round_off(critical)} of {path}, by its noise "
                f"scale: about {factor:.2g} times its {run.epochs:.3g} epochs{goal} are expected, "
                f"{factor * run.epochs:.3g}; nearest: batch.global={nearest}"
            )
    return None


def curve_of_run(path: Path) -> EpochCurve:
    """Return the curve; raise UserError if the run did not reach its target, or measured no noise."""
    batch, run = listing_of(path).batch, read_training(path)
    if run.target is None or batch is None:
        raise UserError(f"{path} has no {TARGET}, and epochs are counted to a target; train it with one")
    if not run.reached:
        raise UserError(f"{path} never reached {TARGET}={run.target:g}; train for longer, or lower the target")
    noise = run.noise
    if noise is None or not noise.over_run:
        why = describe_noise(noise) if noise else "no step was measured (train.noise_every)"
        raise UserError(f"{path} has no noise scale: {why}")
    return curve_of_noise(
        f"noise scale of {path}", batch, run.epochs, noise.over_run, noise.over_run_low, noise.over_run_high
    )
