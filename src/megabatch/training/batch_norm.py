"""BatchNorm's running statistics, independent of the number of ranks.

A BatchNorm normalises with the statistics of its microbatch.  Its running statistics r move once a step, by the
mean over all microbatches of all ranks:  r <- (1 - M) r + M mean_i(s_i),  M the module's momentum.
With A microbatches on a rank, the i-th (1..A) moves r by (M/A) / (1 - (A-i) M/A): the factors of r multiply to
1 - M, and every s_i ends with the weight M/A.  All this is linear in s, so the mean of r over ranks is exact.

In a compiled network a module's momentum is a constant: each new value would compile it again, A times in all, and at
every step where M is None.  There it is 1 throughout, so that a forward pass leaves s_i itself, and r is moved outside.
"""

import torch
from torch import nn

from megabatch.errors import UserError
from megabatch.torch_api import NormBase, foreach_copy_, foreach_lerp_


def share_of_momentum(momentum: float, turn: int, accumulation: int) -> float:
    """What microbatch `turn` (from 0) of `accumulation` moves the running statistics by."""
    share = momentum / accumulation
    return share / (1.0 - (accumulation - 1 - turn) * share)


class RunningStatistics:
    """The running means and variances of all normalisation layers that keep some, over the microbatches of a step."""

    def __init__(self, model: nn.Module, accumulation: int) -> None:
        self.accumulation = accumulation
        self.modules: list[NormBase] = []
        self.tensors: list[torch.Tensor] = []
        self.names: list[str] = []
        for name, module in model.named_modules():
            if not module.training:  # frozen: even the mean over ranks of equal statistics would round them
                continue
            if isinstance(module, NormBase) and module.running_mean is not None and module.running_var is not None:
                self.modules.append(module)
                self.names.append(name)
                self.tensors += [module.running_mean, module.running_var]
        self.sizes = [tensor.numel() for tensor in self.tensors]
        self.moved: list[torch.Tensor] = []  # r, of a compiled network
        self.shares: list[float] = []  # what the microbatch moves each of `tensors` by
        self.momenta = [module.momentum for module in self.modules]
        self.counts: torch.Tensor | None = None  # steps that each module has seen
        self.counting: torch.Tensor | None = None

    @property
    def needs_counts(self) -> bool:
        """Some module asks for the plain average over all steps, so the host must know how many were not skipped."""
        return None in self.momenta

    def move_outside(self, model: nn.Module) -> None:
        """From now on modules have a momentum of 1, and the statistics are moved after each forward pass."""
        self.moved = [torch.empty_like(tensor) for tensor in self.tensors]
        for module in self.modules:
            module.momentum = 1.0
        model.register_forward_hook(self.move)

    def begin_microbatch(self, turn: int) -> None:
        """Before the forward pass of microbatch `turn` (from 0) of a step."""
        if self.counts is None and self.modules:  # read once: a resumed run has restored them by now
            self.counts = torch.stack([counter(module) for module in self.modules])
        if turn == 0 and self.tensors:
            self.before = torch.cat(self.tensors)
        if turn == 0 and self.moved:
            foreach_copy_(self.moved, self.tensors)
        self.shares = []
        counts = self.counts.tolist() if self.needs_counts and self.counts is not None else [0] * len(self.modules)
        for module, momentum, count in zip(self.modules, self.momenta, counts, strict=True):
            if momentum is None:
                momentum = 1.0 / (1.0 + count)
            share = share_of_momentum(momentum, turn, self.accumulation)
            module.momentum = 1.0 if self.moved else share
            self.shares += [share, share]  # of the mean and of the variance

    def move(self, *_: object) -> None:
        """A forward hook: `tensors` are s_i, and become r."""
        if self.shares and torch.is_grad_enabled():  # in a step, and not in evaluation
            # Beside autograd, which keeps them for backward, where a BatchNorm in training does not look at them.
            tensors = [tensor.data for tensor in self.tensors]
            foreach_lerp_(self.moved, tensors, self.shares)
            foreach_copy_(tensors, self.moved)

    @torch.no_grad()
    def end_step(self, averaged: torch.Tensor, skipped: torch.Tensor | None = None) -> None:
        """Takes the mean over ranks, one flat tensor in the order of `tensors`; each module counts one step.

        Where `skipped` is 1, everything is as it was before the step.
        """
        for module, momentum in zip(self.modules, self.momenta, strict=True):
            module.momentum = momentum
        if self.counts is None:
            return
        if skipped is not None:
            averaged = torch.where(skipped > 0, self.before, averaged)
        foreach_copy_(self.tensors, averaged.split(self.sizes))
        counting = self.find_counting()
        self.counts += counting if skipped is None else torch.where(skipped > 0, 0, counting)
        foreach_copy_([counter(module) for module in self.modules], self.counts.unbind())

    def find_counting(self) -> torch.Tensor:
        """1 for each module that counts its forward passes, as one in training does, else 0; known after a step."""
        if self.counting is None:
            assert self.counts is not None
            counting = [self.check_use(index) for index in range(len(self.modules))]
            self.counting = torch.tensor(counting, dtype=self.counts.dtype).to(self.counts.device)
        return self.counting

    def check_use(self, index: int) -> bool:
        """After the first step: True if the module counts its forward passes, as one in training does."""
        assert self.counts is not None
        passes = int(counter(self.modules[index]) - self.counts[index])
        if passes > self.accumulation:
            raise UserError(
                f"the model uses {self.names[index]} {passes // self.accumulation} times in a forward pass, and its "
                "running statistics would depend on the number of ranks; give each use a layer of its own"
            )
        return passes > 0


def counter(module: NormBase) -> torch.Tensor:
    assert module.num_batches_tracked is not None
    return module.num_batches_tracked
