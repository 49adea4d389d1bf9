"""Random erasing (Zhong et al. 2017): a box of an image is replaced by the mean pixel or by noise.

The area of the box is uniform from 0.02 to 0.33 of the image, the ratio of height to width is log-uniform from 0.3 to
3.3, and the position is uniform, as in torchvision.  Up to ten boxes are drawn until one fits.

torchvision and timm erase normalised images.  Here it is done before, so that it costs the training process nothing:
the mean is rounded to a whole level, and noise, which is normal with the mean and deviation of the training images, is
rounded and clipped to the levels 0 to 255.
"""

import math

import numpy as np
import torch

from megabatch.data.pipeline.images import PixelStatistics
from megabatch.data.pipeline.order import BOX, ERASE, Samples, draw
from megabatch.data.pipeline.orientation import Box
from megabatch.data.settings import AugmentSettings

ATTEMPTS = 10
AREAS, RATIOS = (0.02, 0.33), (0.3, 3.3)


class Erasing:
    """The erased boxes of some samples, each in its epoch."""

    def __init__(
        self, settings: AugmentSettings, seed: int, samples: Samples, epochs: Samples, pixels: PixelStatistics | None
    ) -> None:
        assert pixels
        chosen, high, low, _ = draw(seed, ERASE, samples, epochs)
        self.chosen: list[bool] = (chosen * 2.0**-32 < settings.erase).tolist()
        self.keys: list[int] = (high << np.uint64(32) | low).tolist()
        words = draw(seed, BOX + np.arange(ATTEMPTS)[:, None], samples, epochs)
        area, ratio, top, left = (draws * 2.0**-32 for draws in words)
        areas = AREAS[0] + (AREAS[1] - AREAS[0]) * area
        ratios = RATIOS[0] * (RATIOS[1] / RATIOS[0]) ** ratio
        attempts = np.stack([np.sqrt(areas * ratios), np.sqrt(areas / ratios), top, left], axis=-1)
        self.attempts: list[list[list[float]]] = attempts.swapaxes(0, 1).tolist()
        self.mean, self.deviation = (
            np.array(values, np.float32)[:, None, None] for values in (pixels.mean, pixels.deviation)
        )
        self.with_noise = settings.erase_with == "noise"

    def box(self, which: int, height: int, width: int) -> Box | None:
        side = math.sqrt(height * width)
        for tall, wide, down, right in self.attempts[which]:
            rows, columns = round(side * tall), round(side * wide)
            if rows < height and columns < width:
                return int(down * (height - rows + 1)), int(right * (width - columns + 1)), rows, columns
        return None

    def erase(self, which: int, image: torch.Tensor) -> None:
        """Erase the box of an image, [C, H, W], in place, if it is drawn."""
        box = self.box(which, *image.shape[1:]) if self.chosen[which] else None
        if box is None:
            return
        top, left, rows, columns = box
        values = self.mean
        if self.with_noise:
            generator = np.random.Generator(np.random.Philox(key=self.keys[which]))
            noise = generator.standard_normal((len(image), rows, columns), np.float32)
            values = self.mean + self.deviation * noise
        image.numpy()[:, top : top + rows, left : left + columns] = values.round().clip(0, 255).astype(np.uint8)
