"""Whether a recipe lies within what is known to converge, decided before anything is started.

Points are compared that share the recipe's model, optimizer and data: the source's name, or a set of the same size to
1 %, since ImageNet may lie anywhere.  G is the recipe's batch.

Rate, warm-up, decay and momentum (as 1 - momentum, on which the length of its memory depends) are interpolated between
the points on either side of G, as straight lines in log-log, and that value is widened both ways by a factor: 2, and 4
for the decay.  The factors come from the table itself: they are such that each point of ResNet-50 with LARS lies within
what the others foresee for it (test_preflight holds this).

Beyond the known batches the outermost point counts.  But SGD's rate goes with G on both sides (the linear rule, Goyal
et al. 2017); LARS's may do so below, where nothing forbids a shorter warm-up either.

BatchNorm's span and the steps of an epoch are not functions of G: no point of any family has gone below or above the
spans of the table, and no point of this family has got along with fewer steps an epoch than its largest batch has.

Held-out images are counted as trained on: a trial of a recipe is judged as the recipe.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from msgspec import Struct

from megabatch.config.schema import RunConfig
from megabatch.data.sources import FROM_PYTHON
from megabatch.errors import UserError
from megabatch.preflight.reference_results import KNOWN_POINTS, TRUST, KnownPoint

SAME_SIZE = 0.01  # sets are taken for the same if their sizes differ by less
ROUNDING = 1e-9  # a value on the edge is within


class Findings(Struct, frozen=True):
    references: list[str]
    warnings: list[str]


class Quantity(NamedTuple):
    setting: str
    factor: float  # by which what is foreseen is widened
    given: Callable[[RunConfig], float]
    known: Callable[[KnownPoint], float | None]
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


class Known(NamedTuple):
    """What is known of one quantity at one batch."""

    low: float
    good: float
    high: float
    points: list[KnownPoint]


def preflight(config: RunConfig, num_samples: int) -> Findings:
    """The known points nearest to the recipe, and a line for each of its values that lies outside them."""
    points = family_of(config, num_samples)
    if not points:
        return Findings([f"none: nothing is known of {describe_family(config)}"], [])
    warnings = [warn(config, quantity, points) for quantity in QUANTITIES]
    warnings += [warn_of_span(config), warn_of_steps(config, num_samples, points)]
    nearest = around(points, config.batch.global_batch)
    rates = foresee(LEARNING_RATE, points, config.batch.global_batch)
    references = [describe(point) for point in points if point in nearest or (rates and point in rates.points)]
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


def family_of(config: RunConfig, num_samples: int) -> list[KnownPoint]:
    """The known points of the same model, data and optimizer, by batch."""
    family = (config.model.name, optimizer_of(config))
    same = [point for point in KNOWN_POINTS if (point.model, point.optimizer) == family]
    points = [point for point in same if point.data == config.data.source]
    samples = all_samples(config, num_samples)
    points = points or [point for point in same if abs(point.samples / samples - 1) < SAME_SIZE]
    return sorted(points, key=lambda point: point.batch)


def all_samples(config: RunConfig, num_samples: int) -> float:
    """Those that are trained on, and those held out."""
    return num_samples / (1.0 - config.data.validation)


def optimizer_of(config: RunConfig) -> str:
    """LARC's rate is a ceiling, and says nothing beside LARS's."""
    return "larc" if config.optim.name == "lars" and config.optim.variant == "larc" else config.optim.name


def describe_family(config: RunConfig) -> str:
    data = "images from Python" if config.data.source.startswith(FROM_PYTHON) else config.data.source
    return f"{config.model.name} on {data} with {optimizer_of(config)}"


def around(points: Sequence[KnownPoint], batch: int) -> list[KnownPoint]:
    """The point at this batch, those on either side of it, or the outermost; `points` are sorted by batch."""
    below = [point for point in points if point.batch <= batch][-1:]
    above = [point for point in points if point.batch >= batch][:1]
    return below if below == above else below + above


def foresee(quantity: Quantity, points: Sequence[KnownPoint], batch: int) -> Known | None:
    """What the points say of a quantity at this batch; None if they do not say anything."""
    told = [point for point in points if quantity.known(point) is not None]
    if not told:
        return None
    near = around(told, batch)
    first, last = (quantity.turn(quantity.known(point) or 0.0) for point in (near[0], near[-1]))
    if len(near) == 2:
        way = math.log(batch / near[0].batch) / math.log(near[1].batch / near[0].batch)
        least = most = first * (last / first) ** way
    else:
        least, most = beyond(quantity, near[0].optimizer, first, batch / near[0].batch)
    ends = sorted(map(quantity.turn, (least / quantity.factor, most * quantity.factor)))
    return Known(ends[0], quantity.turn(most), ends[1], near)


def beyond(quantity: Quantity, optimizer: str, value: float, ratio: float) -> tuple[float, float]:
    """The least and the most that a point's value may be at `ratio` times its batch."""
    if quantity is LEARNING_RATE and optimizer == "sgd":
        return value * ratio, value * ratio
    if quantity is LEARNING_RATE and ratio < 1:
        return value * ratio, value
    if quantity is WARMUP and ratio < 1:
        return 0.0, value
    return value, value


