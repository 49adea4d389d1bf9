"""Collectives on tensors of an accelerator (NCCL), ordered on the current stream: no call waits on the host.

Legend: p members, n elements.  Without rounding, the backend's collective is used, with its order of additions.  An
all-reduce in a 16-bit comm dtype is an exchange of equal slices, as on CPUs (comm/cpu/process_group.py):
    round     the tensor into equal slices; the end is padding
    scatter   member i receives slice i of all members           all-to-all of equal slices
    sum       the p rows in one fp32 reduction, rounded once
    gather    all members receive the rounded slice i            all-gather of equal slices
Cost: the number of launches and the work of the host do not depend on p.  There are two roundings for any p
(`planning.plan.error_bound`).  The reduction and its order of additions are torch's; on the CPU that order is ascending
for up to 16 rows of whole blocks, as in process_group.py (`tests/comm/test_device_group.py`).  A sum of only -0.0 is
+0.0.
"""

import ctypes
import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megabatch.comm.layouts import comm_dtype_of, require_same
from megabatch.planning.plan import CommDtype, padded_length, padded_slice_of
from megabatch.ranks.backends import Join
from megabatch.torch_api import ALL_GATHER, ALL_TO_ALL, REDUCE_SCATTER

# Buffers that hold a tensor as equal slices, one per member of a process group, with padding at the end.
#
# p members, n elements; L is `padded_length(n, p)`.  Views are made once for each size and dtype, so a step neither
# slices nor allocates.  All tensors of a dtype share the buffer of the largest, because one stream uses it for one
# tensor at a time.  The padding is uninitialized: it is summed like the rest, and its sum is never read.


class PaddedSlices(NamedTuple):
    """Views for tensors of one size."""

    padded: torch.Tensor  # p L elements
    whole: torch.Tensor  # the first n of them, without the padding
    own: torch.Tensor  # L elements in a separate buffer: this member's slice
    own_part: torch.Tensor  # this slice without the padding
    own_range: slice  # its place in the tensor


class Contributions(NamedTuple):
    """Views for the slices that this member receives and sums, for tensors of one size."""

    received: torch.Tensor  # p L elements
    rows: torch.Tensor  # the same as p rows
    total: torch.Tensor  # their sum, L elements of fp32


