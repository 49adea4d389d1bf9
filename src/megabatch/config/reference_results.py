"""Reference results: runs that are known to converge, with which a recipe is compared.

ResNet-50, LARS    the reference convergence points of MLPerf, target 75.9 %: trust coefficient 0.001, eps 0, poly 2,
                   end 1e-4
ResNet-50, SGD     Goyal et al. 2017: 0.1 for each 256 samples
AlexNet-BN, LARS   public code of the authors on whom Jia et al. 2018 build: trust coefficient 0.001, poly 2; it does
                   not say over how many samples BatchNorm goes.  Of 64K the abstract of Jia et al. gives epochs and
                   accuracy alone
the rest           our own recipes.  Where `top1` is None, nobody has run them to their end yet
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from msgspec import Struct

from megabatch.config.resolve import in_epochs
from megabatch.config.schema import RunConfig
from megabatch.data.catalog import FROM_PYTHON
from megabatch.data.sources.shapes import FASHION_MNIST_10K, FULL_FASHION_MNIST, IMAGENET
from megabatch.errors import UserError
from megabatch.optim.lars import TRUST_COEFFICIENT


class ReferenceResult(Struct, frozen=True, kw_only=True):
    """None: the source does not say."""

    model: str
    data: str
    optimizer: str  # "lars" with its learning rate inside or outside the momentum: they differ only while it moves
    samples: int  # of an epoch
    batch: int
    learning_rate: float | None = None  # the peak
    trust_coefficient: float = TRUST_COEFFICIENT  # the same of all results of a model, its data and LARS
    warmup_epochs: float | None = None
    momentum: float | None = None
    weight_decay: float | None = None
    bn_span: int | None = None  # the samples that one BatchNorm sees
    epochs: str
    top1: float | None = None
    source: str

    @property
    def steps_per_epoch(self) -> float:
        return self.samples / self.batch


on_imagenet = partial(ReferenceResult, data="imagenet", samples=IMAGENET.num_train)


def mlperf(
    batch: int, learning_rate: float, warmup: float, momentum: float, weight_decay: float, bn_span: int, epochs: str
) -> ReferenceResult:
    return on_imagenet(
        model="resnet50",
        optimizer="lars",
        batch=batch,
        learning_rate=learning_rate,
        warmup_epochs=warmup,
        momentum=momentum,
        weight_decay=weight_decay,
        bn_span=bn_span,
        epochs=epochs,
        top1=0.759,
        source="MLPerf reference convergence point",
    )


def goyal(batch: int, learning_rate: float, warmup: float | None, top1: float | None) -> ReferenceResult:
    return on_imagenet(
        model="resnet50",
        optimizer="sgd",
        batch=batch,
        learning_rate=learning_rate,
        warmup_epochs=warmup,
        momentum=0.9,
        weight_decay=1e-4,
        bn_span=32,
        epochs="90",
        top1=top1,
        source="Goyal et al. 2017",
    )


def alexnet_bn(batch: int, learning_rate: float, warmup: float) -> ReferenceResult:
    return on_imagenet(
        model="alexnet_bn",
        optimizer="lars",
        batch=batch,
        learning_rate=learning_rate,
        warmup_epochs=warmup,
        momentum=0.9,
        weight_decay=5e-4,
        epochs="100",
        source="public code on which Jia et al. 2018 build",
    )


def fashion(
    recipe: str,
    optimizer: str,
    batch: int,
    learning_rate: float,
    warmup: float,
    bn_span: int,
    epochs: str,
    top1: float | None = None,
    is_embedded: bool = False,
    model: str = "small_resnet",
    trust_coefficient: float = TRUST_COEFFICIENT,
    samples: int | None = None,  # by default all training images
) -> ReferenceResult:
    shape = FASHION_MNIST_10K if is_embedded else FULL_FASHION_MNIST
    return ReferenceResult(
        model=model,
        data="fashion-mnist-10k" if is_embedded else "fashion-mnist",
        optimizer=optimizer,
        samples=samples or shape.num_train,
        batch=batch,
        learning_rate=learning_rate,
        trust_coefficient=trust_coefficient,
        warmup_epochs=warmup,
        momentum=0.9,
        weight_decay=5e-4,
        bn_span=bn_span,
        epochs=epochs,
        top1=top1,
        source=f"megabatch, {recipe}" + ("" if top1 else ": assumed, not run to its end yet"),
    )


REFERENCE_RESULTS = (
    mlperf(1_632, 7.4, 2, 0.9, 5e-5, 204, "33-37"),
    mlperf(3_264, 10.5, 2, 0.9, 5e-5, 204, "34-37"),
    mlperf(4_096, 10, 5, 0.9, 2e-4, 64, "39-42"),
    mlperf(8_192, 17, 5, 0.9, 2e-4, 64, "41-44"),
    mlperf(13_056, 12.8, 9, 0.9, 2.5e-5, 204, "44-46"),
    mlperf(32_768, 21.2, 16, 0.94, 2.5e-5, 128, "55-57"),
    mlperf(49_152, 19.405, 24, 0.951807, 1e-4, 256, "67-69"),
    mlperf(65_536, 24.699, 31, 0.951807, 1e-4, 128, "83-86"),
    goyal(256, 0.1, None, None),
    goyal(8_192, 3.2, 5, 0.763),
    alexnet_bn(8_192, 10, 4),
    alexnet_bn(16_384, 24, 5),
    alexnet_bn(32_768, 32, 10),
    on_imagenet(
        model="alexnet_bn",
        optimizer="lars",
        batch=65_536,
        epochs="95",
        top1=0.587,
        source="Jia et al. 2018",
    ),
    fashion("fashion", "sgd", 256, 0.2, 1, 64, "12", top1=0.9045, is_embedded=True),
    fashion("fashion at 512", "sgd", 512, 0.4, 1, 64, "12", top1=0.895, is_embedded=True),
    fashion("fashion-full", "sgd", 256, 0.2, 1, 64, "12"),
    fashion("fashion-128", "sgd", 128, 0.156, 5, 128, "40", top1=0.9195, model="shallow_cnn"),
    fashion("fashion-3k", "lars", 3_072, 4.5, 5, 128, "40", top1=0.9167, model="shallow_cnn", trust_coefficient=0.01),
    fashion("fashion-8k", "lars", 8_192, 5.92, 5, 128, "40", top1=0.9142, model="shallow_cnn", trust_coefficient=0.01),
    fashion("fashion-90-64", "sgd", 64, 0.025, 5, 64, "90", top1=0.9058, samples=20_000),
    fashion("fashion-90-1k", "lars", 1_024, 2, 5, 64, "90", top1=0.9068, trust_coefficient=0.01, samples=20_000),
    fashion("fashion-90-4k", "lars", 4_096, 10.4, 5, 64, "90", top1=0.9058, trust_coefficient=0.01, samples=20_000),
    ReferenceResult(
        model="small_cnn",
        data="synthetic",
        optimizer="sgd",
        samples=1_024,
        batch=128,
        learning_rate=0.1,
        warmup_epochs=1,
        momentum=0.9,
        bn_span=32,
        epochs="4",
        source="megabatch, smoke",
    ),
)

# Whether a recipe lies within what is known to converge, decided before anything is started.
#
# Results are compared that share the recipe's model, optimizer and data: the source's name, or a set of the same size
# to 1 %, since ImageNet may lie anywhere.  G is the recipe's batch.
#
# Learning rate, warm-up, decay and momentum (as 1 - momentum, on which the length of its memory depends) are
# interpolated between the results on either side of G, as straight lines in log-log, and that value is widened both
# ways by a factor: 2, and 4 for the decay.  The factors come from the table itself: they are such that each result of
# ResNet-50 with LARS lies within what is expected from the others (test_compare holds this).
#
# Beyond the known batches the outermost result counts.  But SGD's learning rate goes with G on both sides (the linear
# rule, Goyal et al. 2017); LARS's may do so below, where nothing forbids a shorter warm-up either.
#
# BatchNorm's span and the steps of an epoch are not functions of G: no result of any family has gone below or above
# the spans of the table, and no result of this family has got along with fewer steps an epoch than its largest batch
# has.
#
# Held-out images are counted as trained on: a trial of a recipe is judged as the recipe.

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
