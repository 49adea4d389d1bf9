"""Curves of a long run, with as many points as a screen can show.

The run's steps are cut into spans of equal length.  Of each span stay its least and its greatest value, and the first
that is no number: no spike, no dip and no gap is lost, and what is drawn covers the same pixels as the whole curve.
The first and the last point stay too.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

MOST_POINTS = 1_000
MOST_MEANS, FEWEST_MEANS, STEPS_OF_MEAN = 160, 20, 8  # of the line through a noisy curve


class Curve(NamedTuple):
    """Points, x ascending.  A y that is not finite is a gap."""

    x: Sequence[float]
    y: Sequence[float]


def thin(curve: Curve, most: int = MOST_POINTS) -> Curve:
    """At most so many points, and one more for each span that has a gap."""
    length = len(curve.y)
    if length <= most:
        return curve
    kept = {0, length - 1}
    num_spans = max(1, (most - 2) // 2)
    for span in range(num_spans):
        kept.update(extremes(curve.y, span * length // num_spans, (span + 1) * length // num_spans))
    return at(curve, sorted(kept))


def extremes(values: Sequence[float], begin: int, end: int) -> list[int]:
    """Where in [begin, end) the least and the greatest value are, and the first that is no number."""
    part = values[begin:end]
    if not all(map(math.isfinite, part)):
        places = range(begin, end)
        gap = next(place for place in places if not math.isfinite(values[place]))
        finite = [place for place in places if math.isfinite(values[place])]
        if not finite:
            return [gap]
        return [gap, min(finite, key=values.__getitem__), max(finite, key=values.__getitem__)]
    return [begin + part.index(min(part)), begin + part.index(max(part))]


def at(curve: Curve, places: Sequence[int]) -> Curve:
    return Curve([curve.x[place] for place in places], [curve.y[place] for place in places])


def means(curve: Curve, num_spans: int | None = None) -> Curve:
    """The mean of each span, at its middle step; a span without a number is a gap."""
    length = len(curve.y)
    if num_spans is None:
        num_spans = min(MOST_MEANS, max(FEWEST_MEANS, length // STEPS_OF_MEAN))
    num_spans = min(num_spans, length)
    x, y = [], []
    for span in range(num_spans):
        begin, end = span * length // num_spans, (span + 1) * length // num_spans
        found = [value for value in curve.y[begin:end] if math.isfinite(value)]
        x.append(curve.x[(begin + end - 1) // 2])
        y.append(mean(found))
    return Curve(x, y)


def mean(values: Sequence[float]) -> float:
    """NaN of nothing, and inf where the sum is beyond all numbers."""
    try:
        return math.fsum(values) / len(values) if values else math.nan
    except OverflowError:
        return math.inf


def runs_of_numbers(curve: Curve) -> list[Curve]:
    """The parts of a curve between its gaps."""
    parts: list[Curve] = []
    x: list[float] = []
    y: list[float] = []
    for place, value in zip(curve.x, curve.y, strict=True):
        if math.isfinite(value) and math.isfinite(place):
            x.append(place)
            y.append(value)
        elif x:
            parts.append(Curve(x, y))
            x, y = [], []
    return [*parts, Curve(x, y)] if x else parts


def finite(values: Sequence[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]
