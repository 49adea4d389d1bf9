"""The one small all-reduce of a step: the loss, whether to stop, and BatchNorm's running statistics.

All of them are known when the last forward pass of the step is done, so the exchange runs underneath backward.
"""

import torch
from msgspec import Struct
from torch.distributed import Work

from megabatch.comm.world import World
from megabatch.train.batch_norm import RunningStatistics

NUM_SCALARS = 3


class Totals(Struct, frozen=True):
    loss: float  # mean over the global batch
    samples: int
    stop: bool  # some rank was asked to


class Exchange:
    """`add` every microbatch's loss, `send` before the last backward pass, `receive` after it."""

    def __init__(self, world: World, statistics: RunningStatistics, dtype: torch.dtype) -> None:
        self.world, self.statistics = world, statistics
        self.scalars = torch.zeros(NUM_SCALARS, dtype=dtype, device=world.device)
        self.message: torch.Tensor | None = None
        self.work: Work | None = None

    def add(self, loss: torch.Tensor, samples: int) -> None:
        self.scalars[0] += loss.detach()
        self.scalars[1] += samples

    def send(self, stop: bool) -> None:
        self.scalars[2] = stop
        statistics = [tensor.flatten().to(self.scalars) for tensor in self.statistics.tensors]
        self.message = torch.cat([self.scalars, *statistics])
        self.work = self.world.start_sum(self.message)
        self.scalars.zero_()

    def receive(self) -> Totals:
        assert self.work is not None and self.message is not None
        self.work.wait()
        self.statistics.assign(self.message[NUM_SCALARS:] / self.world.num_ranks)
        loss, samples, stop = self.message[:NUM_SCALARS].tolist()
        return Totals(loss=loss, samples=int(samples), stop=stop > 0)
