"""The noise scale of gradients whose noise is known."""

import math
from random import Random

import pytest

from megabatch.runs import intervals
from megabatch.runs.noise import (
    NO_SIGNAL,
    OVERFLOWED,
    NoiseAverage,
    describe_noise,
    noise_record,
    student_t,
)
from megabatch.runs.records import NoiseRecord

SIZE, MICRO, NUM = 20, 4, 8
TRUE = [0.3] * SIZE  # the gradient: squared norm 1.8
DEVIATION = 1.5  # of each component of one sample's gradient: trace 45, noise scale 25
SIGNAL, TRACE = 0.09 * SIZE, DEVIATION**2 * SIZE


def measured(random: Random, true: list[float] = TRUE) -> NoiseRecord:
    """Draw the microbatches of one step."""
    deviation = DEVIATION / math.sqrt(MICRO)
    parts = [[random.gauss(mean, deviation) / NUM for mean in true] for _ in range(NUM)]
    whole = [sum(column) for column in zip(*parts, strict=True)]
    return noise_record(sum(value**2 for part in parts for value in part), sum(v**2 for v in whole), NUM, MICRO)


def test_estimates_have_no_bias() -> None:
    random = Random(1)
    records = [measured(random) for _ in range(3000)]
    for name, expected in (("signal", SIGNAL), ("trace", TRACE)):
        found = intervals.spread([getattr(record, name) for record in records])
        assert found.interval and found.interval.low < expected < found.interval.high
        assert found.interval.high - found.interval.low < 0.05 * expected


def test_interval_holds_the_noise_scale_in_95_of_100_runs() -> None:
    random, held = Random(2), 0
    for _ in range(400):
        average = NoiseAverage()
        for _ in range(25):
            last = average.add(measured(random), NUM * MICRO)
        assert last.low is not None and last.scale is not None and last.low < last.scale
        held += last.low < TRACE / SIGNAL < (last.high or math.inf)
    assert 0.92 <= held / 400 <= 0.98


def test_without_a_gradient_the_scale_has_no_upper_bound() -> None:
    random, average, found = Random(3), NoiseAverage(), list[NoiseRecord]()
    for _ in range(40):
        found.append(average.add(measured(random, [0.0] * SIZE), NUM * MICRO))
    assert all(record.low is None for record in found[:3]) and found[-1].low is not None
    assert all(record.over_run_low is None and record.over_run_high is None for record in found[:3])
    assert sum(record.high is None for record in found[3:]) > 30
    lost = next(record for record in found if record.scale is None)
    assert lost.reason == NO_SIGNAL and NO_SIGNAL in describe_noise(lost)


def test_overflowed_step_changes_no_average() -> None:
    average = NoiseAverage()
    average.add(measured(Random(4)), 32)
    before = average.x
    assert average.add(noise_record(math.inf, math.nan, NUM, MICRO), 32).reason == OVERFLOWED
    assert average.x == before


def test_critical_batch_of_a_run_is_the_mean_over_progress() -> None:
    """A step at batch 10 makes 1/2 of the progress at a noise scale of 10, and 1/101 at a noise scale of 1000."""
    average = NoiseAverage()
    average.add(NoiseRecord(signal=1.0, trace=10.0), 10)
    average.x = average.y = average.weight = 0.0
    last = average.add(NoiseRecord(signal=1.0, trace=1000.0), 10)
    assert last.over_run == pytest.approx((10 / 2 + 1000 / 101) / (1 / 2 + 1 / 101))


def test_steps_whose_noise_hides_the_gradient_count_at_the_limit() -> None:
    def over_run(signal: float) -> float | None:
        average = NoiseAverage()
        average.add(NoiseRecord(signal=1.0, trace=10.0), 10)
        average.x = average.y = average.weight = 0.0
        return average.add(NoiseRecord(signal=signal, trace=10.0), 10).over_run

    limit = over_run(1e-9)
    assert over_run(-1.0) == pytest.approx(limit) == pytest.approx((10 / 2 + 10) / (1 / 2))


def test_interval_over_a_run_holds_its_critical_batch() -> None:
    random, held = Random(5), 0
    for _ in range(50):
        average = NoiseAverage()
        for _ in range(25):
            last = average.add(measured(random), NUM * MICRO)
        assert last.over_run_low is not None and last.over_run is not None and last.over_run_high is not None
        assert last.over_run_low < last.over_run < last.over_run_high
        held += last.over_run_low < TRACE / SIGNAL < last.over_run_high
    assert held >= 47


def test_student_t_without_scipy() -> None:
    for degrees in (3, 4, 6, 10, 18, 100):
        assert student_t(degrees) == pytest.approx(intervals.student_t(degrees), rel=0.01)


def test_line_on_screen_has_two_digits() -> None:
    record = NoiseRecord(signal=1.0, trace=1.0, scale=1834.0, low=1512.0, high=None, over_run=746.0, over_run_low=400.0)
    assert describe_noise(record) == (
        "scale 1,800 (1,500 to any size) at the end, 750 (400 to any size) over the run: a batch of up to about 150 "
        "needs few extra epochs here, 750 needs twice as many"
    )
