"""How long a device computes on a microbatch of b images: t(b) = t0 + c b, fitted to published throughputs.

t0 is what a step costs whatever the batch (launches, the update), so small batches are slow.  Published points come
from machines of different speed (40 or 80 GB, 250 or 500 W, another release), each with one or two batch sizes.  They
share the shape of the curve, r = t0/c, and differ by a factor: log t = log s_v + log(r + b), s_v for each variant v.
r is the one with the least squares, s_v the mean of its points.  The batch sizes of all points thereby speak for all
variants, and a slow machine is not taken for a small batch.

Points of large batches hardly tell r.  `ends` are the curves of the lowest and the highest r that fit nearly as well
(squares within 1.64^2 of a point's), so that whoever asks for 16 images learns how little is known of them.

A curve of one model serves another: c grows with its FLOPs, t0 with its layers.
"""

import math
import statistics
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct

from megabatch.errors import UserError, nearest

# Seconds of a microbatch of b images: t(b) = t0 + c b.


class Line(NamedTuple):
    fixed_s: float  # t0
    per_image_s: float  # c

    def seconds(self, num_images: float) -> float:
        return self.fixed_s + self.per_image_s * num_images

    def times(self, fixed: float, per_image: float) -> "Line":
        return Line(fixed * self.fixed_s, per_image * self.per_image_s)


SHAPES = [*(quarter / 4 for quarter in range(400)), *range(100, 1001, 4)]  # r, in images, that are tried
LEAST_SPREAD = 0.02  # relative: nobody's machine is known better
DEVIATIONS = 1.64  # nine in ten
BORROWED = 1.5  # factor by which the r of another device may be wrong

Positive = Annotated[float, Meta(ge=1e-6, le=1e9)]
NotNegative = Annotated[float, Meta(ge=0, le=1e9)]


class Point(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    batch: Positive  # images on a device
    images_per_s: Positive  # of one device, as published
    waited_ms: NotNegative = 0.0  # of its step, where it ran on several nodes: all-reduce and jitter, as simulated
    variant: str = ""  # of the device: memory, power, software
    source: str = ""

    @property
    def seconds(self) -> float:
        return self.batch / self.images_per_s - self.waited_ms / 1e3


class Curve(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Points of one model in one precision."""

    model: str = "resnet50"
    points: tuple[Point, ...]
    fixed_images: NotNegative | None = None  # r, where the points do not tell: of a device alike

    def __post_init__(self) -> None:
        if not self.points or any(point.seconds <= 0 for point in self.points):
            raise UserError(
                f"the curve of {self.model} needs points {{batch, images_per_s}} whose step is longer than it waited"
            )


class FittedCurve(NamedTuple):
    line: Line
    spread: float  # relative: how far machines of one kind lie from it, one deviation
    ends: tuple[Line, ...]  # of the lowest and the highest r

    def doubt(self, num_images: float) -> float:
        """Relative: how far the ends lie from it, at so many images."""
        return max(abs(end.seconds(num_images) / self.line.seconds(num_images) - 1) for end in self.ends)

    def times(self, fixed: float, per_image: float) -> "FittedCurve":
        lines = [line.times(fixed, per_image) for line in (self.line, *self.ends)]
        return FittedCurve(lines[0], self.spread, tuple(lines[1:]))


@lru_cache(maxsize=256)
def fit_curve(curve: Curve, variant: str = "") -> FittedCurve:
    """Of one variant; "" is the first point's.  Points without a variant are of all."""
    points = curve.points
    known = list(dict.fromkeys(point.variant for point in points))
    if variant not in known:
        if variant and "" not in known:
            raise UserError(
                f"device.variant={variant!r} is none of {', '.join(known)}; nearest: {nearest(variant, known)}"
            )
        variant = known[0] if not variant else ""
    shape = curve.fixed_images
    if shape is None:
        if len({point.batch for point in points}) == 1:
            raise UserError(
                f"all points of the curve of {curve.model} are of {points[0].batch:g} images, which does not say "
                "what a step costs at other batches; give a point at another batch, or fixed_images = t0/c of a device "
                "alike"
            )
        squares = {images: squares_of(points, images) for images in SHAPES}
        shape = min(squares, key=squares.__getitem__)
    least = squares_of(points, shape)
    freedom = max(1, len(points) - len(known) - (curve.fixed_images is None))
    spread = max(LEAST_SPREAD, math.sqrt(least / freedom))
    if curve.fixed_images is None:
        fitting = [images for images, found in squares.items() if found <= least + (DEVIATIONS * spread) ** 2]
    else:
        fitting = [shape / BORROWED, shape * BORROWED]
    ends = tuple(line_of(points, images, variant) for images in (min(fitting), max(fitting)))
    return FittedCurve(line_of(points, shape, variant), spread, ends)


def line_of(points: Sequence[Point], shape: float, variant: str) -> Line:
    per_image_s = math.exp(statistics.fmean(math.log(scale) for scale in scales_of(points, shape, variant)))
    return Line(per_image_s * shape, per_image_s)


def scales_of(points: Sequence[Point], shape: float, variant: str) -> list[float]:
    """c, by each point of the variant alone."""
    return [point.seconds / (shape + point.batch) for point in points if point.variant == variant]


def squares_of(points: Sequence[Point], shape: float) -> float:
    """Of logarithms of measured by fitted time, over all points."""
    total = 0.0
    for variant in dict.fromkeys(point.variant for point in points):
        logs = [math.log(scale) for scale in scales_of(points, shape, variant)]
        mean = statistics.fmean(logs)
        total += sum((value - mean) ** 2 for value in logs)
    return total
