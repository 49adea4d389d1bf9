"""The batch-limit study of a recipe: how large a batch keeps its accuracy, and how many epochs each batch needs.

An arm per batch: its learning rate is searched on held-out images around the recipe's, scaled by the batch to the power
3/4, which is between the square-root and the linear rule.  Then seeds are trained on all images, for the recipe's
epochs, and evaluated on the test images after each epoch.  From these follow

    the limit     the largest batch whose accuracy is lower than the smallest batch's by less than the margin, by the
                  upper end of the interval of the gap, as all smaller batches' are
    the curve     epochs to the target, between evaluations as a straight line, fitted by `planning.epochs`
    its forecast  from the noise scale of the smallest batch only, until it reached the target; its interval is the
                  range of the seeds
"""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from msgspec import Struct

from megabatch.config.loading import load_config, silent
from megabatch.config.resolve import plan_run
from megabatch.config.schema import RunConfig
from megabatch.data.catalog import infer_shape
from megabatch.errors import UserError
from megabatch.experiments.design import ArmDesign, Design, SearchDesign
from megabatch.experiments.evidence import Arm, Criterion, Curve, Study, slug
from megabatch.experiments.verdict import divergence, judge
from megabatch.planning.batch import BatchSettings
from megabatch.planning.epochs import EpochCurve, EpochPoint, curve_of_noise, fit_epochs
from megabatch.runs.reader import read_records
from megabatch.runs.records import EvaluationRecord, StepRecord

ACCURACY, NOISE = "test accuracy", "critical batch by noise"
SCALING = 0.75  # the exponent of learning rates
SPREAD = (1 / 3, 1.0, 3.0)
HELD_OUT = 0.2
FEWEST_BATCHES, MOST_BATCHES = 3, 20
FEWEST_IMAGES = 8  # per BatchNorm, unless batch.micro is given
TARGET = "train.target_top1="


class Limits(Struct, frozen=True, kw_only=True):
    """The options of the study."""

    batches: list[int]
    margin_points: float = 0.5
    seeds: int = 5
    trials: int = 5


def design_of(recipe: str, overrides: Sequence[str], limits: Limits) -> Design:
    """Return the design; raise UserError if a batch cannot be trained."""
    config = load_config(recipe, list(overrides), report=silent)
    batches = sorted({*limits.batches})
    if not FEWEST_BATCHES <= len(batches) <= MOST_BATCHES:
        raise UserError(
            f"--batches has {len(batches)} different batches; a curve needs {FEWEST_BATCHES} to {MOST_BATCHES}; "
            "for example --batches 64,256,1024,4096"
        )
    if config.train.target_top1 is None:
        raise UserError(
            f"{config.name} has no train.target_top1, to which epochs are counted; for example train.target_top1=0.85"
        )
    chooses = not any(override.startswith("batch.micro=") for override in overrides)
    micro = common_microbatch(batches, config.batch.microbatch) if chooses else config.batch.microbatch
    for batch in batches:
        BatchSettings(global_batch=batch, microbatch=micro)  # raises if it is not a whole number of microbatches
    names = {batch: f"batch {batch}" for batch in batches}
    smallest = names[batches[0]]
    return Design(
        name=f"batch-limit-{slug(config.name)}",
        title=f"How large a batch can {config.name} use?",
        question=(
            f"Which is the largest batch whose accuracy is lower than that of batch {batches[0]} by less than "
            f"{limits.margin_points:g} points, how many epochs does each batch need to a top-1 of "
            f"{config.train.target_top1:g}, and does the gradient noise scale of the smallest batch predict it?"
        ),
        setup=(
            f"Recipe {config.name} for {config.train.length}, BatchNorm over {micro} images. For each batch, "
            f"{limits.trials} learning rates around the recipe's times (batch / {config.batch.global_batch})^"
            f"{SCALING:g} are searched on {HELD_OUT:.0%} of the training images; then {limits.seeds} seeds train on "
            "all of them. The margin was fixed before the runs. All batches decay their learning rate over the same "
            "epochs, so a batch that reaches the target early could reach it earlier with a shorter schedule."
        ),
        recipe=recipe,
        settings=(*overrides, f"batch.micro={micro}"),
        final_settings=("train.evaluate_every=1",),
        arms=tuple(
            ArmDesign(
                name=names[batch],
                settings=(f"batch.global={batch}", f"{TARGET}{config.train.target_top1:g}"),
                learning_rates=grid(config, batch),
            )
            for batch in batches
        ),
        baseline=smallest,
        search=SearchDesign(trials=limits.trials, held_out=HELD_OUT),
        seeds=limits.seeds,
        criteria=tuple(
            Criterion(arm=names[batch], baseline=smallest, max_upper_points=limits.margin_points)
            for batch in batches[1:]
        ),
        curves={ACCURACY: f"{__name__}:accuracy_of", NOISE: f"{__name__}:critical_of"},
        samples=plan_run(config, infer_shape(config.data), num_ranks=1).num_samples,
    )


