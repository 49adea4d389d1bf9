"""Muon: momentum SGD whose update of a matrix is replaced by the nearest orthogonal one.  Jordan et al. 2024
(kellerjordan.github.io/posts/muon).

W weight [rows, columns], G gradient, V momentum buffer, mu momentum, lambda weight decay

    V = mu V + G,   U = G + mu V,   or U = V without Nesterov
    X = U / |U|;   a few times (Newton-Schulz):   A = X X',   X = a X + (b A + c A A) X
    W = (1 - lr lambda) W - lr s X

The iteration moves all singular values of X into about 0.7 to 1.2.  A convolution's filters [out, in, h, w] are the
matrix [out, in h w].  s depends on the shape:

original         sqrt(max(1, rows / columns)): the author's, and torch's default
match_rms_adamw  0.2 sqrt(max(rows, columns)): updates as large as AdamW's, so that its learning rates apply (Liu et al.
                 2025, arXiv 2502.16982); timm's default
none             1, as in cifar10-airbench

With `fixed_norm`, W is first scaled to the norm sqrt(rows), as in cifar10-airbench.  V is torch.optim.Muon's divided by
1 - mu; the iteration does not depend on the scale of U.

Cost: matrices of one shape are a batch.  A round takes 4 rows^2 columns + 2 rows^3 operations, for rows <= columns, in
bf16; in fp32 on CPUs that cannot multiply bf16, and in fp64 for weights in fp64.  Every rank does all of it.

A step changes nothing if `found_inf` is 1; on a device the host does not read it.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megabatch.errors import UserError, require_one_of
from megabatch.optim.lars import BUFFER
from megabatch.optim.momentum import are_alike, gradient_like
from megabatch.torch_api import (
    declare_found_inf_support,
    foreach_add_,
    foreach_mul_,
    foreach_norm,
    fused_sgd_,
    multiplies_bf16,
)

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # a, b, c: Jordan et al. 2024
SMALLEST_NORM = 1e-7  # of U
ROUNDS = 5
SCALES: dict[str, Callable[[int, int], float]] = {
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "none": lambda rows, columns: 1.0,
}
ParamGroup = dict[str, Any]  # of a torch optimizer


def is_matrix(shape: torch.Size) -> bool:
    """Return whether Muon is for weights of this shape: not position embeddings or filters of a single channel."""
    return len(shape) >= 2 and min(shape[0], shape[1]) > 1


class Muon(torch.optim.Optimizer):
    """Momentum SGD with orthogonal updates, for weights of two or more dimensions (Jordan et al. 2024).

    Args:
        params: Parameters or parameter groups. Filters of convolutions are flattened to matrices.
        lr: The learning rate.
        momentum: The momentum, at least 0 and less than 1.
        nesterov: Use Nesterov momentum.
        weight_decay: The decoupled weight decay.
        rounds: Rounds of the Newton-Schulz iteration.
        scale: "original", "match_rms_adamw" or "none": the factor of the update by the shape of the matrix.
        fixed_norm: Scale every matrix to the norm sqrt(rows) before its update.

    Raises:
        UserError: A parameter is not a matrix, or there is no such scale.

    Examples:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.Flatten(), nn.Linear(8, 4, bias=False))
        >>> optimizer = Muon(model.parameters(), lr=0.02, momentum=0.95)
        >>> model(torch.randn(2, 3, 3, 3)).square().sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        rounds: int = ROUNDS,
        scale: str = "original",
        fixed_norm: bool = False,
    ) -> None:
        require_one_of("scale", scale, SCALES)
        defaults = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
        super().__init__(params, defaults | {"rounds": rounds, "scale": scale, "fixed_norm": fixed_norm})
        declare_found_inf_support(self)

    def add_param_group(self, param_group: ParamGroup) -> None:
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if not is_matrix(parameter.shape):
                raise UserError(f"Muon is for matrices, not for {list(parameter.shape)}; pass it to another optimizer")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        if found_inf is not None and found_inf.device.type == "cpu":
            if found_inf.item():
                return loss
            found_inf = None
        for group in self.param_groups:
            by_shape: dict[Any, list[Tensor]] = {}
            for weight in group["params"]:
                if weight.grad is not None:
                    key = (weight.dtype, weight.device, len(weight), weight[0].numel())
                    by_shape.setdefault(key, []).append(weight)
            for weights in by_shape.values():
                self.update(group, weights, found_inf)
        return loss

    def update(self, group: ParamGroup, weights: list[Tensor], found_inf: Tensor | None) -> None:
        """Update matrices of one shape."""
        batch = self.batch_of(weights)
        self.add_momentum(group, weights, batch, found_inf)
        _, rows, columns = batch.matrices.shape
        batch.matrices.copy_(orthogonalise(batch.matrices, group["rounds"]))
        lr = group["lr"]
        # 0-dimensional if the step may be skipped: the host does not know.
        is_taken: Any = 1.0 if found_inf is None else 1.0 - found_inf.double().reshape(())
        if group["fixed_norm"]:
            factors = math.sqrt(rows) / torch.stack(foreach_norm(weights))
            if found_inf is not None:
                factors = torch.where(found_inf.reshape(()) > 0, 1.0, factors)
            foreach_mul_(weights, list(factors.unbind()))
        if group["weight_decay"]:
            foreach_mul_(weights, 1.0 - lr * group["weight_decay"] * is_taken)
        if found_inf is not None:
            batch.matrices.mul_(is_taken)
        foreach_add_(weights, batch.views, alpha=-lr * SCALES[group["scale"]](rows, columns))

    def add_momentum(self, group: ParamGroup, weights: list[Tensor], batch: "Batch", found_inf: Tensor | None) -> None:
        """Update the buffers, and fill the batch with U."""
        buffers = []
        for weight, view in zip(weights, batch.views, strict=True):
            buffer = self.state[weight].get(BUFFER)
            if buffer is None or not are_alike(view, buffer):
                zeros = torch.zeros_like(view)
                self.state[weight][BUFFER] = zeros if buffer is None else zeros.copy_(buffer)
            buffers.append(self.state[weight][BUFFER])
        gradients = list(map(gradient_like, buffers, weights))
        batch.matrices.zero_()
        fused_sgd_(
            batch.views,
            gradients,
            buffers if group["momentum"] else [],
            weight_decay=0.0,
            momentum=group["momentum"],
            lr=-1.0,
            dampening=0.0,
            nesterov=group["nesterov"] and group["momentum"] > 0,
            maximize=False,
            is_first_step=False,
            found_inf=found_inf,
        )

    def batch_of(self, weights: list[Tensor]) -> "Batch":
        key = tuple(map(id, weights))
        cache: dict[tuple[int, ...], Batch] = self.__dict__.setdefault("kept_batches", {})  # not pickled
        if key not in cache:
            cache[key] = make_batch(weights)
        return cache[key]


