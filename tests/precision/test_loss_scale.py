import pytest
import torch

from megabatch.precision.loss_scale import (
    GROWTH_INTERVAL,
    MAX_OVERFLOWS_IN_A_ROW,
    LossScale,
    choose_loss_scale,
    show_scale,
)
from megabatch.precision.policy import PRECISIONS, PrecisionSettings


def dynamic(value: float = 2.0**24) -> LossScale:
    return LossScale("dynamic", value)


def take_step(scale: LossScale, overflowed: bool) -> None:
    """Update the scale on the device, then on the host, and check that both are the same."""
    scale.update(torch.tensor(float(overflowed)))
    scale.record(overflowed)
    assert scale.on_device == scale.value


def test_the_initial_scale_is_proportional_to_the_global_batch() -> None:
    for batch, expected in ((32, 8192), (65_536, 2**24)):
        scale = choose_loss_scale(PrecisionSettings(name="fp16"), True, batch)
        assert (scale.kind, scale.value) == ("dynamic", expected)


def test_there_is_no_scale_without_fp16_and_a_user_set_scale_is_fixed() -> None:
    assert not choose_loss_scale(PrecisionSettings(name="bf16"), False, 32).is_on
    assert {name for name, precision in PRECISIONS.items() if precision.has_small_range} == {"fp16", "amp"}
    fixed = choose_loss_scale(PrecisionSettings(name="fp16", loss_scale=1000), True, 32)
    for overflowed in (True, *[False] * GROWTH_INTERVAL, True):
        take_step(fixed, overflowed)
    assert (fixed.kind, fixed.value) == ("fixed", 1000)
    loss = torch.tensor(3.0)
    assert fixed.scaled(loss) == 3000
    assert LossScale("off").scaled(loss) is loss


def test_a_hundred_steps_without_overflow_double_the_scale_and_an_overflow_halves_it() -> None:
    scale = dynamic(2.0**4)
    values = []
    for step in range(1, 451):
        take_step(scale, overflowed=step == 150)
        values.append(scale.value)
    changes = {
        step: value
        for step, (before, value) in enumerate(zip([2**4, *values], values, strict=False), 1)
        if value != before
    }
    assert changes == {100: 2**5, 150: 2**4, 250: 2**5, 350: 2**6, 450: 2**7}


def test_the_scale_has_no_maximum_and_a_minimum_of_one() -> None:
    scale = dynamic()
    for _ in range(100 * GROWTH_INTERVAL):
        take_step(scale, overflowed=False)
    assert scale.value == 2.0**124
    halvings = 0
    while not scale.is_exhausted:
        take_step(scale, overflowed=True)
        halvings += 1
    assert (scale.value, halvings) == (1.0, 124)
    take_step(scale, overflowed=True)
    assert scale.value == 1.0


def test_a_fixed_scale_is_exhausted_after_several_overflows_in_a_row() -> None:
    fixed = LossScale("fixed", 8.0)
    for overflowed in [True] * (MAX_OVERFLOWS_IN_A_ROW - 1) + [False] + [True] * (MAX_OVERFLOWS_IN_A_ROW - 1):
        assert not (overflowed and fixed.is_exhausted)
        take_step(fixed, overflowed)
    assert fixed.is_exhausted


@pytest.mark.parametrize("overflows", [[], [3], [3, 4, 7]])
def test_a_restored_scale_continues_like_the_first(overflows: list[int]) -> None:
    first, second = dynamic(), dynamic(1.0)
    for step in range(120):
        take_step(first, step in overflows)
    second.restore(first.state())
    for step in range(120, 400):
        take_step(first, step % 130 == 0)
        take_step(second, step % 130 == 0)
        assert torch.equal(first.state(), second.state())


def test_scales_are_shown_as_powers_of_two() -> None:
    assert [show_scale(value) for value in (1.0, 16.0, 1000.0, 2.0**20)] == ["1", "16", "1000", "2^20"]
