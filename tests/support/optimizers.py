"""Weights, gradients and steps for tests of optimizers."""

from typing import Any

import torch
from torch import Tensor, nn

from megabatch.optim.momentum import ROW
from megabatch.optim.optimizers import set_learning_rate

SHAPES = [(5, 3, 2, 2), (4, 7), (ROW + 37,)]
SAME: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-14}


def random(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def make_weights(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    return [nn.Parameter(random(*shape, dtype=dtype, seed=seed)) for seed, shape in enumerate(SHAPES)]


def take_steps(optimizer: torch.optim.Optimizer, rates: list[float], first: int = 0, scale: float = 1.0) -> None:
    for step, rate in enumerate(rates, first):
        set_learning_rate(optimizer, rate)
        give_gradients(optimizer, step, scale)
        optimizer.step()


def give_gradients(optimizer: torch.optim.Optimizer, step: int, scale: float = 1.0) -> None:
    for group in optimizer.param_groups:
        for index, weight in enumerate(group["params"]):
            weight.grad = scale * random(*weight.shape, dtype=weight.dtype, seed=100 * step + index)
