"""The one small all-reduce of a step: the loss, whether to stop, and BatchNorm's running statistics.

All of them are known when the last forward pass of the step is done, so the exchange runs underneath backward.
"""

import time

import torch
from msgspec import Struct

from megabatch.comm.world import World
from megabatch.train.batch_norm import RunningStatistics


class Totals(Struct, frozen=True):
    loss: float  # mean over the global batch
    samples: int
    stop: bool  # some rank was asked to


class Exchange:
    """`add` every microbatch's loss, `send` before the last backward pass, `receive` after it."""

    def __init__(self, world: World, statistics: RunningStatistics, dtype: torch.dtype) -> None:
        self.world, self.statistics, self.dtype = world, statistics, dtype
        self.losses: list[torch.Tensor] = []
        self.samples = 0
        self.waited_s = 0.0  # in the newest `receive`

    def add(self, loss: torch.Tensor, samples: int) -> None:
        self.losses.append(loss.detach())
        self.samples += samples

    def send(self, stop: bool) -> None:
        counts = torch.tensor([self.samples, stop], dtype=self.dtype, device=self.world.device)
        loss = torch.stack(self.losses).sum(0, keepdim=True)
        statistics = [tensor.to(self.dtype) for tensor in self.statistics.tensors]
        self.message = torch.cat([loss, counts, *statistics])
        self.wait = self.world.start_sum(self.message)
        self.losses, self.samples = [], 0

    def receive(self) -> Totals:
        started_s = time.perf_counter()
        self.wait()
        self.waited_s = time.perf_counter() - started_s
        scalars, statistics = self.message[:3], self.message[3:]
        self.statistics.end_step(statistics / self.world.num_ranks)
        loss, samples, stop = scalars.tolist()
        return Totals(loss=loss, samples=int(samples), stop=stop > 0)