def warn(config: RunConfig, quantity: Quantity, points: Sequence[KnownPoint]) -> str | None:
    batch = config.batch.global_batch
    known = foresee(quantity, points, batch)
    # A weight moves by rate x trust: a larger trust is a larger rate.
    scale = config.optim.trust / points[0].trust if quantity is LEARNING_RATE and config.optim.name == "lars" else 1.0
    value = quantity.given(config)
    if known is None or known.low * (1 - ROUNDING) <= value * scale <= known.high * (1 + ROUNDING):
        return None
    trust = f" with optim.trust={config.optim.trust:g}" if scale != 1.0 else ""
    values = ", ".join(f"{quantity.known(point):g} at {point.batch:,}" for point in known.points)
    sources = " and ".join(dict.fromkeys(point.source for point in known.points))
    return (
        f"{quantity.setting}={value:g}{trust} at batch {batch:,}: known to converge is {known.low / scale:.3g} to "
        f"{known.high / scale:.3g} ({values}: {sources}); "
        f"for example {quantity.setting}={known.good / scale:.3g}"
    )


def warn_of_span(config: RunConfig) -> str | None:
    spans = {point.bn_span: point for point in reversed(KNOWN_POINTS) if point.bn_span}
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


def warn_of_steps(config: RunConfig, num_samples: int, points: Sequence[KnownPoint]) -> str | None:
    batch, micro = config.batch.global_batch, config.batch.microbatch
    samples = all_samples(config, num_samples)
    fewest = min(points, key=lambda point: point.steps_per_epoch)
    if samples / batch >= fewest.steps_per_epoch * (1 - SAME_SIZE):
        return None
    largest = max(1, math.floor(samples / fewest.steps_per_epoch) // micro) * micro
    return (
        f"batch.global={batch} makes {samples / batch:.1f} steps an epoch: known to converge are "
        f"{fewest.steps_per_epoch:.1f} and more ({fewest.source}, batch {fewest.batch:,}); "
        f"nearest: batch.global={largest}"
    )


def describe(point: KnownPoint) -> str:
    told = {
        "rate": point.learning_rate,
        "trust": point.trust if point.trust != TRUST else None,
        "warm-up": point.warmup_epochs,
        "momentum": point.momentum,
        "decay": point.weight_decay,
        "BN span": point.bn_span,
    }
    values = [f"{name} {value:g}" for name, value in told.items() if value is not None]
    reached = f", top-1 {point.top1:g}" if point.top1 else ""
    return f"{', '.join([f'batch {point.batch:,}', *values])}, {point.epochs} epochs{reached} ({point.source})"
