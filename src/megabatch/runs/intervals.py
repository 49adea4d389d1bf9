"""Confidence intervals of means over seeds.

n values, mean m, sample standard deviation s, t(df) as below:

    of a mean          m +- t(n - 1) * s / sqrt(n)                                           Student 1908
    of a gap           m1 - m2 +- t(df) * sqrt(v1 + v2), with v = s^2 / n of each side
                       df = (v1 + v2)^2 / (v1^2 / (n1 - 1) + v2^2 / (n2 - 1))                Welch 1947
    of a paired gap    that of the mean of the n differences                                 Student 1908

t(df) bounds 95 % of Student's distribution on both sides of 0.  All intervals assume normally distributed values.
Welch's allows unequal variances.  The paired interval is shorter the more the effect of a seed is common to both sides.
"""

import math
from collections.abc import Sequence
from functools import cache

from msgspec import Struct

CONFIDENCE = 0.95


class Interval(Struct, frozen=True):
    low: float
    high: float


class Spread(Struct, frozen=True):
    num_values: int
    mean: float
    deviation: float | None  # sample standard deviation; None for one value
    interval: Interval | None  # of 95 % confidence for the mean; None for one value


class Gap(Struct, frozen=True):
    size: float  # mean of the baseline minus mean of the arm: positive if the arm is below
    interval: Interval | None  # None if a side has only one value


def spread(values: Sequence[float]) -> Spread:
    assert values, "the mean of no values"
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return Spread(1, mean, None, None)
    variance = variance_of_mean(values)
    half = student_t(len(values) - 1) * math.sqrt(variance)
    return Spread(len(values), mean, math.sqrt(variance * len(values)), Interval(mean - half, mean + half))


def gap(arm: Sequence[float], baseline: Sequence[float]) -> Gap:
    """Return how far the arm's mean is below the baseline's."""
    size = spread(baseline).mean - spread(arm).mean
    if min(len(arm), len(baseline)) == 1:
        return Gap(size, None)
    parts = [(variance_of_mean(values), len(values) - 1) for values in (arm, baseline)]
    variance = math.fsum(part for part, _ in parts)
    if variance == 0:
        return Gap(size, Interval(size, size))
    # In shares of the variance, since the square of a small variance may underflow.
    freedom = 1 / math.fsum((part / variance) ** 2 / degrees for part, degrees in parts)
    half = student_t(freedom) * math.sqrt(variance)
    return Gap(size, Interval(size - half, size + half))


def paired_gap(arm: Sequence[float], baseline: Sequence[float]) -> Gap:
    """Return the gap of values paired by seed, which removes the effect of a seed on both sides."""
    assert len(arm) == len(baseline), f"pairs have two sides: {len(arm)} and {len(baseline)} values"
    found = spread([other - value for value, other in zip(arm, baseline, strict=True)])
    return Gap(found.mean, found.interval)


def variance_of_mean(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values)


@cache
def student_t(degrees: float) -> float:
    """Return the t that |T| stays below with 95 % probability.  Degrees need not be whole."""
    # Imported here: it takes a third of a second, and most importers need no interval.
    from scipy.special import stdtrit  # type: ignore[import-untyped]

    assert degrees >= 1 - 1e-9, f"an interval needs two values: {degrees} degrees of freedom"
    return float(stdtrit(degrees, (1 + CONFIDENCE) / 2))
