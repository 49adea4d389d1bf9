import math

import numpy as np
import pytest

from megabatch.data.pipeline.augment import ATTEMPTS, RandomCrops, central_box
from megabatch.data.pipeline.order import CROP, draw
from megabatch.data.pipeline.orientation import Box

SAMPLES = np.arange(400)


def draw_crop(seed: int, epoch: int, sample: int, height: int, width: int, least: float, widest: float) -> Box:
    """Draw a crop attempt by attempt."""
    for attempt in range(ATTEMPTS):
        area, ratio, top, left = (int(word[0]) / 2**32 for word in draw(seed, CROP + attempt, [sample], [epoch]))
        target = height * width * (least + (1 - least) * area)
        aspect = math.exp(math.log(1 / widest) + ratio * 2 * math.log(widest))
        columns, rows = round(math.sqrt(target * aspect)), round(math.sqrt(target / aspect))
        if 0 < columns <= width and 0 < rows <= height:
            return int(top * (height - rows + 1)), int(left * (width - columns + 1)), rows, columns
    if width / height < 1 / widest:
        rows, columns = round(width * widest), width
    elif width / height > widest:
        rows, columns = height, round(height * widest)
    else:
        rows, columns = height, width
    return (height - rows) // 2, (width - columns) // 2, rows, columns


@pytest.mark.parametrize("shape", [(375, 500), (500, 375), (64, 64), (1, 1), (20, 900), (900, 20)])
def test_a_crop_depends_only_on_its_counter(shape: tuple[int, int]) -> None:
    for least, widest in ((0.08, 4 / 3), (1.0, 1.0), (0.5, 2.0)):
        crops = RandomCrops(3, SAMPLES, SAMPLES % 5, least, widest)
        for sample in SAMPLES[::9]:
            assert crops.box(sample, *shape) == draw_crop(3, int(sample % 5), int(sample), *shape, least, widest)


def test_crops_stay_inside_and_cover_areas_and_ratios_evenly() -> None:
    crops = RandomCrops(1, np.arange(4000), np.zeros(4000, int), 0.08, 4 / 3)
    boxes = np.array([crops.box(which, 400, 400) for which in range(4000)])
    top, left, rows, columns = boxes.T
    assert (top >= 0).all() and (left >= 0).all() and (top + rows <= 400).all() and (left + columns <= 400).all()
    areas, ratios = rows * columns / 400**2, columns / rows
    assert areas.min() > 0.079 and ratios.min() > 0.73 and ratios.max() < 1.36
    small = areas[areas < 0.7]  # larger areas fit less often
    assert abs(np.mean(small) - (0.08 + 0.7) / 2) < 0.01
    assert abs(np.mean(np.log(ratios))) < 0.01


def test_epochs_and_seeds_have_different_crops() -> None:
    first = RandomCrops(1, SAMPLES, np.zeros(400, int), 0.08, 4 / 3)
    for other in (
        RandomCrops(1, SAMPLES, np.ones(400, int), 0.08, 4 / 3),
        RandomCrops(2, SAMPLES, np.zeros(400, int), 0.08, 4 / 3),
    ):
        assert sum(first.box(which, 300, 300) != other.box(which, 300, 300) for which in range(len(SAMPLES))) > 390


def test_the_center_crop_is_a_square_of_its_share() -> None:
    assert central_box(256, 341, 0.875) == (16, 58, 224, 224)
    assert central_box(1, 1000, 0.5) == (0, 499, 1, 1)
    assert central_box(100, 80, 1.0) == (10, 0, 80, 80)
