"""Collectives of torch.distributed (Gloo) on flat CPU tensors, in the comm dtype of a plan.

Those of accelerators are in accelerator/device_group.py.

An all-reduce over the network is a direct exchange in three stages.  p members, n elements:
    scatter   member i receives slice i of all members, in the comm dtype       all-to-all, n (p-1)/p elements sent
    sum       in ascending rank order, 16-bit values in fp32, rounded once
    gather    all members receive slice i; its owner keeps the rounded values   all-gather, n (p-1)/p elements sent
There are two roundings for any p (`planning.plan.error_bound`), none in fp32, and the result of an element does not
depend on its place in the tensor.  The backend's all-reduce would round 16-bit values at every hop.  An overflow
becomes inf, which the loss scaler detects.  Two members exchange the whole tensor instead: as many bytes, in one stage.
In fp32 the plan `flat` and two members use the backend's all-reduce; `comm.algorithm=ring` uses it in 16 bits too.

An all-reduce yields between its stages, so that the network transfers the next one while this one is summed.  The two
exchanges have separate channels (torch process groups).  On each channel all members start the same exchanges in the
same order, for any interleaving of the stages of several all-reduces.
"""

import ctypes
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megabatch.comm.cpu.barrier import MissingRank
from megabatch.comm.layouts import SIXTEEN_BITS, comm_dtype_of, require_same
from megabatch.planning.plan import CommDtype, slice_of, slices
from megabatch.ranks.backends import Join
from megabatch.torch_api import ALL_GATHER, ALL_TO_ALL

LOOK_UP_S = 0.5  # interval at which a waiting call checks whether another rank has aborted
HAS_LEFT = "has-left"  # store key: a rank has aborted with exchanges in flight


class Handle(NamedTuple):
    """The handle of an operation in flight."""

    channel: str
    work: Any  # of torch


