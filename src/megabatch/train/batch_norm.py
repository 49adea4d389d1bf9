"""BatchNorm's running statistics, independent of the number of ranks.

A BatchNorm normalises with the statistics of its microbatch.  Its running statistics r move once a step, by the
mean over all microbatches of all ranks:  r <- (1 - M) r + M mean_i(s_i),  M the module's momentum.
With A microbatches on a rank, the i-th (1..A) moves r by (M/A) / (1 - (A-i) M/A): the factors of r multiply to
1 - M, and every s_i ends with the weight M/A.  All this is linear in s, so the mean of r over ranks is exact.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def share_of_momentum(momentum: float, turn: int, accumulation: int) -> float:
    """What microbatch `turn` (from 0) of `accumulation` moves the running statistics by."""
    share = momentum / accumulation
    return share / (1.0 - (accumulation - 1 - turn) * share)


class RunningStatistics:
    """The running means and variances of all BatchNorms of a model."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = [
            module for module in model.modules() if isinstance(module, _BatchNorm) and module.running_mean is not None
        ]
        self.tensors = [
            tensor
            for module in self.modules
            for tensor in (module.running_mean, module.running_var)
            if tensor is not None
        ]

    @contextmanager
    def microbatch(self, turn: int, accumulation: int) -> Iterator[None]:
        """Around the forward pass of microbatch `turn` (from 0) of a step."""
        momenta = [module.momentum for module in self.modules]
        for module in self.modules:
            assert module.num_batches_tracked is not None
            # None asks for the plain average over all steps.
            momentum = module.momentum or 1.0 / (1.0 + module.num_batches_tracked.item())
            module.momentum = share_of_momentum(momentum, turn, accumulation)
        try:
            yield
        finally:
            for module, momentum in zip(self.modules, momenta, strict=True):
                module.momentum = momentum
                if module.training and turn < accumulation - 1:
                    assert module.num_batches_tracked is not None
                    module.num_batches_tracked -= 1  # it counts steps: only the last microbatch's increment stays

    @torch.no_grad()
    def assign(self, flat: torch.Tensor) -> None:
        """Takes all statistics from one flat tensor, in the order of `tensors`."""
        parts = flat.split([tensor.numel() for tensor in self.tensors])
        torch._foreach_copy_(self.tensors, list(parts))
