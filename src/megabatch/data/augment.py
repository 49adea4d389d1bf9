"""Random-resized-crop, crop with padding, flip.  What happens to an image depends on (seed, epoch, sample) alone."""

import torch
import torch.nn.functional as F

from megabatch.data.crops import RandomCrops
from megabatch.data.order import Samples
from megabatch.data.philox import AUGMENT, draw, draw_below
from megabatch.data.settings import DataSettings


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
