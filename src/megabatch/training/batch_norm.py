"""BatchNorm's running statistics, independent of the number of ranks.

A BatchNorm normalises with the statistics of its microbatch.  Its running statistics r are updated once per step with
the mean over all microbatches of all ranks:  r <- (1 - M) r + M mean_i(s_i),  M the module's momentum.
With A microbatches on a rank, the i-th (1..A) uses the momentum (M/A) / (1 - (A-i) M/A): the factors of r multiply to
1 - M, and every s_i ends with the weight M/A.  The update is linear in s, so the mean of r over ranks is exact.

In a compiled network a module's momentum is a constant: each new value would trigger a recompilation, A times in all,
and at every step for M = None.  The momentum is therefore 1 there: a forward pass writes s_i, and r is updated outside
the graph.
"""

import torch
from torch import nn

from megabatch.errors import UserError
from megabatch.torch_api import NormBase, foreach_copy_, foreach_lerp_


def share_of_momentum(momentum: float, turn: int, accumulation: int) -> float:
    """Return the momentum for microbatch `turn` (from 0) of `accumulation`."""
    share = momentum / accumulation
    return share / (1.0 - (accumulation - 1 - turn) * share)


class RunningStatistics:
    """The running means and variances of all normalisation layers that track them."""

    def __init__(self, model: nn.Module, accumulation: int) -> None:
        self.accumulation = accumulation
        self.modules: list[NormBase] = []
        self.tensors: list[torch.Tensor] = []
        self.names: list[str] = []
        for name, module in model.named_modules():
            if not module.training:  # frozen: a mean over ranks would round even equal statistics
                continue
            if isinstance(module, NormBase) and module.running_mean is not None and module.running_var is not None:
                self.modules.append(module)
                self.names.append(name)
                self.tensors += [module.running_mean, module.running_var]
        self.sizes = [tensor.numel() for tensor in self.tensors]
        self.outside: list[torch.Tensor] = []  # r of a compiled network
        self.shares: list[float] = []  # the microbatch's momentum for each of `tensors`
        self.momenta = [module.momentum for module in self.modules]
        self.counts: torch.Tensor | None = None  # steps that each module counted
        self.counting: torch.Tensor | None = None

    @property
    def needs_counts(self) -> bool:
        """Whether a module averages over all steps (momentum None): the host must then count the steps not skipped."""
        return None in self.momenta

    def update_outside_graph(self, model: nn.Module) -> None:
        """Set the modules' momentum to 1, and update the statistics in a hook after each forward pass."""
        self.outside = [torch.empty_like(tensor) for tensor in self.tensors]
        for module in self.modules:
            module.momentum = 1.0
        model.register_forward_hook(self.update)

    def begin_microbatch(self, turn: int) -> None:
        """Set the momenta for microbatch `turn` (from 0) of a step.  Call it before the forward pass."""
        if self.counts is None and self.modules:  # read once, after a resumed run restored them
            self.counts = torch.stack([counter(module) for module in self.modules])
        if turn == 0 and self.tensors:
            self.before = torch.cat(self.tensors)
        if turn == 0 and self.outside:
            foreach_copy_(self.outside, self.tensors)
        self.shares = []
        counts = self.counts.tolist() if self.needs_counts and self.counts is not None else [0] * len(self.modules)
        for module, momentum, count in zip(self.modules, self.momenta, counts, strict=True):
            if momentum is None:
                momentum = 1.0 / (1.0 + count)
            share = share_of_momentum(momentum, turn, self.accumulation)
            module.momentum = 1.0 if self.outside else share
            self.shares += [share, share]  # for the mean and the variance

    def update(self, *_: object) -> None:
        """Replace s_i in `tensors` with r.  A forward hook."""
        if self.shares and torch.is_grad_enabled():  # in a step, not in evaluation
            # `.data`, because autograd saved the tensors for backward.  BatchNorm does not read them there in training.
            tensors = [tensor.data for tensor in self.tensors]
            foreach_lerp_(self.outside, tensors, self.shares)
            foreach_copy_(tensors, self.outside)

    @torch.no_grad()
    def end_step(self, averaged: torch.Tensor, skipped: torch.Tensor | None = None) -> None:
        """Set the statistics to the mean over ranks and count the step.

        Args:
            averaged: The mean over ranks, as one flat tensor in the order of `tensors`.
            skipped: 1 to restore the statistics from before the step.
        """
        for module, momentum in zip(self.modules, self.momenta, strict=True):
            module.momentum = momentum
        if self.counts is None:
            return
        if skipped is not None:
            averaged = torch.where(skipped > 0, self.before, averaged)
        foreach_copy_(self.tensors, averaged.split(self.sizes))
        counting = self.counting_mask()
        self.counts += counting if skipped is None else torch.where(skipped > 0, 0, counting)
        foreach_copy_([counter(module) for module in self.modules], self.counts.unbind())

    def counting_mask(self) -> torch.Tensor:
        """Return 1 for each module that counted the first step's forward passes, else 0."""
        if self.counting is None:
            assert self.counts is not None
            counting = [self.counts_passes(index) for index in range(len(self.modules))]
            self.counting = torch.tensor(counting, dtype=self.counts.dtype).to(self.counts.device)
        return self.counting

    def counts_passes(self, index: int) -> bool:
        """Return whether the module counted the first step's forward passes, as it does in training mode."""
        assert self.counts is not None
        passes = int(counter(self.modules[index]) - self.counts[index])
        if passes > self.accumulation:
            raise UserError(
                f"the model uses {self.names[index]} {passes // self.accumulation} times in a forward pass, so its "
                "running statistics would depend on the number of ranks; use a separate layer for each"
            )
        return passes > 0


def counter(module: NormBase) -> torch.Tensor:
    assert module.num_batches_tracked is not None
    return module.num_batches_tracked
