"""Number formats: planning's names, and torch's."""

import torch

from megabatch.planning.backward import GradientDtype
from megabatch.planning.plan import CommDtype

TORCH_DTYPES: dict[GradientDtype, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
SIXTEEN_BITS = (torch.float16, torch.bfloat16)


def travelling_dtype(tensor: torch.Tensor, dtype: CommDtype) -> torch.dtype | None:
    """The 16-bit type that travels; None: the tensor's own, and nothing is rounded.

    A 16-bit tensor travels as it is, but is summed in fp32 like any other that travels in 16 bits.
    """
    if dtype != "fp32":
        return TORCH_DTYPES[dtype]
    return tensor.dtype if tensor.dtype in SIXTEEN_BITS else None
