"""Optimizers by name, or custom ones as "package.module:function"."""

from collections.abc import Callable, Iterable
from typing import Annotated, Any

import torch
from msgspec import Meta, Struct

from megabatch.errors import UserError, require_one_of
from megabatch.optim.groups import LR_FACTOR
from megabatch.optim.lars import LARS, TRUST_COEFFICIENT, VARIANTS
from megabatch.torch_api import foreach_mul_, foreach_norm, supports_found_inf
from megabatch.user_code import import_user_code, is_user_code

LearningRate = Annotated[float, Meta(gt=0, le=10**6)]
WIDEST_RATIO = 1e9  # of the learning rates of the head and the other layers, and its inverse


class OptimSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str = "sgd"
    learning_rate: LearningRate  # the peak; `schedule` shapes it
    head_learning_rate: LearningRate | None = None  # of the last layer; by default that of the others
    momentum: Annotated[float, Meta(ge=0, lt=1)] = 0.9
    nesterov: bool | None = None  # only for sgd; by default true with momentum
    weight_decay: Annotated[float, Meta(ge=0, le=1000)] = 0.0
    decay_all: bool = False  # biases and normalisation layers too
    decoupled_decay: bool = False  # only for sgd: see DecoupledSGD
    clip_norm: Annotated[float, Meta(ge=0, le=10**12)] = 0.0  # of the whole gradient; 0 does not clip
    # For lars.  sgd ignores them, so optim.name=sgd is enough to compare the two.
    variant: str = "you2017"
    # The step of a weight at a learning rate of 1, relative to its norm.
    trust_coefficient: Annotated[float, Meta(gt=0, le=10**6)] = TRUST_COEFFICIENT
    eps: Annotated[float, Meta(ge=0, le=10**6)] = 0.0  # added to the gradient's norm in the trust ratio

    def __post_init__(self) -> None:
        if not is_user_code(self.name):
            require_one_of("optim.name", self.name, OPTIMIZERS)
        require_one_of("optim.variant", self.variant, VARIANTS)
        head, rate = self.head_learning_rate, self.learning_rate
        if head is not None and not rate / WIDEST_RATIO <= head <= rate * WIDEST_RATIO:
            raise UserError(
                f"optim.head_learning_rate={head:g} is more than {WIDEST_RATIO:g} times optim.learning_rate={rate:g}, "
                f"or less than its inverse; nearest: optim.head_learning_rate={rate:g}"
            )
        if self.nesterov and self.name != "sgd":
            raise UserError(
                f"optim.nesterov=true with optim.name={self.name}: only sgd has a Nesterov form; leave nesterov out"
            )
        if self.decoupled_decay and self.name != "sgd":
            raise UserError(
                f"optim.decoupled_decay=true with optim.name={self.name}: only sgd has a decoupled form; "
                "leave decoupled_decay out"
            )
        if self.decoupled_decay and self.weight_decay >= 1:
            raise UserError(
                f"optim.weight_decay={self.weight_decay:g} with optim.decoupled_decay=true: expected less than 1: "
                "a step multiplies weights by 1 - weight_decay; for example optim.weight_decay=5e-4"
            )
        if self.nesterov and self.momentum == 0:
            raise UserError("optim.nesterov=true needs momentum, and optim.momentum=0; nearest: optim.nesterov=false")


