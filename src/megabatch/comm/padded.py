"""Room for a tensor in equal slices, one for each member of a process group, the end filled up with padding.

p members, n elements; L is `padded_length(n, p)`.  Views are made once for each size and dtype, so a step slices and
enumerates nothing, and allocates nothing either.  All tensors of a dtype share the room of the largest, which is
allowed because one stream works on them one after another.  Padding holds whatever was there: it is summed like the
rest, and nobody reads the result.
"""

from typing import NamedTuple

import torch

from megabatch.planning.plan import padded_length, padded_slice_of


class PaddedSlices(NamedTuple):
    """Views for tensors of one size."""

    padded: torch.Tensor  # p L elements
    whole: torch.Tensor  # the n of them that are no padding
    own: torch.Tensor  # L elements, which are elsewhere: this member's slice
    own_part: torch.Tensor  # those of it that are no padding
    own_range: slice  # their place in the tensor


class Contributions(NamedTuple):
    """Everybody's slice of this member, for tensors of one size."""

    arrived: torch.Tensor  # p L elements
    rows: torch.Tensor  # the same, p rows
    total: torch.Tensor  # their sum, L elements of fp32


class PaddedBuffers:
    """Of one process group.  Made on the stream that asks, and to be used on that one."""

    def __init__(self, num_members: int, index: int, device: torch.device) -> None:
        self.num_members, self.index, self.device = num_members, index, device
        self.clear()

    def clear(self) -> None:
        self.rooms: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        self.known_slices: dict[tuple[int, torch.dtype], PaddedSlices] = {}
        self.known_contributions: dict[tuple[int, torch.dtype], Contributions] = {}

    def slices(self, num_elements: int, dtype: torch.dtype) -> PaddedSlices:
        known = self.known_slices.get((num_elements, dtype))
        if known is None:
            length = padded_length(num_elements, self.num_members)
            padded, own = self.room("padded", self.num_members * length, dtype), self.room("own", length, dtype)
            begin, end = padded_slice_of(num_elements, self.num_members, self.index)
            known = PaddedSlices(padded, padded[:num_elements], own, own[: end - begin], slice(begin, end))
            self.known_slices[num_elements, dtype] = known
        return known

    def contributions(self, num_elements: int, dtype: torch.dtype) -> Contributions:
        known = self.known_contributions.get((num_elements, dtype))
        if known is None:
            length = padded_length(num_elements, self.num_members)
            arrived = self.room("arrived", self.num_members * length, dtype)
            total = self.room("total", length, torch.float32)
            known = Contributions(arrived, arrived.view(self.num_members, length), total)
            self.known_contributions[num_elements, dtype] = known
        return known

    def room(self, purpose: str, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        room = self.rooms.get((purpose, dtype))
        if room is None or len(room) < num_elements:
            # Views of the smaller one would keep it.
            self.known_slices, self.known_contributions = {}, {}
            room = self.rooms[purpose, dtype] = torch.empty(num_elements, dtype=dtype, device=self.device)
        return room[:num_elements]
