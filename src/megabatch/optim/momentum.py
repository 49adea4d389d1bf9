"""One step of momentum SGD whose gradient is multiplied by a factor.

w weight, g gradient, v momentum buffer (none without momentum), lambda weight decay

    v = momentum v + factor (g + lambda w),   w -= step_size v

`step_fused` takes one factor, and makes one pass over memory; `step_lists` takes a factor per tensor, which may be on
any device and stays there.
"""

import torch
from torch import Tensor

from megabatch.optim.dense import are_alike

Tensors = tuple[Tensor, ...] | list[Tensor]


def step_fused(
    weights: Tensors,
    gradients: Tensors,
    buffers: Tensors = (),
    *,
    factor: float,
    step_size: float,
    momentum: float,
    weight_decay: float,
) -> None:
    """Tensors of one dtype, on the CPU.  Where the kernel would be wrong, `step_lists` takes over."""
    if not buffers:  # the kernel reads `dampening` only where there is momentum
        factor, step_size = 1.0, step_size * factor
    # The kernel is handed 1 - factor, rounded to float64: the weights must be rounded more than that.
    is_exact = factor == 0 or factor >= 2.0**-53 / torch.finfo(weights[0].dtype).eps
    if not is_exact or not all(are_alike(*each) for each in zip(weights, gradients, buffers or weights, strict=True)):
        factors = [torch.tensor(factor, dtype=weight.dtype) for weight in weights]
        step_lists(
            weights,
            gradients,
            buffers,
            factors=factors,
            step_size=step_size,
            momentum=momentum,
            weight_decay=weight_decay,
        )
        return
    torch._fused_sgd_(
        weights,
        gradients,
        buffers,
        weight_decay=weight_decay,
        momentum=momentum,
        lr=step_size,
        dampening=1.0 - factor,
        nesterov=False,
        maximize=False,
        is_first_step=False,  # the first would ignore `dampening`; our buffers start as zeros
    )


def step_lists(
    weights: Tensors,
    gradients: Tensors,
    buffers: Tensors = (),
    *,
    factors: Tensors,
    step_size: float,
    momentum: float,
    weight_decay: float,
) -> None:
    steps: Tensors = torch._foreach_add(gradients, weights, alpha=weight_decay)
    torch._foreach_mul_(steps, factors)
    if buffers:
        torch._foreach_mul_(buffers, momentum)
        torch._foreach_add_(buffers, steps)
        steps = buffers
    torch._foreach_add_(weights, steps, alpha=-step_size)
