"""An exponential moving average (EMA) of the weights, which is evaluated and stored instead of the weights.

Legend: w_s are the weights after step s, a is their average, k the steps between updates, H the half-life in steps.
    before step k       a = w_0
    s = k               a <- w_s
    s = 2k, 3k, ...     a <- d a + (1 - d) w_s,    d = 2^(-k/H)

This is torch.optim.swa_utils.AveragedModel with get_ema_multi_avg_fn(d) and use_buffers=True.  BatchNorm's running
statistics are averaged like the weights that they belong to; other buffers are those of the model.  A 16-bit model has
the average of its fp32 master weights.

The average depends on the steps and the weights only: every rank computes the same, and a resumed run continues it
bitwise.  A skipped step counts like any other, with unchanged weights, so the host does not need to know about it.
"""

import torch
from torch import nn

from megabatch.precision.master_weights import MasterWeights, named_tensors
from megabatch.torch_api import foreach_copy_, foreach_lerp_
from megabatch.training.batch_norm import RunningStatistics


class WeightAverage:
    """The average of the trained weights and the running statistics; empty without a `decay`."""

    def __init__(
        self, model: nn.Module, weights: MasterWeights, statistics: RunningStatistics, decay: float | None, every: int
    ) -> None:
        self.decay, self.every = decay, every
        averaged: dict[int, torch.Tensor] = {
            id(parameter): weights.weights[name] for name, parameter in weights.parameters.items()
        }
        averaged |= {id(tensor): tensor for tensor in statistics.tensors}
        self.sources: dict[str, torch.Tensor] = {}  # by the first name in the model's state dict
        self.names: dict[str, str] = {}  # the first name for each name, of which tied tensors have several
        self.dtypes: dict[str, torch.dtype] = {}  # in the model
        first_names: dict[int, str] = {}
        for name, tensor in named_tensors(model).items() if decay is not None else ():
            if id(tensor) in averaged:
                self.names[name] = first = first_names.setdefault(id(tensor), name)
                self.sources[first], self.dtypes[first] = averaged[id(tensor)].detach(), tensor.dtype
        self.tensors = {name: source.clone() for name, source in self.sources.items()}

    @property
    def is_on(self) -> bool:
        return self.decay is not None

    @torch.no_grad()
    def update(self, done: int) -> None:
        """Include the weights after `done` steps, if it is their turn."""
        if self.decay is None or done % self.every:
            return
        averages, sources = list(self.tensors.values()), list(self.sources.values())
        if done == self.every:
            foreach_copy_(averages, sources)
        else:
            foreach_lerp_(averages, sources, 1 - self.decay)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the averages by all names in the model's state dict."""
        return {name: self.tensors[first] for name, first in self.names.items()}

    def for_forward(self) -> dict[str, torch.Tensor]:
        """Return the averages in the model's dtypes, for `functional_call`."""
        return {name: tensor.to(self.dtypes[name]) for name, tensor in self.tensors.items()}
