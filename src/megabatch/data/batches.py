"""Batches, as functions of where they stand: a training microbatch of (step, index), a test batch of its number."""

from collections.abc import Iterator

import numpy as np
import torch

from megabatch.data.augment import augment
from megabatch.data.order import Samples, samples_at
from megabatch.data.sources import DataSettings, ImageSet
from megabatch.errors import UserError
from megabatch.planning.batch import StepPlan

Batch = tuple[torch.Tensor, torch.Tensor]  # uint8 images [B, C, H, W], int64 labels [B]


class TrainingImages:
    """The training set in the run's order, augmented."""

    def __init__(self, images: ImageSet, settings: DataSettings, seed: int, plan: StepPlan) -> None:
        self.images, self.settings, self.seed, self.plan = images, settings, seed, plan

    def samples(self, step: int, index: int) -> tuple[Samples, Samples]:
        """Which samples a microbatch holds, and in which pass over the set each of them stands."""
        return samples_at(self.seed, len(self.images), self.plan.positions(step, index))

    def microbatch(self, step: int, index: int) -> Batch:
        samples, epochs = self.samples(step, index)
        pixels = augment(
            self.images.read(samples), self.seed, epochs, samples, self.settings.crop_padding, self.settings.flip
        )
        return pixels, self.images.labels[torch.from_numpy(samples)]


def evaluation_batches(
    images: ImageSet, batch_size: int, rank: int, num_ranks: int
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """This rank's share, every `num_ranks`-th batch: number, images, labels.  A batch is the same for any ranks."""
    num_batches = -(-len(images) // batch_size)
    for number in range(rank, num_batches, num_ranks):
        samples = np.arange(number * batch_size, min((number + 1) * batch_size, len(images)))
        yield number, images.read(samples), images.labels[samples]


def first_not_finite(images: ImageSet, samples: Samples) -> int:
    return next(int(sample) for sample in samples if not images.read(np.array([sample])).isfinite().all())


class Normalise:
    """uint8 -> the training set's zero mean and unit deviation per channel, on the device, rounded to `dtype` once."""

    MEASURED_SAMPLES = 50_000

    def __init__(self, images: ImageSet, device: torch.device, dtype: torch.dtype, channels_last: bool = False) -> None:
        totals = torch.zeros(2, 1, dtype=torch.float64)
        count = 0
        # Evenly spread: a set may be sorted by class.
        measured = np.arange(0, len(images), -(-len(images) // self.MEASURED_SAMPLES))
        for start in range(0, len(measured), 1000):
            pixels = images.read(measured[start : start + 1000]).double()
            totals = totals + torch.stack([pixels.sum((0, 2, 3)), pixels.square().sum((0, 2, 3))])
            count += pixels.numel() // pixels.shape[1]
        mean, mean_square = totals / count
        if not mean.isfinite().all():  # integers always are, images of one's own may not be
            raise UserError(
                f"image {first_not_finite(images, measured)} of the training set is not finite; mend or leave it out"
            )
        # A channel without variation is only shifted.
        deviation = (mean_square - mean.square()).clamp(min=0).sqrt()
        deviation = torch.where(deviation > 0, deviation, 1.0)
        self.device, self.dtype = device, dtype
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        wide = torch.promote_types(dtype, torch.float32)
        self.scale, self.shift = (
            values.view(1, -1, 1, 1).to(device, wide) for values in (1 / deviation, -mean / deviation)
        )

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        moved = images.to(self.device, non_blocking=True).to(self.scale.dtype, memory_format=self.memory_format)
        return moved.mul_(self.scale).add_(self.shift).to(self.dtype)
