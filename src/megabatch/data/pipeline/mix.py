"""MixUp (Zhang et al. 2018) and CutMix (Yun et al. 2019) of a microbatch on the device.

Every image and its target are mixed with those of the previous image of the microbatch.  One operation serves both:
image x and its predecessor y become w x + (1 - w) y with a weight w per pixel, and the target has the mean of w.
MixUp has one weight for all pixels, from Beta(alpha, alpha).  CutMix has 0 in a box and 1 elsewhere.  The area of the
box is 1 - Beta(alpha, alpha) of the image, its centre is uniform, and it is clipped at the edges, as in torchvision.

All draws are functions of (seed, step, microbatch), so that a run is the same on any number of ranks.
"""

import math
from typing import NamedTuple

import numpy as np
import torch

from megabatch.data.pipeline.order import mix_seed
from megabatch.data.settings import AugmentSettings


class Mix(NamedTuple):
    weights: torch.Tensor  # [H, W] of an image in its mixture
    share: torch.Tensor  # their mean, the weight of its target


class Mixing:
    """The mixtures of a run; None for all microbatches if the settings ask for none."""

    def __init__(self, settings: AugmentSettings, seed: int, device: torch.device, dtype: torch.dtype) -> None:
        self.settings, self.seed, self.device = settings, seed, device
        self.dtype = torch.promote_types(dtype, torch.float32)

    def __call__(self, step: int, microbatch: int, height: int, width: int) -> Mix | None:
        settings = self.settings
        if not settings.mixes:
            return None
        generator = np.random.Generator(np.random.Philox(key=mix_seed(self.seed, step, microbatch)))
        cuts = settings.mixup == 0 or (settings.cutmix > 0 and generator.random() < 0.5)
        alpha = settings.cutmix if cuts else settings.mixup
        share = generator.beta(alpha, alpha)
        weights = torch.full((height, width), 1.0 if cuts else share, dtype=self.dtype, device=self.device)
        if cuts:
            top, bottom, left, right = cut_box(share, height, width, *generator.integers((height, width)).tolist())
            weights[top:bottom, left:right] = 0
            share = 1 - (bottom - top) * (right - left) / (height * width)
        return Mix(weights, torch.full((), share, dtype=self.dtype, device=self.device))


def cut_box(share: float, height: int, width: int, row: int, column: int) -> tuple[int, int, int, int]:
    """Return top, bottom, left and right of CutMix's box around a pixel, given the share that stays."""
    half = 0.5 * math.sqrt(1 - share)
    rows, columns = int(half * height), int(half * width)
    return max(0, row - rows), min(height, row + rows), max(0, column - columns), min(width, column + columns)


def mix_images(images: torch.Tensor, mix: Mix) -> torch.Tensor:
    return previous(images).lerp(images, mix.weights)


def mix_labels(labels: torch.Tensor, logits: torch.Tensor, mix: Mix | None) -> torch.Tensor:
    """Return the targets of mixed images, [B, classes], in at least fp32; without a mixture the labels themselves."""
    if mix is None:
        return labels
    targets = labels.to(torch.promote_types(logits.dtype, torch.float32))
    if labels.ndim == 1:
        targets = torch.zeros_like(logits, dtype=targets.dtype).scatter_(1, labels[:, None], 1.0)
    return previous(targets).lerp(targets, mix.share.to(targets.dtype))


def previous(values: torch.Tensor) -> torch.Tensor:
    """Return the previous one of each value.  Unlike `roll`, it keeps channels last."""
    return torch.cat([values[-1:], values[:-1]])
