"""Puts a model where and how it will compute: its device, its memory order, its number formats."""

import torch
from torch import nn

from megabatch.precision.cast import cast_model
from megabatch.precision.master_weights import MasterWeights, clone_tensors
from megabatch.precision.policy import Precision, PrecisionSettings, check_device


def place_model(
    model: nn.Module, settings: PrecisionSettings, device: torch.device, channels_last: bool
) -> MasterWeights:
    """Moves and casts the model in place, and returns the weights for the optimizer to update."""
    check_device(settings, device)
    model.to(device, settings.formats.update)
    if channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return to_precision(model, settings.formats, device)


def to_precision(model: nn.Module, precision: Precision, device: torch.device) -> MasterWeights:
    """Casts the model in place; its master weights keep the values from before."""
    before = clone_tensors(model)
    cast_model(model, precision, device)
    return MasterWeights(model, before)
