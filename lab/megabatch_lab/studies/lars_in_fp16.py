"""LARS computed entirely in fp16, as it should not be: the control of `megabatch study precision`.

Every result is rounded to fp16: weights, gradients, squares, their sum (which torch accumulates in fp32), norms, the
trust ratio, the momentum.  Squares of gradients up to 1.7e-4 are 0, sums of squares above 65,504 infinite, and a step
of less than 1/2,048 of a weight may be lost.  Jia et al. 2018 compute LARS in fp32, because otherwise values become 0
and training stalls.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from megabatch.optim.lars import BUFFER, unclipped
from megabatch.optim.optimizers import OptimSettings


class LarsInFp16(torch.optim.Optimizer):
    """`LARS`, variant you2017, in fp16.  Weights keep their dtype but are rounded to fp16."""

    def __init__(self, params: Iterable[Any], lr: float, momentum: float, trust_coefficient: float, eps: float) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": 0.0, "eps": eps}
        super().__init__(params, defaults | {"trust_coefficient": trust_coefficient, "trust_ratio": True})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                weight, gradient = parameter.half(), parameter.grad.half()
                before = self.state[parameter].get(BUFFER, torch.zeros_like(weight)).half()
                decayed = gradient + group["weight_decay"] * weight
                momentum = group["momentum"] * before + group["lr"] * (trust_ratio(group, weight, gradient) * decayed)
                self.state[parameter][BUFFER] = momentum
                parameter.copy_(weight - momentum)


def trust_ratio(group: dict[str, Any], weight: Tensor, gradient: Tensor) -> Tensor:
    weight_norm, gradient_norm = norm(weight), norm(gradient)
    is_defined = group["trust_ratio"] and weight_norm > 0 and gradient_norm > 0
    if not is_defined:
        return torch.ones_like(weight_norm)
    return unclipped(weight_norm, gradient_norm, group["trust_coefficient"], group["weight_decay"], group["eps"])


def norm(tensor: Tensor) -> Tensor:
    return (tensor * tensor).sum().sqrt()


def lars_in_fp16(groups: Iterable[dict[str, Any]], settings: OptimSettings) -> torch.optim.Optimizer:
    return LarsInFp16(
        groups,
        lr=settings.learning_rate,
        momentum=settings.momentum,
        trust_coefficient=settings.trust_coefficient,
        eps=settings.eps_of("lars"),
    )
