"""fp32 master weights of a model that computes in 16 bits (Jia et al. 2018, "mixed precision with LARS").

    gradients, all-reduced         fp16   -> load_gradients: cast, undo the loss scale, look for inf and NaN
    clip, LARS, momentum, update   fp32
    copy_to_model                  fp32   -> fp16 weights of the next forward pass

LARS in fp16 would leave its range: ratios become 0 and training stalls.  A parameter that is fp32 anyway, as those of
normalisation layers are, is its own master weight; so in an fp32 run there is nothing to copy.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from megabatch.precision.loss_scale import LossScale
from megabatch.torch_api import foreach_copy_, foreach_zero_


class MasterWeights:
    """What the optimizer updates, beside a model that was cast from the tensors `before`, which this keeps."""

    def __init__(self, model: nn.Module, before: dict[str, torch.Tensor]) -> None:
        self.model = model
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.weights = {  # what the optimizer updates
            name: parameter if parameter.dtype == before[name].dtype else nn.Parameter(before[name])
            for name, parameter in self.parameters.items()
        }
        copied = [name for name, weight in self.weights.items() if weight is not self.parameters[name]]
        self.rounded_parameters: list[torch.Tensor] = [self.parameters[name] for name in copied]  # to 16 bits
        self.copies: list[torch.Tensor] = [self.weights[name] for name in copied]  # in fp32
        for weight in self.copies:
            weight.grad = torch.zeros_like(weight)
        # Frozen parameters and buffers were rounded too.  Whoever saves the model gets them as they were.
        self.originals = {
            name: (tensor, before[name])
            for name, tensor in named_tensors(model).items()
            if name not in self.parameters and tensor.dtype != before[name].dtype
        }

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The model's state dict with nothing rounded."""
        wide: dict[int, torch.Tensor] = {
            id(parameter): self.weights[name] for name, parameter in self.parameters.items()
        }
        for tensor, original in self.originals.values():
            if torch.equal(tensor, original.to(tensor.dtype)):  # a buffer may have changed since
                wide[id(tensor)] = original
        return {name: wide.get(id(tensor), tensor).detach() for name, tensor in named_tensors(self.model).items()}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
        """Of the model and of the master weights, from what `state_dict` gives."""
        self.model.load_state_dict(state_dict)
        for name, weight in self.weights.items():
            weight.copy_(state_dict[name])
        for name, (_, original) in self.originals.items():
            original.copy_(state_dict[name])
        self.copy_to_model()

    def param_groups(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The groups of the model's parameters (see `parameter_groups`) with the master weights in their place."""
        return [group | {"params": [self.weights[name] for name in group["param_names"]]} for group in groups]

    def clear_gradients(self, accumulates: bool) -> None:
        """Before a step.  A gradient that is not added to is written once: DDP copies it into its bucket."""
        if accumulates:
            foreach_zero_(gradients_of(self.parameters.values()))
            return
        for parameter in self.parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def load_gradients(self, loss_scale: LossScale) -> torch.Tensor:
        """Copies gradients from the model; 1 if a scaled one has overflowed, then the step is to be skipped, else 0.

        Gradients are the same on all ranks by now, and so is the answer, which stays on the device.
        """
        if self.copies:
            foreach_copy_(gradients_of(self.copies), gradients_of(self.rounded_parameters))
        return loss_scale.unscale(gradients_of(self.weights.values()))

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """After an update: each weight is rounded once a step."""
        if self.copies:
            foreach_copy_(self.rounded_parameters, self.copies)

    def first_overflow(self) -> str | None:
        """The parameter whose gradient is not finite, and which backward reached first: those after it follow.

        None if all are finite: on an accelerator the gradients of the next step may be here already.
        """
        for name, weight in reversed(self.weights.items()):
            if weight.grad is not None and not weight.grad.isfinite().all():
                return name
        return None


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers themselves, under the names of the state dict, tied ones under each."""
    tensors: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
    return tensors


def clone_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The values of parameters and buffers as they are now, under the names of the state dict."""
    return {name: tensor.detach().clone() for name, tensor in named_tensors(model).items()}


def gradients_of(weights: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [weight.grad for weight in weights if weight.grad is not None]
