import math

import pytest

from megabatch.errors import UserError
from megabatch.optim.schedules import ScheduleSettings, schedule

PEAK, WARMUP, STEPS, END = 2.0, 10, 50, 0.1


def rates(decay: str, **settings: float) -> list[float]:
    learning_rate = schedule(ScheduleSettings(decay=decay, end=END, **settings), PEAK, WARMUP, STEPS)
    return [learning_rate(step) for step in range(STEPS)]


@pytest.mark.parametrize("decay", ["poly", "cosine", "constant"])
def test_warmup_is_linear_per_step_and_ends_at_the_peak(decay: str) -> None:
    assert rates(decay)[:WARMUP] == pytest.approx([PEAK * (step + 1) / WARMUP for step in range(WARMUP)])
    assert rates(decay)[WARMUP] == pytest.approx(PEAK)


@pytest.mark.parametrize("power", [1.0, 2.0])
def test_poly_is_the_formula(power: float) -> None:
    after = [END + (PEAK - END) * (1 - (step - 10) / 40) ** power for step in range(10, 50)]
    assert rates("poly", power=power)[10:] == pytest.approx(after)


def test_cosine_is_the_formula() -> None:
    after = [END + (PEAK - END) * (1 + math.cos(math.pi * (step - 10) / 40)) / 2 for step in range(10, 50)]
    assert rates("cosine")[10:] == pytest.approx(after)


def test_constant_stays_at_the_peak() -> None:
    assert rates("constant")[10:] == [PEAK] * 40


def test_no_step_is_wasted_on_a_rate_of_zero() -> None:
    learning_rate = schedule(ScheduleSettings(end=0.0), PEAK, WARMUP, STEPS)
    assert all(learning_rate(step) > 0 for step in range(STEPS))
    assert learning_rate(STEPS) == 0  # one past the last


def test_without_warmup_the_first_step_is_at_the_peak() -> None:
    assert schedule(ScheduleSettings(), PEAK, 0, STEPS)(0) == PEAK


def test_an_unknown_decay_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"schedule.decay='cosin' .*nearest: schedule.decay=cosine"):
        ScheduleSettings(decay="cosin")
