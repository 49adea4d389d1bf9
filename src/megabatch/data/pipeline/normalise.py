"""Normalisation of pixels to zero mean and unit deviation per channel, as measured on the training set."""

from collections.abc import Iterator
from contextlib import closing
from functools import partial

import numpy as np
import torch

from megabatch.data.pipeline.encoded import EncodedImages
from megabatch.data.pipeline.images import ImageSet, PixelStatistics
from megabatch.data.pipeline.mix import Mix, mix_images
from megabatch.data.pipeline.order import Samples
from megabatch.data.pipeline.reader import BatchRequest, Reader
from megabatch.data.sources.from_python import DatasetImages
from megabatch.errors import UserError

MEASURED_SAMPLES = 50_000
DECODED_SAMPLES = 1_000  # if images must be decoded
CHUNK = 64


class Normalise:
    """Normalisation of uint8 images on the device.  The result is rounded to `dtype` once."""

    def __init__(
        self, statistics: PixelStatistics, device: torch.device, dtype: torch.dtype, channels_last: bool = False
    ) -> None:
        self.device, self.dtype = device, dtype
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        mean, deviation = (
            torch.tensor(values, dtype=torch.float64) for values in (statistics.mean, statistics.deviation)
        )
        wide = torch.promote_types(dtype, torch.float32)
        self.scale, self.shift = (
            values.view(1, -1, 1, 1).to(device, wide) for values in (1 / deviation, -mean / deviation)
        )

    def __call__(self, images: torch.Tensor, mix: Mix | None = None) -> torch.Tensor:
        """Normalise images, and mix them before they are rounded."""
        moved = images.to(self.device, non_blocking=True).to(self.scale.dtype, memory_format=self.memory_format)
        normal = moved.mul_(self.scale).add_(self.shift)
        return (mix_images(normal, mix) if mix else normal).to(self.dtype)


def evenly_spaced(images: ImageSet, most: int) -> Samples:
    """Return at most `most` samples, evenly spaced because a set may be sorted."""
    return np.arange(0, len(images), -(-len(images) // most))


def read_batches(images: ImageSet, samples: Samples) -> Iterator[torch.Tensor]:
    """Yield the images as evaluation sees them, in batches of uint8 [B, C, H, W], without those that are skipped."""
    chunks = np.split(samples, range(CHUNK, len(samples), CHUNK))
    with closing(Reader(images).prefetch((partial(BatchRequest, chunk, None) for chunk in chunks), CHUNK)) as batches:
        for batch in batches:
            yield batch.images


def measure_pixels(images: ImageSet) -> PixelStatistics:
    """Measure up to 50,000 images, or up to 1,000 that must be decoded."""
    most = DECODED_SAMPLES if isinstance(images, EncodedImages | DatasetImages) else MEASURED_SAMPLES
    measured = evenly_spaced(images, most)
    totals = torch.zeros(2, 1, dtype=torch.float64)
    count = 0
    for batch in read_batches(images, measured):
        pixels = batch.double()
        totals = totals + torch.stack([pixels.sum((0, 2, 3)), pixels.square().sum((0, 2, 3))])
        count += pixels.numel() // pixels.shape[1]
    if not count:
        raise UserError(f"none of {len(measured)} training images can be read; check the files")
    mean, mean_square = totals / count
    if not mean.isfinite().all():  # possible only for custom image sets
        broken = next(int(sample) for sample in measured if not images.read(np.array([sample])).isfinite().all())
        raise UserError(f"image {broken} of the training set is not finite; fix or remove it")
    deviation = (mean_square - mean.square()).clamp(min=0).sqrt()
    deviation = torch.where(deviation > 0, deviation, 1.0)
    return PixelStatistics(tuple(mean.tolist()), tuple(deviation.tolist()))