class Batch(NamedTuple):
    """Memory for matrices of one shape, and views of them in the shapes of the weights."""

    matrices: Tensor  # [number, rows, columns]
    views: list[Tensor]


def make_batch(weights: list[Tensor]) -> Batch:
    """Return a batch whose columns are in the memory order of each weight: their order does not matter to Muon."""
    first = weights[0]
    rows, columns = len(first), first[0].numel()
    matrices = torch.zeros(len(weights), rows, columns, dtype=first.dtype, device=first.device)
    views = []
    for matrix, weight in zip(matrices, weights, strict=True):
        strides = torch.empty_like(weight).stride()
        by_rows = strides[0] == columns and 1 in strides  # else the weight is transposed
        views.append(matrix.as_strided(weight.shape, strides) if by_rows else matrix.view(weight.shape))
    return Batch(matrices, views)


def orthogonalise(matrices: Tensor, rounds: int = ROUNDS) -> Tensor:
    """Return matrices [number, rows, columns] with all singular values near 1, in the dtype of the iteration."""
    a, b, c = COEFFICIENTS
    x = matrices.to(dtype_of(matrices))
    is_tall = x.shape[1] > x.shape[2]
    if is_tall:
        x = x.mT
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=SMALLEST_NORM)
    for _ in range(rounds):
        products = x @ x.mT
        polynomials = torch.baddbmm(products, products, products, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomials, x, beta=a)
    return x.mT if is_tall else x


def dtype_of(matrices: Tensor) -> torch.dtype:
    if matrices.dtype == torch.float64:
        return torch.float64
    return torch.bfloat16 if matrices.device.type != "cpu" or multiplies_bf16() else torch.float32
