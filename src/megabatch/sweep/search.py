"""Coarse to fine over learning rates, within a budget of trials.

A geometric grid is tried first.  Then, until the budget is used up: if the best rate lies at an end of what was tried,
the rate one step beyond it; otherwise the geometric midpoints between it and its neighbours.  Where accuracy has one
peak over the rates, that peak lies between the best rate's neighbours as soon as the best is not at an end.

A score is an accuracy, or None for a rate that diverged.
"""

import math
from collections.abc import Mapping

DIGITS = 3  # of a rate
HELD_OUT = 1 / 12  # of the training images, to judge rates by: 5,000 of Fashion-MNIST's


def coarse_grid(low: float, high: float, num: int) -> list[float]:
    """`num` rates from `low` to `high`, each the same multiple of the one before it."""
    shares = [index / (num - 1) for index in range(num)]
    return [rounded(low ** (1 - share) * high**share) for share in shares]


def next_learning_rates(scores: Mapping[float, float | None], budget: int) -> list[float]:
    """The rates to try next, at most two; none if the budget is used up or nothing lies between."""
    assert len(scores) > 1, "the step of a grid shows in two of its rates"
    rates, best = sorted(scores), best_learning_rate(scores)
    if is_at_end(best, scores):
        inner = rates[1] if best == rates[0] else rates[-2]
        wanted = [best * (best / inner)]
    else:
        place = rates.index(best)
        neighbours = [rates[place - 1], rates[place + 1]]
        # The better side first, in case that the budget has one trial left.
        neighbours.sort(key=lambda rate: rank_of(scores[rate]), reverse=True)
        wanted = [math.sqrt(best) * math.sqrt(rate) for rate in neighbours]
    new = [rate for rate in map(rounded, wanted) if rate not in scores and 0 < rate < math.inf]
    return new[: max(0, budget - len(scores))]


def best_learning_rate(scores: Mapping[float, float | None]) -> float:
    """Of equals the lowest, and so it is if all have diverged."""
    return max(sorted(scores), key=lambda rate: rank_of(scores[rate]))


def is_at_end(rate: float, scores: Mapping[float, float | None]) -> bool:
    return rate in (min(scores), max(scores))


def rank_of(score: float | None) -> float:
    return -math.inf if score is None else score


def rounded(rate: float) -> float:
    return float(f"{rate:.{DIGITS}g}")
