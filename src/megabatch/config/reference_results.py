"""Reference results: runs that are known to converge, and the check of a recipe against them before it starts.

ResNet-50, LARS    the reference convergence points of MLPerf, target 75.9 %: trust coefficient 0.001, eps 0, poly 2,
                   end 1e-4
ResNet-50, SGD     Goyal et al. 2017: 0.1 per 256 samples; ffcv-imagenet; torchvision's V2 weights; with decoupled
                   decay, MosaicML
ResNet-50, LAMB    procedure A3 of Wightman et al. 2021
timm's models      the repositories of DeiT and ConvNeXt, by AdamW
AlexNet-BN, LARS   NVCaffe, on which Jia et al. 2018 build: trust coefficient 0.001, poly 2; it does not give the span
                   of BatchNorm. For 64K, the abstract of Jia et al. gives only epochs and accuracy
others             recipes of megabatch. Without a `top1` they were not run to the end yet

A recipe is compared with the results of the same model, optimizer and data: the same source, or a set of the same size
up to 1 %, because ImageNet may be in any folder. G is the recipe's batch.

Learning rate, warm-up, decay and momentum (as 1 - momentum, which determines its time constant) are interpolated
between the results on both sides of G, as straight lines in log-log. The range is widened in both directions by a
factor: 2, and 5 for the decay. The factors come from the table: each result of ResNet-50 with LARS is inside the range
that the other results predict (test_compare checks this).

Beyond the known batches, the outermost result is used. Two exceptions: the learning rate of SGD is proportional to G on
both sides (linear scaling rule, Goyal et al. 2017). Below the known batches, the learning rate of LARS may be
proportional to G, and the warm-up may be shorter.

The span of BatchNorm and the steps per epoch are not functions of G. Spans must be inside the range of the whole table.
Steps per epoch must be at least those of the largest batch of the same family.

Held-out images count as training images, so that a trial of a recipe is judged like the recipe.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean
from typing import NamedTuple

from msgspec import Struct

from megabatch.config.resolve import in_epochs
from megabatch.config.schema import RunConfig
from megabatch.data.catalog import FROM_PYTHON
from megabatch.data.sources.shapes import FASHION_MNIST_10K, FULL_FASHION_MNIST, IMAGENET
from megabatch.errors import UserError
from megabatch.optim.lars import TRUST_COEFFICIENT
from megabatch.planning.epochs import EpochPoint, fit_epochs


class ReferenceResult(Struct, frozen=True, kw_only=True):
    """A run that converged. None: the source does not give the value."""

    model: str
    data: str
    optimizer: str  # "lars": learning rate inside or outside the momentum, which differ only while it changes
    samples: int  # per epoch
    batch: int
    learning_rate: float | None = None  # peak
    trust_coefficient: float = TRUST_COEFFICIENT  # the same for all results of one model, data set and LARS
    warmup_epochs: float | None = None
    momentum: float | None = None
    weight_decay: float | None = None
    bn_span: int | None = None  # samples per BatchNorm
    epochs: str
    top1: float | None = None
    source: str

    @property
    def steps_per_epoch(self) -> float:
        return self.samples / self.batch


MLPERF, MLPERF_TOP1 = "MLPerf reference convergence point", 0.759
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
        top1=MLPERF_TOP1,
        source=MLPERF,
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
        source="NVCaffe, on which Jia et al. 2018 build",
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
        source=f"megabatch, {recipe}" + ("" if top1 else ": assumed, not run to the end yet"),
    )


REFERENCE_RESULTS = (
    mlperf(1_632, 7.4, 2, 0.9, 5e-5, 204, "33-37"),
    mlperf(3_264, 10.5, 2, 0.9, 5e-5, 204, "34-37"),
    mlperf(4_096, 10, 5, 0.9, 2e-4, 64, "39-42"),
    mlperf(8_192, 17, 5, 0.9, 2e-4, 64, "41-44"),
    mlperf(13_056, 12.8, 9, 0.9, 2.5e-5, 204, "44-46"),
    mlperf(32_768, 21.2, 16, 0.94, 2.5e-5, 128, "55-57"),
    mlperf(49_152, 19.405, 24, 0.951807, 1e-4, 256, "67-69"),
    mlperf(58_880, 23.246, 29, 0.951807, 1e-4, 230, "78-81"),
    mlperf(65_536, 24.699, 31, 0.951807, 1e-4, 128, "83-86"),
    mlperf(67_840, 24.699, 31, 0.951807, 1e-4, 424, "85-87"),
    goyal(256, 0.1, None, None),
    goyal(8_192, 3.2, 5, 0.763),
    on_imagenet(
        model="resnet50",
        optimizer="sgd",
        batch=4_096,
        learning_rate=1.7,
        momentum=0.9,
        weight_decay=1e-4,
        bn_span=512,
        epochs="88",
        top1=0.784,
        source="ffcv",
    ),
    on_imagenet(
        model="resnet50",
        optimizer="decoupled sgd",
        batch=2_048,
        learning_rate=2.048,
        momentum=0.875,
        weight_decay=5e-4,
        epochs="27 of 28",
        top1=0.7605,
        source="MosaicML, MLPerf v2.0 open",
    ),
    on_imagenet(
        model="resnet50",
        optimizer="sgd",
        batch=1_024,
        learning_rate=0.5,
        momentum=0.9,
        weight_decay=2e-5,
        bn_span=128,
        epochs="600",
        top1=0.8085,
        source="torchvision V2",
    ),
    on_imagenet(
        model="resnet50",
        optimizer="lamb",
        batch=2_048,
        learning_rate=0.008,
        warmup_epochs=5,
        weight_decay=0.02,
        epochs="100",
        top1=0.7805,
        source="ResNet strikes back, A3",
    ),
    on_imagenet(
        model="deit_small_patch16_224",
        optimizer="adamw",
        batch=1_024,
        learning_rate=0.001,
        warmup_epochs=5,
        weight_decay=0.05,
        epochs="300",
        top1=0.799,
        source="DeiT",
    ),
    on_imagenet(
        model="convnext_tiny",
        optimizer="adamw",
        batch=4_096,
        learning_rate=0.004,
        warmup_epochs=20,
        weight_decay=0.05,
        epochs="300",
        top1=0.821,
        source="ConvNeXt",
    ),
    alexnet_bn(8_192, 10, 3.84),
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
    ReferenceResult(
        model="airbench94",
        data="cifar-10-batches-bin",
        optimizer="muon",
        samples=50_000,
        batch=2_000,
        learning_rate=0.24,
        warmup_epochs=0,
        momentum=0.6,
        weight_decay=0,
        bn_span=500,
        epochs="8",
        top1=0.9405,
        source="megabatch, cifar10",
    ),
)

SAME_SIZE = 0.01  # data sets whose sizes differ by less count as the same
ROUNDING = 1e-9  # a value on the edge is inside


def epoch_points(model: str, samples: int) -> list[EpochPoint]:
    """Return the epochs of MLPerf's reference convergence points: the middle of each range."""
    return [
        EpochPoint(result.batch, middle_of(result.epochs))
        for result in REFERENCE_RESULTS
        if (result.source, result.model) == (MLPERF, model) and abs(result.samples / samples - 1) < SAME_SIZE
    ]


