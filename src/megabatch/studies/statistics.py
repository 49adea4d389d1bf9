"""What a few seeds say about the mean.  n values, mean m, sample standard deviation s, t(df) below.

    of a mean   m +- t(n - 1) * s / sqrt(n)                                           Student 1908
    of a gap    m1 - m2 +- t(df) * sqrt(v1 + v2), with v = s^2 / n of each side
                df = (v1 + v2)^2 / (v1^2 / (n1 - 1) + v2^2 / (n2 - 1))                Welch 1947

t(df) bounds 95 % of Student's distribution on both sides of 0.  Both intervals take the values to scatter normally;
Welch's does not take both sides to scatter alike.
"""

import math
from collections.abc import Sequence
from functools import cache

from msgspec import Struct

CONFIDENCE = 0.95
LARGEST_T = 13.0  # t(1) = 12.706, and t falls with df
PANELS = 256  # of Simpson's rule up to t: an error below 1e-9 for every df


class Interval(Struct, frozen=True):
    low: float
    high: float


class Spread(Struct, frozen=True):
    num_values: int
    mean: float
    deviation: float | None  # sample standard deviation; None: one value has none
    interval: Interval | None  # that holds the true mean with 95 % confidence; None: one value has none


class Gap(Struct, frozen=True):
    size: float  # mean of the baseline minus mean of the arm: positive where the arm lies below
    interval: Interval | None  # None: a side has one value only


def spread(values: Sequence[float]) -> Spread:
    assert values, "no values have no mean"
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return Spread(1, mean, None, None)
    variance = variance_of_mean(values)
    half = student_t(len(values) - 1) * math.sqrt(variance)
    return Spread(len(values), mean, math.sqrt(variance * len(values)), Interval(mean - half, mean + half))


def gap(arm: Sequence[float], baseline: Sequence[float]) -> Gap:
    """How far the arm's mean lies below the baseline's."""
    size = spread(baseline).mean - spread(arm).mean
    if min(len(arm), len(baseline)) == 1:
        return Gap(size, None)
    parts = [(variance_of_mean(values), len(values) - 1) for values in (arm, baseline)]
    variance = math.fsum(part for part, _ in parts)
    if variance == 0:
        return Gap(size, Interval(size, size))
    # By shares, since the square of a small variance may be 0.
    freedom = 1 / math.fsum((part / variance) ** 2 / degrees for part, degrees in parts)
    half = student_t(freedom) * math.sqrt(variance)
    return Gap(size, Interval(size - half, size + half))


def variance_of_mean(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values)


@cache
def student_t(degrees: float) -> float:
    """The t that |T| stays below with 95 % probability, found by bisection.  Degrees need not be whole."""
    assert degrees >= 1 - 1e-9, f"two values are the least that have an interval: {degrees}"
    low, high = 0.0, LARGEST_T
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if probability_within(middle, degrees) < CONFIDENCE else (low, middle)
    return middle


def probability_within(t: float, degrees: float) -> float:
    """That |T| is at most t: twice Student's density from 0 to t, by Simpson's rule."""
    logarithm = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2) - math.log(degrees * math.pi) / 2
    width = t / PANELS
    heights = [math.exp(-(degrees + 1) / 2 * math.log1p((i * width) ** 2 / degrees)) for i in range(PANELS + 1)]
    area = math.fsum([heights[0], heights[-1], *(4 * h for h in heights[1:-1:2]), *(2 * h for h in heights[2:-1:2])])
    return 2 * math.exp(logarithm) * area * width / 3
