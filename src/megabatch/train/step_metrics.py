"""The one small all-reduce of a step: the loss, whether to stop, who waited how long, BatchNorm's statistics.

All of them are known when the last forward pass of the step is done, so the exchange runs underneath backward, before
the first gradients.
"""

import time

import torch
from msgspec import Struct

from megabatch.comm.hook import GradientSums
from megabatch.ranks.world import World
from megabatch.train.batch_norm import RunningStatistics


class Totals(Struct, frozen=True):
    loss: float  # mean over the global batch
    samples: int
    stop: bool  # some rank was asked to
    skipped: list[str]  # images that could not be read, and why; on any rank
    waited_s: list[float]  # a step, each rank, for gradients of the others; since the run began or went on
    statistics: torch.Tensor  # of BatchNorm, the mean over ranks


class Exchange:
    """`add` every microbatch's loss, `send` before the last backward pass, `receive` after it."""

    def __init__(
        self, gradients: GradientSums, statistics: RunningStatistics, world: World, dtype: torch.dtype
    ) -> None:
        self.gradients, self.statistics, self.world = gradients, statistics, world
        self.losses: list[torch.Tensor] = []  # of the step
        self.samples = 0
        self.told_s: float | None = None  # what was waited before the first step is not told
        self.all_waits_s, self.num_told = [0.0] * world.num_ranks, 0
        self.waited_s = 0.0  # in the newest `receive`
        num_statistics = sum(tensor.numel() for tensor in statistics.tensors)
        self.message = torch.zeros(4 + world.num_ranks + num_statistics, dtype=dtype, device=world.device)
        self.loss, self.counts, self.waits, self.averages = self.message.split([1, 3, world.num_ranks, num_statistics])

    def add(self, loss: torch.Tensor, samples: int) -> None:
        self.losses.append(loss.detach())
        self.samples += samples

    def send(self, stop: bool, skipped: list[str]) -> None:
        self.sent_losses = torch.stack(self.losses)
        self.loss.copy_(self.sent_losses.sum())
        self.counts.copy_(torch.tensor([self.samples, stop, len(skipped)]))
        self.skipped = skipped
        waited_s = self.gradients.waited_s
        self.waits.zero_()
        self.waits[self.world.rank] = 0.0 if self.told_s is None else waited_s - self.told_s
        if self.statistics.tensors:
            torch.cat(self.statistics.tensors, out=self.averages)
        self.sum = self.gradients.start_sum(self.message)
        self.losses, self.samples, self.told_s = [], 0, waited_s

    def receive(self) -> Totals:
        started_s = time.perf_counter()
        self.sum.wait()
        self.waited_s = time.perf_counter() - started_s
        loss, samples, stop, num_skipped, *waits = self.message[: 4 + self.world.num_ranks].tolist()
        self.all_waits_s = [before_s + wait_s for before_s, wait_s in zip(self.all_waits_s, waits, strict=True)]
        mean_waits_s = [wait_s / max(1, self.num_told) for wait_s in self.all_waits_s]
        self.num_told += 1  # a step's waits are told in the next
        return Totals(
            loss=loss,
            samples=int(samples),
            stop=stop > 0,
            skipped=[line for lines in self.world.collect(self.skipped) for line in lines] if num_skipped else [],
            waited_s=mean_waits_s,
            statistics=self.averages / self.world.num_ranks,
        )
