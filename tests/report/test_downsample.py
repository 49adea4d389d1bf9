"""Downsampled curves keep extremes and gaps."""

import math

from hypothesis import given
from hypothesis import strategies as st

from megabatch.report.view import Curve, downsample, finite, finite_runs, means

VALUES = st.lists(st.floats(), min_size=1, max_size=400)  # NaN and infinities too


@given(values=VALUES, most=st.integers(2, 60))
def test_first_last_and_extreme_points_are_kept(values: list[float], most: int) -> None:
    curve = Curve(range(len(values)), values)
    downsampled = downsample(curve, most)
    assert (downsampled.x[0], downsampled.x[-1]) == (0, len(values) - 1)
    assert all(values[int(x)] is y or values[int(x)] == y for x, y in zip(downsampled.x, downsampled.y, strict=True))
    assert list(downsampled.x) == sorted(set(downsampled.x))
    if finite(values):
        assert min(finite(downsampled.y)) == min(finite(values)) and max(finite(downsampled.y)) == max(finite(values))
    num_spans = max(1, (most - 2) // 2)
    assert len(downsampled.x) <= max(most, 2 + 3 * num_spans)


@given(length=st.integers(3000, 20_000), gap=st.integers(0, 2999))
def test_single_nan_stays_a_gap_in_a_long_curve(length: int, gap: int) -> None:
    values = [1.0 + (place % 7) for place in range(length)]
    values[gap] = math.nan
    downsampled = downsample(Curve(range(length), values))
    assert gap in downsampled.x
    assert len(downsampled.x) < 1_100


@given(values=VALUES)
def test_means_are_within_the_values_and_gaps_split_a_curve(values: list[float]) -> None:
    found = means(Curve(range(len(values)), values), 10)
    known = finite(values)
    for mean in finite(found.y):
        slack = 1e-9 * max(abs(min(known)), abs(max(known)))
        assert min(known) - slack <= mean <= max(known) + slack
    parts = finite_runs(Curve(range(len(values)), values))
    assert [y for part in parts for y in part.y] == known
