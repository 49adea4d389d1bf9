"""Collectives on tensors of an accelerator (NCCL), ordered on the current stream: no call waits on the host.

p members, n elements.  What is not rounded is the backend's own operation, and so is the order of its additions.  An
all-reduce of which 16 bits travel is an exchange of equal slices (padded.py), as on CPUs (process_group.py):
    round     into equal slices; the end is padding
    scatter   member i gets everybody's slice i                 all-to-all of equal slices
    sum       of p rows, by one reduction in fp32, and rounded once
    gather    slice i goes to everybody, rounded                all-gather of equal slices
As many launches, and as much work for the host, whatever p is.  Two roundings whatever p is
(`planning.plan.error_bound`).  The reduction is torch's, and so is the order of its additions; on the CPU that order is
ascending for up to 16 rows of whole blocks, as ours is (`tests/comm/test_device_group.py`).  A sum of nothing but -0.0
is +0.0.
"""

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megabatch.comm.agreement import require_same
from megabatch.comm.layouts import travelling_dtype
from megabatch.planning.plan import CommDtype, padded_length, padded_slice_of
from megabatch.ranks.backends import Join
from megabatch.torch_api import ALL_GATHER, ALL_TO_ALL, REDUCE_SCATTER

# Room for a tensor in equal slices, one for each member of a process group, the end filled up with padding.
#
# p members, n elements; L is `padded_length(n, p)`.  Views are made once for each size and dtype, so a step slices
# and enumerates nothing, and allocates nothing either.  All tensors of a dtype share the room of the largest, which
# is allowed because one stream works on them one after another.  Padding holds whatever was there: it is summed like
# the rest, and nobody reads the result.


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


def backend_timeout_s(timeout_s: float) -> float:
    """What the backend is given: it ends the process without naming anybody, so our watchdog comes first."""
    return 2 * timeout_s + 60


class DeviceGroup:
    """Ranks that work together over NCCL, in a process group of our own.  One stream at a time works with it."""

    def __init__(
        self, store: Any, index: int, names: Sequence[int], timeout_s: float, device: torch.device, join: Join
    ) -> None:
        self.names, self.num_members = names, len(names)
        deadline = timedelta(seconds=backend_timeout_s(timeout_s))
        self.group = join(dist.PrefixStore("device", store), index, len(names), deadline)  # type: ignore[attr-defined]
        self.buffers = PaddedBuffers(len(names), index, device)
        self.has_ended = False

    def run(self, operation: str, *args: Any) -> None:
        """Behind all that the current stream has to do; what follows there, follows it."""
        getattr(self.group, operation)(*args).wait()

    def require_same(self, layout: int, flat: torch.Tensor) -> None:
        """All members are about to exchange the same tensor.  Waits on the host."""
        require_same(self.run, self.names, layout, flat)

    def backend_all_reduce(self, flat: torch.Tensor, dtype: CommDtype) -> None:
        """The backend's own sum, in the dtype that travels: it rounds at every hop."""
        travels_as = travelling_dtype(flat, dtype)
        if travels_as is None or travels_as == flat.dtype:
            self.run("allreduce", [flat])
            return
        travelling = self.buffers.slices(len(flat), travels_as).whole
        travelling.copy_(flat)
        self.run("allreduce", [travelling])
        flat.copy_(travelling)

    def all_reduce(self, flat: torch.Tensor, dtype: CommDtype) -> None:
        travels_as = travelling_dtype(flat, dtype)
        if travels_as is None:
            self.run("allreduce", [flat])
            return
        views = self.buffers.slices(len(flat), travels_as)
        views.whole.copy_(flat)
        self.sum_own_slice(len(flat), travels_as)
        self.run(ALL_GATHER, views.padded, views.own)
        flat.copy_(views.whole)

    def sum_own_slice(self, num_elements: int, travels_as: torch.dtype) -> None:
        """Everybody's slice of this member, 16 bits summed in fp32 and rounded once."""
        views = self.buffers.slices(num_elements, travels_as)
        arrived, rows, total = self.buffers.contributions(num_elements, travels_as)
        self.run(ALL_TO_ALL, arrived, views.padded, [], [])
        torch.sum(rows, dim=0, dtype=torch.float32, out=total)
        views.own.copy_(total)

    def reduce(self, flat: torch.Tensor, dtype: CommDtype) -> None:
        """To the first member."""
        if travelling_dtype(flat, dtype) is None:
            self.run("reduce", [flat], dist.ReduceOptions())
        else:
            self.all_reduce(flat, dtype)

    def broadcast(self, flat: torch.Tensor, dtype: CommDtype) -> None:
        """From the first member; rounded there too."""
        travels_as = travelling_dtype(flat, dtype)
        travelling = flat if travels_as is None else flat.to(travels_as)
        self.run("broadcast", [travelling], dist.BroadcastOptions())
        if travelling is not flat:
            flat.copy_(travelling)

    def reduce_scatter(self, flat: torch.Tensor, dtype: CommDtype) -> None:
        """The own slice, of equal ones (`planning.plan.padded_slice_of`), becomes the sum."""
        travels_as = travelling_dtype(flat, dtype)
        views = self.buffers.slices(len(flat), travels_as or flat.dtype)
        views.whole.copy_(flat)
        if travels_as is None:
            self.run(REDUCE_SCATTER, views.own, views.padded)
        else:
            self.sum_own_slice(len(flat), travels_as)
        flat[views.own_range] = views.own_part

    def all_gather(self, flat: torch.Tensor, dtype: CommDtype) -> None:
        """Everybody's own slice, of equal ones, at everybody."""
        views = self.buffers.slices(len(flat), travelling_dtype(flat, dtype) or flat.dtype)
        views.own_part.copy_(flat[views.own_range])
        self.run(ALL_GATHER, views.padded, views.own)
        flat.copy_(views.whole)

    def gather(self, flat: torch.Tensor) -> None:
        """The same, in the tensor's own dtype."""
        self.all_gather(flat, "fp32")

    def free_buffers(self) -> None:
        self.buffers.clear()

    def abort(self) -> None:
        """Ends what is on the way, so that whoever waits for the device comes back."""
        if not self.has_ended:
            # Freed, it might wait for what others do not answer.  Never freed, it ends with the process.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.group))
        self.end("abort")

    def close(self) -> None:
        """When nothing is on the way any more, at all members."""
        self.end("shutdown")

    def end(self, how: str) -> None:
        if not self.has_ended:
            self.has_ended = True
            with suppress(RuntimeError):  # the backend has no such thing
                getattr(self.group, how, int)()
            self.buffers.clear()
