"""One step of momentum SGD whose gradient is multiplied by a factor.

w weight, g gradient, v momentum buffer (none without momentum), lambda weight decay

    v = momentum v + factor (g + lambda w),   w -= step_size v

`step_fused` takes one factor and makes one pass over memory.  `step_rows` takes one factor per tensor, on the device,
and runs a few kernels for any number of tensors.  `step_small` is for one tensor that fits into the cache.  It rounds
as `step_rows` does, so on a device whose kernels round like the CPU's, steps of small tensors are bitwise identical to
the CPU's; those of larger tensors are equal up to rounding.  If `found_inf` is 1, on the device, nothing changes.
"""

import math
from typing import Any

import torch
from torch import Tensor

from megabatch.torch_api import foreach_add, foreach_add_, foreach_copy_, foreach_mul_, fused_sgd_

# Norms of tensors in their memory order, for any memory format (channels_last).
#
# A norm is computed from the norms of rows, which are added in fp64; the last row is padded with zeros.  This is as
# fast as `torch.linalg.vector_norm`, uses all threads, does not depend on their number, and has a relative error of
# 2e-7; a single sum in float32 has an error of 0.002 for the 38 million weights of AlexNet's first linear layer.

ROW = 4096  # divides the size of most weights of ResNet and AlexNet, which then need no padding


def norm(tensor: Tensor) -> float:
    """Return the Euclidean norm."""
    line = in_memory_order(tensor)
    rest = line.numel() % ROW
    if not rest:
        return math.sqrt(sum_of_squares(line.reshape(-1, ROW)))
    line = line.reshape(-1)
    last = torch.zeros(ROW, dtype=line.dtype, device=line.device)
    last[:rest] = line[-rest:]
    return math.sqrt(sum_of_squares(line[:-rest].view(-1, ROW)) + sum_of_squares(last.view(1, ROW)))


def sum_of_squares(rows: Tensor) -> float:
    norms = torch.linalg.vector_norm(rows, dim=1).double()
    return float(norms.dot(norms))


def are_alike(*tensors: Tensor) -> bool:
    """Return True if all are dense and have the same memory order, so that a kernel can process them as flat arrays."""
    if all(tensor.is_contiguous() for tensor in tensors):
        return True
    order = memory_order(tensors[0])
    return all(tensor.permute(order).is_contiguous() for tensor in tensors)


def gradient_like(state: Tensor, weight: Tensor) -> Tensor:
    """Return the weight's gradient in the memory order of its state, which is dense."""
    assert weight.grad is not None
    return weight.grad if are_alike(state, weight.grad) else torch.empty_like(state).copy_(weight.grad)


