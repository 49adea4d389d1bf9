"""Where an arm is searched: learning rates, and momenta if it asks for them, within one budget of trials.

eta learning rate, mu momentum.  A weight moves by about eta / (1 - mu) times its gradient in the end, so that

    eta (1 - mu_0) / (1 - mu)

is as fast with mu_0 as eta is with mu.  The grid of learning rates is tried with the first momentum.  Then the best of
them is tried, as fast, with each other momentum; and with the momentum that was best the rates are made finer, on the
axis of those that are as fast with the first.  Momenta take trials from the finer steps: the budget is every arm's.
"""

from collections.abc import Mapping, Sequence

from msgspec import Struct

from megabatch.sweep.search import next_learning_rates, rank_of, rounded

Score = float | None  # None: diverged


class Point(Struct, frozen=True, order=True):
    learning_rate: float
    momentum: float | None = None  # None: the recipe's


def next_points(
    scores: Mapping[Point, Score], grid: Sequence[float], momenta: Sequence[float], budget: int
) -> list[Point]:
    """What to try next; nothing if the budget is used up."""
    if not scores:
        return [Point(rate, momenta[0] if momenta else None) for rate in grid]
    best, left = best_point(scores), budget - len(scores)
    tried = {point.momentum for point in scores}
    if others := [momentum for momentum in momenta if momentum not in tried]:
        return [as_fast_as(best, momentum) for momentum in others][: max(0, left)]
    first = momenta[0] if momenta else None
    along: dict[float, Score] = {}
    for point, score in scores.items():
        rate = as_fast_as(point, first).learning_rate
        along[rate] = max(along.get(rate), score, key=rank_of)
    # One rate may have been tried with several momenta, so that fewer rates than trials are known.
    rates = next_learning_rates(along, len(along) + left)
    return [as_fast_as(Point(rate, first), best.momentum) for rate in rates]


def best_point(scores: Mapping[Point, Score]) -> Point:
    """Of equals the lowest."""
    return max(sorted(scores), key=lambda point: rank_of(scores[point]))


def as_fast_as(point: Point, momentum: float | None) -> Point:
    if point.momentum is None or momentum is None or momentum == point.momentum:
        return point
    return Point(rounded(point.learning_rate * (1 - momentum) / (1 - point.momentum)), momentum)
