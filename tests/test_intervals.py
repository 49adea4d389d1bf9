import math
import statistics

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.stats import ttest_ind, ttest_rel  # type: ignore[import-untyped]

from megabatch.runs.intervals import Gap, Interval, gap, paired_gap, spread, student_t

values = st.lists(st.integers(-1000, 1000).map(lambda n: n / 10), min_size=2, max_size=8)
shifts = st.integers(-1000, 1000).map(float)
scales = st.sampled_from([0.25, 0.5, 3.0, 100.0])


def close(left: Interval | None, low: float, high: float) -> bool:
    assert left is not None
    return (left.low, left.high) == pytest.approx((low, high), abs=1e-6, rel=1e-9)


def test_t_matches_published_tables() -> None:
    table = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 8: 2.306, 9: 2.262, 20: 2.086, 120: 1.980, 1e7: 1.960}
    assert {degrees: round(student_t(degrees), 3) for degrees in table} == table


def test_t_has_its_closed_forms_at_1_2_and_infinity() -> None:
    assert student_t(1) == pytest.approx(math.tan(0.475 * math.pi), abs=1e-9)
    assert student_t(2) == pytest.approx(0.95 * math.sqrt(2 / (1 - 0.95**2)), abs=1e-9)
    assert student_t(1e8) == pytest.approx(statistics.NormalDist().inv_cdf(0.975), abs=1e-6)


@given(degrees=st.floats(1, 60), more=st.floats(0.01, 10))
def test_t_falls_with_the_degrees_of_freedom(degrees: float, more: float) -> None:
    assert student_t(degrees + more) < student_t(degrees)


@given(values=values)
def test_mean_and_deviation_match_the_standard_library(values: list[float]) -> None:
    found = spread(values)
    assert found.mean == pytest.approx(statistics.fmean(values), abs=1e-9)
    assert found.deviation == pytest.approx(statistics.stdev(values), abs=1e-9)


@given(values=values, shift=shifts, scale=scales)
def test_intervals_move_and_grow_with_the_values(values: list[float], shift: float, scale: float) -> None:
    before, after = spread(values), spread([scale * value + shift for value in values])
    assert before.interval is not None
    assert close(after.interval, scale * before.interval.low + shift, scale * before.interval.high + shift)


@given(one=values, other=values, shift=shifts, scale=scales)
def test_gap_is_antisymmetric_shift_invariant_and_scales(
    one: list[float], other: list[float], shift: float, scale: float
) -> None:
    found, back = gap(one, other), gap(other, one)
    assert found.interval is not None and back.size == -found.size
    assert close(back.interval, -found.interval.high, -found.interval.low)
    moved = gap([scale * value + shift for value in one], [scale * value + shift for value in other])
    assert moved.size == pytest.approx(scale * found.size, abs=1e-6)
    assert close(moved.interval, scale * found.interval.low, scale * found.interval.high)


@given(values=values)
def test_with_equal_sides_welch_is_the_pooled_t(values: list[float]) -> None:
    size, found = len(values), gap(values, values)
    half = student_t(2 * size - 2) * statistics.stdev(values) * math.sqrt(2 / size)
    assert close(found.interval, -half, half)


def test_gap_matches_a_published_example() -> None:
    # R's sleep data (Student 1908), as t.test(extra ~ group) prints it: t = -1.8608, df = 17.776, -3.3654832 0.2054832.
    first = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    second = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    found = gap(arm=second, baseline=first)
    assert found.size == pytest.approx(0.75 - 2.33)
    assert close(found.interval, -3.3654832, 0.2054832)


@given(arm=values, baseline=values)
def test_gap_matches_scipys_welch_test(arm: list[float], baseline: list[float]) -> None:
    assume(len({*arm}) > 1 and len({*baseline}) > 1)
    reference = ttest_ind(baseline, arm, equal_var=False).confidence_interval(0.95)
    assert close(gap(arm, baseline).interval, reference.low, reference.high)


@given(pairs=st.lists(st.tuples(st.integers(-1000, 1000), st.integers(-1000, 1000)), min_size=2, max_size=20))
def test_paired_gap_matches_scipys_paired_test(pairs: list[tuple[int, int]]) -> None:
    assume(len({one - other for one, other in pairs}) > 1)
    arm, baseline = ([value / 10 for value in side] for side in zip(*pairs, strict=True))
    reference = ttest_rel(baseline, arm).confidence_interval(0.95)
    found = paired_gap(arm, baseline)
    assert found.size == pytest.approx(gap(arm, baseline).size, abs=1e-9)
    assert close(found.interval, reference.low, reference.high)


def test_paired_gap_matches_a_published_example() -> None:
    # R's sleep data (Student 1908), as t.test(..., paired = TRUE) prints it: t = -4.0621, -2.4598858 -0.7001142.
    first = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    second = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    assert close(paired_gap(arm=second, baseline=first).interval, -2.4598858, -0.7001142)


@given(values=values, shift=shifts)
def test_effect_of_a_seed_on_both_sides_cancels(values: list[float], shift: float) -> None:
    found = paired_gap(values, [value + shift for value in values])
    assert found.size == pytest.approx(shift) and close(found.interval, shift, shift)


def test_single_value_has_a_mean_and_no_interval() -> None:
    alone = spread([93.0])
    assert (alone.num_values, alone.mean, alone.deviation, alone.interval) == (1, 93.0, None, None)
    assert gap([92.0], [93.0, 94.0]) == Gap(1.5, None)
    assert paired_gap([92.0], [93.0]) == Gap(1.0, None)


def test_equal_values_have_an_interval_of_width_zero() -> None:
    assert gap([92.0, 92.0], [93.0, 93.0, 93.0]) == Gap(1.0, Interval(1.0, 1.0))
