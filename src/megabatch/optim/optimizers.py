"""Optimizers by name, classes such as "torch.optim:AdamW", or custom functions as "package.module:function"."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any

import torch
from msgspec import Meta, Struct, field

from megabatch.errors import UserError, require_one_of
from megabatch.optim.groups import LR_FACTOR, OPTIMIZER, UNTIL
from megabatch.optim.lamb import LAMB
from megabatch.optim.lars import LARS, TRUST_COEFFICIENT, VARIANTS
from megabatch.optim.muon import ROUNDS, SCALES, Muon
from megabatch.torch_api import declare_found_inf_support, foreach_mul_, foreach_norm, supports_found_inf
from megabatch.user_code import import_user_code, is_user_code

LearningRate = Annotated[float, Meta(gt=0, le=10**6)]
Momentum = Annotated[float, Meta(ge=0, lt=1)]
WeightDecay = Annotated[float, Meta(ge=0, le=1000)]
WIDEST_RATIO = 1e9  # of the learning rates of a group and the others, and its inverse
HAS_NESTEROV = ("sgd", "muon")
TRUST_RATIO = ("lars", "lamb")
FORM = "a subclass of torch.optim.Optimizer, or a function (groups, settings) that returns an optimizer"
EPS = {"adamw": 1e-8, "lamb": 1e-6}  # defaults of optim.eps; for others 0


class GroupSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of some parameters that differ from those of `optim`."""

    parameters: list[str]  # names, in which * stands for any text
    optimizer: str | None = None
    learning_rate: LearningRate | None = None
    momentum: Momentum | None = None
    weight_decay: WeightDecay | None = None
    until: Annotated[float, Meta(gt=0, le=1)] = 1.0  # the share of the run after which they are no longer trained

    def __post_init__(self) -> None:
        if not self.parameters:
            raise UserError('optim.groups: a group has no parameters; for example parameters=["*.bias"]')
        if self.optimizer is not None:
            require_one_of("optim.groups.optimizer", self.optimizer, OPTIMIZERS)


class MuonSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of `muon`, for which no other optimizer has a use."""

    scale: str = "match_rms_adamw"  # of the update, by the shape of the matrix
    rounds: Annotated[int, Meta(ge=1, le=100)] = ROUNDS  # of the Newton-Schulz iteration
    fixed_norm: bool = False  # scale every matrix to the norm sqrt(rows) before its update
    others: str = "adamw"  # the optimizer of biases, normalisation layers and the last layer
    others_learning_rate: LearningRate | None = None  # by default that of the matrices

    def __post_init__(self) -> None:
        require_one_of("optim.muon.scale", self.scale, SCALES)
        require_one_of("optim.muon.others", self.others, [name for name in OPTIMIZERS if name != "muon"])

    @property
    def group(self) -> GroupSettings:
        return GroupSettings(parameters=["*"], optimizer=self.others, learning_rate=self.others_learning_rate)


class OptimSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str = "sgd"
    learning_rate: LearningRate  # the peak; `schedule` shapes it
    head_learning_rate: LearningRate | None = None  # of the last layer; by default that of the others
    layer_decay: Annotated[float, Meta(gt=0, le=1)] = (
        1.0  # factor of the learning rate from each layer to the one below
    )
    groups: list[GroupSettings] = field(default_factory=list)  # a parameter belongs to the last that names it
    momentum: Momentum = 0.9
    nesterov: bool | None = None  # only for sgd and muon; by default true with momentum
    betas: tuple[Momentum, Momentum] = (0.9, 0.999)  # for adamw and lamb
    weight_decay: WeightDecay = 0.0
    decay_all: bool = False  # biases and normalisation layers too
    decoupled_decay: bool = False  # only for sgd: see DecoupledSGD
    clip_norm: Annotated[float, Meta(ge=0, le=10**12)] = 0.0  # of the whole gradient; 0 does not clip
    # For lars.  sgd ignores them, so optim.name=sgd is enough to compare the two.
    variant: str = "you2017"
    # The step of a weight at a learning rate of 1, relative to its norm.
    trust_coefficient: Annotated[float, Meta(gt=0, le=10**6)] = TRUST_COEFFICIENT
    eps: Annotated[float, Meta(ge=0, le=10**6)] | None = None  # in a denominator; by default EPS
    muon: MuonSettings = field(default_factory=MuonSettings)
    options: dict[str, Any] = field(default_factory=dict)  # arguments of an optimizer class that `name` imports

    def __post_init__(self) -> None:
        if not self.is_user_optimizer:
            require_one_of("optim.name", self.name, OPTIMIZERS)
        require_one_of("optim.variant", self.variant, VARIANTS)
        if self.is_user_optimizer and any(group.optimizer for group in self.groups):
            raise UserError(
                f"optim.groups: a group has an optimizer, but optim.name={self.name} is one for all parameters; leave "
                "the group's optimizer out"
            )
        if self.options and not self.is_user_optimizer:
            raise UserError(
                f"optim.options is for an optimizer class such as torch.optim:AdamW; {self.name} takes its settings "
                f"from optim; leave optim.options out"
            )
        rate = self.learning_rate
        others = {"optim.head_learning_rate": self.head_learning_rate}
        others |= {"optim.muon.others_learning_rate": self.muon.others_learning_rate}
        others |= {f"optim.groups: learning_rate of {group.parameters}": group.learning_rate for group in self.groups}
        for key, other in others.items():
            if other is not None and not rate / WIDEST_RATIO <= other <= rate * WIDEST_RATIO:
                raise UserError(
                    f"{key}={other:g} is more than {WIDEST_RATIO:g} times optim.learning_rate={rate:g}, "
                    f"or less than its inverse; nearest: {key}={rate:g}"
                )
        if self.nesterov and self.name not in HAS_NESTEROV:
            raise UserError(
                f"optim.nesterov=true with optim.name={self.name}: only sgd and muon have a Nesterov form; leave "
                "nesterov out"
            )
        if self.decoupled_decay and self.name != "sgd":
            raise UserError(
                f"optim.decoupled_decay=true with optim.name={self.name}: only sgd has a decoupled form that is "
                "optional; leave decoupled_decay out"
            )
        if self.decoupled_decay and self.weight_decay >= 1:
            raise UserError(
                f"optim.weight_decay={self.weight_decay:g} with optim.decoupled_decay=true: expected less than 1: "
                "a step multiplies weights by 1 - weight_decay; for example optim.weight_decay=5e-4"
            )
        if self.nesterov and self.momentum == 0:
            raise UserError("optim.nesterov=true needs momentum, and optim.momentum=0; nearest: optim.nesterov=false")

    @property
    def is_user_optimizer(self) -> bool:
        return is_user_code(self.name)

    def eps_of(self, optimizer: str) -> float:
        return EPS.get(optimizer, 0.0) if self.eps is None else self.eps


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
    return start_momentum(optimizer)


def start_momentum(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Start the buffers of a fused SGD at 0: torch leaves them uninitialized if `found_inf` skips the first step."""
    for group in optimizer.param_groups if isinstance(optimizer, torch.optim.SGD) else []:
        for parameter in group["params"] if group["fused"] and group["momentum"] and not group["dampening"] else []:
            optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return optimizer