def in_memory_order(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_contiguous() else tensor.permute(memory_order(tensor))


def memory_order(tensor: Tensor) -> list[int]:
    """Return the dimensions by stride, the longest first."""
    return sorted(range(tensor.dim()), key=tensor.stride, reverse=True)


Tensors = tuple[Tensor, ...] | list[Tensor]

SMALL = 1 << 17  # elements that `step_small` takes: half a megabyte


def step_fused(
    weights: Tensors,
    gradients: Tensors,
    buffers: Tensors = (),
    *,
    factor: float,
    step_size: float,
    momentum: float,
    weight_decay: float,
    found_inf: Tensor | None = None,
) -> None:
    """Update CPU tensors of one dtype.  If the fused kernel would be inexact, `step_each` is used."""
    if not buffers:  # the kernel reads `dampening` only with momentum
        factor, step_size = 1.0, step_size * factor
    # The kernel takes 1 - factor, rounded to float64.  The rounding of the weights must be coarser.
    is_exact = factor == 0 or factor >= 2.0**-53 / torch.finfo(weights[0].dtype).eps
    if not is_exact or not all(are_alike(*each) for each in zip(weights, gradients, buffers or weights, strict=True)):
        if found_inf is None or not found_inf.item():
            step_each(weights, gradients, buffers, factor, step_size, momentum, weight_decay)
        return
    settings = {"weight_decay": weight_decay, "momentum": momentum, "lr": step_size, "found_inf": found_inf}
    step_in_one_pass(weights, gradients, buffers, dampening=1.0 - factor, **settings)


def step_in_one_pass(weights: Tensors, gradients: Tensors, buffers: Tensors, **settings: Any) -> None:
    # The first step would ignore `dampening`.  Here buffers start as zeros, so no step is a first step.
    fused_sgd_(weights, gradients, buffers, nesterov=False, maximize=False, is_first_step=False, **settings)


def step_each(
    weights: Tensors,
    gradients: Tensors,
    buffers: Tensors,
    factor: float,
    step_size: float,
    momentum: float,
    weight_decay: float,
) -> None:
    """Compute the formula directly, for factors too small for the kernel and for tensors of different memory orders."""
    steps: Tensors = foreach_add(gradients, weights, alpha=weight_decay)
    foreach_mul_(steps, [torch.tensor(factor, dtype=step.dtype) for step in steps])
    if buffers:
        foreach_mul_(buffers, momentum)
        foreach_add_(buffers, steps)
        steps = buffers
    foreach_add_(weights, steps, alpha=-step_size)


class Rows:
    """A buffer for one tensor per weight, split into the rows that `norm` uses.

    No row has parts of two tensors, so a factor per tensor is a factor per row.
    """

    def __init__(self, weights: Tensors) -> None:
        first, counts = weights[0], [-(-weight.numel() // ROW) for weight in weights]
        self.rows = torch.zeros(sum(counts), ROW, dtype=first.dtype, device=first.device)
        starts = [ROW * sum(counts[:place]) for place in range(len(counts))]
        flat = self.rows.view(-1)
        self.tensors = [
            flat.as_strided(weight.shape, torch.empty_like(weight).stride(), start)
            for weight, start in zip(weights, starts, strict=True)
        ]
        lengths = torch.tensor(counts)
        self.lengths = lengths.to(first.device)  # rows of each tensor
        self.owners = torch.arange(len(counts)).repeat_interleave(lengths).to(first.device)  # the tensor of each row

    def fill(self, tensors: Tensors) -> None:
        foreach_copy_(self.tensors, tensors)

    def norms(self) -> Tensor:
        """Return the norm of each tensor in fp64."""
        squares = torch.linalg.vector_norm(self.rows, dim=1).double().square()
        return torch.segment_reduce(squares, "sum", lengths=self.lengths, unsafe=True).sqrt()

    def measure(self, weights: Tensors, gradients: Tensors) -> list[Tensor]:
        """Return the norms of weights and gradients.  Afterwards the rows contain the gradients."""
        norms = []
        for tensors in (weights, gradients):
            self.fill(tensors)
            norms.append(self.norms())
        return norms

    def add(self, tensors: Tensors, factor: float) -> None:
        if factor:
            foreach_add_(self.tensors, tensors, alpha=factor)

    def scale(self, factors: Tensor) -> None:
        """Multiply each tensor by its factor.  Padding stays 0 while factors are finite, that is, while weights are."""
        self.rows.mul_(factors.to(self.rows.dtype).index_select(0, self.owners).unsqueeze(1))


def rows_of(optimizer: torch.optim.Optimizer, weights: list[Tensor]) -> Rows:
    """Return the rows for these weights, which the optimizer keeps between steps."""
    key = tuple(map(id, weights))
    cache: dict[tuple[int, ...], Rows] = optimizer.__dict__.setdefault("kept_rows", {})  # not pickled
    if key not in cache:
        for other in [other for other in cache if not set(other).isdisjoint(key)]:
            del cache[other]
        cache[key] = Rows(weights)
    return cache[key]


def step_small(
    weight: Tensor,
    gradient: Tensor,
    buffer: Tensor | None = None,
    *,
    factor: float,
    step_size: float,
    momentum: float,
    weight_decay: float,
    found_inf: Tensor | None = None,
) -> None:
    buffers = [] if buffer is None else [buffer]
    if not buffers:
        factor, step_size = factor * step_size, 1.0
    step = torch.empty_like(weight).copy_(gradient)
    if weight_decay:
        step.add_(weight, alpha=weight_decay)
    step.mul_(factor)
    step_by([weight], [step], buffers, step_size, momentum, found_inf)


def step_rows(
    rows: Rows,  # filled with gradients
    weights: Tensors,
    buffers: Tensors = (),
    *,
    factors: Tensor,  # fp64, one per tensor
    step_size: float,
    momentum: float,
    weight_decay: float,
    found_inf: Tensor | None = None,
) -> None:
    if not buffers:
        factors, step_size = factors * step_size, 1.0
    rows.add(weights, weight_decay)
    rows.scale(factors)
    step_by(weights, rows.tensors, buffers, step_size, momentum, found_inf)


def step_by(
    weights: Tensors, steps: Tensors, buffers: Tensors, step_size: float, momentum: float, found_inf: Tensor | None
) -> None:
    """Apply v = momentum v + step,   w -= step_size v."""
    if all(are_alike(*each) for each in zip(weights, steps, buffers or weights, strict=True)):
        settings = {"weight_decay": 0.0, "momentum": momentum, "lr": step_size, "found_inf": found_inf}
        step_in_one_pass(weights, steps, buffers, dampening=0.0, **settings)
    elif found_inf is None or not found_inf.item():
        step_each(weights, steps, buffers, 1.0, step_size, momentum, 0.0)
