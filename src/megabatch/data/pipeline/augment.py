"""Random-resized-crop, crop with padding, flip.  What happens to an image depends on (seed, epoch, sample) alone."""

import math

import numpy as np
import torch
import torch.nn.functional as F

from megabatch.data.pipeline.decode import Box
from megabatch.data.pipeline.order import AUGMENT, CROP, Samples, draw, draw_below
from megabatch.data.settings import DataSettings

# Which part of an image is looked at: a box at random in training, the middle otherwise.
#
# The law is that of random-resized-crop (Szegedy et al. 2015, as torchvision has it): an area from `area` to 1 of the
# image, evenly; a ratio of width to height from 1/`ratio` to `ratio`, evenly on a log scale; a place, evenly.  Up to
# ten boxes are drawn until one fits; if none does, it is the largest box in the middle whose ratio is allowed. All
# draws are functions of (seed, epoch, sample), as in `augment`.

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


class Augmentation:
    """Of the samples of one microbatch, each in its epoch.  `crops` is None where nothing is cropped at random."""

    def __init__(self, settings: DataSettings, seed: int, samples: Samples, epochs: Samples) -> None:
        down, right, mirrored, _ = draw(seed, AUGMENT, samples, epochs)
        self.padding = settings.crop_padding
        self.rows, self.columns = (draw_below(2 * self.padding + 1, words) for words in (down, right))
        self.mirrored = (draw_below(2, mirrored) == 1) & settings.flip
        self.crops = (
            RandomCrops(seed, samples, epochs, settings.crop_area, settings.crop_ratio) if settings.crop_area else None
        )

    def change(self, images: torch.Tensor) -> torch.Tensor:
        """The whole microbatch, [B, C, H, W].  May work in place."""
        if self.crops:
            height, width = images.shape[2:]
            images = torch.stack(
                [crop(image, self.crops.box(which, height, width)) for which, image in enumerate(images)]
            )
        if self.padding:
            windows = windows_of(images, self.padding)
            places = torch.arange(len(images)), slice(None), torch.from_numpy(self.rows), torch.from_numpy(self.columns)
            images = windows[places]
        chosen = torch.from_numpy(self.mirrored)
        if chosen.any():
            images[chosen] = images[chosen].flip(3)
        return images

    def pad(self, which: int, images: torch.Tensor) -> None:
        """Crop with padding and flip of one image, [1, C, H, W], in place."""
        images.copy_(windows_of(images, self.padding)[:, :, self.rows[which], self.columns[which]])
        if self.mirrored[which]:
            images.copy_(images.flip(3))


def windows_of(images: torch.Tensor, padding: int) -> torch.Tensor:
    """All crops of the padded images, as a view: [B, C, rows, columns, H, W]."""
    *_, height, width = images.shape
    return F.pad(images, [padding] * 4).unfold(2, height, 1).unfold(3, width, 1)


def crop(image: torch.Tensor, box: tuple[int, int, int, int]) -> torch.Tensor:
    """A box of an image [C, H, W], at the size of the image."""
    top, left, height, width = box
    part = image[None, :, top : top + height, left : left + width]
    return F.interpolate(part, size=image.shape[1:], mode="bilinear", antialias=True)[0]
