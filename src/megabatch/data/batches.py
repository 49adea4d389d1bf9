"""Batches, as functions of where they stand: a training microbatch of (step, index), a test batch of its number."""

import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from types import TracebackType
from typing import Self

import numpy as np
import torch

from megabatch.data.augment import Augmentation
from megabatch.data.encoded import EncodedImages
from megabatch.data.images import ImageSet
from megabatch.data.order import Samples, samples_at
from megabatch.data.reader import CPU, Batch, Batches, Reader, Request
from megabatch.data.settings import DataSettings
from megabatch.errors import UserError
from megabatch.planning.batch import StepPlan
from megabatch.runs.time_breakdown import Stages


class TrainingImages:
    """The training set in the run's order, augmented."""

    def __init__(
        self, images: ImageSet, settings: DataSettings, seed: int, plan: StepPlan, device: torch.device = CPU
    ) -> None:
        self.reader = Reader(images, device, partial(Augmentation, settings, seed))
        self.images, self.seed, self.plan = images, seed, plan

    def samples(self, step: int, index: int) -> tuple[Samples, Samples]:
        """Which samples a microbatch holds, and in which pass over the set each of them stands."""
        return samples_at(self.seed, len(self.images), self.plan.positions(step, index))

    def microbatch(self, step: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Images and labels of one, made now."""
        batch = self.reader.make(self.request(step, index))
        return batch.images, batch.labels

    def request(self, step: int, index: int) -> Request:
        return Request(*self.samples(step, index))

    def stream(self, rank: int, first_step: int = 0) -> "Stream":
        """A rank's microbatches from a step on, made ahead."""
        return Stream(
            self.reader.ahead(
                partial(self.request, step, index)
                for step in range(first_step, self.plan.num_steps)
                for index in self.plan.microbatches_of(rank)
            )
        )


class Stream:
    """Batches in order, with an account of what was waited for.  A wait is what its batch was spent on, in parts."""

    def __init__(self, batches: Batches) -> None:
        self.batches = batches
        self.waited, self.skipped = Stages(), list[str]()  # since they were last taken

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        asked_s = time.perf_counter()
        batch = next(self.batches)
        waited_s = time.perf_counter() - asked_s
        spent = batch.spent if batch.spent.total else Stages(read=1.0)
        self.waited.add(spent, waited_s / spent.total)
        self.skipped += batch.skipped
        return batch.images, batch.labels

    def take_account(self) -> tuple[Stages, list[str]]:
        waited, skipped = self.waited, self.skipped
        self.waited, self.skipped = Stages(), []
        return waited, skipped

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.batches.close()


def evaluation_batches(
    images: ImageSet, batch_size: int, rank: int, num_ranks: int, device: torch.device = CPU
) -> Iterator[tuple[int, Batch]]:
    """This rank's share, every `num_ranks`-th batch, and its number.  A batch is the same for any ranks."""
    numbers = range(rank, -(-len(images) // batch_size), num_ranks)

    def request(number: int) -> Request:
        return Request(np.arange(number * batch_size, min((number + 1) * batch_size, len(images))), None)

    with closing(Reader(images, device).ahead(partial(request, number) for number in numbers)) as batches:
        yield from zip(numbers, batches, strict=True)


def first_not_finite(images: ImageSet, samples: Samples) -> int:
    return next(int(sample) for sample in samples if not images.read(np.array([sample])).isfinite().all())


class Normalise:
    """uint8 -> the training set's zero mean and unit deviation per channel, on the device, rounded to `dtype` once."""

    MEASURED_SAMPLES = 50_000
    DECODED_SAMPLES = 1_000  # of images that have to be decoded for it

    def __init__(self, images: ImageSet, device: torch.device, dtype: torch.dtype, channels_last: bool = False) -> None:
        totals = torch.zeros(2, 1, dtype=torch.float64)
        count = 0
        # Evenly spread: a set may be sorted by class.
        most = self.DECODED_SAMPLES if isinstance(images, EncodedImages) else self.MEASURED_SAMPLES
        measured = np.arange(0, len(images), -(-len(images) // most))
        chunks = np.split(measured, range(64, len(measured), 64))
        with closing(Reader(images).ahead(partial(Request, chunk, None) for chunk in chunks)) as batches:
            for batch in batches:
                pixels = batch.images.double()
                totals = totals + torch.stack([pixels.sum((0, 2, 3)), pixels.square().sum((0, 2, 3))])
                count += pixels.numel() // pixels.shape[1]
        if not count:
            raise UserError(f"none of {len(measured)} training images that were tried can be read; mend the set")
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