def spans_of(model: str, samples: int) -> list[int]:
    """Return the spans of BatchNorm of the results of this model and a data set of this size."""
    return [
        result.bn_span
        for result in REFERENCE_RESULTS
        if result.bn_span and result.model == model and abs(result.samples / samples - 1) < SAME_SIZE
    ]


def middle_of(epochs: str) -> float:
    """Return the middle of a range such as "81-88"; the value of a single number."""
    return fmean(map(float, epochs.split("-")))


class Findings(Struct, frozen=True):
    references: list[str]
    warnings: list[str]


class Quantity(NamedTuple):
    setting: str
    factor: float  # widens the expected range
    given: Callable[[RunConfig], float]
    reference: Callable[[ReferenceResult], float | None]
    from_one: bool = False  # interpolate 1 - value

    def turn(self, value: float) -> float:
        return 1.0 - value if self.from_one else value


LEARNING_RATE = Quantity("optim.learning_rate", 2.0, lambda c: c.optim.learning_rate, lambda p: p.learning_rate)
WARMUP = Quantity("schedule.warmup_epochs", 2.0, lambda c: c.schedule.warmup_epochs, lambda p: p.warmup_epochs)
QUANTITIES = (
    LEARNING_RATE,
    WARMUP,
    Quantity("optim.momentum", 2.0, lambda c: c.optim.momentum, lambda p: p.momentum, from_one=True),
    Quantity("optim.weight_decay", 5.0, lambda c: c.optim.weight_decay, lambda p: p.weight_decay),
)


