"""The gradient noise scale of a script that uses `attach`: each rank's gradient is one microbatch (see `runs.noise`).

DDP averages over P ranks, so rank r adds h_r = g_r / P.  The squares of g_r are computed before a bucket is reduced,
that of the mean after all buckets are.  The host reads them when the script asks.
"""

from collections.abc import Callable

import torch

from megabatch.errors import UserError
from megabatch.runs.noise import ONE_MICROBATCH, NoiseAverage, noise_record
from megabatch.runs.records import NoiseRecord


class RankNoise:
    def __init__(
        self, every: int, num_ranks: int, device: torch.device, sum_over_ranks: Callable[[torch.Tensor], None]
    ):
        self.every, self.num_ranks, self.sum_over_ranks = every, num_ranks, sum_over_ranks
        self.buckets: list[torch.Tensor] = []  # of this step, which are reduced in place
        self.norms: list[torch.Tensor] = []  # of this rank's gradients in them
        self.total = torch.zeros(1, dtype=torch.float64, device=device)
        self.unread: list[torch.Tensor] = []  # both squares of each measured step
        self.average = NoiseAverage()
        self.last: NoiseRecord | None = None

    def is_measured(self, step: int) -> bool:
        return (step + 1) % self.every == 0 and self.num_ranks > 1

    @torch.no_grad()
    def note(self, step: int, bucket: torch.Tensor) -> None:
        """Measure a bucket before it is reduced."""
        if self.is_measured(step):
            self.buckets.append(bucket)
            self.norms.append(norm_of(bucket))

    @torch.no_grad()
    def end_backward(self) -> None:
        """Add the step, if it was measured.  All buckets are reduced."""
        if not self.buckets:
            return
        torch.sum(torch.stack(self.norms).double().square(), dim=0, keepdim=True, out=self.total)
        self.sum_over_ranks(self.total)
        mean = torch.stack([norm_of(bucket) for bucket in self.buckets]).double().square().sum()
        self.unread.append(torch.cat([self.total / self.num_ranks**2, mean.reshape(1)]))
        self.buckets, self.norms = [], []

    def scale(self, samples: int) -> NoiseRecord | None:
        """Return the estimate if each rank has this number of samples per step; None before the first measured step."""
        if samples < 1:
            raise UserError(f"samples_per_rank={samples}: expected at least 1, the samples of one rank in a step")
        if self.num_ranks == 1:
            return NoiseRecord(reason=ONE_MICROBATCH)
        for squares in self.unread:
            of_ranks, of_mean = squares.tolist()
            found = noise_record(of_ranks, of_mean, self.num_ranks, samples)
            self.last = self.average.add(found, samples * self.num_ranks)
        self.unread = []
        return self.last


def norm_of(bucket: torch.Tensor) -> torch.Tensor:
    norm: torch.Tensor = torch.linalg.vector_norm(bucket, dtype=torch.promote_types(bucket.dtype, torch.float32))
    return norm
