"""Collectives of torch.distributed (Gloo, NCCL) on a flat tensor, with 16-bit values on the wire where a plan says so.

A 16-bit wire is never summed by the engine, which would round at every hop.  p members, n elements:
    scatter   member i gets everybody's slice i, rounded once               all-to-all, n (p-1)/p elements sent
    sum       in fp32, in ascending rank order                              and rounded once
    gather    slice i goes to everybody; its owner keeps the rounded values all-gather, n (p-1)/p elements sent
Two roundings whatever p is (`planning.plan.error_bound`).  An overflow becomes inf, for the loss scaler to see.
Gloo's reduce_scatter is a whole all-reduce underneath, so scatter and sum stand for it too.
"""

import torch
import torch.distributed as dist

from megabatch.planning.plan import Wire, slices

WIRE_DTYPES: dict[Wire, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
SIXTEEN_BITS = (torch.float16, torch.bfloat16)


class Engine:
    """One process group.  Calls block, or on CUDA are ordered on the current stream."""

    def __init__(self, group: "dist.ProcessGroup", members: tuple[int, ...]) -> None:
        self.group, self.members = group, members  # their global ranks, ascending
        self.index = dist.get_rank(group)

    def all_reduce(self, flat: torch.Tensor, wire: Wire) -> None:
        dtype = self.travels_as(flat, wire)
        if dtype is None:
            dist.all_reduce(flat, group=self.group)
            return
        rounded = flat.to(dtype)
        begin, end = self.own_slice(flat)
        rounded[begin:end] = self.sum_of_slice(rounded)
        self.gather(rounded)
        flat.copy_(rounded)

    def reduce(self, flat: torch.Tensor, wire: Wire) -> None:
        """To the first member."""
        if self.travels_as(flat, wire) is None:
            dist.reduce(flat, self.members[0], group=self.group)
        else:
            self.all_reduce(flat, wire)

    def broadcast(self, flat: torch.Tensor, wire: Wire) -> None:
        """From the first member; rounded there too."""
        dtype = self.travels_as(flat, wire)
        travelling = flat if dtype is None else flat.to(dtype)
        dist.broadcast(as_bits(travelling), self.members[0], group=self.group)
        flat.copy_(travelling)

    def reduce_scatter(self, flat: torch.Tensor, wire: Wire) -> None:
        """Slice i of member i's tensor becomes the sum."""
        dtype = self.travels_as(flat, wire)
        begin, end = self.own_slice(flat)
        flat[begin:end] = self.sum_of_slice(flat if dtype is None else flat.to(dtype))

    def all_gather(self, flat: torch.Tensor, wire: Wire) -> None:
        dtype = self.travels_as(flat, wire)
        travelling = flat if dtype is None else flat.to(dtype)
        self.gather(travelling)
        flat.copy_(travelling)

    def travels_as(self, flat: torch.Tensor, wire: Wire) -> torch.dtype | None:
        """The 16-bit type of the wire; 16-bit tensors are summed in fp32 on their own wire too.  None: as it is."""
        return WIRE_DTYPES[wire] or (flat.dtype if flat.dtype in SIXTEEN_BITS else None)

    def own_slice(self, flat: torch.Tensor) -> tuple[int, int]:
        return slices(len(flat), len(self.members))[self.index]

    def sum_of_slice(self, flat: torch.Tensor) -> torch.Tensor:
        """This member's slice of the sum, in the tensor's type; 16 bits are summed in fp32."""
        sizes = [end - begin for begin, end in slices(len(flat), len(self.members))]
        own = sizes[self.index]
        arrived = torch.empty(own * len(self.members), dtype=flat.dtype, device=flat.device)
        dist.all_to_all_single(as_bits(arrived), as_bits(flat), [own] * len(self.members), sizes, group=self.group)
        first, *others = arrived.chunk(len(self.members)) if own else [arrived]
        total = first.to(torch.float32) if flat.dtype in SIXTEEN_BITS else first
        for contribution in others:
            total += contribution
        return total.to(flat.dtype)

    def gather(self, flat: torch.Tensor) -> None:
        """Everybody's own slice, at everybody."""
        parts = slices(len(flat), len(self.members))
        begin, end = parts[self.index]
        largest = max(stop - start for start, stop in parts)
        padded = torch.zeros(largest, dtype=flat.dtype, device=flat.device)
        padded[: end - begin] = flat[begin:end]
        arrived = torch.empty(largest * len(parts), dtype=flat.dtype, device=flat.device)
        dist.all_gather_into_tensor(as_bits(arrived), as_bits(padded), group=self.group)
        for index, (start, stop) in enumerate(parts):
            flat[start:stop] = arrived[index * largest : index * largest + stop - start]


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """16-bit floats travel as integers: not every engine knows them, and nothing is computed on the way."""
    return tensor.view(torch.int16) if tensor.dtype in SIXTEEN_BITS else tensor
