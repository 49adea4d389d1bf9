"""The side of training images over a run."""

import math
from itertools import groupby
from typing import Any

import msgspec
import pytest

from megabatch.config.loading import load_config
from megabatch.errors import UserError
from megabatch.planning.sizes import Ramp, Sizes, base_epochs, describe_sides, plan_stages, stage_at

LIST: Sizes = [(0, 128), (0.4, 160), (0.75, 192)]
MILD = Ramp(first=88, last=176, start=0.4, end=0.8, multiple=4)
FFCV_16 = Ramp(first=160, last=192, start=11 / 16, end=13 / 16, multiple=32)
SHRINKING = Ramp(first=64, last=32, start=0.0, end=1.0, multiple=8)


def side_of(sizes: Sizes, share: float) -> int:
    """Return the side by the definitions of the settings, step by step and without stages."""
    if isinstance(sizes, Ramp):
        grown = min(1.0, max(0.0, (share - sizes.start) / (sizes.end - sizes.start)))
        whole, rest = divmod(sizes.first + (sizes.last - sizes.first) * grown, sizes.multiple)
        return round(whole + (rest >= sizes.multiple / 2)) * sizes.multiple
    return [side for start, side in sizes if share >= start][-1]


@pytest.mark.parametrize("sizes", [LIST, MILD, FFCV_16, SHRINKING])
@pytest.mark.parametrize("num_steps", [1, 2, 7, 160, 1601])
def test_stages_are_the_runs_of_equal_sides(sizes: Sizes, num_steps: int) -> None:
    sides = [side_of(sizes, step / num_steps) for step in range(num_steps)]
    stages = plan_stages(sizes, 999, num_steps)
    assert [(stage.side, stage.num_steps) for stage in stages] == [
        (side, len(list(steps))) for side, steps in groupby(sides)
    ]
    assert [stage_at(stages, step).side for step in range(num_steps)] == sides
    assert stage_at(stages, num_steps).side == sides[-1]


def test_a_long_run_is_planned_without_visiting_its_steps() -> None:
    assert [stage.num_steps for stage in plan_stages(LIST, 192, 10**12)] == [4 * 10**11, 35 * 10**10, 25 * 10**10]


def test_a_run_with_one_size_has_one_stage() -> None:
    assert plan_stages([], 224, 9) == [(224, 0, 9)]


def test_published_schedules_have_their_published_work() -> None:
    """Composer's mild has 0.329 of 36 epochs; ffcv's 16 epochs are 12 at 160 and 4 at 192."""
    assert base_epochs(plan_stages(MILD, 176, 36_000), 1 / 1000) / 36 == pytest.approx(0.329, abs=0.0005)
    assert plan_stages(FFCV_16, 192, 16_000) == [(160, 0, 12_000), (192, 12_000, 4_000)]
    assert base_epochs([*plan_stages(FFCV_16, 192, 16)], 1.0) == pytest.approx(9.1, abs=0.05)
    assert base_epochs(plan_stages([], 112, 100), 0.5) == pytest.approx(math.prod([100, 0.5, 0.25]))


def test_sides_are_described_in_one_line() -> None:
    assert describe_sides([], 28, 28) == "28 pixels"
    assert describe_sides(LIST, 192, 224) == "128 > 160 > 192 pixels, tested at 224"
    assert describe_sides(MILD, 176, 176) == "88 > 92 > ... > 176 pixels"


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ("[[0.1, 28]]", "first share is 0.1"),
        ("[[0, 14], [0.5, 20], [0.4, 28]]", "0.4 must be more than the previous one, 0.5"),
        ("[[0, 14], [0.5, 20], [0.5, 28]]", "0.5 must be more than the previous one, 0.5"),
        ("[[0, 14], [1, 28]]", "1 must be less than 1"),
        ("[[0, 14], [0.5, 20]]", r"data\.image_size=28 must be the largest side.*20; set data\.image_size=20"),
        ("[[0, 4], [0.5, 28]]", r"data\.sizes=.*>= 8"),
        ("[[0, 14, 3]]", r"data\.sizes="),
        ("[14, 28]", r"data\.sizes="),
        ("28", r"data\.sizes="),
        ("{ from = 16, to = 28, start = 0.5, end = 0.5 }", "start=0.5 must be less than end=0.5"),
        ("{ from = 15, to = 28, start = 0, end = 0.5, multiple = 4 }", "from=15 is not a multiple.*nearest: from=16"),
        ("{ from = 16, to = 28, start = 0 }", "end"),
        ("{ from = 16, to = 28, start = 0, end = 2 }", r"data\.sizes="),
    ],
)
def test_bad_sizes_are_one_line(sizes: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as refusal:
        load_config("fashion", [f"data.sizes={sizes}"])
    assert "\n" not in str(refusal.value)


def test_compilation_is_refused_for_more_sides_than_torch_compiles() -> None:
    ramp = "data.sizes={ from = 20, to = 28, start = 0, end = 0.5 }"
    with pytest.raises(UserError, match=r"model\.compile=true: data\.sizes has 9 sides.*at most 8"):
        load_config("fashion", ["model.compile=true", ramp])
    assert load_config("fashion", ["model.compile=true", ramp.replace("20", "21")]).model.compile
    with pytest.raises(UserError, match=r"model\.cuda_graphs=true: data\.sizes has 9 sides.*images of one size"):
        load_config("fashion", ["model.cuda_graphs=true", ramp])


@pytest.mark.parametrize(
    "sizes", ["[[0, 14], [0.5, 28]]", "{ from = 16, to = 28, start = 0, end = 0.5, multiple = 4 }", "[]"]
)
def test_sizes_round_trip_through_toml(sizes: str) -> None:
    config = load_config("fashion", [f"data.sizes={sizes}", "data.test_image_size=32"])
    again: Any = msgspec.toml.decode(config.to_toml(), type=type(config))
    assert again == config and again.data.test_side == 32
