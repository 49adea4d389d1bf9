"""The head of a network, frozen layers, and an average pooling layer."""

from collections.abc import Sequence

import torch
from torch import nn

from megabatch.errors import UserError, nearest


class AverageTo(nn.AdaptiveAvgPool2d):
    """Adaptive average pooling that does nothing if the size is right.

    torch would copy, which takes a sixth of `tiny_cnn`'s time, and its backward on CUDA is not deterministic.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.shape[-2:] == (self.output_size, self.output_size) else super().forward(x)


def head_of(model: nn.Module) -> str:
    """Return the last registered module that has direct parameters."""
    owners: list[str] = [
        name for name, module in model.named_modules() if any(True for _ in module.parameters(recurse=False))
    ]
    if not owners:
        raise UserError(f"{type(model).__name__} has no parameters; pass a network with parameters")
    return owners[-1]


def head_parameters(model: nn.Module) -> list[str]:
    """Return the names of the head's parameters, such as fc.weight and fc.bias of a ResNet."""
    head = head_of(model)
    own = model.get_submodule(head).named_parameters(recurse=False)
    return [f"{head}.{name}" if head else name for name, _ in own]


def freeze(model: nn.Module, names: Sequence[str]) -> nn.Module:
    """Freeze modules in place.

    Their parameters are not trained, and they run in evaluation mode, so that BatchNorm uses its statistics without
    updating them.
    """
    modules = {name: module for name, module in model.named_modules() if name}
    for name in names:
        if name not in modules:
            remedy = f"nearest: {nearest(name, modules)}" if modules else "it has none"
            raise UserError(f"model.freeze={list(names)}: the model has no module {name!r}; {remedy}")
        modules[name].requires_grad_(False).eval()
    if names and not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(f"model.freeze={list(names)} leaves nothing to train; leave {names[-1]!r} out")
    return model
