import math

import pytest

from megabatch.experiments.plan import Score, SearchPoint, as_fast_as, best_point, next_points

GRID, MOMENTA, BUDGET = (2.0, 6.0, 18.0), (0.9, 0.95), 6


def search(peak: float, best_momentum: float) -> dict[SearchPoint, Score]:
    """Search an accuracy that peaks at the rate as fast as `peak` with momentum 0.9 and diverges at 100 times that."""
    scores: dict[SearchPoint, Score] = {}
    while points := next_points(scores, GRID, MOMENTA, BUDGET):
        for point in points:
            distance = abs(math.log(point.learning_rate / (1 - (point.momentum or 0)) / (peak / 0.1)))
            scores[point] = None if distance > math.log(100) else -distance - 0.01 * (point.momentum != best_momentum)
    return scores


@pytest.mark.parametrize("momentum", MOMENTA)
@pytest.mark.parametrize("peak", [0.5, 2.0, 6.0, 9.0, 18.0, 60.0])
def test_momenta_share_the_budget_and_the_better_one_is_refined(peak: float, momentum: float) -> None:
    scores = search(peak, momentum)
    assert len(scores) == BUDGET
    points = list(scores)
    assert points[:3] == [SearchPoint(rate, 0.9) for rate in GRID]
    assert points[3] == as_fast_as(best_point({point: scores[point] for point in points[:3]}), 0.95)
    assert {point.momentum for point in points[4:]} == {momentum}
    found = best_point(scores)
    assert found.momentum == momentum
    # Two finer rates get within half a step of the grid; beyond the grid, the search takes two steps.
    assert abs(math.log(as_fast_as(found, 0.9).learning_rate / peak)) < math.log(3) / 2 + 1e-2 or peak > 54


def test_search_without_momenta_is_the_search_over_rates() -> None:
    assert next_points({}, (1, 4), (), 4) == [SearchPoint(1), SearchPoint(4)]
    assert next_points({SearchPoint(1): 0.5, SearchPoint(4): 0.8}, (1, 4), (), 4) == [SearchPoint(16)]
    assert next_points({SearchPoint(1): 0.5, SearchPoint(4): 0.8, SearchPoint(16): 0.7}, (1, 4), (), 4) == [
        SearchPoint(8)
    ]
    assert next_points({SearchPoint(1): None, SearchPoint(4): None}, (1, 4), (), 2) == []


def test_points_of_equal_speed_have_equal_total_steps() -> None:
    for momentum in (0.5, 0.95):
        rate = as_fast_as(SearchPoint(6.0, 0.9), momentum).learning_rate
        ways = [sum(lr * mu**k for k in range(2000)) for lr, mu in ((6.0, 0.9), (rate, momentum))]
        assert ways[0] == pytest.approx(ways[1])
