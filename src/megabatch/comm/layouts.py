"""Layouts of DDP's buckets.  Ranks compare them, and messages name parameters from them."""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from megabatch.comm.cpu.barrier import RankMismatch
from megabatch.planning.pipeline import GradientDtype
from megabatch.planning.plan import CommDtype
from megabatch.text import name_ranks
from megabatch.torch_api import ALL_GATHER, storage_id


class Layout(NamedTuple):
    storage: torch.UntypedStorage  # holds a reference, so that no other bucket gets its address
    text: str  # names, dtypes, shapes and strides, in order
    hash: int  # of the text
    parameters: list[nn.Parameter]


class BucketLayouts:
    def __init__(self, model: nn.Module) -> None:
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.seen: dict[int, Layout] = {}  # by bucket index

    @property
    def num_bytes(self) -> int:
        """Size of all gradients."""
        return sum(parameter.numel() * parameter.element_size() for parameter in self.parameters)

    @property
    def has_16_bits(self) -> bool:
        """Return True if any gradient is sent in 16 bits even if it is not rounded."""
        return any(parameter.dtype in SIXTEEN_BITS for parameter in self.parameters)

    def layout_hash(self, bucket: "dist.GradBucket", tensor: torch.Tensor) -> int:  # type: ignore[name-defined]
        """Return a hash of the bucket's layout.  It is computed once for each bucket that DDP makes."""
        known = self.seen.get(bucket.index())
        if known is None or storage_id(known.storage) != storage_id(tensor.untyped_storage()):
            parameters = bucket.parameters()
            # A gradient has the strides of its parameter.  `bucket.gradients()` returns contiguous views.
            text = json.dumps([(self.names.get(id(p)), str(p.dtype), p.shape, p.stride()) for p in parameters])
            layout_hash = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])
            known = Layout(tensor.untyped_storage(), text, layout_hash, parameters)
            self.seen[bucket.index()] = known
        return known.hash

    def text(self, index: int) -> str:
        return self.seen[index].text if index in self.seen else "[]"

    def missing_from(self, reduced: Iterable[int]) -> list[str]:
        """Return the parameters outside of these buckets: those without a gradient, or all if each has one."""
        reduced_ids = {id(parameter) for index in reduced for parameter in self.seen[index].parameters}
        to_reduce = [parameter for parameter in self.parameters if id(parameter) not in reduced_ids]
        # Gradients of the previous step may still be present.
        return [self.names[id(p)] for p in [p for p in to_reduce if lacks_gradient(p)] or to_reduce]


def lacks_gradient(parameter: nn.Parameter) -> bool:
    """Return True if the gradient is absent or zero.  Device memory is not read, because the device may hang."""
    gradient = parameter.grad
    return gradient is None or (gradient.device.type == "cpu" and not bool(gradient.count_nonzero()))


Run = Callable[..., None]  # an operation of a process group, by name


def require_same(run: Run, names: Sequence[int], layout: int, flat: torch.Tensor) -> None:
    """Raise RankMismatch if layout or size differ between members.  Blocks the host, so call it once per bucket.

    One small all-reduce gives all members the maximum and the minimum, so all reach the same conclusion.  Only if these
    differ, an all-gather collects the values of all members for the message.
    """
    own = torch.tensor([layout, len(flat)], device=flat.device)
    bounds = torch.cat([own, -own])
    run("allreduce", [bounds], max_options())
    *most, least_layout, least_size = bounds.tolist()
    if most == [-least_layout, -least_size]:
        return
    arrived = torch.empty(2 * len(names), dtype=own.dtype, device=flat.device)
    run(ALL_GATHER, arrived, own)
    raise RankMismatch(describe_mismatch(names, arrived.view(-1, 2).tolist()))


def max_options() -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    return options


def describe_mismatch(names: Sequence[int], values: Sequence[Sequence[int]]) -> str:
    """Return a message with the ranks of each layout and size."""
    ranks_with: dict[tuple[int, ...], list[int]] = {}
    for name, value in zip(names, values, strict=True):
        ranks_with.setdefault(tuple(value), []).append(name)
    parts = [
        f"{name_ranks(ranks)} with {size:,} elements, layout {layout:016x}"
        for (layout, size), ranks in ranks_with.items()
    ]
    return f"{', '.join(parts)}; all ranks must exchange the same tensors in the same order"


# Dtypes by their names in planning.

TORCH_DTYPES: dict[GradientDtype, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
SIXTEEN_BITS = (torch.float16, torch.bfloat16)


def comm_dtype_of(tensor: torch.Tensor, dtype: CommDtype) -> torch.dtype | None:
    """Return the 16-bit dtype in which the tensor is sent, or None if it is sent in its own dtype without rounding.

    A 16-bit tensor is sent unchanged, but reduced in fp32 like every tensor that is sent in 16 bits.
    """
    if dtype != "same":
        return TORCH_DTYPES[dtype]
    return tensor.dtype if tensor.dtype in SIXTEEN_BITS else None