class PaddedBuffers:
    """The buffers of one process group.  Use them only on the stream that was current when they were allocated."""

    def __init__(self, num_members: int, index: int, device: torch.device) -> None:
        self.num_members, self.index, self.device = num_members, index, device
        self.clear()

    def clear(self) -> None:
        self.storage: dict[tuple[str, torch.dtype], torch.Tensor] = {}
        self.known_slices: dict[tuple[int, torch.dtype], PaddedSlices] = {}
        self.known_contributions: dict[tuple[int, torch.dtype], Contributions] = {}

    def slices(self, num_elements: int, dtype: torch.dtype) -> PaddedSlices:
        known = self.known_slices.get((num_elements, dtype))
        if known is None:
            length = padded_length(num_elements, self.num_members)
            padded, own = self.allocate("padded", self.num_members * length, dtype), self.allocate("own", length, dtype)
            begin, end = padded_slice_of(num_elements, self.num_members, self.index)
            known = PaddedSlices(padded, padded[:num_elements], own, own[: end - begin], slice(begin, end))
            self.known_slices[num_elements, dtype] = known
        return known

    def contributions(self, num_elements: int, dtype: torch.dtype) -> Contributions:
        known = self.known_contributions.get((num_elements, dtype))
        if known is None:
            length = padded_length(num_elements, self.num_members)
            received = self.allocate("received", self.num_members * length, dtype)
            total = self.allocate("total", length, torch.float32)
            known = Contributions(received, received.view(self.num_members, length), total)
            self.known_contributions[num_elements, dtype] = known
        return known

    def allocate(self, purpose: str, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the first `num_elements` of the buffer for this purpose and dtype, which grows if it is too small."""
        buffer = self.storage.get((purpose, dtype))
        if buffer is None or len(buffer) < num_elements:
            # Views of the smaller buffer would keep its memory.
            self.known_slices, self.known_contributions = {}, {}
            buffer = self.storage[purpose, dtype] = torch.empty(num_elements, dtype=dtype, device=self.device)
        return buffer[:num_elements]


def backend_timeout_s(timeout_s: float) -> float:
    """Return a longer timeout for the backend, so that the watchdog acts first: the backend does not name a rank."""
    return 2 * timeout_s + 60


class DeviceGroup:
    """A separate process group of ranks that communicate over NCCL.  Use it on one stream at a time."""

    def __init__(
        self, store: Any, index: int, names: Sequence[int], timeout_s: float, device: torch.device, join: Join
    ) -> None:
        self.names, self.num_members = names, len(names)
        deadline = timedelta(seconds=backend_timeout_s(timeout_s))
        self.group = join(dist.PrefixStore("device", store), index, len(names), deadline)  # type: ignore[attr-defined]
        self.buffers = PaddedBuffers(len(names), index, device)
        self.has_ended = False

    def run(self, operation: str, *args: Any) -> None:
        """Enqueue a collective on the current stream."""
        getattr(self.group, operation)(*args).wait()

    def require_same(self, layout: int, flat: torch.Tensor) -> None:
        """Check that all members are about to exchange the same tensor.  The host waits for the result."""
        require_same(self.run, self.names, layout, flat)

    def backend_all_reduce(self, flat: torch.Tensor, dtype: CommDtype) -> None:
        """Use the all-reduce of the backend in the comm dtype, which rounds at every hop."""
        comm_dtype = comm_dtype_of(flat, dtype)
        if comm_dtype is None or comm_dtype == flat.dtype:
            self.run("allreduce", [flat])
            return
        sent = self.buffers.slices(len(flat), comm_dtype).whole
        sent.copy_(flat)
        self.run("allreduce", [sent])
        flat.copy_(sent)

    def all_reduce(self, flat: torch.Tensor, dtype: CommDtype) -> None:
        comm_dtype = comm_dtype_of(flat, dtype)
        if comm_dtype is None:
            self.run("allreduce", [flat])
            return
        views = self.buffers.slices(len(flat), comm_dtype)
        views.whole.copy_(flat)
        self.sum_own_slice(len(flat), comm_dtype)
        self.run(ALL_GATHER, views.padded, views.own)
        flat.copy_(views.whole)

    def sum_own_slice(self, num_elements: int, comm_dtype: torch.dtype) -> None:
        """Sum this member's slice of all members: 16-bit values are added in fp32 and rounded once."""
        views = self.buffers.slices(num_elements, comm_dtype)
        received, rows, total = self.buffers.contributions(num_elements, comm_dtype)
        self.run(ALL_TO_ALL, received, views.padded, [], [])
        torch.sum(rows, dim=0, dtype=torch.float32, out=total)
        views.own.copy_(total)

    def reduce(self, flat: torch.Tensor, dtype: CommDtype) -> None:
        """Reduce to the first member."""
        if comm_dtype_of(flat, dtype) is None:
            self.run("reduce", [flat], dist.ReduceOptions())
        else:
            self.all_reduce(flat, dtype)

    def broadcast(self, flat: torch.Tensor, dtype: CommDtype) -> None:
        """Broadcast from the first member, which rounds its own tensor too."""
        comm_dtype = comm_dtype_of(flat, dtype)
        sent = flat if comm_dtype is None else flat.to(comm_dtype)
        self.run("broadcast", [sent], dist.BroadcastOptions())
        if sent is not flat:
            flat.copy_(sent)

    def reduce_scatter(self, flat: torch.Tensor, dtype: CommDtype) -> None:
        """Replace this member's slice with the sum.  Slices have equal sizes (`planning.plan.padded_slice_of`)."""
        comm_dtype = comm_dtype_of(flat, dtype)
        views = self.buffers.slices(len(flat), comm_dtype or flat.dtype)
        views.whole.copy_(flat)
        if comm_dtype is None:
            self.run(REDUCE_SCATTER, views.own, views.padded)
        else:
            self.sum_own_slice(len(flat), comm_dtype)
        flat[views.own_range] = views.own_part

    def all_gather(self, flat: torch.Tensor, dtype: CommDtype) -> None:
        """Send this member's slice to all members.  Slices have equal sizes."""
        views = self.buffers.slices(len(flat), comm_dtype_of(flat, dtype) or flat.dtype)
        views.own_part.copy_(flat[views.own_range])
        self.run(ALL_GATHER, views.padded, views.own)
        flat.copy_(views.whole)

    def gather(self, flat: torch.Tensor) -> None:
        """All-gather in the dtype of the tensor."""
        self.all_gather(flat, "same")

    def free_buffers(self) -> None:
        self.buffers.clear()

    def abort(self) -> None:
        """End the collectives in flight, so that a thread that waits for the device continues.  Nothing here waits."""
        if not self.has_ended:
            self.has_ended = True
            # Its destructor might wait for ranks that do not answer, so it is never freed and ends with the process.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.group))
            abort_in_thread(self.group)

    def close(self) -> None:
        """Shut down.  No collective may be in flight at any member."""
        if not self.has_ended:
            self.has_ended = True
            with suppress(RuntimeError):  # the backend does not support it
                self.group.shutdown()
            self.buffers.clear()


def abort_in_thread(group: Any) -> None:
    """Abort a process group without waiting: NCCL's abort may wait for kernels of other communicators, or forever."""

    def abort() -> None:
        with suppress(RuntimeError):  # the backend does not support it
            group.abort()

    threading.Thread(target=abort, daemon=True).start()
