"""Whether a recipe lies within what is known to converge, decided before anything is started.

Results are compared that share the recipe's model, optimizer and data: the source's name, or a set of the same size to
1 %, since ImageNet may lie anywhere.  G is the recipe's batch.

Learning rate, warm-up, decay and momentum (as 1 - momentum, on which the length of its memory depends) are interpolated
between the results on either side of G, as straight lines in log-log, and that value is widened both ways by a factor:
2, and 4 for the decay.  The factors come from the table itself: they are such that each result of ResNet-50 with LARS
lies within what is expected from the others (test_compare holds this).

Beyond the known batches the outermost result counts.  But SGD's learning rate goes with G on both sides (the linear
rule, Goyal et al. 2017); LARS's may do so below, where nothing forbids a shorter warm-up either.

BatchNorm's span and the steps of an epoch are not functions of G: no result of any family has gone below or above the
spans of the table, and no result of this family has got along with fewer steps an epoch than its largest batch has.

Held-out images are counted as trained on: a trial of a recipe is judged as the recipe.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from msgspec import Struct

from megabatch.config.resolve import in_epochs
from megabatch.config.schema import RunConfig
from megabatch.data.sources import FROM_PYTHON
from megabatch.errors import UserError
from megabatch.optim.lars import TRUST_COEFFICIENT
from megabatch.preflight.reference_results import REFERENCE_RESULTS, ReferenceResult

SAME_SIZE = 0.01  # sets are taken for the same if their sizes differ by less
ROUNDING = 1e-9  # a value on the edge is within


class Findings(Struct, frozen=True):
    references: list[str]
    warnings: list[str]


class Quantity(NamedTuple):
    setting: str
    factor: float  # by which the expected range is widened
    given: Callable[[RunConfig], float]
    reference: Callable[[ReferenceResult], float | None]
    from_one: bool = False  # it is 1 - value that is interpolated

    def turn(self, value: float) -> float:
        return 1.0 - value if self.from_one else value


LEARNING_RATE = Quantity("optim.learning_rate", 2.0, lambda c: c.optim.learning_rate, lambda p: p.learning_rate)
WARMUP = Quantity("schedule.warmup_epochs", 2.0, lambda c: c.schedule.warmup_epochs, lambda p: p.warmup_epochs)
QUANTITIES = (
    LEARNING_RATE,
    WARMUP,
    Quantity("optim.momentum", 2.0, lambda c: c.optim.momentum, lambda p: p.momentum, from_one=True),
    Quantity("optim.weight_decay", 4.0, lambda c: c.optim.weight_decay, lambda p: p.weight_decay),
)


class Expected(NamedTuple):
    """What reference results say of one quantity at one batch."""

    low: float
    good: float
    high: float
    results: list[ReferenceResult]


def preflight(config: RunConfig, num_samples: int) -> Findings:
    """The reference results nearest to the recipe, and a line for each of its values that lies outside them."""
    config = in_epochs(config, num_samples)
    results = family_of(config, num_samples)
    if not results:
        return Findings([f"none: nothing is known of {describe_family(config)}"], [])
    warnings = [warn(config, quantity, results) for quantity in QUANTITIES]
    warnings += [warn_of_span(config), warn_of_steps(config, num_samples, results)]
    nearest = around(results, config.batch.global_batch)
    rates = expected_range(LEARNING_RATE, results, config.batch.global_batch)
    references = [describe(result) for result in results if result in nearest or (rates and result in rates.results)]
    return Findings(references, [warning for warning in warnings if warning])


def require_known(config: RunConfig, num_samples: int) -> None:
    """--strict: what would be a warning is an error."""
    if not family_of(config, num_samples):
        raise UserError(
            f"--strict: nothing is known of {describe_family(config)}; "
            "leave --strict out, or take a recipe that `megabatch recipes` lists"
        )
    warnings = preflight(config, num_samples).warnings
    if warnings:
        more = f" ({len(warnings) - 1} more: --dry-run lists them)" if len(warnings) > 1 else ""
        raise UserError(f"--strict: {warnings[0]}{more}")


def family_of(config: RunConfig, num_samples: int) -> list[ReferenceResult]:
    """The reference results of the same model, data and optimizer, by batch; all of them began at random."""
    if config.model.weights:
        return []
    family = (config.model.name, optimizer_of(config))
    same = [result for result in REFERENCE_RESULTS if (result.model, result.optimizer) == family]
    results = [result for result in same if result.data == config.data.source]
    samples = all_samples(config, num_samples)
    results = results or [result for result in same if abs(result.samples / samples - 1) < SAME_SIZE]
    return sorted(results, key=lambda result: result.batch)


def all_samples(config: RunConfig, num_samples: int) -> float:
    """Those that are trained on, and those held out."""
    return num_samples / (1.0 - config.data.held_out(has_tests=True))


def optimizer_of(config: RunConfig) -> str:
    """LARC's learning rate is a ceiling, and says nothing beside LARS's."""
    return "larc" if config.optim.name == "lars" and config.optim.variant == "larc" else config.optim.name


def describe_family(config: RunConfig) -> str:
    data = "images from Python" if config.data.source.startswith(FROM_PYTHON) else config.data.source
    start = f" from {config.model.weights}" if config.model.weights else ""
    return f"{config.model.name}{start} on {data} with {optimizer_of(config)}"


def around(results: Sequence[ReferenceResult], batch: int) -> list[ReferenceResult]:
    """The result at this batch, those on either side of it, or the outermost; `results` are sorted by batch."""
    below = [result for result in results if result.batch <= batch][-1:]
    above = [result for result in results if result.batch >= batch][:1]
    return below if below == above else below + above


def expected_range(quantity: Quantity, results: Sequence[ReferenceResult], batch: int) -> Expected | None:
    """What the results say of a quantity at this batch; None if they do not say anything."""
    telling = [result for result in results if quantity.reference(result) is not None]
    if not telling:
        return None
    near = around(telling, batch)
    first, last = (quantity.turn(quantity.reference(result) or 0.0) for result in (near[0], near[-1]))
    if len(near) == 2:
        way = math.log(batch / near[0].batch) / math.log(near[1].batch / near[0].batch)
        least = most = first * (last / first) ** way
    else:
        least, most = beyond(quantity, near[0].optimizer, first, batch / near[0].batch)
    ends = sorted(map(quantity.turn, (least / quantity.factor, most * quantity.factor)))
    return Expected(ends[0], quantity.turn(most), ends[1], near)


def beyond(quantity: Quantity, optimizer: str, value: float, ratio: float) -> tuple[float, float]:
    """The least and the most that a result's value may be at `ratio` times its batch."""
    if quantity is LEARNING_RATE and optimizer == "sgd":
        return value * ratio, value * ratio
    if quantity is LEARNING_RATE and ratio < 1:
        return value * ratio, value
    if quantity is WARMUP and ratio < 1:
        return 0.0, value
    return value, value


