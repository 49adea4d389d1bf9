"""The time a device computes on a microbatch of b images: t(b) = t0 + c b, fitted to published throughputs.

Legend: t0 is the time of a step that does not depend on the batch (kernel launches and latencies, the update); c is the
time per image.

Idea: t0 belongs to the software stack and c to the machine.  Published points come from variants of a device (40 or
80 GB, 250 or 500 W), each with one or two batch sizes.  Memory and power change c but not the number of launches, so
variants share t0 and variant v has c_v:

    log t = log(t0 + c_v b)

by least squares of logarithms; c_v is the mean over the points of v.  Points of large batches hardly determine t0.
Therefore a curve can have a prior, `fixed_ms`: the t0 of another device that launches kernels in the same way (from
CUDA graphs, or one by one from the CPU).  The prior is log-normal.  The fit minimises

    squares / spread^2 + (log(t0 / prior) / log PRIOR)^2

Without `fixed_ms` the prior is weak: t0 is about that of USUAL images.  It is 10 to 30 on the devices with small
batches among their points (V100, A100 and H100, with and without CUDA graphs).

Uncertainty: `ends` are the lines of the lowest and highest t0 within 1.64 deviations.  A batch outside the range of the
points adds EXTRAPOLATION per factor e, because the line itself is then unproved.

Source: the two ResNet-50 curves that were published down to one image (V100 and K80 in fp32, SCALING.md A2) follow a
line within 5 %.

A curve of one model serves another: c grows with its FLOPs, t0 with its number of layers.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct

from megabatch.errors import UserError, nearest


class Line(NamedTuple):
    fixed_s: float  # t0
    per_image_s: float  # c

    def seconds(self, num_images: float) -> float:
        return self.fixed_s + self.per_image_s * num_images

    def times(self, fixed: float, per_image: float) -> "Line":
        return Line(fixed * self.fixed_s, per_image * self.per_image_s)


LEAST_SPREAD = 0.02  # relative: no machine is known better
DEVIATIONS = 1.64  # nine in ten
PRIOR = 1.28  # one deviation of t0 around `fixed_ms`, as a factor: nine in ten devices within 1.5
USUAL, WEAK = 17.0, 1.9  # t0 / c in images, and one deviation of it as a factor: nine in ten within 2.9
EXTRAPOLATION = 0.05  # relative doubt per factor e between a batch and the nearest that was fitted

Positive = Annotated[float, Meta(ge=1e-6, le=1e9)]
NotNegative = Annotated[float, Meta(ge=0, le=1e9)]


class ThroughputPoint(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    batch: Positive  # images per device
    images_per_s: Positive  # of one device, as published
    waited_ms: NotNegative = 0.0  # simulated all-reduce and jitter in its step, if it ran on several nodes
    variant: str = ""  # of the device: memory, power, software
    source: str = ""

    @property
    def seconds(self) -> float:
        return self.batch / self.images_per_s - self.waited_ms / 1e3


class Curve(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Points of one model in one precision."""

    model: str = "resnet50"
    points: tuple[ThroughputPoint, ...]
    fixed_ms: Positive | None = None  # t0 of a similar device

    def __post_init__(self) -> None:
        if not self.points or any(point.seconds <= 0 for point in self.points):
            raise UserError(
                f"the curve of {self.model} needs points {{batch, images_per_s}} whose step is longer than waited_ms"
            )


class FittedCurve(NamedTuple):
    line: Line
    spread: float  # relative deviation of machines of one kind from the line
    ends: tuple[Line, ...]  # of the lowest and the highest t0
    batches: tuple[float, float]  # the smallest and the largest that were fitted

    def doubt(self, num_images: float) -> float:
        """Return the relative uncertainty of the line at `num_images`."""
        of_ends = max(abs(end.seconds(num_images) / self.line.seconds(num_images) - 1) for end in self.ends)
        low, high = self.batches
        return math.hypot(of_ends, EXTRAPOLATION * math.log(max(1.0, low / num_images, num_images / high)))

    def times(self, fixed: float, per_image: float) -> "FittedCurve":
        low, high = (end.times(fixed, per_image) for end in self.ends)
        return self._replace(line=self.line.times(fixed, per_image), ends=(low, high))


@lru_cache(maxsize=256)
def fit_curve(curve: Curve, variant: str = "") -> FittedCurve:
    """Fit the line of one variant; "" is the variant of the first point.  Points without a variant apply to all."""
    points = curve.points
    known = list(dict.fromkeys(point.variant for point in points))
    if variant not in known:
        if variant and "" not in known:
            raise UserError(
                f"device.variant={variant!r} is not one of {', '.join(known)}; nearest: {nearest(variant, known)}"
            )
        variant = known[0] if not variant else ""
    batches = sorted(point.batch for point in points)
    most_s = min(point.seconds for point in points)
    least = squares_of(points, argmin(lambda fixed_s: squares_of(points, fixed_s), most_s))
    freedom = max(1, len(points) - len(known) - (batches[0] < batches[-1]))
    spread = max(LEAST_SPREAD, math.sqrt(least / freedom))

    def misfit(fixed_s: float) -> float:
        """Return twice the negative logarithm of the posterior density."""
        if curve.fixed_ms is None:
            images_s = statistics.geometric_mean(per_image_s(points, fixed_s, each) for each in known)
            expected_s, deviation = USUAL * images_s, math.log(WEAK)
        else:
            expected_s, deviation = curve.fixed_ms / 1e3, math.log(PRIOR)
        deviations = math.log(max(fixed_s, 1e-12) / expected_s) / deviation
        return squares_of(points, fixed_s) / spread**2 + deviations**2

    fixed_s = argmin(misfit, most_s)
    worst = misfit(fixed_s) + DEVIATIONS**2
    low_s, high_s = (edge(misfit, fixed_s, outside_s, worst) for outside_s in (0.0, most_s))
    line, low, high = (Line(each_s, per_image_s(points, each_s, variant)) for each_s in (fixed_s, low_s, high_s))
    return FittedCurve(line, spread, (low, high), (batches[0], batches[-1]))


def per_image_s(points: Sequence[ThroughputPoint], fixed_s: float, variant: str) -> float:
    """Return c of the variant: the geometric mean over its points."""
    own = [point for point in points if point.variant == variant]
    return math.exp(statistics.fmean(math.log(max(1e-12, point.seconds - fixed_s) / point.batch) for point in own))


def squares_of(points: Sequence[ThroughputPoint], fixed_s: float) -> float:
    """Return the sum of squares of log(measured / fitted time)."""
    scales = {variant: per_image_s(points, fixed_s, variant) for variant in {point.variant for point in points}}
    return sum(math.log(point.seconds / (fixed_s + scales[point.variant] * point.batch)) ** 2 for point in points)


def argmin(function: Callable[[float], float], high: float) -> float:
    """Return the argument in [0, high) with the least value, by grids that become finer."""
    low, num = 0.0, 40
    while True:
        width = (high - low) / num
        best = min((low + width * index for index in range(num)), key=function)
        if width <= 1e-9 * (best + width):
            return best
        low, high = max(low, best - width), min(high, best + width)


def edge(function: Callable[[float], float], inside: float, outside: float, limit: float) -> float:
    """Return the place between `inside` and `outside` where the function reaches the limit, by bisection."""
    for _ in range(50):
        middle = (inside + outside) / 2
        if function(middle) <= limit:
            inside = middle
        else:
            outside = middle
    return inside
