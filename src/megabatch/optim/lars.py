"""LARS: momentum SGD in which every weight tensor moves in proportion to its own norm.  You et al. 2017.

w weight, g gradient, v momentum buffer, lambda weight decay, mu momentum, eta trust coefficient

    tau = eta |w| / (|g| + lambda |w| + eps),  1 where |w| or |g| is 0;      u = tau (g + lambda w)

you2017   v = mu v + lr u,   w -= v       lr inside the momentum, as in MLPerf's TensorFlow reference
outside   v = mu v + u,      w -= lr v    most PyTorch ports, and NVIDIA's MLPerf code, which multiplies you2017's
                                          momentum by lr / last lr; differs from you2017 only while lr changes
larc      `outside` with tau = min(tau / lr, 1), so that no step is larger than SGD's
decayed   `outside` with tau = eta |w| / (|g + lambda w| + eps), as in self-supervised learning (MAE)

A group with "trust_ratio": False has tau = 1: biases and normalisation layers, see `parameter_groups`.  tau does not
depend on whether a group decays.

Memory traffic: w and g are read for the norms; then w, g, v are read and w, v written.  On the CPU each tensor is
measured and then updated by a fused kernel, so there is no other traffic, and less if w and g are still in the cache.
On other devices all tensors are updated together by a few kernels, for any number of tensors, and tau stays on the
device.  In both cases tau is computed in fp64 from norms in fp32.

Like torch's fused optimizers, a step changes nothing if `found_inf` of the optimizer is 1 (torch.amp.GradScaler sets
it), and the host does not read it.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from megabatch.errors import UserError, require_one_of
from megabatch.optim.momentum import SMALL, Rows, norm, rows_of, step_fused, step_rows, step_small
from megabatch.torch_api import declare_found_inf_support, foreach_norm, group_by_device_and_dtype

Norm = TypeVar("Norm", float, Tensor)
ParamGroup = dict[str, Any]  # of a torch optimizer
BUFFER = "momentum_buffer"  # torch.optim.SGD's name, so that either can load the other's state


TRUST_COEFFICIENT = 0.001  # You et al. 2017


class Variant(NamedTuple):
    lr_in_momentum: bool = False
    clips_ratio: bool = False
    measures_decayed: bool = False  # |g + lambda w| instead of |g| + lambda |w|


VARIANTS = {
    "you2017": Variant(lr_in_momentum=True),
    "outside": Variant(),
    "larc": Variant(clips_ratio=True),
    "decayed": Variant(measures_decayed=True),
}

RULES: dict[str, tuple[str, Callable[[float], bool]]] = {
    "lr": ("lr >= 0; for example lr=10.0", lambda value: value >= 0),
    "momentum": ("0 <= momentum < 1; for example momentum=0.9", lambda value: 0 <= value < 1),
    "weight_decay": ("weight_decay >= 0; nearest: weight_decay=0", lambda value: value >= 0),
    "trust_coefficient": ("trust_coefficient > 0; for example trust_coefficient=0.001", lambda value: value > 0),
    "eps": ("eps >= 0; nearest: eps=0", lambda value: value >= 0),
}


def trust_ratio(
    weight_norm: float,
    gradient_norm: float,
    *,
    trust_coefficient: float,
    weight_decay: float,
    eps: float = 0.0,
    clip_at: float | None = None,
) -> float:
    """Return tau.  For LARC, `clip_at` is the learning rate."""
    if not (weight_norm > 0 and gradient_norm > 0) or clip_at == 0:
        return 1.0
    ratio = unclipped(weight_norm, gradient_norm, trust_coefficient, weight_decay, eps)
    return ratio if clip_at is None else min(ratio / clip_at, 1.0)


def trust_ratios(
    weight_norms: Tensor,
    gradient_norms: Tensor,
    *,
    trust_coefficient: float,
    weight_decay: float,
    eps: float = 0.0,
    clip_at: float | None = None,
) -> Tensor:
    """Return `trust_ratio` of many tensors on their device.  For a single CPU tensor it is ten times slower."""
    ratios = unclipped(weight_norms, gradient_norms, trust_coefficient, weight_decay, eps)
    if clip_at is not None:
        ratios = (ratios / clip_at).clamp(max=1.0)
    return torch.where((weight_norms > 0) & (gradient_norms > 0), ratios, 1.0)


def unclipped(
    weight_norm: Norm, gradient_norm: Norm, trust_coefficient: float, weight_decay: float, eps: float
) -> Norm:
    return trust_coefficient * weight_norm / (gradient_norm + weight_decay * weight_norm + eps)


class LARS(torch.optim.Optimizer):
    """Momentum SGD with a learning rate per weight tensor, scaled by the norms of weight and gradient.

    Implements layer-wise adaptive rate scaling (You et al. 2017). Use it with `parameter_groups`, so that biases and
    normalisation layers get no trust ratio. If torch.amp.GradScaler sets `found_inf`, a step changes nothing.

    Args:
        params: Parameters or parameter groups, in fp32 or fp64. A group with "trust_ratio": False is updated as by SGD.
        lr: The learning rate, at least 0.
        momentum: The momentum, at least 0 and less than 1.
        weight_decay: The weight decay, at least 0.
        trust_coefficient: The trust coefficient (eta), greater than 0.
        eps: Added to the denominator of the trust ratio, at least 0.
        variant: "you2017" multiplies by the learning rate before the momentum, "outside" after it, and "larc" also
            limits the step to that of SGD. "decayed" is "outside" with the norm of the gradient plus its decay.
        foreach: Update lists of tensors together. By default, only on devices other than the CPU.

    Raises:
        UserError: A value is out of bounds, or a parameter is in 16 bits.

    Examples:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        >>> optimizer = LARS(parameter_groups(model, weight_decay=5e-5), lr=2.0, momentum=0.9)
        >>> model(torch.randn(8, 4)).square().sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = TRUST_COEFFICIENT,
        eps: float = 0.0,
        variant: str = "you2017",
        foreach: bool | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "eps": eps,
            "variant": variant,
            "trust_ratio": True,
            "foreach": foreach,
        }
        super().__init__(params, defaults)
        declare_found_inf_support(self)

    def add_param_group(self, param_group: ParamGroup) -> None:
        settings = self.defaults | param_group
        require_one_of("variant", settings["variant"], VARIANTS)
        for key, (rule, holds) in RULES.items():
            if not holds(settings[key]):
                raise UserError(f"{key}={settings[key]:g} is not allowed: expected {rule}")
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.dtype not in (torch.float32, torch.float64):
                self.param_groups.pop()
                raise UserError(
                    f"a parameter {list(parameter.shape)} is {parameter.dtype}, whose range is too small for LARS; "
                    "pass a float32 copy of the weights"
                )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for parameter, state in self.state.items():
            if BUFFER in state:  # in the parameter's memory order, which files do not store
                state[BUFFER] = torch.empty_like(parameter).copy_(state[BUFFER])

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        measured: dict[int, Any] = self.__dict__.pop("measured", {})
        if closure is not None:
            measured = {}
            with torch.enable_grad():
                loss = closure()
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        for group, tensors in self.tensors():
            norms = measured.get(id(tensors[0][0]))
            if not group["trust_ratio"]:
                update_without_trust_ratio(group, found_inf, *tensors)
            elif uses_foreach(group, tensors[0]):
                update_foreach(group, found_inf, norms, rows_of(self, tensors[0]), *tensors)
            else:
                update_each(group, found_inf, norms, *tensors)
        return loss

    @torch.no_grad()
    def gradient_norm(self) -> Tensor:
        """Return the norm of the whole gradient.  The next step reuses it, so gradients must not change in between."""
        norms: list[Tensor] = []  # in fp64: one tensor per group, not per weight, so that there are few launches
        measured: dict[int, Any] = self.__dict__.setdefault("measured", {})
        for group, (weights, gradients, *_) in self.tensors():
            if not group["trust_ratio"] or measures_decayed(group):  # norms of which the step has no use
                norms.append(torch.stack(foreach_norm(gradients)).double())
            elif uses_foreach(group, weights):
                measured[id(weights[0])] = both = rows_of(self, weights).measure(weights, gradients)
                norms.append(both[1])
            else:
                measured[id(weights[0])] = each = [norm(gradient) for gradient in gradients]
                norms.append(torch.tensor(each, dtype=torch.float64))
        return torch.cat(norms).square().sum().sqrt()

    def tensors(self) -> Iterator[tuple[ParamGroup, list[list[Tensor]]]]:
        """Yield weights, gradients and, with momentum, buffers of one group, device and dtype at a time."""
        for group in self.param_groups:
            weights = [parameter for parameter in group["params"] if parameter.grad is not None]
            if weights:
                lists = [weights, [weight.grad for weight in weights], self.momentum_buffers(group, weights)]
                filled = [tensors for tensors in lists if tensors]
                yield from ((group, tensors) for tensors, _ in group_by_device_and_dtype(filled).values())

    def momentum_buffers(self, group: ParamGroup, weights: list[Tensor]) -> list[Tensor]:
        """Return one buffer per weight, or no buffers without momentum."""
        if group["momentum"] == 0:
            return []
        for weight in weights:
            if BUFFER not in self.state[weight]:
                self.state[weight][BUFFER] = torch.zeros_like(weight)
        return [self.state[weight][BUFFER] for weight in weights]


