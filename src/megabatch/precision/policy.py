"""The number formats that a run computes in.

|          | weights, activations, gradients    | master weights, update | loss scale |
|----------|------------------------------------|------------------------|------------|
| fp32     | fp32                               | the same               |            |
| tf32     | fp32; GPUs multiply in TF32        | the same               |            |
| fp64     | fp64                               | the same               |            |
| fp16     | fp16                               | fp32                   | yes        |   Jia et al. 2018
| bf16     | bf16, which has fp32's range       | fp32                   |            |
| amp      | fp32; autocast computes in fp16    | the same               | yes        |
| amp-bf16 | fp32; autocast computes in bf16    | the same               |            |

TF32 rounds the factors of a product to a 10-bit mantissa, as in fp16, with fp32's range, and accumulates in fp32.
Normalisation layers, the loss and all sums over a step stay in fp32 (fp64 with fp64).
"""

from typing import Annotated, NamedTuple

import torch
from msgspec import Meta, Struct

from megabatch.errors import UserError, require_one_of


class Precision(NamedTuple):
    model: torch.dtype  # weights, images and gradients
    autocast: torch.dtype | None = None  # convolutions and matrix products
    has_small_range: bool = False  # small gradients underflow unless the loss is scaled
    allows_tf32: bool = False  # GPUs with TF32 use it for fp32 products

    @property
    def update(self) -> torch.dtype:
        """The dtype of master weights, statistics, sums and the loss."""
        return torch.promote_types(self.model, torch.float32)


PRECISIONS = {
    "fp32": Precision(torch.float32),
    "tf32": Precision(torch.float32, allows_tf32=True),
    "fp64": Precision(torch.float64),
    "fp16": Precision(torch.float16, has_small_range=True),
    "bf16": Precision(torch.bfloat16),
    "amp": Precision(torch.float32, autocast=torch.float16, has_small_range=True),
    "amp-bf16": Precision(torch.float32, autocast=torch.bfloat16),
}


class PrecisionSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str = "fp32"
    loss_scale: Annotated[float, Meta(ge=1, le=2**32)] | None = None  # a fixed scale; None: dynamic

    def __post_init__(self) -> None:
        require_one_of("precision.name", self.name, PRECISIONS)
        if self.name == "fp64" and self.loss_scale is not None:
            raise UserError(f"precision.loss_scale={self.loss_scale:g}: fp64 needs no loss scale; remove the setting")

    @property
    def formats(self) -> Precision:
        return PRECISIONS[self.name]


def check_device(settings: PrecisionSettings, device: torch.device) -> None:
    """Compute in the format on the device, since torch has no list of supported formats."""
    dtype = settings.formats.autocast or settings.formats.model
    try:
        with torch.inference_mode(False), torch.enable_grad():  # even if the caller disabled gradients
            image = torch.ones(1, 1, 3, 3, dtype=dtype, device=device, requires_grad=True)
            kernel = torch.ones(1, 1, 3, 3, dtype=dtype, device=device, requires_grad=True)
            torch.nn.functional.conv2d(image, kernel).flatten(1).matmul(kernel[0, 0, :1]).float().sum().backward()
    except (RuntimeError, TypeError) as error:
        remedy = "precision.name=amp" if dtype == torch.bfloat16 else "precision.name=fp32"
        raise UserError(
            f"precision.name={settings.name!r} does not work on {device.type} ({error}); nearest: {remedy}"
        ) from error
