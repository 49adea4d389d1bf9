import math
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megabatch.experiments.search import best_learning_rate, coarse_grid, is_at_end, next_learning_rates, rounded

Score = float | None
ROUNDING = 1.01  # a rate of three digits is off by half a percent at most

lows = st.floats(1e-4, 1e2)
steps = st.floats(1.5, 10.0)
sizes = st.integers(2, 6)


def search(grid: list[float], budget: int, score: Callable[[float], Score]) -> dict[float, Score]:
    scores = {rate: score(rate) for rate in grid}
    while more := next_learning_rates(scores, budget):
        assert not {*more} & {*scores} and len({*more}) == len(more), "a rate is tried once"
        scores |= {rate: score(rate) for rate in more}
    return scores


def peaked(peak: float, left: float, right: float) -> Callable[[float], float]:
    """Return a score that falls from its peak with different slopes on either side."""

    def score(rate: float) -> float:
        distance = math.log(rate / peak)
        return -right * distance if distance > 0 else left * distance

    return score


@given(lows, steps, sizes)
def test_grid_is_geometric(low: float, step: float, num: int) -> None:
    grid = coarse_grid(low, low * step ** (num - 1), num)
    assert grid[0] == rounded(low) and grid[-1] == rounded(low * step ** (num - 1)) and len(grid) == num
    assert all(above / below == pytest.approx(step, rel=0.011) for below, above in pairwise(grid))


@given(lows, steps, sizes, st.integers(0, 12), st.data())
def test_any_scores_keep_the_budget_and_repeat_no_rate(
    low: float, step: float, num: int, extra: int, data: st.DataObject
) -> None:
    scores = st.none() | st.sampled_from([0.1, 0.5, 0.9])  # with ties
    tried = search(coarse_grid(low, low * step ** (num - 1), num), num + extra, lambda rate: data.draw(scores))
    assert num <= len(tried) <= num + extra
    assert all(rate == rounded(rate) > 0 for rate in tried)


@settings(max_examples=200)
@given(lows, steps, st.integers(3, 6), st.floats(0, 1), st.floats(0.1, 10), st.floats(0.1, 10), st.integers(0, 3))
def test_two_trials_halve_the_interval_around_a_peak(
    low: float, step: float, num: int, where: float, left: float, right: float, rounds: int
) -> None:
    span = step ** (num - 1)
    peak = low * span**where
    tried = search(coarse_grid(low, low * span, num), num + 1 + 2 * rounds, peaked(peak, left, right))
    best, rates = best_learning_rate(tried), sorted(tried)
    assert not is_at_end(best, tried)  # one trial goes beyond the end, if the best of the grid is there
    below, above = rates[rates.index(best) - 1], rates[rates.index(best) + 1]
    assert below / ROUNDING <= peak <= above * ROUNDING
    finest = step ** (1 / 2**rounds)
    assert above / below <= max(finest**2, ROUNDING) * ROUNDING**2


@given(lows, steps, st.integers(-4, 4))
def test_peak_beyond_an_end_is_reached_step_by_step(low: float, step: float, beyond: int) -> None:
    grid = coarse_grid(low, low * step**2, 3)
    peak = grid[1] * step ** (beyond + math.copysign(1, beyond))
    tried = search(grid, 3 + abs(beyond) + 2, peaked(peak, 1.0, 1.0))
    assert not is_at_end(best_learning_rate(tried), tried)
    assert 1 / step / ROUNDING < best_learning_rate(tried) / peak < step * ROUNDING


def test_divergence_is_the_worst_score_and_leads_to_lower_rates() -> None:
    assert best_learning_rate({0.1: 0.0, 1.0: None}) == 0.1
    assert next_learning_rates({0.1: 0.2, 1.0: 0.3, 10.0: None}, budget=9) == [0.316, 3.16]
    assert next_learning_rates({1.0: None, 10.0: None}, budget=3) == [0.1]
    assert next_learning_rates({1e-300: None, 1.0: None}, budget=3) == []  # there is no rate below


def test_lower_rate_wins_a_tie() -> None:
    assert best_learning_rate({4.0: 0.9, 2.0: 0.9, 1.0: 0.8}) == 2.0


def test_the_last_trial_goes_to_the_side_of_the_better_neighbour() -> None:
    assert next_learning_rates({1.0: 0.1, 4.0: 0.9, 16.0: 0.5}, budget=4) == [8.0]
    assert next_learning_rates({1.0: 0.5, 4.0: 0.9, 16.0: 0.5}, budget=4) == [2.0]
    assert next_learning_rates({1.0: 0.5, 4.0: 0.9, 16.0: 0.5}, budget=3) == []