def update_without_trust_ratio(
    group: ParamGroup, found_inf: Tensor | None, weights: list[Tensor], gradients: list[Tensor], *buffers: list[Tensor]
) -> None:
    """Update with tau = 1, so all tensors have one factor."""
    factor, step_size = factor_and_step_size(group, 1.0)
    settings = momentum_settings(group) | {"factor": factor, "step_size": step_size, "found_inf": found_inf}
    step_fused(weights, gradients, *buffers, **settings)


def update_each(
    group: ParamGroup,
    found_inf: Tensor | None,
    norms: list[float] | None,  # of gradients, if known
    weights: list[Tensor],
    gradients: list[Tensor],
    *buffers: list[Tensor],
) -> None:
    for_ratio, for_momentum = ratio_settings(group), momentum_settings(group) | {"found_inf": found_inf}
    if norms is None and measures_decayed(group):
        decayed = partial(torch.add, alpha=group["weight_decay"])
        norms = list(map(norm, map(decayed, gradients, weights)))
    for gradient_norm, *tensors in zip(norms or map(norm, gradients), weights, gradients, *buffers, strict=True):
        tau = trust_ratio(norm(tensors[0]), gradient_norm, **for_ratio)
        factor, step_size = factor_and_step_size(group, tau)
        if tensors[0].numel() <= SMALL:
            step_small(*tensors, factor=factor, step_size=step_size, **for_momentum)
        else:
            step_fused(*([tensor] for tensor in tensors), factor=factor, step_size=step_size, **for_momentum)


