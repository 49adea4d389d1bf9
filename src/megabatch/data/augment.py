"""Crop with padding, and flip.  What happens to an image depends on (seed, epoch, sample) alone."""

import torch
import torch.nn.functional as F

from megabatch.data.order import Samples
from megabatch.data.philox import AUGMENT, draw, draw_below


def augment(
    images: torch.Tensor, seed: int, epochs: Samples, samples: Samples, crop_padding: int, flip: bool
) -> torch.Tensor:
    """uint8 images [B, C, H, W], padded with zeros, cropped back at random, flipped at random.  May work in place."""
    down, right, mirrored, _ = draw(seed, AUGMENT, samples, epochs)
    if crop_padding:
        *_, height, width = images.shape
        padded = F.pad(images, [crop_padding] * 4)
        windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # a view: [B, C, rows, columns, H, W]
        rows, columns = (torch.from_numpy(draw_below(2 * crop_padding + 1, words)) for words in (down, right))
        images = windows[torch.arange(len(images)), :, rows, columns]
    if flip:
        chosen = torch.from_numpy(draw_below(2, mirrored) == 1)
        images[chosen] = images[chosen].flip(3)
    return images
