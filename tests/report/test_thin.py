"""Thinned curves: nothing that stands out is lost."""

import math

from hypothesis import given
from hypothesis import strategies as st

from megabatch.report.view import Curve, finite, means, runs_of_numbers, thin

VALUES = st.lists(st.floats(), min_size=1, max_size=400)  # NaN and infinities too


@given(values=VALUES, most=st.integers(2, 60))
def test_first_last_least_and_greatest_stay_and_few_points_are_left(values: list[float], most: int) -> None:
    curve = Curve(range(len(values)), values)
    thinned = thin(curve, most)
    assert (thinned.x[0], thinned.x[-1]) == (0, len(values) - 1)
    assert all(curve.y[x] is y or curve.y[x] == y for x, y in zip(thinned.x, thinned.y, strict=True))
    assert list(thinned.x) == sorted(set(thinned.x))
    if finite(values):
        assert min(finite(thinned.y)) == min(finite(values)) and max(finite(thinned.y)) == max(finite(values))
    num_spans = max(1, (most - 2) // 2)
    assert len(thinned.x) <= max(most, 2 + 3 * num_spans)


@given(length=st.integers(3000, 20_000), gap=st.integers(0, 2999))
def test_one_step_that_is_no_number_is_a_gap_in_a_long_curve(length: int, gap: int) -> None:
    values = [1.0 + (place % 7) for place in range(length)]
    values[gap] = math.nan
    thinned = thin(Curve(range(length), values))
    assert gap in thinned.x
    assert len(thinned.x) < 1_100


@given(values=VALUES)
def test_means_lie_within_the_values_and_gaps_cut_a_curve(values: list[float]) -> None:
    found = means(Curve(range(len(values)), values), 10)
    known = finite(values)
    for mean in finite(found.y):
        slack = 1e-9 * max(abs(min(known)), abs(max(known)))
        assert min(known) - slack <= mean <= max(known) + slack
    parts = runs_of_numbers(Curve(range(len(values)), values))
    assert [y for part in parts for y in part.y] == known
