"""Which part of an image is looked at: a box at random in training, the middle otherwise.

The law is that of random-resized-crop (Szegedy et al. 2015, as torchvision has it): an area from `area` to 1 of the
image, evenly; a ratio of width to height from 1/`ratio` to `ratio`, evenly on a log scale; a place, evenly.  Up to ten
boxes are drawn until one fits; if none does, it is the largest box in the middle whose ratio is allowed.
All draws are functions of (seed, epoch, sample), as in `augment`.
"""

import math

import numpy as np

from megabatch.data.decode import Box
from megabatch.data.order import Samples
from megabatch.data.philox import CROP, draw

ATTEMPTS = 10


class RandomCrops:
    """The boxes of some samples, each in its epoch."""

    def __init__(self, seed: int, samples: Samples, epochs: Samples, least_area: float, widest: float) -> None:
        words = draw(seed, CROP + np.arange(ATTEMPTS)[:, None], samples, epochs)
        area, ratio, top, left = (draws * 2.0**-32 for draws in words)  # [attempt, sample], from 0 to 1
        areas, ratios = least_area + (1 - least_area) * area, widest ** (2 * ratio - 1)
        # Height and width in an image whose area is 1.  As lists: numbers of numpy take five times as long.
        attempts = np.stack([np.sqrt(areas / ratios), np.sqrt(areas * ratios), top, left], axis=-1)
        self.attempts: list[list[list[float]]] = attempts.swapaxes(0, 1).tolist()
        self.widest = widest

    def box(self, which: int, height: int, width: int) -> Box:
        side = math.sqrt(height * width)
        for tall, wide, down, right in self.attempts[which]:
            rows, columns = round(side * tall), round(side * wide)
            if 0 < rows <= height and 0 < columns <= width:
                return int(down * (height - rows + 1)), int(right * (width - columns + 1)), rows, columns
        rows, columns = min(height, round(width * self.widest)), min(width, round(height * self.widest))
        return (height - rows) // 2, (width - columns) // 2, rows, columns


def central_box(height: int, width: int, share: float) -> Box:
    """A square in the middle, whose side is a share of the shorter one."""
    side = max(1, round(share * min(height, width)))
    return (height - side) // 2, (width - side) // 2, side, side