def common_microbatch(batches: Sequence[int], most: int) -> int:
    """Return the largest divisor of all batches up to `most` that leaves at least two microbatches in each."""
    common, most = math.gcd(*batches), min(most, min(batches) // 2)
    found = next((size for size in range(most, 0, -1) if common % size == 0), 1)
    if found < FEWEST_IMAGES:
        size = max(FEWEST_IMAGES, 1 << most.bit_length() - 1)
        near = [max(2, round(batch / size)) * size for batch in batches]
        nearest = f"nearest: --batches {','.join(map(str, near))}, or " if len({*near}) == len(near) else ""
        raise UserError(
            f"--batches {','.join(map(str, batches))}: BatchNorm needs a common microbatch of at least {FEWEST_IMAGES} "
            f"images, two per batch; {nearest}give batch.micro={found}"
        )
    return found


def grid(config: RunConfig, batch: int) -> tuple[float, ...]:
    center = config.optim.learning_rate * (batch / config.batch.global_batch) ** SCALING
    return tuple(float(f"{center * factor:.3g}") for factor in SPREAD)


def accuracy_of(folder: Path) -> Curve:
    """Return top-1 after each evaluation of a run."""
    return [(record.epoch, record.top1) for record in read_records(folder) if isinstance(record, EvaluationRecord)]


def critical_of(folder: Path) -> Curve:
    """Return the critical batch so far, by the noise scale, on each measured step of a run."""
    return [
        (record.epoch, record.noise.over_run)
        for record in read_records(folder)
        if isinstance(record, StepRecord) and record.noise and record.noise.over_run is not None
    ]


class Limit(Struct, frozen=True, kw_only=True):
    """The answer of a study."""

    largest: int  # batch within the margin
    points: list[EpochPoint]
    never: list[int]  # batches of which a seed did not reach the target
    curve: EpochCurve | None
    problem: str  # why there is no curve
    forecast: EpochCurve | None  # from the noise scale


def limit_of(study: Study) -> Limit:
    arms = {batch_of(arm): arm for arm in study.arms}
    batches, points = sorted(arms), list[EpochPoint]()
    held = {batch_of(study.arm(criterion.arm)): judge(study, criterion).holds for criterion in study.criteria}
    largest = batches[0]
    for batch in batches[1:]:
        if not held.get(batch):
            break
        largest = batch
    for batch in batches:
        points += [EpochPoint(batch, epochs) for epochs in epochs_of(arms[batch]) or ()]
    never = [batch for batch in batches if not epochs_of(arms[batch])]
    curve, problem = None, ""
    try:
        curve = fit_epochs(points, f"study {study.name}")
    except UserError as error:
        problem = str(error)
    first = [point.epochs for point in points if point.batch == batches[0]]
    critical = [
        value
        for run, epochs in zip(arms[batches[0]].runs, first, strict=False)
        if (value := value_before(run.curves.get(NOISE, []), epochs))
    ]
    forecast = None
    if first and critical:
        source = f"noise scale of batch {batches[0]}"
        low, high = (min(critical), max(critical)) if len(critical) > 1 else (None, None)
        forecast = curve_of_noise(source, batches[0], fmean(first), fmean(critical), low, high)
    return Limit(largest=largest, points=points, never=never, curve=curve, problem=problem, forecast=forecast)


def epochs_of(arm: Arm) -> list[float] | None:
    """Return the epochs that each seed needed to the target; None if one did not reach it."""
    reached = [epochs_to(run.curves.get(ACCURACY, []), target_of(arm)) for run in arm.runs]
    return None if None in reached else [epochs for epochs in reached if epochs is not None]


def target_rows(study: Study) -> list[list[str]]:
    """Return a table of the epochs and steps to the target, its head first; [] for other studies."""
    if not is_batch_limit(study):
        return []
    found, rows = limit_of(study), list[list[str]]()
    for arm in sorted(study.arms, key=batch_of):
        batch, epochs = batch_of(arm), epochs_of(arm)
        curves = [f"{curve.epochs(batch):.1f}" if curve else "-" for curve in (found.curve, found.forecast)]
        measured = ["not reached" if arm.runs else divergence(arm), "-", "-"]
        if epochs:
            spread = f"{min(epochs):.1f} to {max(epochs):.1f}"
            measured = [f"{fmean(epochs):.1f}", spread, f"{fmean(epochs) * study.samples / batch:,.0f}"]
        rows.append([arm.name, *measured, *curves])
    top1 = f"{target_of(study.arms[0]):.1%}"
    return [[f"to {top1}", "epochs", "of the seeds", "steps", "fitted epochs", "forecast by noise"], *rows]


def curve_of_study(study: Study) -> EpochCurve:
    """Return the fitted curve; raise UserError if the study does not have one."""
    if not is_batch_limit(study):
        raise UserError(f"{study.name} is not a batch-limit study; give the JSON of megabatch study batch-limit")
    return fit_epochs(limit_of(study).points, f"study {study.name}")


def batch_of(arm: Arm) -> int:
    return int(next(text for text in arm.settings if text.startswith("batch.global=")).partition("=")[2])


def batches_of(study: Study) -> list[int]:
    return [batch_of(arm) for arm in study.arms]


def target_of(arm: Arm) -> float:
    return float(next(text for text in arm.settings if text.startswith(TARGET)).partition("=")[2])


def epochs_to(curve: Curve, target: float) -> float | None:
    """Return when the curve first reaches the target, on straight lines from (0, 0); None if never."""
    before = (0.0, 0.0)
    for epoch, value in curve:
        if value is None:
            continue
        if value >= target:
            return before[0] + (epoch - before[0]) * (target - before[1]) / (value - before[1])
        before = (epoch, value)
    return None


def value_before(curve: Curve, epoch: float) -> float | None:
    """Return the last value of the curve up to an epoch; the noise after the target does not affect epochs to it."""
    return next((value for at, value in reversed(curve) if at <= epoch and value is not None), None)


def is_batch_limit(study: Study) -> bool:
    return all(any(setting.startswith(TARGET) for setting in arm.settings) for arm in study.arms)


def answer_lines(study: Study) -> list[str]:
    """Return the answer in lines for the screen and the page; [] for other studies and before all runs are complete."""
    if not is_batch_limit(study) or study.num_runs < study.num_planned:
        return []
    found = limit_of(study)
    lines = [f"the largest batch within the margin is {found.largest:,}"]
    if found.never:
        lines.append(f"a seed of batch {', '.join(f'{batch:,}' for batch in found.never)} did not reach the target")
    for name, curve in (
        ("measured", found.curve),
        ("predicted by the noise scale of the smallest batch", found.forecast),
    ):
        if curve:
            lines.append(
                f"{name}: epochs = {curve.fewest:.3g} x (1 + batch / {curve.critical:,.0f})"
                + (f", misfit {curve.misfit:.1%}" if name == "measured" else "")
            )
    if found.problem:
        lines.append(f"no curve: {found.problem}")
    return lines
