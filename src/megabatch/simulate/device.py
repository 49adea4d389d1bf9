"""How long a device computes on a microbatch of b images: t(b) = t0 + c b, fitted to published throughputs.

t0 is what a step costs whatever the batch (launches, the update), so small batches are slow.  Published points come
from machines of different speed (40 or 80 GB, 250 or 500 W, another release), each with one or two batch sizes.  They
share the shape of the curve, r = t0/c, and differ by a factor: log t = log s_v + log(r + b), s_v for each variant v.
r is the one with the least squares, s_v the mean of its points.  The batch sizes of all points thereby speak for all
variants, and a slow machine is not taken for a small batch.

A curve of one model serves another: c grows with its FLOPs, t0 with its layers.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct

from megabatch.errors import UserError, nearest

SHAPES = [images / 4 for images in range(0, 4 * 120)]  # r, in images, that are tried
LEAST_SPREAD = 0.02  # relative: nobody's machine is known better

Positive = Annotated[float, Meta(gt=0)]


class Point(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    batch: Positive  # images on a device
    images_per_s: Positive  # of one device
    variant: str = ""  # of the device: memory, power, software
    source: str = ""


class Curve(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Points of one model in one precision."""

    model: str = "resnet50"
    points: list[Point]
    fixed_images: Annotated[float, Meta(ge=0)] | None = None  # r, where the points do not tell: of a device alike

    def __post_init__(self) -> None:
        if not self.points:
            raise UserError("a device's curve has no points; give at least one {batch, images_per_s}")


class FittedCurve(NamedTuple):
    fixed_s: float  # t0
    per_image_s: float  # c
    spread: float  # relative: how far machines of one kind lie from it

    def seconds(self, num_images: float) -> float:
        return self.fixed_s + self.per_image_s * num_images


def fit_curve(curve: Curve, variant: str = "") -> FittedCurve:
    """Of one variant; "" is the first point's.  Points without a variant are of all."""
    known = list(dict.fromkeys(point.variant for point in curve.points))
    if variant not in known:
        if variant and "" not in known:
            raise UserError(
                f"device.variant={variant!r} is none of {', '.join(known)}; nearest: {nearest(variant, known)}"
            )
        variant = known[0] if not variant else ""
    shape = curve.fixed_images
    if shape is None:
        if len({point.batch for point in curve.points}) == 1:
            raise UserError(
                f"all points of the curve of {curve.model} are of {curve.points[0].batch:g} images, which does not say "
                "what a step costs at other batches; give a point at another batch, or fixed_images = t0/c of a device "
                "alike"
            )
        shape = min(SHAPES, key=lambda images: sum(residual**2 for residual in residuals(curve.points, images)))
    scale_s = math.exp(statistics.fmean(math.log(s) for s in scales_of(curve.points, shape, variant)))
    left = residuals(curve.points, shape)
    freedom = max(1, len(left) - len(known) - (curve.fixed_images is None))
    spread = max(LEAST_SPREAD, math.sqrt(sum(residual**2 for residual in left) / freedom))
    return FittedCurve(scale_s * shape, scale_s, spread)


def scales_of(points: Sequence[Point], shape: float, variant: str) -> list[float]:
    """c, by each point of the variant alone."""
    return [point.batch / point.images_per_s / (shape + point.batch) for point in points if point.variant == variant]


def residuals(points: Sequence[Point], shape: float) -> list[float]:
    """Logarithms of measured by fitted time, of all points."""
    result = []
    for variant in dict.fromkeys(point.variant for point in points):
        logs = [math.log(scale) for scale in scales_of(points, shape, variant)]
        mean = statistics.fmean(logs)
        result += [value - mean for value in logs]
    return result