def warn(config: RunConfig, quantity: Quantity, results: Sequence[ReferenceResult]) -> str | None:
    batch = config.batch.global_batch
    expected = expected_range(quantity, results, batch)
    value, scale, coefficient = quantity.given(config), 1.0, config.optim.trust_coefficient
    if quantity is LEARNING_RATE and config.optim.name == "lars":
        # A weight moves by learning rate x trust coefficient: a larger one of either is as good as of the other.
        scale = coefficient / results[0].trust_coefficient
    if expected is None or expected.low * (1 - ROUNDING) <= value * scale <= expected.high * (1 + ROUNDING):
        return None
    trust = f" with optim.trust_coefficient={coefficient:g}" if scale != 1.0 else ""
    values = ", ".join(f"{quantity.reference(result):g} at {result.batch:,}" for result in expected.results)
    sources = " and ".join(dict.fromkeys(result.source for result in expected.results))
    remedy = f"for example {quantity.setting}={expected.good / scale:.3g}"
    epochs = config.train.epochs
    if quantity is WARMUP and epochs is not None and expected.good >= epochs:
        remedy = f"train.epochs={epochs:.3g} have no room for it: train for longer"
    return (
        f"{quantity.setting}={value:g}{trust} at batch {batch:,}: known to converge is {expected.low / scale:.3g} to "
        f"{expected.high / scale:.3g} ({values}: {sources}); {remedy}"
    )


def warn_of_span(config: RunConfig) -> str | None:
    spans = {result.bn_span: result for result in reversed(REFERENCE_RESULTS) if result.bn_span}
    low, high = min(spans), max(spans)
    span = config.batch.microbatch
    if low <= span <= high:
        return None
    fitting = [size for size in range(low, high + 1) if config.batch.global_batch % size == 0]
    closest = min(fitting, key=lambda size: abs(size - span), default=None)
    remedy = f"nearest: batch.micro={closest}" if closest else "choose another batch.global"
    return (
        f"batch.micro={span} is BatchNorm's span: known to converge is {low} ({spans[low].source}) to "
        f"{high} ({spans[high].source}); {remedy}"
    )


def warn_of_steps(config: RunConfig, num_samples: int, results: Sequence[ReferenceResult]) -> str | None:
    batch, micro = config.batch.global_batch, config.batch.microbatch
    samples = all_samples(config, num_samples)
    fewest = min(results, key=lambda result: result.steps_per_epoch)
    if samples / batch >= fewest.steps_per_epoch * (1 - SAME_SIZE):
        return None
    largest = max(1, math.floor(samples / fewest.steps_per_epoch) // micro) * micro
    return (
        f"batch.global={batch} makes {samples / batch:.1f} steps an epoch: known to converge are "
        f"{fewest.steps_per_epoch:.1f} and more ({fewest.source}, batch {fewest.batch:,}); "
        f"nearest: batch.global={largest}"
    )


def describe(result: ReferenceResult) -> str:
    given = {
        "learning rate": result.learning_rate,
        "trust coefficient": result.trust_coefficient if result.trust_coefficient != TRUST_COEFFICIENT else None,
        "warm-up": result.warmup_epochs,
        "momentum": result.momentum,
        "decay": result.weight_decay,
        "BN span": result.bn_span,
    }
    values = [f"{name} {value:g}" for name, value in given.items() if value is not None]
    reached = f", top-1 {result.top1:g}" if result.top1 else ""
    return f"{', '.join([f'batch {result.batch:,}', *values])}, {result.epochs} epochs{reached} ({result.source})"