class Expected(NamedTuple):
    """The range of one quantity at one batch that reference results support."""

    low: float
    good: float
    high: float
    results: list[ReferenceResult]


def preflight(config: RunConfig, num_samples: int) -> Findings:
    """Return the reference results nearest to the recipe, and a warning for each value outside their range."""
    config = in_epochs(config, num_samples)
    results = family_of(config, num_samples)
    if not results:
        return Findings([f"none: there is no reference result of {describe_family(config)}"], [])
    warnings = [warn(config, quantity, results) for quantity in QUANTITIES]
    warnings += [warn_of_span(config), warn_of_steps(config, num_samples, results), warn_of_epochs(config, num_samples)]
    nearest = around(results, config.batch.global_batch)
    rates = expected_range(LEARNING_RATE, results, config.batch.global_batch)
    references = [
        describe_result(result) for result in results if result in nearest or (rates and result in rates.results)
    ]
    return Findings(references, [warning for warning in warnings if warning])


def require_known(config: RunConfig, num_samples: int) -> None:
    """Raise an error for the first warning (--strict)."""
    if not family_of(config, num_samples):
        raise UserError(
            f"--strict: there is no reference result of {describe_family(config)}; "
            "remove --strict, or use a recipe of megabatch recipes"
        )
    warnings = preflight(config, num_samples).warnings
    if warnings:
        more = f" ({len(warnings) - 1} more: --dry-run lists them)" if len(warnings) > 1 else ""
        raise UserError(f"--strict: {warnings[0]}{more}")


def family_of(config: RunConfig, num_samples: int) -> list[ReferenceResult]:
    """Return the results of the same model, data and optimizer, sorted by batch; all started from random weights."""
    if config.model.weights:
        return []
    family = (model_of(config), optimizer_of(config))
    same = [result for result in REFERENCE_RESULTS if (result.model, result.optimizer) == family]
    results = [result for result in same if result.data == config.data.source]
    samples = all_samples(config, num_samples)
    results = results or [result for result in same if abs(result.samples / samples - 1) < SAME_SIZE]
    return sorted(results, key=lambda result: result.batch)


def all_samples(config: RunConfig, num_samples: int) -> float:
    """Return the number of training images, held-out images included."""
    return num_samples / (1.0 - config.data.held_out(has_tests=True))


def model_of(config: RunConfig) -> str:
    """Return the model's name; that of a function that makes models by name, such as timm's, is in its options."""
    return str(config.model.options.get("model_name", config.model.name))


def optimizer_of(config: RunConfig) -> str:
    """Return the optimizer's name; LARC (its learning rate is an upper bound) and decoupled decay are separate."""
    if config.optim.decoupled_decay:
        return f"decoupled {config.optim.name}"
    return "larc" if config.optim.name == "lars" and config.optim.variant == "larc" else config.optim.name


