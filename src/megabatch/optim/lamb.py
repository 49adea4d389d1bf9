"""LAMB: Adam in which every weight tensor moves in proportion to its own norm.  You et al. 2020 (arXiv 1904.00962).

w weight, g gradient, m and v averages of g and g^2, t number of steps, lambda weight decay

    m = beta1 m + (1 - beta1) g,   v = beta2 v + (1 - beta2) g^2
    u = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps) + lambda w,   w -= lr tau u

tau = |w| / |u|, and 1 if a norm is 0: the trust ratio of LARS with u as the gradient.  A group with "trust_ratio":
False has tau = 1, which is AdamW.  The same as timm's Lamb without its clipping of the whole gradient, which is
`optim.clip_norm` here; but timm gives tau = 1 to every weight without decay.

torch's fused kernel of Adam computes the update into zeros, in one pass.  On the CPU each tensor is updated while it is
in the cache; on other devices all together, by a few kernels for any number of tensors.  Like torch's fused optimizers,
a step changes nothing if `found_inf` is 1; on a device the host does not read it.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from megabatch.optim.lars import trust_ratio, trust_ratios
from megabatch.optim.momentum import SMALL, are_alike, gradient_like, norm, rows_of
from megabatch.torch_api import (
    declare_found_inf_support,
    foreach_add_,
    foreach_copy_,
    foreach_sub_,
    fused_adamw_,
    group_by_device_and_dtype,
)

ParamGroup = dict[str, Any]  # of a torch optimizer
STATE = ("exp_avg", "exp_avg_sq")  # names as in torch.optim.AdamW
OF_UPDATE = {"trust_coefficient": 1.0, "weight_decay": 0.0}  # tau of LARS with u, which has the decay, as the gradient


class LAMB(torch.optim.Optimizer):
    """Adam with a learning rate per weight tensor, scaled by the norms of weight and update (You et al. 2020).

    Use it with `parameter_groups`, so that biases and normalisation layers get no trust ratio. If
    torch.amp.GradScaler sets `found_inf`, a step changes nothing.

    Args:
        params: Parameters or parameter groups, in fp32 or fp64. A group with "trust_ratio": False is updated as by
            AdamW.
        lr: The learning rate.
        betas: Decays of the averages of gradients and of their squares.
        eps: Added to the root of the average of squares.
        weight_decay: The weight decay.
        foreach: Update lists of tensors together. By default, only on devices other than the CPU.

    Examples:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        >>> optimizer = LAMB(parameter_groups(model, weight_decay=0.02), lr=8e-3)
        >>> model(torch.randn(8, 4)).square().sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        foreach: bool | None = None,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        # fused: its kernel counts steps on the device.
        super().__init__(params, defaults | {"trust_ratio": True, "foreach": foreach, "fused": True})
        declare_found_inf_support(self)

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
        for group, weights, gradients, averages, squares, steps in self.tensors():
            foreach_add_(steps, 1)
            of_adam = (gradients, averages, squares, steps)
            foreach = weights[0].device.type != "cpu" if group["foreach"] is None else group["foreach"]
            if not group["trust_ratio"]:
                adam(group, weights, *of_adam, found_inf, lr=group["lr"], weight_decay=group["weight_decay"])
            elif foreach:
                self.update_foreach(group, weights, *of_adam, found_inf)
            else:
                self.update_each(group, weights, *of_adam)
            if found_inf is not None:
                foreach_sub_(steps, [found_inf.reshape(())] * len(steps))
        return loss

    def tensors(
        self,
    ) -> Iterator[tuple[ParamGroup, list[Tensor], list[Tensor], list[Tensor], list[Tensor], list[Tensor]]]:
        """Yield weights, gradients, averages, squares and step counts of one group, device and dtype at a time."""
        for group in self.param_groups:
            weights = [parameter for parameter in group["params"] if parameter.grad is not None]
            for weight in weights:
                state = self.state[weight]
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32, device=weight.device)
                    state.update({key: torch.zeros_like(weight) for key in STATE})
            if weights:
                averages, squares, steps = ([self.state[weight][key] for weight in weights] for key in (*STATE, "step"))
                lists = [weights, list(map(gradient_like, averages, weights)), averages, squares, steps]
                for tensors, _ in group_by_device_and_dtype(lists).values():
                    yield group, *tensors

    def update_each(
        self,
        group: ParamGroup,
        weights: list[Tensor],
        gradients: list[Tensor],
        averages: list[Tensor],
        squares: list[Tensor],
        steps: list[Tensor],
    ) -> None:
        scratch = self.scratch_for(weights)
        for weight, gradient, average, square, step in zip(weights, gradients, averages, squares, steps, strict=True):
            update = scratch[: weight.numel()].as_strided(weight.shape, average.stride()).zero_()
            adam(group, [update], [gradient], [average], [square], [step], None, lr=-1.0)
            if group["weight_decay"]:
                update.add_(weight, alpha=group["weight_decay"])
            factor = -group["lr"] * trust_ratio(norm(weight), norm(update), **OF_UPDATE)
            if weight.numel() <= SMALL:  # in the cache, and rounded as in `update_foreach`
                weight.add_(update.mul_(factor))
            else:
                weight.add_(update, alpha=factor)

    def update_foreach(
        self,
        group: ParamGroup,
        weights: list[Tensor],
        gradients: list[Tensor],
        averages: list[Tensor],
        squares: list[Tensor],
        steps: list[Tensor],
        found_inf: Tensor | None,
    ) -> None:
        """Update all tensors together, without reading a value from the device, which would wait for it."""
        rows = rows_of(self, weights)
        rows.fill(weights)
        weight_norms = rows.norms()
        rows.rows.zero_()
        adam(group, rows.tensors, gradients, averages, squares, steps, found_inf, lr=-1.0)
        rows.add(weights, group["weight_decay"])
        factors = -group["lr"] * trust_ratios(weight_norms, rows.norms(), **OF_UPDATE)
        if found_inf is not None:
            factors = factors * (1.0 - found_inf.double().reshape(()))
        rows.scale(factors)
        foreach_add_(weights, rows.tensors)

    def scratch_for(self, weights: list[Tensor]) -> Tensor:
        """Return memory for the largest update, which is kept between steps."""
        cache: dict[torch.dtype, Tensor] = self.__dict__.setdefault("kept_scratch", {})  # not pickled
        size, dtype = max(weight.numel() for weight in weights), weights[0].dtype
        if dtype not in cache or cache[dtype].numel() < size:
            cache[dtype] = torch.empty(size, dtype=dtype)
        return cache[dtype]


def adam(
    group: ParamGroup,
    weights: list[Tensor],
    gradients: list[Tensor],
    averages: list[Tensor],
    squares: list[Tensor],
    steps: list[Tensor],
    found_inf: Tensor | None,
    *,
    lr: float,
    weight_decay: float = 0.0,
) -> None:
    """Take a step of AdamW."""
    beta1, beta2 = group["betas"]
    settings = {"amsgrad": False, "lr": lr, "beta1": beta1, "beta2": beta2, "weight_decay": weight_decay}
    settings |= {"eps": group["eps"], "maximize": False, "found_inf": found_inf}
    if all(map(are_alike, weights, averages)):
        fused_adamw_(weights, gradients, averages, squares, [], steps, **settings)
        return
    # In the memory order of the averages: that of weights may have changed since, or a file may not have stored it.
    dense = [torch.empty_like(average).copy_(weight) for weight, average in zip(weights, averages, strict=True)]
    fused_adamw_(dense, gradients, averages, squares, [], steps, **settings)
    foreach_copy_(weights, dense)
