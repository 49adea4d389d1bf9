"""Makes a model compute in the number formats of a precision."""

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from megabatch.precision.policy import Precision

# Their sums leave fp16's range: a LocalResponseNorm squares activations, a BatchNorm adds them up over a microbatch.
KEPT_IN_FP32 = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, nn.LocalResponseNorm)


def cast_model(model: nn.Module, precision: Precision, device: torch.device) -> None:
    """Changes the model in place: 16-bit weights, or autocast around forward; normalisation layers stay in fp32."""
    narrow = precision.autocast or precision.model
    if narrow == precision.update:
        return
    for module in model.modules():
        if not isinstance(module, KEPT_IN_FP32):
            cast_own_tensors(module, precision.model)
        elif not isinstance(module, _BatchNorm):  # a BatchNorm takes 16-bit images itself, and keeps fp32 inside
            module.register_forward_pre_hook(lambda _, images: tuple(image.to(precision.update) for image in images))
            module.register_forward_hook(lambda _, images, result: result.to(narrow))
    if precision.autocast:
        model.forward = torch.autocast(device.type, precision.autocast)(model.forward)


def cast_own_tensors(module: nn.Module, dtype: torch.dtype) -> None:
    """The parameters and buffers of this module; those of its children are theirs."""
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
