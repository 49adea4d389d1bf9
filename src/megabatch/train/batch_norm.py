"""BatchNorm's running statistics, independent of the number of ranks.

A BatchNorm normalises with the statistics of its microbatch.  Its running statistics r move once a step, by the
mean over all microbatches of all ranks:  r <- (1 - M) r + M mean_i(s_i),  M the module's momentum.
With A microbatches on a rank, the i-th (1..A) moves r by (M/A) / (1 - (A-i) M/A): the factors of r multiply to
1 - M, and every s_i ends with the weight M/A.  All this is linear in s, so the mean of r over ranks is exact.
"""

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def share_of_momentum(momentum: float, turn: int, accumulation: int) -> float:
    """What microbatch `turn` (from 0) of `accumulation` moves the running statistics by."""
    share = momentum / accumulation
    return share / (1.0 - (accumulation - 1 - turn) * share)


class RunningStatistics:
    """The running means and variances of all BatchNorms of a model, over the microbatches of a step."""

    def __init__(self, model: nn.Module, accumulation: int) -> None:
        self.accumulation = accumulation
        self.modules: list[_BatchNorm] = []
        self.tensors: list[torch.Tensor] = []
        for module in model.modules():
            if isinstance(module, _BatchNorm) and module.running_mean is not None and module.running_var is not None:
                self.modules.append(module)
                self.tensors += [module.running_mean, module.running_var]
        self.momenta = [module.momentum for module in self.modules]

    def begin_microbatch(self, turn: int) -> None:
        """Before the forward pass of microbatch `turn` (from 0) of a step."""
        for module, momentum in zip(self.modules, self.momenta, strict=True):
            if momentum is None:  # asks for the plain average over all steps
                assert module.num_batches_tracked is not None
                momentum = 1.0 / (1.0 + module.num_batches_tracked.item() - turn)
            module.momentum = share_of_momentum(momentum, turn, self.accumulation)

    @torch.no_grad()
    def end_step(self, averaged: torch.Tensor) -> None:
        """Takes the mean over ranks, one flat tensor in the order of `tensors`; each module counts one step."""
        parts = averaged.split([tensor.numel() for tensor in self.tensors])
        for tensor, part in zip(self.tensors, parts, strict=True):
            tensor.copy_(part)
        for module, momentum in zip(self.modules, self.momenta, strict=True):
            module.momentum = momentum
            if module.training and self.accumulation > 1:
                assert module.num_batches_tracked is not None
                module.num_batches_tracked.sub_(self.accumulation - 1)
