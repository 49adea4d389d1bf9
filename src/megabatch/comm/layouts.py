"""What lies where in the buckets that DDP has made: ranks compare it, and messages name parameters by it."""

import hashlib
import json
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from megabatch.planning.pipeline import GradientDtype
from megabatch.planning.plan import CommDtype
from megabatch.torch_api import storage_id


class Layout(NamedTuple):
    storage: torch.UntypedStorage  # kept, so that no other bucket is taken for this one
    text: str  # names, types, shapes and strides, in their order
    number: int  # a hash of the text
    parameters: list[nn.Parameter]


class BucketLayouts:
    def __init__(self, model: nn.Module) -> None:
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.seen: dict[int, Layout] = {}  # by the bucket's index

    @property
    def num_bytes(self) -> int:
        """Of all gradients."""
        return sum(parameter.numel() * parameter.element_size() for parameter in self.parameters)

    def number(self, bucket: "dist.GradBucket", tensor: torch.Tensor) -> int:  # type: ignore[name-defined]
        """A hash of what lies where in the bucket; made when DDP has made the bucket."""
        known = self.seen.get(bucket.index())
        if known is None or storage_id(known.storage) != storage_id(tensor.untyped_storage()):
            parameters = bucket.parameters()
            # DDP lays a gradient out like its parameter; `bucket.gradients()` shows all of them contiguous.
            text = json.dumps([(self.names.get(id(p)), str(p.dtype), p.shape, p.stride()) for p in parameters])
            number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])
            known = Layout(tensor.untyped_storage(), text, number, parameters)
            self.seen[bucket.index()] = known
        return known.number

    def text(self, index: int) -> str:
        return self.seen[index].text if index in self.seen else "[]"

    def missing_from(self, reduced: Iterable[int]) -> list[str]:
        """The parameters that are in none of these buckets: of them those without a gradient, if there are any."""
        there = {id(parameter) for index in reduced for parameter in self.seen[index].parameters}
        to_reduce = [parameter for parameter in self.parameters if id(parameter) not in there]
        # Those of the step before may still be there.
        return [self.names[id(p)] for p in [p for p in to_reduce if lacks_gradient(p)] or to_reduce]


def lacks_gradient(parameter: nn.Parameter) -> bool:
    """As far as the host knows: a device that hangs would not say whether all of it is zero."""
    gradient = parameter.grad
    return gradient is None or (gradient.device.type == "cpu" and not bool(gradient.count_nonzero()))


# Number formats: planning's names, and torch's.

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
