"""The training state as named tensors: every tensor that the next step depends on."""

from collections.abc import Iterator
from typing import Any

import torch

from megabatch.errors import UserError
from megabatch.optim.optimizers import parts_of
from megabatch.training.parts import Training

MODEL, OPTIMIZER, LOSS_SCALE = "model.", "optimizer.", "loss_scale"
AVERAGE = "average."  # moving averages of tensors of the model, in runs that have them
NUMBER = "optimizer_number."  # state that the optimizer keeps as a Python number or None


def training_state(training: Training) -> dict[str, torch.Tensor]:
    """Return every tensor that the next step depends on, by name."""
    state = {f"{MODEL}{name}": tensor for name, tensor in training.master_weights.state_dict().items()}
    state |= {f"{AVERAGE}{name}": tensor for name, tensor in training.average.state_dict().items()}
    state[LOSS_SCALE] = training.loss_scale.state()
    for name, parameter in named_parameters(training.optimizer):
        for key, value in training.optimizer.state[parameter].items():
            if isinstance(value, torch.Tensor):
                state[f"{OPTIMIZER}{name}.{key}"] = value
            else:
                state[f"{NUMBER}{name}.{key}"] = number_to_tensor(value, key, training.optimizer)
    return state


def model_state(state: dict[str, torch.Tensor], prefix: str = MODEL) -> dict[str, torch.Tensor]:
    """Return the model's state dict from a `training_state`, or the averages in it."""
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


def result_of(training: Training) -> dict[str, torch.Tensor]:
    """Return the model's state dict as evaluations use it: with averages, if the run has them."""
    return training.master_weights.state_dict() | training.average.state_dict()


def restore_training_state(training: Training, state: dict[str, torch.Tensor]) -> None:
    """Restore a `training_state`."""
    training.master_weights.load_state_dict(model_state(state))
    for name, average in training.average.tensors.items():
        average.copy_(state[f"{AVERAGE}{name}"])
    training.loss_scale.restore(state[LOSS_SCALE])
    parameters = dict(named_parameters(training.optimizer))
    for name, tensor in state.items():
        if name.startswith((OPTIMIZER, NUMBER)):
            parameter_name, key = split_name(name)
            parameter = parameters[parameter_name]
            entry = training.optimizer.state[parameter]
            entry[key] = tensor_to_number(tensor) if name.startswith(NUMBER) else copy_like(tensor, parameter)
    for part in parts_of(training.optimizer):
        if part.defaults.get("fused") or part.defaults.get("capturable"):
            continue
        for _, parameter in named_parameters(part):
            entry = part.state[parameter]
            if isinstance(entry.get("step"), torch.Tensor):
                entry["step"] = entry["step"].cpu()  # torch's optimizers count on the host, even for weights on CUDA


def split_name(name: str) -> tuple[str, str]:
    """Split the name of an optimizer tensor into the parameter's name and the key."""
    parameter_name, _, key = name.partition(".")[2].rpartition(".")
    return parameter_name, key


def copy_like(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Copy in the parameter's memory format, such as channels_last, which fused kernels need, if the shapes match."""
    if tensor.shape != parameter.shape:
        return tensor.clone()
    return torch.empty_like(parameter, dtype=tensor.dtype).copy_(tensor)


def number_to_tensor(value: Any, key: str, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    if value is None:
        return torch.empty(0)
    if isinstance(value, bool | int | float):
        return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
    raise UserError(
        f"{type(optimizer).__name__} stores the state {key!r} of a parameter as a {type(value).__name__}; "
        "a checkpoint holds only tensors and numbers, so store it as one of them"
    )


def tensor_to_number(tensor: torch.Tensor) -> bool | int | float | None:
    """Convert the result of `number_to_tensor` back."""
    return tensor.item() if tensor.numel() else None


def named_parameters(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for group in optimizer.param_groups:
        yield from zip(group["param_names"], group["params"], strict=True)


def readable_name(name: str) -> str:
    """Return the name of a tensor of a `training_state` for messages: the model's 0.weight."""
    owners = {MODEL: "the model's", AVERAGE: "the average's", OPTIMIZER: "the optimizer's"}
    part = next((part for part in owners if name.startswith(part)), "")
    of = owners.get(part, "the")
    return f"{of} {name.removeprefix(part)}"
