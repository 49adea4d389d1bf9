from collections.abc import Callable

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, PolynomialLR

from megabatch.errors import UserError
from megabatch.optim.schedules import ScheduleSettings, schedule

PEAK, WARMUP, STEPS, END = 2.0, 10, 50, 0.1


def rates(decay: str, **settings: float) -> list[float]:
    learning_rate = schedule(ScheduleSettings(decay=decay, end=END, **settings), PEAK, WARMUP, STEPS)
    return [learning_rate(step) for step in range(STEPS)]


def by_torch(scheduler: Callable[[torch.optim.Optimizer], LRScheduler], peak: float, num_steps: int) -> list[float]:
    """Return the learning rates of a torch scheduler."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=peak)
    scheduled = scheduler(optimizer)
    seen = []
    for _ in range(num_steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduled.step()
    return seen


@pytest.mark.parametrize("decay", ["poly", "cosine", "constant"])
def test_warmup_equals_linear_lr_and_ends_at_the_peak(decay: str) -> None:
    expected = by_torch(lambda optimizer: LinearLR(optimizer, 1 / WARMUP, total_iters=WARMUP - 1), PEAK, WARMUP)
    assert rates(decay)[:WARMUP] == pytest.approx(expected)
    assert rates(decay)[WARMUP - 1] == pytest.approx(PEAK) == rates(decay)[WARMUP]


@pytest.mark.parametrize("power", [1.0, 2.0])
def test_poly_equals_polynomial_lr_above_the_end(power: float) -> None:
    above = by_torch(lambda optimizer: PolynomialLR(optimizer, STEPS - WARMUP, power), PEAK - END, STEPS - WARMUP)
    assert rates("poly", power=power)[WARMUP:] == pytest.approx([END + rate for rate in above])


def test_cosine_equals_cosine_annealing_lr() -> None:
    expected = by_torch(lambda optimizer: CosineAnnealingLR(optimizer, STEPS - WARMUP, END), PEAK, STEPS - WARMUP)
    assert rates("cosine")[WARMUP:] == pytest.approx(expected)


def test_constant_stays_at_the_peak() -> None:
    assert rates("constant")[10:] == [PEAK] * 40


def test_no_step_is_wasted_on_a_learning_rate_of_zero() -> None:
    learning_rate = schedule(ScheduleSettings(end=0.0), PEAK, WARMUP, STEPS)
    assert all(learning_rate(step) > 0 for step in range(STEPS))
    assert learning_rate(STEPS) == 0  # one past the last


def test_without_warmup_the_first_step_is_at_the_peak() -> None:
    assert schedule(ScheduleSettings(), PEAK, 0, STEPS)(0) == PEAK


def test_unknown_decay_is_rejected_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"schedule.decay='cosin' .*nearest: schedule.decay=cosine"):
        ScheduleSettings(decay="cosin")
