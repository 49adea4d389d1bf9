"""Collectives of torch.distributed (Gloo) on a flat tensor of the CPU, of which 16 bits travel where a plan says so.
Those of accelerators are in device_group.py.

An all-reduce that crosses the network is a direct exchange, in three stages.  p members, n elements:
    scatter   member i gets everybody's slice i, rounded to what travels      all-to-all, n (p-1)/p elements sent
    sum       in ascending rank order, 16 bits in fp32, and rounded once
    gather    slice i goes to everybody; its owner keeps the rounded values   all-gather, n (p-1)/p elements sent
Two roundings whatever p is (`planning.plan.error_bound`), none with fp32, and the same bits wherever an element lies in
its tensor.  The backend's own all-reduce would round 16 bits at every hop.  An overflow becomes inf, for the loss
scaler to see.  Two members send each other all of it instead: as many bytes, in one stage.  In fp32 `flat` and two
members take the backend's own all-reduce; a plan that asks for it does so in 16 bits too (`comm.algorithm=ring`).

Between its stages an all-reduce yields, so that the network carries the next one while this one is summed.  The two
exchanges have channels of their own (torch process groups): on each, all members start the same ones in the same order,
however the stages of one all-reduce fall between those of another.
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

from megabatch.comm.agreement import require_same
from megabatch.comm.cpu.barrier import MissingRank
from megabatch.comm.layouts import SIXTEEN_BITS, travelling_dtype
from megabatch.planning.plan import CommDtype, slice_of, slices
from megabatch.ranks.backends import Join
from megabatch.torch_api import ALL_GATHER, ALL_TO_ALL

LOOK_UP_S = 0.5  # how often a call on the CPU looks whether anybody still wants it
HAS_LEFT = "has-left"  # a key of the store: a rank has aborted with exchanges in flight


class Handle(NamedTuple):
    """Of an operation that was started."""

    channel: str
    work: Any  # torch's


class ProcessGroup:
    """Ranks that work together over Gloo.  Calls block.

    Groups of our own: a script may use its groups at the same time, from another thread.  They are not made by
    `dist.new_group`, which all ranks would have to call: with `use_local_synchronization` it names the group after how
    many others this rank has joined, so ranks that are in different numbers of groups wait for each other for ever.
    """

    def __init__(
        self,
        store: Any,
        index: int,
        names: Sequence[int],
        timeout_s: float,
        join: Join,
        uses_backend: bool = False,  # its own all-reduce, where nothing is rounded
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
        """Until it has ended; looks up now and then whether anybody still wants it."""
        channel, work = handle
        num_looks = 0  # and not the time, in which this process may have been stopped
        while not work.is_completed():
            if self.has_aborted:
                raise MissingRank("this rank has aborted, or has closed its all-reduce")
            with suppress(RuntimeError):  # not yet; or it has failed, and says so below
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
            del work, handle  # an error would keep this frame, and it the connections

    def run(self, operation: str, *args: Any) -> None:
        self.wait(self.start("scatter", operation, *args))

    def require_same(self, layout: int, flat: torch.Tensor) -> None:
        """All members are about to exchange the same tensor."""
        require_same(self.run, self.names, layout, flat)

    def free_buffers(self) -> None:
        """It keeps none."""

    def abort(self) -> None:
        self.has_aborted = True
        # Those that are idle go, which ends their connections, so that the others know.
        self.channels = {channel: group for channel, group in self.channels.items() if self.in_flight[channel]}
        if self.channels:  # these stay connected, so the store says it
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
            # Its destructor would wait until the others answer.  Never freed, it ends with the process.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        self.channels = {}

    def all_reduce(self, flat: torch.Tensor, dtype: CommDtype) -> None:
        for wait in self.stages(flat, dtype):
            wait()

    def stages(self, flat: torch.Tensor, dtype: CommDtype) -> Iterator[Callable[[], None]]:
        """An all-reduce; continues after each wait that it yields, once somebody has called that."""
        travels_as = travelling_dtype(flat, dtype)
        if travels_as is None and self.uses_backend:
            yield from self.backend_stages(flat, dtype)
            return
        travelling = flat if travels_as is None else flat.to(travels_as)
        if travels_as is not None and self.num_members == 2:
            arrived = torch.empty(2 * len(flat), dtype=travels_as, device=flat.device)
            yield partial(self.wait, self.start("scatter", ALL_GATHER, arrived, travelling))
            flat.copy_(self.sum_of(arrived))
            return
        arrived, handle = self.start_scatter(travelling)
        yield partial(self.wait, handle)
        begin, end = self.own_slice(flat)
        travelling[begin:end] = self.sum_of(arrived)
        yield from self.gather_stages(travelling)
        if travelling is not flat:
            flat.copy_(travelling)

    def backend_stages(self, flat: torch.Tensor, dtype: CommDtype) -> Iterator[Callable[[], None]]:
        """The backend's own all-reduce, in the dtype that travels: it rounds at every hop."""
        travelling = flat.to(travelling_dtype(flat, dtype) or flat.dtype)
        yield partial(self.wait, self.start("scatter", "allreduce", [travelling]))
        if travelling is not flat:
            flat.copy_(travelling)

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
        flat.copy_(travelling)

    def reduce_scatter(self, flat: torch.Tensor, dtype: CommDtype) -> None:
        """Slice i of member i's tensor becomes the sum."""
        travels_as = travelling_dtype(flat, dtype)
        begin, end = self.own_slice(flat)
        flat[begin:end] = self.sum_of_slice(flat if travels_as is None else flat.to(travels_as))

    def all_gather(self, flat: torch.Tensor, dtype: CommDtype) -> None:
        travels_as = travelling_dtype(flat, dtype)
        travelling = flat if travels_as is None else flat.to(travels_as)
        self.gather(travelling)
        flat.copy_(travelling)

    def own_slice(self, flat: torch.Tensor) -> tuple[int, int]:
        return slice_of(len(flat), self.num_members, self.index)

    def start_scatter(self, flat: torch.Tensor) -> tuple[torch.Tensor, Handle]:
        """Everybody's contribution to this member's slice, one after another, once the handle was waited for."""
        sizes = [end - begin for begin, end in slices(len(flat), self.num_members)]
        own = sizes[self.index]
        arrived = torch.empty(own * self.num_members, dtype=flat.dtype, device=flat.device)
        return arrived, self.start("scatter", ALL_TO_ALL, arrived, flat, [own] * self.num_members, sizes)

    def sum_of(self, arrived: torch.Tensor) -> torch.Tensor:
        """The sum of contributions that lie one after another, in their type; 16 bits are summed in fp32."""
        first, *others = arrived.chunk(self.num_members) if len(arrived) else [arrived]
        if len(others) == 1:  # torch adds two of 16 bits in fp32 too, and rounds once
            return first + others[0]
        total = first.to(torch.float32) if arrived.dtype in SIXTEEN_BITS else first
        for contribution in others:
            total += contribution
        return total.to(arrived.dtype)

    def sum_of_slice(self, flat: torch.Tensor) -> torch.Tensor:
        arrived, handle = self.start_scatter(flat)
        self.wait(handle)
        return self.sum_of(arrived)

    def gather(self, flat: torch.Tensor) -> None:
        """Everybody's own slice, at everybody."""
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
        arrived = torch.empty(largest * len(parts), dtype=flat.dtype, device=flat.device)
        yield partial(self.wait, self.start("gather", ALL_GATHER, arrived, padded))
        for index, (start, stop) in enumerate(parts):
            flat[start:stop] = arrived[index * largest : index * largest + stop - start]
