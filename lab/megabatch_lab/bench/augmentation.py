"""The costs of augmentation, which `megabatch bench input` prints: microseconds of CPU time per image, on one thread.

Each arm augments the same batch of crops in memory.  Arms take turns, with a rotated order every round.  A cost is the
median over rounds of the difference to the arm without it in the same round.

flip                   mirror half of the images
trivial_augment_wide   one operation per image
rand_augment           two operations per image, magnitude 9, as in torchvision
rand_augment_timm      timm's rand-m9-mstd0.5-inc1
jitter, jitter_hue     brightness, contrast and saturation of 0.4; the same and a hue of 0.1
erase_mean, _noise     erase a box in every image
mixup, cutmix          mix the batch while it is normalised, compared with normalising it
"""

import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from megabatch.data.pipeline.augment import Augmentation
from megabatch.data.pipeline.images import PixelStatistics
from megabatch.data.pipeline.mix import Mixing
from megabatch.data.pipeline.normalise import Normalise
from megabatch.data.settings import AugmentSettings, DataSettings
from megabatch_lab.bench.report import in_turns

ROUNDS = 31
PIXELS = PixelStatistics((124.0, 116.0, 104.0), (58.0, 57.0, 57.0))  # of ImageNet
AUGMENTED = {
    "trivial_augment_wide": AugmentSettings(policy="trivial_augment_wide"),
    "rand_augment": AugmentSettings(policy="rand_augment"),
    "rand_augment_timm": AugmentSettings(policy="rand_augment_timm", magnitude_std=0.5, increasing=True),
    "jitter": AugmentSettings(brightness=0.4, contrast=0.4, saturation=0.4),
    "jitter_hue": AugmentSettings(brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1),
    "erase_mean": AugmentSettings(erase=1.0),
    "erase_noise": AugmentSettings(erase=1.0, erase_with="noise"),
}
MIXED = {"mixup": AugmentSettings(mixup=0.2), "cutmix": AugmentSettings(cutmix=1.0)}
PLAIN, NORMALISE = "plain", "normalise"  # the arms without augmentation


def costs_us(images: torch.Tensor) -> dict[str, float]:
    """Return the cost per image of each augmentation of images, uint8 [B, C, H, W]."""
    side = images.shape[-1]

    def augment(settings: DataSettings, epoch: int) -> None:
        samples = np.arange(len(images))
        Augmentation(settings, 1, samples, np.full_like(samples, epoch), pixels=PIXELS).change(images.clone())

    normalise = Normalise(PIXELS, torch.device("cpu"), torch.float32)

    def mix(settings: AugmentSettings, epoch: int) -> None:
        normalise(images, Mixing(settings, 1, torch.device("cpu"), torch.float32)(epoch, 0, side, side))

    plain = DataSettings(source="", image_size=side)
    arms: dict[str, Callable[[int], None]] = {
        PLAIN: partial(augment, plain),
        "flip": partial(augment, DataSettings(source="", image_size=side, flip=True)),
        **{
            name: partial(augment, DataSettings(source="", image_size=side, augment=settings))
            for name, settings in AUGMENTED.items()
        },
        NORMALISE: partial(mix, AugmentSettings()),
        **{name: partial(mix, settings) for name, settings in MIXED.items()},
    }
    times: dict[str, list[float]] = {name: [] for name in arms}
    for number, (name, is_counted) in enumerate(in_turns(arms, ROUNDS, warm_up=1)):
        started_s = time.thread_time()
        arms[name](number // len(arms))
        if is_counted:
            times[name].append(time.thread_time() - started_s)

    def cost(name: str) -> float:
        without = times[NORMALISE if name in MIXED else PLAIN]
        return statistics.median(one - other for one, other in zip(times[name], without, strict=True))

    return {name: 1e6 * cost(name) / len(images) for name in arms if name not in (PLAIN, NORMALISE)}