def describe_family(config: RunConfig) -> str:
    data = "images from Python" if config.data.source.startswith(FROM_PYTHON) else config.data.source
    start = f" from {config.model.weights}" if config.model.weights else ""
    return f"{model_of(config)}{start} on {data} with {optimizer_of(config)}"


def around(results: Sequence[ReferenceResult], batch: int) -> list[ReferenceResult]:
    """Return the result at this batch, or those on both sides, or the outermost. `results` are sorted by batch."""
    below = [result for result in results if result.batch <= batch][-1:]
    above = [result for result in results if result.batch >= batch][:1]
    return below if below == above else below + above


def expected_range(quantity: Quantity, results: Sequence[ReferenceResult], batch: int) -> Expected | None:
    """Return the range of a quantity at this batch, or None if no result gives it."""
    known = [result for result in results if quantity.reference(result) is not None]
    if not known:
        return None
    near = around(known, batch)
    first, last = (quantity.turn(quantity.reference(result) or 0.0) for result in (near[0], near[-1]))
    if len(near) == 2:
        fraction = math.log(batch / near[0].batch) / math.log(near[1].batch / near[0].batch)
        least = most = first * (last / first) ** fraction
    else:
        least, most = beyond(quantity, near[0].optimizer, first, batch / near[0].batch)
    ends = sorted(map(quantity.turn, (least / quantity.factor, most * quantity.factor)))
    return Expected(ends[0], quantity.turn(most), ends[1], near)


def beyond(quantity: Quantity, optimizer: str, value: float, ratio: float) -> tuple[float, float]:
    """Return the smallest and largest value expected at `ratio` times the batch of the outermost result."""
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
        # A weight moves by learning rate x trust coefficient, so only their product matters.
        scale = coefficient / results[0].trust_coefficient
    if expected is None or expected.low * (1 - ROUNDING) <= value * scale <= expected.high * (1 + ROUNDING):
        return None
    trust = f" with optim.trust_coefficient={coefficient:g}" if scale != 1.0 else ""
    values = ", ".join(f"{quantity.reference(result):g} at {result.batch:,}" for result in expected.results)
    sources = " and ".join(dict.fromkeys(result.source for result in expected.results))
    remedy = f"for example {quantity.setting}={expected.good / scale:.3g}"
    epochs = config.train.epochs
    if quantity is WARMUP and epochs is not None and expected.good >= epochs:
        remedy = f"train.epochs={epochs:.3g} is too short for it; train for longer"
    return (
        f"{quantity.setting}={value:g}{trust} at batch {batch:,}: known to converge: {expected.low / scale:.3g} to "
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
        f"batch.micro={span} is the span of BatchNorm; known to converge: {low} ({spans[low].source}) to "
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
        f"batch.global={batch} makes {samples / batch:.1f} steps per epoch; known to converge: at least "
        f"{fewest.steps_per_epoch:.1f} ({fewest.source}, batch {fewest.batch:,}); "
        f"nearest: batch.global={largest}"
    )


def warn_of_epochs(config: RunConfig, num_samples: int) -> str | None:
    """Compare the length with the epochs that MLPerf's reference points need at this batch to reach the target."""
    target, epochs, batch = config.train.target_top1, config.train.epochs, config.batch.global_batch
    points = epoch_points(config.model.name, round(all_samples(config, num_samples)))
    if optimizer_of(config) != "lars" or not points or target is None or target < MLPERF_TOP1 or epochs is None:
        return None
    curve = fit_epochs(points, MLPERF)
    expected = curve.epochs(batch)
    if epochs >= expected * (1 - curve.doubt(batch)):
        return None
    return (
        f"train.epochs={epochs:g} at batch {batch:,}: about {expected:.0f} epochs are expected to reach "
        f"{MLPERF_TOP1:.1%} ({MLPERF}s); for example train.epochs={expected:.0f}"
    )


def describe_result(result: ReferenceResult) -> str:
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