def lars(groups: Iterable[dict[str, Any]], settings: OptimSettings) -> torch.optim.Optimizer:
    return LARS(
        groups,
        lr=settings.learning_rate,
        momentum=settings.momentum,
        trust_coefficient=settings.trust_coefficient,
        eps=settings.eps_of("lars"),
        variant=settings.variant,
    )


def adamw(groups: Iterable[dict[str, Any]], settings: OptimSettings) -> torch.optim.Optimizer:
    # fused: its kernel counts steps on the device and reads `found_inf` there.
    eps = settings.eps_of("adamw")
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas, eps=eps, fused=True)


def lamb(groups: Iterable[dict[str, Any]], settings: OptimSettings) -> torch.optim.Optimizer:
    return LAMB(groups, lr=settings.learning_rate, betas=settings.betas, eps=settings.eps_of("lamb"))


def muon(groups: Iterable[dict[str, Any]], settings: OptimSettings) -> torch.optim.Optimizer:
    return Muon(
        groups,
        lr=settings.learning_rate,
        momentum=settings.momentum,
        nesterov=settings.nesterov is not False,
        rounds=settings.muon.rounds,
        scale=settings.muon.scale,
        fixed_norm=settings.muon.fixed_norm,
    )


MakeOptimizer = Callable[[list[dict[str, Any]], OptimSettings], torch.optim.Optimizer]
OPTIMIZERS: dict[str, MakeOptimizer] = {"sgd": sgd, "lars": lars, "adamw": adamw, "lamb": lamb, "muon": muon}


