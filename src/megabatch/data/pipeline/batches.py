"""Batches as functions of their position: a training microbatch of (step, index), a test batch of its number."""

import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import Self

import numpy as np
import torch

from megabatch.data.pipeline.augment import Augmentation
from megabatch.data.pipeline.images import ImageSet, PixelStatistics
from megabatch.data.pipeline.order import BalancedOrder, EpochSamples, Samples, samples_at, spread_copies
from megabatch.data.pipeline.reader import CPU, Batch, Batches, BatchRequest, MakeRequest, Reader
from megabatch.data.settings import DataSettings
from megabatch.planning.batch import StepPlan
from megabatch.planning.sizes import plan_stages, stage_at
from megabatch.runs.records import TimeBreakdown


class TrainingImages:
    """The augmented training images in the order of the run."""

    def __init__(
        self,
        images: ImageSet,
        settings: DataSettings,
        seed: int,
        plan: StepPlan,
        device: torch.device = CPU,
        pixels: PixelStatistics | None = None,
    ) -> None:
        self.reader = Reader(images, device, partial(Augmentation, settings, seed, pixels=pixels))
        self.images, self.seed, self.plan, self.repeats = images, seed, plan, settings.augment.repeats
        self.balanced = BalancedOrder(seed, images.labels.numpy()) if settings.sampling == "balanced" else None
        self.stages = plan_stages(settings.sizes, settings.image_size, plan.num_steps)

    def samples(self, step: int, index: int) -> tuple[Samples, Samples]:
        """Return the samples of a microbatch and the epoch of each."""
        samples, epochs, _ = self.request(step, index)()
        assert epochs is not None
        return samples, epochs

    def microbatch(self, step: int, index: int, side: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Make a microbatch now, by default with the side of its step, and return its images and labels."""
        batch = self.reader.make(self.request(step, index, side)())
        return batch.images, batch.labels

    @property
    def num_ahead(self) -> int:
        """Return the number of microbatches that a stream prefetches."""
        return self.reader.num_ahead(self.plan.microbatch)

    def request(self, step: int, index: int, side: int | None = None) -> MakeRequest:
        positions = self.plan.positions(step, index)
        copies = None if self.repeats == 1 else (self.plan.global_batch, self.repeats)
        make = partial(training_request, self.seed, len(self.images), positions, side or self.side(step), copies)
        # The decoder process has no labels, so this process makes a balanced request.
        return partial(BatchRequest, *make(self.balanced)) if self.balanced else make

    def side(self, step: int) -> int:
        return stage_at(self.stages, step).side

    def stream(self, rank: int, first_step: int = 0) -> "Stream":
        """Return the prefetched microbatches of a rank from a step on."""
        return Stream(
            self.reader.prefetch(
                (
                    self.request(step, index)
                    for step in range(first_step, self.plan.num_steps)
                    for index in self.plan.microbatches_of(rank)
                ),
                self.plan.microbatch,
            )
        )


def training_request(
    seed: int,
    num_samples: int,
    positions: range,
    side: int,
    copies: tuple[int, int] | None = None,
    epoch_samples: EpochSamples | None = None,
) -> BatchRequest:
    """Return the request of a microbatch.  Functions at the top of a file can be sent to the decoder process.

    `copies` has the global batch and the number of copies of each sample in it, if there are several.
    """
    spread, repeats = (positions, 1) if copies is None else (spread_copies(positions, *copies), copies[1])
    return BatchRequest(*samples_at(seed, num_samples, spread, repeats, epoch_samples), side)


def evaluation_request(begin: int, end: int) -> BatchRequest:
    return BatchRequest(np.arange(begin, end), None)


class Stream:
    """Batches in order, with a record of the time spent waiting for them.

    A wait is attributed to reading, decoding and augmentation in proportion to the time that these took.
    """

    def __init__(self, batches: Batches) -> None:
        self.batches = batches
        self.waited, self.skipped = TimeBreakdown(), list[str]()  # since the last `take_waits`

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        begin_s = time.perf_counter()
        batch = next(self.batches)
        waited_s = time.perf_counter() - begin_s
        spent = batch.spent if batch.spent.total else TimeBreakdown(read=1.0)
        self.waited.add(spent, waited_s / spent.total)
        self.skipped += batch.skipped
        return batch.images, batch.labels

    def take_waits(self) -> tuple[TimeBreakdown, list[str]]:
        """Return the waiting times and the skipped images since the last call."""
        waited, skipped = self.waited, self.skipped
        self.waited, self.skipped = TimeBreakdown(), []
        return waited, skipped

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.batches.close()


def evaluation_batches(
    images: ImageSet, batch_size: int, rank: int, num_ranks: int, device: torch.device = CPU
) -> Iterator[tuple[int, Batch]]:
    """Yield every `num_ranks`-th batch with its number.  The batches do not depend on the number of ranks."""
    numbers = range(rank, -(-len(images) // batch_size), num_ranks)

    requests = (
        partial(evaluation_request, number * batch_size, min((number + 1) * batch_size, len(images)))
        for number in numbers
    )
    with closing(Reader(images, device).prefetch(requests, batch_size)) as batches:
        yield from zip(numbers, batches, strict=True)
