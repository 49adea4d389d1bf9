"""Optimizers by name, and a user's own by "package.module:function"."""

from collections.abc import Callable, Iterable
from typing import Annotated, Any

import torch
from msgspec import Meta, Struct

from megabatch.errors import UserError, require_one_of
from megabatch.optim.groups import LR_FACTOR
from megabatch.optim.lars import LARS, TRUST_COEFFICIENT, VARIANTS
from megabatch.torch_api import foreach_norm, heeds_found_inf
from megabatch.user_code import import_own_code, is_own_code

LearningRate = Annotated[float, Meta(gt=0, le=10**6)]
WIDEST_RATIO = 1e9  # of the head's learning rate to that of the others, and its inverse


class OptimSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str = "sgd"
    learning_rate: LearningRate  # the peak; `schedule` shapes it
    head_learning_rate: LearningRate | None = None  # of the last layer; by default as of the others
    momentum: Annotated[float, Meta(ge=0, lt=1)] = 0.9
    nesterov: bool | None = None  # of sgd, by default where there is momentum; lars has no such form
    weight_decay: Annotated[float, Meta(ge=0, le=1000)] = 0.0
    decay_all: bool = False  # biases and normalisation layers too
    clip_norm: Annotated[float, Meta(ge=0, le=10**12)] = 0.0  # of the whole gradient; 0 leaves it alone
    # Of lars; sgd has no use for them, so that optim.name=sgd is all it takes to compare the two.
    variant: str = "you2017"
    # How far a weight moves at a learning rate of 1, as a share of its norm.
    trust_coefficient: Annotated[float, Meta(gt=0, le=10**6)] = TRUST_COEFFICIENT
    eps: Annotated[float, Meta(ge=0, le=10**6)] = 0.0  # beside the gradient's norm in the trust ratio

    def __post_init__(self) -> None:
        if not is_own_code(self.name):
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
        if self.nesterov and self.momentum == 0:
            raise UserError("optim.nesterov=true needs momentum, and optim.momentum=0; nearest: optim.nesterov=false")


def sgd(groups: Iterable[dict[str, Any]], settings: OptimSettings) -> torch.optim.Optimizer:
    # fused: a fifth of the time of foreach on CPU, and one kernel on CUDA.
    optimizer = torch.optim.SGD(
        groups,
        lr=settings.learning_rate,
        momentum=settings.momentum,
        nesterov=settings.momentum > 0 if settings.nesterov is None else settings.nesterov,
        fused=True,
    )
    if settings.momentum:  # torch leaves it as it finds it in memory if the first step is one that `found_inf` skips
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
    """That which the recipe names: one of ours, or a user's own."""
    if is_own_code(settings.name):
        return own_optimizer(import_own_code("optim.name", settings.name), groups, settings)
    return OPTIMIZERS[settings.name](groups, settings)


def own_optimizer(make: MakeOptimizer, groups: list[dict[str, Any]], settings: OptimSettings) -> torch.optim.Optimizer:
    """A user's, of all parameters in groups that still say what they are called: checkpoints know them by that."""
    given = named_groups(groups)
    optimizer = make(groups, settings)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(f"optimizer returned a {type(optimizer).__name__}; expected a torch.optim.Optimizer")
    if named_groups(optimizer.param_groups) != given:
        raise UserError(
            f"optimizer returned a {type(optimizer).__name__} of other parameter groups than it was given; "
            "pass them on as they are, as in AdamW(groups, lr=settings.learning_rate)"
        )
    return optimizer


def named_groups(groups: Iterable[dict[str, Any]]) -> list[tuple[Any, list[int]]]:
    """What tells groups from others: the names, and which parameters they are of."""
    return [(group.get("param_names"), [id(parameter) for parameter in group["params"]]) for group in groups]


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group.get(LR_FACTOR, 1.0)


def step_unless(optimizer: torch.optim.Optimizer, skipped: torch.Tensor) -> None:
    """Takes a step, but leaves everything as it is where `skipped` is 1.

    Kernels that know `found_inf`, as torch.amp.GradScaler calls it, look at it themselves, on the device.  For any
    other optimizer the host has to look, and on an accelerator waits.
    """
    if heeds_found_inf(optimizer):
        optimizer.found_inf = skipped  # type: ignore[attr-defined]
        optimizer.step()
    elif not skipped.item():
        optimizer.step()


def clip_gradients(optimizer: torch.optim.Optimizer, clip_norm: float) -> torch.Tensor | None:
    """Shrinks the whole gradient to `clip_norm` if it is longer; its norm before that, where it was asked for.

    Gradients are equal on all ranks, and so is this.
    """
    if clip_norm == 0:
        return None
    return torch.nn.utils.clip_grad_norm_(trained(optimizer), clip_norm)


@torch.no_grad()
def has_bad_gradient(optimizer: torch.optim.Optimizer, norm: torch.Tensor | None = None) -> torch.Tensor:
    """1 if a gradient is inf or NaN, else 0, on the device.  `norm`: of the whole gradient, if it is known.

    A norm is inf, too, of finite gradients from about 1e19 on; that is told apart where it costs no wait.
    """
    are_bad = is_not_finite(gradient_norm(optimizer) if norm is None else norm)
    if are_bad.device.type == "cpu" and are_bad:
        are_bad.fill_(any(not gradient.isfinite().all() for gradient in gradients_of(optimizer)))
    return are_bad


def gradient_norm(optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """Of the whole gradient: one pass over it."""
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(foreach_norm(gradients_of(optimizer))))
    return norm


def is_not_finite(value: torch.Tensor) -> torch.Tensor:
    """1 if it is inf or NaN, else 0."""
    return torch.ne(value - value, 0).float()  # inf - inf is NaN, which differs from everything


def gradients_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter.grad for parameter in trained(optimizer) if parameter.grad is not None]


def trained(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
