"""Batches, as functions of where they stand: a training microbatch of (step, index), a test batch of its number."""

import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from types import TracebackType
from typing import Self

import numpy as np
import torch

from megabatch.data.pipeline.augment import Augmentation
from megabatch.data.pipeline.images import ImageSet
from megabatch.data.pipeline.order import Samples, samples_at
from megabatch.data.pipeline.reader import CPU, Batch, Batches, Reader, Request
from megabatch.data.settings import DataSettings
from megabatch.planning.batch import StepPlan
from megabatch.runs.records import TimeBreakdown


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
            self.reader.prefetch(
                partial(self.request, step, index)
                for step in range(first_step, self.plan.num_steps)
                for index in self.plan.microbatches_of(rank)
            )
        )


class Stream:
    """Batches in order, with an account of the time that was waited for them.

    A wait is divided as the time in which its batch was made.
    """

    def __init__(self, batches: Batches) -> None:
        self.batches = batches
        self.waited, self.skipped = TimeBreakdown(), list[str]()  # since they were last taken

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        asked_s = time.perf_counter()
        batch = next(self.batches)
        waited_s = time.perf_counter() - asked_s
        spent = batch.spent if batch.spent.total else TimeBreakdown(read=1.0)
        self.waited.add(spent, waited_s / spent.total)
        self.skipped += batch.skipped
        return batch.images, batch.labels

    def take_account(self) -> tuple[TimeBreakdown, list[str]]:
        waited, skipped = self.waited, self.skipped
        self.waited, self.skipped = TimeBreakdown(), []
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

    with closing(Reader(images, device).prefetch(partial(request, number) for number in numbers)) as batches:
        yield from zip(numbers, batches, strict=True)
