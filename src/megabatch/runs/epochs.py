"""The curve of epochs against batch that the noise scale of one run predicts."""

import glob
import math
from pathlib import Path

from megabatch.errors import UserError
from megabatch.planning.epochs import EpochCurve, curve_of_noise
from megabatch.runs.noise import describe_noise, round_off
from megabatch.runs.reader import listing_of, read_records, read_summary
from megabatch.runs.records import EvaluationRecord, NoiseRecord, StepRecord
from megabatch.runs.settings import TARGET, read_settings

MOST_EARLIER = 10  # runs of the recipe to look at


def warn_of_noise(recipe: str, batch: int, microbatch: int, folder: Path = Path("runs")) -> str | None:
    """Return a warning if the batch is beyond the noise scale of the newest earlier run of the recipe."""
    earlier = sorted(folder.glob(f"{glob.escape(recipe)}-[0-9]*"), reverse=True)
    for path in earlier[:MOST_EARLIER]:
        try:
            summary, before = read_summary(path), listing_of(path).batch
        except (UserError, OSError):
            continue
        critical = summary.noise.over_run if summary and summary.noise else None
        if critical and before:
            if batch <= max(critical, before):
                return None
            nearest = max(1, round(critical / microbatch)) * microbatch
            factor = (1 + batch / critical) / (1 + before / critical)
            return (
                f"batch.global={batch} is beyond the critical batch {round_off(critical)} of {path}, by its noise "
                f"scale: about {factor:.2g} times its epochs are expected; nearest: batch.global={nearest}"
            )
    return None


def curve_of_run(path: Path) -> EpochCurve:
    """Return the curve; raise UserError if the run did not reach its target, or measured no noise."""
    settings, batch = read_settings(path), listing_of(path).batch
    target = settings.get(TARGET)
    if not isinstance(target, float) or batch is None:
        raise UserError(f"{path} has no train.target_top1, and epochs are counted to a target; train it with one")
    reached: float | None = None
    noise: NoiseRecord | None = None
    for record in read_records(path):
        if isinstance(record, StepRecord):
            noise = record.noise or noise
        elif isinstance(record, EvaluationRecord) and record.top1 >= target:
            reached = record.epoch
            break
    if reached is None:
        raise UserError(f"{path} never reached train.target_top1={target:g}; train for longer, or lower the target")
    if noise is None or not noise.over_run:
        why = describe_noise(noise) if noise else "no step was measured (train.noise_every)"
        raise UserError(f"{path} has no noise scale: {why}")
    doubt = 1.0  # at the critical batch half of the epochs follow from the noise scale
    if noise.low and noise.high and noise.scale:
        doubt = max(0.1, 0.5 * math.log(noise.high / noise.low) / 2)
    return curve_of_noise(f"noise scale of {path}", batch, reached, noise.over_run, min(doubt, 1.0))