class DecoupledSGD(torch.optim.SGD):
    """SGD whose weight decay is neither in the gradient nor in the momentum (Loshchilov and Hutter 2019).

    w weight, v SGD's step, lambda weight decay, lr_peak the learning rate that the optimizer was made with

        w = (1 - lambda lr / lr_peak) w,   w -= lr v

    lambda follows the shape of the schedule, but not the size of the learning rate, as in Composer's DecoupledSGDW.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], **settings: Any) -> None:
        super().__init__(groups, **settings)
        self.peak: float = settings["lr"]
        self.decays = [group["weight_decay"] for group in self.param_groups]
        for group in self.param_groups:
            group["weight_decay"] = 0.0  # of SGD's step

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is None
        found_inf: torch.Tensor | None = getattr(self, "found_inf", None)
        for group, decay in zip(self.param_groups, self.decays, strict=True):
            share = decay * group["lr"] / (self.peak * group.get(LR_FACTOR, 1.0))
            weights = [parameter for parameter in group["params"] if parameter.grad is not None]
            if share and weights:
                # 0-dimensional, in fp64: the factor is not rounded before the weights are.
                is_taken = 1.0 if found_inf is None else 1.0 - found_inf.double().reshape(())
                foreach_mul_(weights, 1.0 - share * is_taken)
        return super().step()


def sgd(groups: Iterable[dict[str, Any]], settings: OptimSettings) -> torch.optim.Optimizer:
    # fused: a fifth of the time of foreach on CPU, and one kernel on CUDA.
    make = DecoupledSGD if settings.decoupled_decay else torch.optim.SGD
    optimizer = make(
        groups,
        lr=settings.learning_rate,
        momentum=settings.momentum,
        nesterov=settings.momentum > 0 if settings.nesterov is None else settings.nesterov,
        fused=True,
    )
    if settings.momentum:  # torch leaves it uninitialized if `found_inf` skips the first step
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def lars(groups: Iterable[dict[str, Any]], settings: OptimSettings) -> torch.optim.Optimizer:
    return LARS(
        groups,
        lr=settings.learning_rate,
        momentum=settings.momentum,
        trust_coefficient=settings.trust_coefficient,
        eps=settings.eps,
        variant=settings.variant,
    )


MakeOptimizer = Callable[[list[dict[str, Any]], OptimSettings], torch.optim.Optimizer]
OPTIMIZERS: dict[str, MakeOptimizer] = {"sgd": sgd, "lars": lars}


def make_optimizer(groups: list[dict[str, Any]], settings: OptimSettings) -> torch.optim.Optimizer:
    """Return the optimizer that the recipe names: one of OPTIMIZERS, or a custom one."""
    if is_user_code(settings.name):
        return make_user_optimizer(import_user_code("optim.name", settings.name), groups, settings)
    return OPTIMIZERS[settings.name](groups, settings)


def make_user_optimizer(
    make: MakeOptimizer, groups: list[dict[str, Any]], settings: OptimSettings
) -> torch.optim.Optimizer:
    """Return a custom optimizer.  Its groups must have all parameters and their names, which checkpoints use."""
    given = named_groups(groups)
    optimizer = make(groups, settings)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(f"optimizer returned a {type(optimizer).__name__}; expected a torch.optim.Optimizer")
    if named_groups(optimizer.param_groups) != given:
        raise UserError(
            f"optimizer returned a {type(optimizer).__name__} with other parameter groups than it was given; "
            "pass them unchanged, as in AdamW(groups, lr=settings.learning_rate)"
        )
    return optimizer


def named_groups(groups: Iterable[dict[str, Any]]) -> list[tuple[Any, list[int]]]:
    """Return the names and identities of the parameters in each group."""
    return [(group.get("param_names"), [id(parameter) for parameter in group["params"]]) for group in groups]


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group.get(LR_FACTOR, 1.0)


def step_unless(optimizer: torch.optim.Optimizer, skipped: torch.Tensor) -> None:
    """Take a step, or change nothing if `skipped` is 1.

    Kernels that support `found_inf`, the name in torch.amp.GradScaler, read it on the device.  For other optimizers
    the host reads it, and on an accelerator waits.
    """
    if supports_found_inf(optimizer):
        optimizer.found_inf = skipped  # type: ignore[attr-defined]
        optimizer.step()
    elif not skipped.item():
        optimizer.step()


def clip_gradients(optimizer: torch.optim.Optimizer, clip_norm: float) -> torch.Tensor | None:
    """Scale the whole gradient down to a norm of `clip_norm`.  Return its norm before that, or None without clipping.

    Gradients are equal on all ranks, so the norm is equal too.
    """
    if clip_norm == 0:
        return None
    return torch.nn.utils.clip_grad_norm_(trained(optimizer), clip_norm)


@torch.no_grad()
def has_bad_gradient(optimizer: torch.optim.Optimizer, norm: torch.Tensor | None = None) -> torch.Tensor:
    """Return 1 if a gradient is inf or NaN, else 0, on the device.  `norm`: of the whole gradient, if known.

    The norm of finite gradients above about 1e19 is also inf.  On the CPU, a check that does not wait
    finds that they are finite.
    """
    are_bad = is_not_finite(gradient_norm(optimizer) if norm is None else norm)
    if are_bad.device.type == "cpu" and are_bad:
        are_bad.fill_(any(not gradient.isfinite().all() for gradient in gradients_of(optimizer)))
    return are_bad


def gradient_norm(optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """Return the norm of the whole gradient in one pass over it."""
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(foreach_norm(gradients_of(optimizer))))
    return norm


def is_not_finite(value: torch.Tensor) -> torch.Tensor:
    """Return 1 if the value is inf or NaN, else 0."""
    return torch.ne(value - value, 0).float()  # inf - inf is NaN, which differs from everything


def gradients_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter.grad for parameter in trained(optimizer) if parameter.grad is not None]


def trained(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
