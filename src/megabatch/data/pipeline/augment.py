"""The augmentation of training images.  All draws are functions of (seed, epoch, sample).

The order is that of torchvision's and timm's references: random-resized-crop, flip, policy, colour jitter (see
`policies`), random erasing.  All but the crop work at the final size.

Random-resized-crop follows Szegedy et al. 2015, as implemented in torchvision.  The area of the box is uniform from
`area` to 1 of the image, the ratio of width to height is log-uniform from 1/`ratio` to `ratio`, and the position is
uniform.  Up to ten boxes are drawn until one fits.  If none does, the box is the largest centered one with an allowed
ratio.

An alternating flip (Jordan 2024) mirrors a random half of the images in even epochs, and the other half in odd ones.

Random erasing (Zhong et al. 2017) replaces a box by the mean pixel or by noise.  The area of the box is uniform from
0.02 to 0.33 of the image, the ratio of height to width is log-uniform from 0.3 to 3.3, and the position is uniform, as
in torchvision.  Up to ten boxes are drawn until one fits.  torchvision and timm erase normalised images.  Here it is
done before, so that it costs the training process nothing: the mean is rounded to a whole level, and noise, which is
normal with the mean and deviation of the training images, is rounded and clipped to the levels 0 to 255.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F

from megabatch.data.pipeline.images import PixelStatistics, resize_all
from megabatch.data.pipeline.order import AUGMENT, BOX, CROP, ERASE, FLIP, Samples, draw, draw_below
from megabatch.data.pipeline.orientation import Box
from megabatch.data.pipeline.policies import Recolouring
from megabatch.data.settings import AugmentSettings, DataSettings

ATTEMPTS = 10
ERASED_AREAS, ERASED_RATIOS = (0.02, 0.33), (0.3, 3.3)
PADDING_MODES = {"zeros": "constant", "reflect": "reflect"}  # torch's names


class RandomCrops:
    """The random crop boxes of some samples, each in its epoch."""

    def __init__(self, seed: int, samples: Samples, epochs: Samples, least_area: float, widest: float) -> None:
        words = draw(seed, CROP + np.arange(ATTEMPTS)[:, None], samples, epochs)
        area, ratio, top, left = (draws * 2.0**-32 for draws in words)  # [attempt, sample], from 0 to 1
        areas, ratios = least_area + (1 - least_area) * area, widest ** (2 * ratio - 1)
        # Height and width in an image whose area is 1.  Lists, because numpy scalars take five times as long.
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
        areas = ERASED_AREAS[0] + (ERASED_AREAS[1] - ERASED_AREAS[0]) * area
        ratios = ERASED_RATIOS[0] * (ERASED_RATIOS[1] / ERASED_RATIOS[0]) ** ratio
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


def central_box(height: int, width: int, share: float) -> Box:
    """Return a centered square whose side is a share of the shorter side."""
    side = max(1, round(share * min(height, width)))
    return (height - side) // 2, (width - side) // 2, side, side


class Augmentation:
    """The augmentation of the samples of a microbatch, to images of `side` pixels, by default `image_size`.

    `crops` has the boxes of random-resized-crop, if it is used.  `pixels` is needed for a mean pixel.
    """

    def __init__(
        self,
        settings: DataSettings,
        seed: int,
        samples: Samples,
        epochs: Samples,
        side: int | None = None,
        pixels: PixelStatistics | None = None,
    ) -> None:
        side = side or settings.image_size
        down, right, mirrored, _ = draw(seed, AUGMENT, samples, epochs)
        self.scale, self.padding = side / settings.image_size, settings.padding_at(side)
        self.padding_mode = settings.padding_mode
        self.rows, self.columns = (draw_below(2 * self.padding + 1, words) for words in (down, right))
        self.mirrored = (draw_below(2, mirrored) == 1) & bool(settings.flip)
        if settings.flip == "alternating":
            self.mirrored = (draw_below(2, draw(seed, FLIP, samples, 0)[0]) + epochs) % 2 == 1
        self.crops = (
            RandomCrops(seed, samples, epochs, settings.crop_area, settings.crop_ratio) if settings.crop_area else None
        )
        augment = settings.augment
        self.recolouring = Recolouring(augment, seed, samples, epochs, pixels) if augment.recolours else None
        self.erasing = Erasing(augment, seed, samples, epochs, pixels) if augment.erase else None

    def change(self, images: torch.Tensor) -> torch.Tensor:
        """Augment and resize the whole microbatch, [B, C, H, W].  May work in place."""
        height, width = images.shape[2:]
        size = round(self.scale * height), round(self.scale * width)
        if self.crops:
            images = torch.stack(
                [crop(image, self.crops.box(which, height, width), size) for which, image in enumerate(images)]
            )
        images = resize_all(images, size)
        if self.padding:
            windows = windows_of(images, self.padding, self.padding_mode)
            places = torch.arange(len(images)), slice(None), torch.from_numpy(self.rows), torch.from_numpy(self.columns)
            images = windows[places]
        chosen = torch.from_numpy(self.mirrored)
        if chosen.any():
            images[chosen] = images[chosen].flip(3)
        for which, image in enumerate(images if self.recolouring or self.erasing else ()):
            self.finish(which, image)
        return images

    def finish(self, which: int, image: torch.Tensor) -> None:
        """Apply everything after the flip to one image, [C, H, W], in place."""
        if self.recolouring:
            self.recolouring.change(which, image)
        if self.erasing:
            self.erasing.erase(which, image)

    def pad(self, which: int, images: torch.Tensor) -> None:
        """Apply crop with padding and flip to one image, [1, C, H, W], in place."""
        images.copy_(windows_of(images, self.padding, self.padding_mode)[:, :, self.rows[which], self.columns[which]])
        if self.mirrored[which]:
            images.copy_(images.flip(3))


def windows_of(images: torch.Tensor, padding: int, mode: str = "zeros") -> torch.Tensor:
    """Return all crops of the padded images as a view, [B, C, rows, columns, H, W]."""
    *_, height, width = images.shape
    return F.pad(images, [padding] * 4, PADDING_MODES[mode]).unfold(2, height, 1).unfold(3, width, 1)


def crop(image: torch.Tensor, box: Box, size: tuple[int, int]) -> torch.Tensor:
    """Resize a box of an image [C, H, W]."""
    top, left, height, width = box
    part = image[None, :, top : top + height, left : left + width]
    return F.interpolate(part, size=size, mode="bilinear", antialias=True)[0]
