"""Casting of a model to the number formats of a precision."""

import copy
from functools import partial
from typing import Any

import torch
from torch import nn

from megabatch.precision.master_weights import MasterWeights, clone_tensors
from megabatch.precision.policy import Precision, PrecisionSettings, check_device
from megabatch.torch_api import BatchNormBase, NormBase, forward_hooks

# Their sums exceed fp16's range: a LocalResponseNorm squares activations, a BatchNorm adds them over a microbatch.
FP32_LAYERS = (NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, nn.LocalResponseNorm)


def cast_model(model: nn.Module, precision: Precision, device: torch.device) -> None:
    """Cast the weights to 16 bits or wrap forward in autocast, in place. Normalisation layers stay in fp32."""
    narrow = precision.autocast or precision.model
    if narrow == precision.update:
        return
    for module in model.modules():
        if not isinstance(module, FP32_LAYERS):
            cast_own_tensors(module, precision.model)
        elif not isinstance(module, BatchNormBase):  # a BatchNorm accepts 16-bit images and computes in fp32
            module.register_forward_pre_hook(partial(cast_images, precision.update))
            module.register_forward_hook(partial(cast_result, narrow))
    if precision.autocast:
        model.forward = torch.autocast(device.type, precision.autocast)(model.forward)


def cast_own_tensors(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast the parameters and buffers of this module, without those of its children."""
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)


def cast_images(dtype: torch.dtype, module: nn.Module, images: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(image.to(dtype) for image in images)


def cast_result(dtype: torch.dtype, module: nn.Module, images: Any, result: torch.Tensor) -> torch.Tensor:
    return result.to(dtype)


def copy_in_fp32(model: nn.Module) -> nn.Module:
    """Return a copy that computes in fp32 and undoes `cast_model`, except that rounded weights stay rounded."""
    plain = copy.deepcopy(model)
    vars(plain).pop("forward", None)  # the autocast wrapper, which is bound to the original model
    for module in plain.modules():
        for hooks in forward_hooks(module):
            for key, hook in list(hooks.items()):
                if isinstance(hook, partial) and hook.func in (cast_images, cast_result):
                    del hooks[key]
    return plain.float()


def place_model(
    model: nn.Module, settings: PrecisionSettings, device: torch.device, channels_last: bool
) -> MasterWeights:
    """Move and cast the model in place, and return its master weights."""
    check_device(settings, device)
    model.to(device, settings.formats.update)
    if channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return to_precision(model, settings.formats, device)


def to_precision(model: nn.Module, precision: Precision, device: torch.device) -> MasterWeights:
    """Cast the model in place, and return master weights with the values from before the cast."""
    before = clone_tensors(model)
    cast_model(model, precision, device)
    return MasterWeights(model, before)
