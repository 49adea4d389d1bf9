"""fp32 master weights of a model that computes in 16 bits (Jia et al. 2018, "mixed precision with LARS").

    gradients, all-reduced         fp16   -> load_gradients: cast, unscale, check for inf and NaN
    clip, LARS, momentum, update   fp32
    copy_to_model                  fp32   -> fp16 weights of the next forward pass

LARS would leave the range of fp16: trust ratios become 0 and training stalls.  A parameter that is fp32 anyway, such as
those of normalisation layers, is its own master weight, so an fp32 run copies nothing.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from megabatch.precision.loss_scale import LossScale
from megabatch.torch_api import foreach_copy_, foreach_zero_


class MasterWeights:
    """The weights that the optimizer updates, for a model that was cast from the tensors `before`."""

    def __init__(self, model: nn.Module, before: dict[str, torch.Tensor]) -> None:
        self.model = model
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.weights = {
            name: parameter if parameter.dtype == before[name].dtype else nn.Parameter(before[name])
            for name, parameter in self.parameters.items()
        }
        copied = [name for name, weight in self.weights.items() if weight is not self.parameters[name]]
        self.rounded_parameters: list[torch.Tensor] = [self.parameters[name] for name in copied]  # 16 bits
        self.copies: list[torch.Tensor] = [self.weights[name] for name in copied]  # fp32
        for weight in self.copies:
            weight.grad = torch.zeros_like(weight)
        # Frozen parameters and buffers were rounded too.  A saved model has their original values.
        self.originals = {
            name: (tensor, before[name])
            for name, tensor in named_tensors(model).items()
            if name not in self.parameters and tensor.dtype != before[name].dtype
        }

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the model's state dict with unrounded tensors."""
        wide: dict[int, torch.Tensor] = {
            id(parameter): self.weights[name] for name, parameter in self.parameters.items()
        }
        for tensor, original in self.originals.values():
            if torch.equal(tensor, original.to(tensor.dtype)):  # unless a buffer has changed
                wide[id(tensor)] = original
        return {name: wide.get(id(tensor), tensor).detach() for name, tensor in named_tensors(self.model).items()}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, torch.Tensor]) -> None:
        """Load the model and the master weights from the result of `state_dict`."""
        self.model.load_state_dict(state_dict)
        for name, weight in self.weights.items():
            weight.copy_(state_dict[name])
        for name, (_, original) in self.originals.items():
            original.copy_(state_dict[name])
        self.copy_to_model()

    def param_groups(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return parameter groups (see `parameter_groups`) with master weights in place of the model's parameters."""
        return [group | {"params": [self.weights[name] for name in group["param_names"]]} for group in groups]

    def clear_gradients(self, accumulates: bool) -> None:
        """Clear gradients before a step: zero them if it accumulates, else set None, which saves a write."""
        if accumulates:
            foreach_zero_(gradients_of(self.parameters.values()))
            return
        for parameter in self.parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def load_gradients(self, loss_scale: LossScale) -> torch.Tensor:
        """Copy gradients from the model and unscale them; return 1 if any overflowed, to skip the step, else 0.

        Gradients are all-reduced, so the result is the same on all ranks. It stays on the device.
        """
        if self.copies:
            foreach_copy_(gradients_of(self.copies), gradients_of(self.rounded_parameters))
        return loss_scale.unscale(gradients_of(self.weights.values()))

    @torch.no_grad()
    def copy_to_model(self) -> None:
        """Round the updated weights into the model, once per step."""
        if self.copies:
            foreach_copy_(self.rounded_parameters, self.copies)

    def first_overflow(self) -> str | None:
        """Return the parameter with a non-finite gradient that backward reached first: it causes the later ones.

        None if all are finite: on an accelerator the gradients may already be those of the next step.
        """
        for name, weight in reversed(self.weights.items()):
            if weight.grad is not None and not weight.grad.isfinite().all():
                return name
        return None


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers by their names in the state dict, tied ones under each name."""
    tensors: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
    return tensors


def clone_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of the parameters and buffers by their names in the state dict."""
    return {name: tensor.detach().clone() for name, tensor in named_tensors(model).items()}


def gradients_of(weights: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [weight.grad for weight in weights if weight.grad is not None]