class ProcessGroup:
    """Ranks that communicate over Gloo.  Calls block.

    The groups are separate, because a script may use its own at the same time, from another thread.  `dist.new_group`
    would have to be called by all ranks.  With `use_local_synchronization` it names a group by the number of groups
    that this rank has joined, so ranks that are in different numbers of groups would wait for each other forever.
    """

    def __init__(
        self,
        store: Any,
        index: int,
        names: Sequence[int],
        timeout_s: float,
        join: Join,
        uses_backend: bool = False,  # the backend's all-reduce, if nothing is rounded
    ) -> None:
        self.index, self.names = index, names  # of this rank; the global ranks
        self.num_members = len(names)
        self.uses_backend, self.timeout_s = uses_backend, timeout_s
        self.channels = {
            channel: join(
                dist.PrefixStore(channel, store),  # type: ignore[attr-defined]
                index,
                len(names),
                timedelta(seconds=timeout_s),
            )
            for channel in ("scatter", "gather")
        }
        self.store, self.has_aborted = store, False
        self.in_flight: Counter[str] = Counter()  # by channel

    def start(self, channel: str, operation: str, *args: Any) -> Handle:
        work = getattr(self.channels[channel], operation)(*args)
        self.in_flight[channel] += 1
        return Handle(channel, work)

    def wait(self, handle: Handle) -> None:
        """Wait until the operation has ended, and check every LOOK_UP_S whether another rank has aborted."""
        channel, work = handle
        num_looks = 0  # not the elapsed time, because this process may have been stopped
        while not work.is_completed():
            if self.has_aborted:
                raise MissingRank("this rank has aborted, or has closed its all-reduce")
            with suppress(RuntimeError):  # it is not complete, or has failed and raises below
                work.wait(timedelta(seconds=LOOK_UP_S))
            why = None if work.is_completed() else self.why_others_left()
            if why:
                raise RuntimeError(why)
            num_looks += 1
            if num_looks * LOOK_UP_S > self.timeout_s and not work.is_completed():
                raise RuntimeError(f"no answer within {self.timeout_s:g} s")
        self.in_flight[channel] -= 1
        try:
            work.wait()
        finally:
            del work, handle  # the frame of an error would keep the connections open

    def run(self, operation: str, *args: Any) -> None:
        self.wait(self.start("scatter", operation, *args))

    def require_same(self, layout: int, flat: torch.Tensor) -> None:
        """Check that all members are about to exchange the same tensor."""
        require_same(self.run, self.names, layout, flat)

    def free_buffers(self) -> None:
        """Do nothing: this group keeps no buffers."""

    def abort(self) -> None:
        self.has_aborted = True
        # Free the idle channels: closed connections notify the other ranks.
        self.channels = {channel: group for channel, group in self.channels.items() if self.in_flight[channel]}
        if self.channels:  # these stay connected, so notify the others through the store
            with suppress(RuntimeError):
                self.store.set(HAS_LEFT, "")

    def why_others_left(self) -> str | None:
        try:
            return "another rank has aborted" if self.store.check([HAS_LEFT]) else None
        except RuntimeError:
            return "the store does not answer"

    def close(self) -> None:
        self.abort()
        for group in self.channels.values():
            # Its destructor would wait for the other ranks, so it is never freed and ends with the process.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        self.channels = {}

    def all_reduce(self, flat: torch.Tensor, dtype: CommDtype) -> None:
        for wait in self.stages(flat, dtype):
            wait()

    def stages(self, flat: torch.Tensor, dtype: CommDtype) -> Iterator[Callable[[], None]]:
        """All-reduce in stages.  Yields the wait of each stage, which the caller must call before it continues."""
        comm_dtype = comm_dtype_of(flat, dtype)
        if comm_dtype is None and self.uses_backend:
            yield from self.backend_stages(flat, dtype)
            return
        sent = flat if comm_dtype is None else flat.to(comm_dtype)
        if comm_dtype is not None and self.num_members == 2:
            received = torch.empty(2 * len(flat), dtype=comm_dtype, device=flat.device)
            yield partial(self.wait, self.start("scatter", ALL_GATHER, received, sent))
            flat.copy_(self.sum_of(received))
            return
        received, handle = self.start_scatter(sent)
        yield partial(self.wait, handle)
        begin, end = self.own_slice(flat)
        sent[begin:end] = self.sum_of(received)
        yield from self.gather_stages(sent)
        if sent is not flat:
            flat.copy_(sent)

    def backend_stages(self, flat: torch.Tensor, dtype: CommDtype) -> Iterator[Callable[[], None]]:
        """Use the all-reduce of the backend in the comm dtype, which rounds at every hop."""
        sent = flat.to(comm_dtype_of(flat, dtype) or flat.dtype)
        yield partial(self.wait, self.start("scatter", "allreduce", [sent]))
        if sent is not flat:
            flat.copy_(sent)

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
        flat.copy_(sent)

    def reduce_scatter(self, flat: torch.Tensor, dtype: CommDtype) -> None:
        """Replace slice i of member i's tensor with the sum."""
        comm_dtype = comm_dtype_of(flat, dtype)
        begin, end = self.own_slice(flat)
        flat[begin:end] = self.sum_of_slice(flat if comm_dtype is None else flat.to(comm_dtype))

    def all_gather(self, flat: torch.Tensor, dtype: CommDtype) -> None:
        comm_dtype = comm_dtype_of(flat, dtype)
        sent = flat if comm_dtype is None else flat.to(comm_dtype)
        self.gather(sent)
        flat.copy_(sent)

    def own_slice(self, flat: torch.Tensor) -> tuple[int, int]:
        return slice_of(len(flat), self.num_members, self.index)

    def start_scatter(self, flat: torch.Tensor) -> tuple[torch.Tensor, Handle]:
        """Start to receive the contributions to this member's slice, which are complete after a wait for the handle."""
        sizes = [end - begin for begin, end in slices(len(flat), self.num_members)]
        own = sizes[self.index]
        received = torch.empty(own * self.num_members, dtype=flat.dtype, device=flat.device)
        return received, self.start("scatter", ALL_TO_ALL, received, flat, [own] * self.num_members, sizes)

    def sum_of(self, received: torch.Tensor) -> torch.Tensor:
        """Return the sum of concatenated contributions in their dtype.  16-bit values are summed in fp32."""
        first, *others = received.chunk(self.num_members) if len(received) else [received]
        if len(others) == 1:  # torch also adds two 16-bit values in fp32 and rounds once
            return first + others[0]
        total = first.to(torch.float32) if received.dtype in SIXTEEN_BITS else first
        for contribution in others:
            total += contribution
        return total.to(received.dtype)

    def sum_of_slice(self, flat: torch.Tensor) -> torch.Tensor:
        received, handle = self.start_scatter(flat)
        self.wait(handle)
        return self.sum_of(received)

    def gather(self, flat: torch.Tensor) -> None:
        """Send this member's slice to all members."""
        for wait in self.gather_stages(flat):
            wait()

    def gather_stages(self, flat: torch.Tensor) -> Iterator[Callable[[], None]]:
        parts = slices(len(flat), self.num_members)
        begin, end = parts[self.index]
        largest = max(stop - start for start, stop in parts)
        if largest * len(parts) == len(flat):
            yield partial(self.wait, self.start("gather", ALL_GATHER, flat, flat[begin:end].clone()))
            return
        padded = torch.zeros(largest, dtype=flat.dtype, device=flat.device)
        padded[: end - begin] = flat[begin:end]
        received = torch.empty(largest * len(parts), dtype=flat.dtype, device=flat.device)
        yield partial(self.wait, self.start("gather", ALL_GATHER, received, padded))
        for index, (start, stop) in enumerate(parts):
            flat[start:stop] = received[index * largest : index * largest + stop - start]