class Several(torch.optim.Optimizer):
    """Optimizers of different groups of parameters, as one. They share their groups and their state with it."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        super().__init__([dict(group) for group in groups], {})
        self.optimizers, self.param_groups = optimizers, groups
        for optimizer in optimizers:
            self.state.update(optimizer.state)
            optimizer.state = self.state
        declare_found_inf_support(self)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is None
        for optimizer in self.optimizers:
            step_unless(optimizer, getattr(self, "found_inf", None))


def parts_of(optimizer: torch.optim.Optimizer) -> Sequence[torch.optim.Optimizer]:
    """Return the optimizers that it consists of: usually itself."""
    return optimizer.optimizers if isinstance(optimizer, Several) else [optimizer]


def make_optimizer(groups: list[dict[str, Any]], settings: OptimSettings) -> torch.optim.Optimizer:
    """Return the optimizer that the recipe names: one of OPTIMIZERS, or a custom one."""
    if settings.is_user_optimizer:
        return make_user_optimizer(import_user_code("optim.name", settings.name), groups, settings)
    of_each: dict[str, list[dict[str, Any]]] = {}
    for group in groups:
        of_each.setdefault(group.get(OPTIMIZER, settings.name), []).append(group)
    optimizers = [OPTIMIZERS[name](members, settings) for name, members in of_each.items()]
    return optimizers[0] if len(optimizers) == 1 else Several(optimizers)


def make_user_optimizer(
    make: MakeOptimizer | type[torch.optim.Optimizer], groups: list[dict[str, Any]], settings: OptimSettings
) -> torch.optim.Optimizer:
    """Return a custom optimizer.  Its groups must have all parameters and their names, which checkpoints use."""
    given = named_groups(groups)
    if isinstance(make, type):
        optimizer = make_by_class(make, groups, settings)
    else:
        require_form(make, groups, settings)
        optimizer = make(groups, settings)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(f"optimizer returned a {type(optimizer).__name__}; expected a torch.optim.Optimizer")
    if named_groups(optimizer.param_groups) != given:
        raise UserError(
            f"optimizer returned a {type(optimizer).__name__} with other parameter groups than it was given; "
            "pass them unchanged, as in AdamW(groups, lr=settings.learning_rate)"
        )
    return start_momentum(optimizer)


def make_by_class(
    make: type[torch.optim.Optimizer], groups: list[dict[str, Any]], settings: OptimSettings
) -> torch.optim.Optimizer:
    """Return an optimizer of a class such as torch.optim.AdamW.  The groups have their weight decay."""
    if not issubclass(make, torch.optim.Optimizer):
        raise UserError(f"optimizer {make.__qualname__} is a class; expected {FORM}")
    call = f"{make.__name__}(groups, lr={settings.learning_rate:g}, **optim.options)"
    try:
        return make(groups, lr=settings.learning_rate, **settings.options)  # type: ignore[call-arg]
    except Exception as error:
        raise UserError(f"optimizer {call} fails: {error}; change optim.options or the optimizer") from error


def require_form(make: MakeOptimizer, groups: object, settings: object) -> None:
    try:
        inspect.signature(make).bind(groups, settings)
    except (TypeError, ValueError) as error:
        name = getattr(make, "__qualname__", type(make).__name__)
        raise UserError(
            f"optimizer {name} cannot be called with (groups, settings): {error}; expected {FORM}"
        ) from error


def state_bytes(groups: list[dict[str, Any]], settings: OptimSettings) -> int:
    """Return the size of the optimizer's state, from that of a small weight of each group."""
    small = [
        group | {"params": [stand_in(group["params"][0])], "param_names": group["param_names"][:1]} for group in groups
    ]
    optimizer = make_optimizer(small, settings)
    optimizer.step()
    total = 0
    for group, small_group in zip(groups, small, strict=True):
        (weight,) = small_group["params"]
        for value in optimizer.state.get(weight, {}).values():
            if isinstance(value, torch.Tensor):
                is_elementwise = value.shape == weight.shape
                counts = [parameter.numel() if is_elementwise else value.numel() for parameter in group["params"]]
                total += sum(counts) * value.element_size()
    return total


def stand_in(parameter: torch.Tensor) -> torch.nn.Parameter:
    """Return a small weight with as many dimensions, and a gradient."""
    weight = torch.nn.Parameter(torch.zeros([min(2, side) for side in parameter.shape], dtype=parameter.dtype))
    weight.grad = torch.zeros_like(weight)
    return weight


def named_groups(groups: Iterable[dict[str, Any]]) -> list[tuple[Any, list[int]]]:
    """Return the names and identities of the parameters in each group."""
    return [(group.get("param_names"), [id(parameter) for parameter in group["params"]]) for group in groups]


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group.get(LR_FACTOR, 1.0)


def follow_schedule(
    optimizer: torch.optim.Optimizer, learning_rate: Callable[[float], float], step: int, num_steps: int
) -> None:
    """Set the learning rates of a step.  A group with UNTIL has its whole schedule in that share of the run."""
    set_learning_rate(optimizer, learning_rate(step))
    for group in optimizer.param_groups:
        until = group.get(UNTIL, 1.0)
        if until < 1.0:
            rate = learning_rate(step / until) if step < until * num_steps else 0.0
            group["lr"] = rate * group.get(LR_FACTOR, 1.0)


def step_unless(optimizer: torch.optim.Optimizer, skipped: torch.Tensor | None) -> None:
    """Take a step, or change nothing if `skipped` is 1.

    Kernels that support `found_inf`, the name in torch.amp.GradScaler, read it on the device.  For other optimizers
    the host reads it, and on an accelerator waits.
    """
    if supports_found_inf(optimizer):
        optimizer.found_inf = skipped  # type: ignore[attr-defined]
        optimizer.step()
    elif skipped is None or not skipped.item():
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
