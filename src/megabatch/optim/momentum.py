"""One step of momentum SGD whose gradient is multiplied by a factor.

w weight, g gradient, v momentum buffer (none without momentum), lambda weight decay

    v = momentum v + factor (g + lambda w),   w -= rate v

`step_fused` makes it in one pass over memory, for one factor; `step_lists` for a factor per tensor, which may be on any
device and stays there.
"""

import torch
from torch import Tensor

from megabatch.optim.dense import are_alike

# The kernel is handed 1 - factor in float64.  A smaller factor would keep fewer bits than float32 has.
LEAST_FUSED_FACTOR = 2.0**-28


def step_fused(
    weights: list[Tensor],
    gradients: list[Tensor],
    buffers: list[Tensor],
    factor: float,
    *,
    rate: float,
    momentum: float,
    weight_decay: float,
) -> None:
    """Only on the CPU: where the kernel cannot, it calls `step_lists`."""
    if not buffers:  # the kernel reads `dampening` only where there is momentum
        factor, rate = 1.0, rate * factor
    tensors = zip(weights, gradients, buffers or weights, strict=True)
    if 0 < factor < LEAST_FUSED_FACTOR or not all(are_alike(*each) for each in tensors):
        factors = [torch.tensor(factor, dtype=weight.dtype) for weight in weights]
        step_lists(weights, gradients, buffers, factors, rate=rate, momentum=momentum, weight_decay=weight_decay)
        return
    torch._fused_sgd_(
        weights,
        gradients,
        buffers,
        weight_decay=weight_decay,
        momentum=momentum,
        lr=rate,
        dampening=1.0 - factor,
        nesterov=False,
        maximize=False,
        is_first_step=False,  # the first would ignore `dampening`; our buffers begin as zeros
    )


def step_lists(
    weights: list[Tensor],
    gradients: list[Tensor],
    buffers: list[Tensor],
    factors: list[Tensor],
    *,
    rate: float,
    momentum: float,
    weight_decay: float,
) -> None:
    steps = list(torch._foreach_add(gradients, weights, alpha=weight_decay))
    torch._foreach_mul_(steps, tuple(factors))
    if buffers:
        torch._foreach_mul_(buffers, momentum)
        torch._foreach_add_(buffers, steps)
        steps = buffers
    torch._foreach_add_(weights, steps, alpha=-rate)
