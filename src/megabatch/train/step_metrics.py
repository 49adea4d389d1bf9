"""The one small all-reduce of a step: the loss, whether to stop, who waited how long, BatchNorm's statistics.

All of them are known when the last forward pass of the step is done, so it runs underneath backward, before the first
gradients.
"""

import statistics
import time

import torch
from msgspec import Struct

from megabatch.comm.gradient_all_reduce import GradientAllReduce
from megabatch.ranks.world import World
from megabatch.train.batch_norm import RunningStatistics


class StepTotals(Struct, frozen=True):
    """Of a step, over all ranks."""

    loss: float  # mean over the global batch
    samples: int
    stop: bool  # some rank was asked to
    skipped: list[str]  # images that cannot be read, and why
    straggler: int  # the rank that has waited least for others so far
    straggler_delay_s: float  # by how much less than the median of the others, a step
    statistics: torch.Tensor  # of BatchNorm, the mean over ranks


class StepMetrics:
    """`add` every microbatch's loss, `send` before the last backward pass, `receive` after it."""

    def __init__(
        self, gradients: GradientAllReduce, running: RunningStatistics, world: World, dtype: torch.dtype
    ) -> None:
        self.gradients, self.running, self.world = gradients, running, world
        self.losses: list[torch.Tensor] = []  # of the step
        self.samples = 0
        self.sent_wait_s: float | None = None  # what was waited before the first step is not sent
        self.all_waits_s, self.num_received = [0.0] * world.num_ranks, 0
        self.waited_s = 0.0  # in the newest `receive`
        num_statistics = sum(tensor.numel() for tensor in running.tensors)
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
        self.waits[self.world.rank] = 0.0 if self.sent_wait_s is None else waited_s - self.sent_wait_s
        if self.running.tensors:
            torch.cat(self.running.tensors, out=self.averages)
        self.future = self.gradients.start_metrics(self.message)
        self.losses, self.samples, self.sent_wait_s = [], 0, waited_s

    def receive(self) -> StepTotals:
        started_s = time.perf_counter()
        self.future.wait()
        self.waited_s = time.perf_counter() - started_s
        loss, samples, stop, num_skipped, *waits = self.message[: 4 + self.world.num_ranks].tolist()
        self.all_waits_s = [before_s + wait_s for before_s, wait_s in zip(self.all_waits_s, waits, strict=True)]
        # A step's waits are sent in the next.
        straggler, delay_s = find_straggler([wait_s / max(1, self.num_received) for wait_s in self.all_waits_s])
        self.num_received += 1
        return StepTotals(
            loss=loss,
            samples=int(samples),
            stop=stop > 0,
            skipped=[line for lines in self.world.all_gather(self.skipped) for line in lines] if num_skipped else [],
            straggler=straggler,
            straggler_delay_s=delay_s,
            statistics=self.averages / self.world.num_ranks,
        )


def find_straggler(waits_s: list[float]) -> tuple[int, float]:
    """The rank that waited least, and by how much less than the median of the others.  Clocks are not compared."""
    rank = min(range(len(waits_s)), key=waits_s.__getitem__)
    others = waits_s[:rank] + waits_s[rank + 1 :]
    return rank, statistics.median(others) - waits_s[rank] if others else 0.0
