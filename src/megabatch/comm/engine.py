"""Collectives of torch.distributed (Gloo, NCCL) on a flat tensor, with 16-bit values on the wire where a plan says so.

An all-reduce that crosses the network is a direct exchange, in three stages.  p members, n elements:
    scatter   member i gets everybody's slice i, rounded to the wire          all-to-all, n (p-1)/p elements sent
    sum       in ascending rank order, 16 bits in fp32, and rounded once
    gather    slice i goes to everybody; its owner keeps the rounded values   all-gather, n (p-1)/p elements sent
Two roundings whatever p is (`planning.plan.error_bound`), none with fp32 on the wire, and the same bits wherever an
element lies in its tensor.  An engine's own sum would round 16 bits at every hop.  An overflow becomes inf, for the
loss scaler to see.  Two members send each other all of it instead: as many bytes, in one stage.  In fp32 `flat`, two
members, and whatever NCCL sums take the engine's own all-reduce.

Between its stages an all-reduce yields, so that the network carries the next one while this one is summed.  The two
exchanges have lanes of their own (process groups): on each, all members start the same ones in the same order, however
the stages of one all-reduce fall between those of another.
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

from megabatch.comm.barrier import MissingRank, RankMismatch
from megabatch.planning.plan import Wire, slices

WIRE_DTYPES: dict[Wire, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
SIXTEEN_BITS = (torch.float16, torch.bfloat16)
LOOK_UP_S = 0.5  # how often a call on the CPU looks whether anybody still wants it
HAS_LEFT = "has-left"  # a key of the store: a rank has given up with exchanges under way


def join_gloo(store: Any, index: int, size: int, timeout: timedelta) -> Any:
    return dist.ProcessGroupGloo(store, index, size, timeout)


def join_nccl(store: Any, index: int, size: int, timeout: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, index, size, options)


JOIN = {"cpu": join_gloo, "cuda": join_nccl}


class Flight(NamedTuple):
    lane: str
    work: Any


class Engine:
    """Ranks that exchange over Gloo or NCCL.  Calls block, or on CUDA are ordered on the current stream.

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
        device: torch.device,
        sums_itself: bool = False,  # the engine's own all-reduce, where nothing is rounded
    ) -> None:
        self.index, self.names, self.device = index, names, device  # the place of this rank; the ranks' global numbers
        self.num_members = len(names)
        self.sums_itself = sums_itself
        lanes = ("scatter", "gather") if device.type == "cpu" else ("scatter",)  # NCCL orders by streams
        self.lanes = {
            lane: JOIN[device.type](
                dist.PrefixStore(lane, store),  # type: ignore[attr-defined]
                index,
                len(names),
                timedelta(seconds=timeout_s),
            )
            for lane in lanes
        }
        self.store, self.is_abandoned = store, False
        self.in_flight: Counter[str] = Counter()  # by lane

    def start(self, lane: str, operation: str, *args: Any) -> Flight:
        lane = lane if self.device.type == "cpu" else "scatter"
        work = getattr(self.lanes[lane], operation)(*args)
        self.in_flight[lane] += 1
        return Flight(lane, work)

    def end(self, flight: Flight) -> None:
        """Waits for it, and looks up now and then whether anybody still wants it."""
        lane, work = flight
        while self.device.type == "cpu" and not work.is_completed():
            if self.is_abandoned:
                raise MissingRank("this rank has given up, or has closed its sums")
            with suppress(RuntimeError):  # not yet; or it has failed, and says so below
                work.wait(timedelta(seconds=LOOK_UP_S))
            if not work.is_completed() and self.others_have_left():
                raise RuntimeError("another rank has given up")
        self.in_flight[lane] -= 1
        try:
            work.wait()
        finally:
            del work, flight  # an error would keep this frame, and it the connections

    def run(self, operation: str, *args: Any) -> None:
        self.end(self.start("scatter", operation, *args))

    def require_same(self, layout: int, flat: torch.Tensor) -> None:
        """All members are about to exchange the same tensor."""
        own = torch.tensor([layout, len(flat)], device=flat.device)
        arrived = torch.empty(2 * self.num_members, dtype=own.dtype, device=flat.device)
        self.run("_allgather_base", arrived, own)
        found: dict[tuple[int, ...], list[str]] = {}
        for name, words in zip(self.names, arrived.view(-1, 2).tolist(), strict=True):
            found.setdefault(tuple(words), []).append(str(name))
        if len(found) > 1:
            said = [
                f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)} with {size:,} elements, layout {layout:016x}"
                for (layout, size), ranks in found.items()
            ]
            raise RankMismatch(f"{', '.join(said)}; all ranks must exchange the same tensors in the same order")

    def abandon(self) -> None:
        self.is_abandoned = True
        # Those that are idle go, which ends their connections, so that the others know.
        self.lanes = {lane: group for lane, group in self.lanes.items() if self.in_flight[lane]}
        if self.lanes:  # these stay connected, so the others are told
            with suppress(RuntimeError):
                self.store.set(HAS_LEFT, "")

    def others_have_left(self) -> bool:
        try:
            return bool(self.store.check([HAS_LEFT]))
        except RuntimeError:  # the store is gone, with the rank that held it
            return True

    def close(self) -> None:
        self.abandon()
        for group in self.lanes.values():
            # Its destructor would wait until the others answer.  Never freed, it ends with the process.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        self.lanes = {}

    def all_reduce(self, flat: torch.Tensor, wire: Wire) -> None:
        for wait in self.stages(flat, wire):
            wait()

    def stages(self, flat: torch.Tensor, wire: Wire) -> Iterator[Callable[[], None]]:
        """An all-reduce; goes on after each wait that it yields, once somebody has called that."""
        dtype = self.travels_as(flat, wire)
        if dtype is None and self.sums_itself:
            work = self.start("scatter", "allreduce", [flat])
            yield partial(self.end, work)
            return
        travelling = flat if dtype is None else flat.to(dtype)
        if dtype is not None and self.num_members == 2:
            arrived = torch.empty(2 * len(flat), dtype=dtype, device=flat.device)
            yield partial(self.end, self.start("scatter", "_allgather_base", arrived, travelling))
            flat.copy_(self.sum_of(arrived))
            return
        arrived, work = self.start_scatter(travelling)
        yield partial(self.end, work)
        begin, end = self.own_slice(flat)
        travelling[begin:end] = self.sum_of(arrived)
        yield from self.gather_stages(travelling)
        if travelling is not flat:
            flat.copy_(travelling)

    def reduce(self, flat: torch.Tensor, wire: Wire) -> None:
        """To the first member."""
        if self.travels_as(flat, wire) is None:
            self.run("reduce", [flat], dist.ReduceOptions())
        else:
            self.all_reduce(flat, wire)

    def broadcast(self, flat: torch.Tensor, wire: Wire) -> None:
        """From the first member; rounded there too."""
        dtype = self.travels_as(flat, wire)
        travelling = flat if dtype is None else flat.to(dtype)
        self.run("broadcast", [travelling], dist.BroadcastOptions())
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
        return slices(len(flat), self.num_members)[self.index]

    def start_scatter(self, flat: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Everybody's contribution to this member's slice, one after another, once the work has ended."""
        sizes = [end - begin for begin, end in slices(len(flat), self.num_members)]
        own = sizes[self.index]
        arrived = torch.empty(own * self.num_members, dtype=flat.dtype, device=flat.device)
        return arrived, self.start("scatter", "alltoall_base", arrived, flat, [own] * self.num_members, sizes)

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
        arrived, work = self.start_scatter(flat)
        self.end(work)
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
            yield partial(self.end, self.start("gather", "_allgather_base", flat, flat[begin:end].clone()))
            return
        padded = torch.zeros(largest, dtype=flat.dtype, device=flat.device)
        padded[: end - begin] = flat[begin:end]
        arrived = torch.empty(largest * len(parts), dtype=flat.dtype, device=flat.device)
        yield partial(self.end, self.start("gather", "_allgather_base", arrived, padded))
        for index, (start, stop) in enumerate(parts):
            flat[start:stop] = arrived[index * largest : index * largest + stop - start]