def update_foreach(
    group: ParamGroup,
    found_inf: Tensor | None,
    norms: list[Tensor] | None,  # of weights and gradients, if known; then the rows contain the gradients
    rows: Rows,
    weights: list[Tensor],
    gradients: list[Tensor],
    *buffers: list[Tensor],
) -> None:
    """Update all tensors together, without reading a value from the device, which would wait for it."""
    norms = norms or rows.measure(weights, gradients)
    settings = momentum_settings(group)
    if measures_decayed(group):
        rows.add(weights, settings["weight_decay"])
        norms, settings["weight_decay"] = [norms[0], rows.norms()], 0.0
    factors, step_size = factor_and_step_size(group, trust_ratios(*norms, **ratio_settings(group)))
    settings |= {"factors": factors, "step_size": step_size, "found_inf": found_inf}
    step_rows(rows, weights, *buffers, **settings)


def uses_foreach(group: ParamGroup, weights: list[Tensor]) -> bool:
    return bool(weights[0].device.type != "cpu" if group["foreach"] is None else group["foreach"])


def factor_and_step_size(group: ParamGroup, tau: Any) -> tuple[Any, float]:
    """Return the factor of g + lambda w and the step size of the momentum buffer.  lr is part of one of them."""
    lr = group["lr"]
    return (tau * lr, 1.0) if VARIANTS[group["variant"]].lr_in_momentum else (tau, lr)


def measures_decayed(group: ParamGroup) -> bool:
    return VARIANTS[group["variant"]].measures_decayed


def ratio_settings(group: ParamGroup) -> dict[str, Any]:
    return {
        "trust_coefficient": group["trust_coefficient"],
        "weight_decay": 0.0 if measures_decayed(group) else group["weight_decay"],  # already in the norm
        "eps": group["eps"],
        "clip_at": group["lr"] if VARIANTS[group["variant"]].clips_ratio else None,
    }


def momentum_settings(group: ParamGroup) -> dict[str, Any]:
    return {"momentum": group["momentum"], "weight_decay": group["weight_decay"]}
