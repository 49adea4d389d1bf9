"""Every tensor that the next step of a training depends on, by name; and back into a training."""

from collections.abc import Iterator
from typing import Any

import torch

from megabatch.errors import UserError
from megabatch.training.parts import Training

MODEL, OPTIMIZER, LOSS_SCALE = "model.", "optimizer.", "loss_scale"
NUMBER = "optimizer_number."  # what an optimizer keeps as a Python number, or as None


def training_state(training: Training) -> dict[str, torch.Tensor]:
    """Every tensor that the next step depends on, by name."""
    state = {f"{MODEL}{name}": tensor for name, tensor in training.master_weights.state_dict().items()}
    state[LOSS_SCALE] = training.loss_scale.state()
    for name, parameter in named_parameters(training.optimizer):
        for key, value in training.optimizer.state[parameter].items():
            if isinstance(value, torch.Tensor):
                state[f"{OPTIMIZER}{name}.{key}"] = value
            else:
                state[f"{NUMBER}{name}.{key}"] = number_to_tensor(value, key, training.optimizer)
    return state


def model_state(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The part of a `training_state` that is the model's state dict."""
    return {name.removeprefix(MODEL): tensor for name, tensor in state.items() if name.startswith(MODEL)}


def restore_training_state(training: Training, state: dict[str, torch.Tensor]) -> None:
    """The inverse of `training_state`."""
    training.master_weights.load_state_dict(model_state(state))
    training.loss_scale.restore(state[LOSS_SCALE])
    parameters = dict(named_parameters(training.optimizer))
    for name, tensor in state.items():
        if name.startswith((OPTIMIZER, NUMBER)):
            parameter_name, key = split_name(name)
            parameter = parameters[parameter_name]
            of_parameter = training.optimizer.state[parameter]
            of_parameter[key] = tensor_to_number(tensor) if name.startswith(NUMBER) else placed(tensor, parameter)
    defaults = training.optimizer.defaults
    if not defaults.get("fused") and not defaults.get("capturable"):
        for of_parameter in training.optimizer.state.values():
            if isinstance(of_parameter.get("step"), torch.Tensor):
                of_parameter["step"] = of_parameter[
                    "step"
                ].cpu()  # where torch's optimizers count, beside weights on CUDA


def split_name(name: str) -> tuple[str, str]:
    """Of what an optimizer keeps: the parameter, and what it keeps of that."""
    parameter_name, _, key = name.partition(".")[2].rpartition(".")
    return parameter_name, key


def placed(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """In the parameter's memory order (channels_last), which fused kernels rely on; other shapes stay as they are."""
    if tensor.shape != parameter.shape:
        return tensor.clone()
    return torch.empty_like(parameter, dtype=tensor.dtype).copy_(tensor)


def number_to_tensor(value: Any, key: str, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    if value is None:
        return torch.empty(0)
    if isinstance(value, bool | int | float):
        return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
    raise UserError(
        f"{type(optimizer).__name__} keeps {key!r} of a parameter as a {type(value).__name__}; "
        "a checkpoint holds tensors and numbers, so keep it as one of them"
    )


def tensor_to_number(tensor: torch.Tensor) -> bool | int | float | None:
    """The inverse of `number_to_tensor`."""
    return tensor.item() if tensor.numel() else None


def named_parameters(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for group in optimizer.param_groups:
        yield from zip(group["param_names"], group["params"], strict=True)


def what_is(name: str) -> str:
    """A tensor of a `training_state`, in a user's words."""
    part = next((part for part in (MODEL, OPTIMIZER) if name.startswith(part)), "")
    of = {MODEL: "the model's", OPTIMIZER: "the optimizer's"}.get(part, "the")
    return f"{of} {name.removeprefix(part)}"
