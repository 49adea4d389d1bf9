"""Process groups that replace NCCL on the fake CUDA: of real processes, and of one process that stands for all ranks.

    connect(info, "cuda", RankStore(info), backend=REHEARSED)                                 real ranks
    connect(info, "cuda", RankStore(info, dist.HashStore()), backend=MIRRORED, topology=regular(256, 8))
    info = RankInfo(0, 2048, 0, 8)

rehearsed  Gloo sends the tensors.  Members reduce in ascending order in the tensor's dtype, so that results are bitwise
           reproducible and 16-bit values are rounded at every addition, as in NCCL's ring.
blocking   As rehearsed, but like NCCL at its worst: collectives return before they have ended, and never end if a
           member is gone; `shutdown` and `abort` never return.
mirrored   One process is rank r of p, and every collective returns the result that it would have if all ranks held the
           data of this one.  Usually rank 0, because other ranks would not hold the objects that rank 0 broadcasts.

All log the collectives.  A collective of CUDA tensors counts as one launch on the current stream.  With NCCL the host
would not wait for it.  Here it waits in `FakeWork.wait`, which is not counted as a synchronisation; with "blocking" for
at most PATIENCE_S, after which the device is held in the collective.
"""

import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from megabatch.ranks.backends import Backend, Join
from megabatch.torch_api import ALL_GATHER, ALL_TO_ALL, REDUCE_SCATTER, foreach_copy_
from megabatch_lab.rehearsal.fake_cuda import host_view

Tensors = list[torch.Tensor]
PATIENCE_S = 3.0  # more than a healthy member is late; then results are right although the device computes at once


class Collective(NamedTuple):
    op: str
    dtype: torch.dtype
    num_elements: int  # of this rank's tensor
    num_members: int
    stream: int  # 0 for the default stream or the host
    num_bytes: int  # that this rank sends and receives, by the algorithm with the least traffic


log: list[Collective] = []


# Groups that were connected through the store, and those that were split off another one.
made: Counter[str] = Counter()


class FakeWork(dist.Work):
    """Works of Gloo, and a function to call when they have completed."""

    def __init__(
        self, works: Sequence[Any] = (), finish: Callable[[], object] = int, results: Tensors | None = None
    ) -> None:
        super().__init__()
        self.works, self.unfinished, self.results = works, [finish], results

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.works)

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self.works:
            work.wait(timeout) if timeout else work.wait()
        while self.unfinished:
            self.unfinished.pop()()
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self.results)  # DDP without a hook reads it
        return future


class FakeGroup(dist.ProcessGroup):
    """The collectives of megabatch, DDP and torch's object collectives, built on four primitives on flat host tensors.

    Signatures follow the calls of torch's C++ code, which are only one overload of torch's stubs.
    """

    backend_name = ""

    def __init__(self, store: Any, index: int, size: int, timeout: timedelta) -> None:
        super().__init__(index, size)  # type: ignore[call-arg]  # an overload that torch's stubs lack
        self.index, self.num_members, self.title = index, size, ""
        made["connected"] += 1

    def reduce_flat(self, flat: torch.Tensor, op: Any, root: int | None) -> FakeWork:
        """Reduce in place, at all members or only at the root."""
        raise NotImplementedError

    def gather_flat(self, out: torch.Tensor, flat: torch.Tensor) -> FakeWork:
        """Gather the tensors of all members in order."""
        raise NotImplementedError

    def broadcast_flat(self, flat: torch.Tensor, root: int) -> FakeWork:
        raise NotImplementedError

    def exchange_flat(self, out: torch.Tensor, flat: torch.Tensor, received: list[int], sent: list[int]) -> FakeWork:
        """Exchange all-to-all, with the number of elements received from and sent to each member."""
        raise NotImplementedError

    def colors(self, color: int) -> list[int]:
        """Gather the colors of all members, which therefore all have to call it."""
        found = torch.empty(self.num_members, dtype=torch.int64)
        self.gather_flat(found, torch.tensor([color])).wait()
        colors: list[int] = found.tolist()
        return colors

    def begin(
        self, op: str, tensor: torch.Tensor, num_copies: float, outs: Sequence[torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Log a collective that sends and receives `num_copies` of the tensor, and return a host view of the tensor."""
        stream = 0
        if tensor.is_cuda:
            stream = torch.accelerator.current_stream(tensor.device).stream_id
            read, written = ([], [tensor]) if outs is None else ([tensor], outs)
            torch.ops.rehearsal.launch(f"rehearsal::{op}", read, written)
        num_bytes = round(num_copies * tensor.nbytes)
        log.append(Collective(op, tensor.dtype, tensor.numel(), self.num_members, stream, num_bytes))
        return host_view(tensor)

    def all_reduce_one(self, tensor: torch.Tensor, op: Any) -> FakeWork:
        host = self.begin("allreduce", tensor, 4 * (1 - 1 / self.num_members))
        flat = host.contiguous().view(-1)
        work = self.reduce_flat(flat, op, None)
        return FakeWork([work], lambda: host.copy_(flat.view(host.shape)))

    def allreduce(self, tensors: Tensors, opts: Any = None) -> FakeWork:  # type: ignore[override]
        return FakeWork([self.all_reduce_one(tensor, op_of(opts)) for tensor in tensors], results=tensors)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> FakeWork:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Tensors, opts: Any) -> FakeWork:  # type: ignore[override]
        (tensor,) = tensors
        host = self.begin("reduce", tensor, 1)
        flat = host.contiguous().view(-1)
        work = self.reduce_flat(flat, op_of(opts), opts.rootRank)
        return FakeWork([work], lambda: host.copy_(flat.view(host.shape)))

    def broadcast(self, tensors: Tensors, opts: Any) -> FakeWork:  # type: ignore[override]
        (tensor,) = tensors
        host = self.begin("broadcast", tensor, 1)
        flat = host.contiguous().view(-1)
        work = self.broadcast_flat(flat, opts.rootRank)
        return FakeWork([work], lambda: host.copy_(flat.view(host.shape)))

    def gather_one(self, outs: Tensors, tensor: torch.Tensor, op: str = "allgather") -> FakeWork:
        """Gather into one tensor, or into one tensor per member."""
        own = self.begin(op, tensor, 2 * (self.num_members - 1), outs).contiguous().view(-1)
        hosts = [host_view(out) for out in outs]
        is_whole = len(hosts) == 1 and hosts[0].is_contiguous()
        arrived = hosts[0].view(-1) if is_whole else own.new_empty(self.num_members * len(own))
        work = self.gather_flat(arrived, own)
        if is_whole:
            return work
        parts = arrived.view(len(outs), -1).unbind()
        return FakeWork([work], lambda: foreach_copy_([host.view(-1) for host in hosts], parts))

    def allgather(self, outs: list[Tensors], tensors: Tensors, opts: Any = None) -> FakeWork:  # type: ignore[override]
        return FakeWork([self.gather_one(out, tensor) for out, tensor in zip(outs, tensors, strict=True)])

    def all_gather_single(self, out: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> FakeWork:
        return self.gather_one([out], tensor)

    def all_gather_single_coalesced(self, outs: Tensors, tensors: Tensors, opts: Any = None) -> FakeWork:
        return FakeWork([self.gather_one([out], tensor) for out, tensor in zip(outs, tensors, strict=True)])

    def gather(self, outs: list[Tensors], tensors: Tensors, opts: Any) -> FakeWork:  # type: ignore[override]
        (tensor,) = tensors
        gathered = outs[0] if self.index == opts.rootRank else [torch.empty_like(tensor) for _ in range(self.size())]
        return self.gather_one(gathered, tensor, "gather")

    def all_to_all_single(
        self, out: torch.Tensor, tensor: torch.Tensor, received: list[int], sent: list[int], opts: Any = None
    ) -> FakeWork:
        host = self.begin("alltoall", tensor, 2 * (1 - 1 / self.num_members), [out])
        even = [len(host) // self.num_members] * self.num_members
        return self.exchange_flat(host_view(out), host, received or even, sent or even)

    def reduce_scatter_single(self, out: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> FakeWork:
        flat = self.begin("reduce_scatter", tensor, 2 * (1 - 1 / self.num_members), [out]).reshape(-1).clone()
        work, own = self.reduce_flat(flat, op_of(opts), None), flat.view(self.num_members, -1)[self.index]
        return FakeWork([work], lambda: host_view(out).copy_(own.view(out.shape)))

    def reduce_scatter(self, outs: Tensors, tensors: list[Tensors], opts: Any = None) -> FakeWork:  # type: ignore[override]
        whole = [torch.cat([host_view(tensor).reshape(-1) for tensor in each]) for each in tensors]
        return FakeWork([self.reduce_scatter_single(out, each, opts) for out, each in zip(outs, whole, strict=True)])

    def barrier(self, opts: Any = None) -> FakeWork:
        self.begin("barrier", torch.empty(0), 0)
        return self.gather_flat(torch.zeros(self.num_members), torch.zeros(1))

    _allgather_base = all_gather_single  # type: ignore[assignment]
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]
    alltoall_base = all_to_all_single  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]

    def getBackendName(self) -> str:
        return self.backend_name

    def _get_backend(self, device: torch.device) -> Any:
        return self  # torch reads supports_splitting from it

    supports_splitting = False

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]  # for torch's object collectives

    def _set_group_name(self, name: str) -> None:
        self.title = name

    @property
    def group_name(self) -> str:  # type: ignore[override]  # torch's stubs have a NewType of str
        return self.title


class Rehearsed(FakeGroup):
    backend_name = "rehearsed"

    def __init__(self, store: Any, index: int, size: int, timeout: timedelta) -> None:
        super().__init__(store, index, size, timeout)
        self.gloo: Any = dist.ProcessGroupGloo(store, index, size, timeout)  # torch's stubs lack its methods

    def reduce_flat(self, flat: torch.Tensor, op: Any, root: int | None) -> FakeWork:
        arrived = flat.new_empty(self.num_members * len(flat))
        work = self.gather_flat(arrived, flat)
        if root not in (None, self.index):
            return work
        return FakeWork([work], lambda: flat.copy_(combined(arrived.view(self.num_members, -1), op)))

    def gather_flat(self, out: torch.Tensor, flat: torch.Tensor) -> FakeWork:
        return FakeWork([getattr(self.gloo, ALL_GATHER)(as_bytes(out), as_bytes(flat))] if len(flat) else [])

    def broadcast_flat(self, flat: torch.Tensor, root: int) -> FakeWork:
        options = dist.BroadcastOptions()
        options.rootRank = root
        return FakeWork([self.gloo.broadcast([as_bytes(flat)], options)] if len(flat) else [])

    def exchange_flat(self, out: torch.Tensor, flat: torch.Tensor, received: list[int], sent: list[int]) -> FakeWork:
        sizes = [[number * flat.element_size() for number in numbers] for numbers in (received, sent)]
        return FakeWork([getattr(self.gloo, ALL_TO_ALL)(as_bytes(out), as_bytes(flat), *sizes)])


class HeldWork(dist.Work):
    """A collective that the host does not wait for.  If a member is gone, the device stays in it forever."""

    def __init__(self, work: FakeWork) -> None:
        super().__init__()
        self.work, self.ended = work, threading.Event()
        threading.Thread(target=self.complete, daemon=True).start()

    def complete(self) -> None:
        with suppress(RuntimeError):  # a lost connection, which NCCL does not notice
            self.work.wait()
            self.ended.set()

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self.ended.wait(PATIENCE_S):
            torch.ops.rehearsal.hold()
            threading.Thread(target=self.release, daemon=True).start()
        return True

    def release(self) -> None:
        self.ended.wait()
        torch.ops.rehearsal.release()

    def is_completed(self) -> bool:
        return self.ended.is_set()

    def get_future(self) -> torch.futures.Future[Any]:
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(None)
        return future


class Blocking(Rehearsed):
    backend_name = "blocking"

    def shutdown(self) -> None:
        threading.Event().wait()

    def abort(self) -> None:
        threading.Event().wait()


def held(collective: Callable[..., FakeWork]) -> Callable[..., HeldWork]:
    return lambda *args, **options: HeldWork(collective(*args, **options))


for name in (
    *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "allgather", "all_gather_single", ALL_GATHER),
    *("gather", "all_to_all_single", ALL_TO_ALL, "reduce_scatter_single", REDUCE_SCATTER, "barrier"),
):
    setattr(Blocking, name, held(getattr(Rehearsed, name)))


def split(parent: Any, device: torch.device, color: int | None) -> Join | None:
    """Split a group as ncclCommSplit does: all members of `parent` take part, and have their order in it."""
    colors = parent.colors(-1 if color is None else color)

    def join(store: Any, index: int, size: int, timeout: timedelta) -> FakeGroup:
        is_mirrored = isinstance(parent, Mirrored)  # all members have the color of this one
        assert is_mirrored or (index, size) == (colors[: parent.index].count(color), colors.count(color))
        group: FakeGroup = type(parent)(store, index, size, timeout)
        made["connected"] -= 1
        made["split"] += 1
        return group

    return None if color is None else join


class Mirrored(FakeGroup):
    """A group of one process.  Nothing here loops over ranks, so thousands of ranks are possible."""

    backend_name = "mirrored"

    def reduce_flat(self, flat: torch.Tensor, op: Any, root: int | None) -> FakeWork:
        if root in (None, self.index) and op == ReduceOp.SUM:
            flat.mul_(self.num_members)
        elif root in (None, self.index) and op == ReduceOp.PRODUCT:
            flat.pow_(self.num_members)
        return FakeWork()

    @torch.no_grad()
    def gather_one(self, outs: Tensors, tensor: torch.Tensor, op: str = "allgather") -> FakeWork:
        if len(outs) == 1:
            return super().gather_one(outs, tensor, op)
        self.begin(op, tensor, 2 * (self.num_members - 1), outs)
        foreach_copy_(outs, [tensor] * len(outs))
        return FakeWork()

    def gather_flat(self, out: torch.Tensor, flat: torch.Tensor) -> FakeWork:
        out.view(self.num_members, -1).copy_(flat)
        return FakeWork()

    def broadcast_flat(self, flat: torch.Tensor, root: int) -> FakeWork:
        return FakeWork()

    def exchange_flat(self, out: torch.Tensor, flat: torch.Tensor, received: list[int], sent: list[int]) -> FakeWork:
        begin = sum(sent[: self.index])
        return self.gather_flat(out, flat[begin : begin + sent[self.index]])


def combined(contributions: torch.Tensor, op: Any) -> torch.Tensor:
    """Reduce in ascending order of members, rounding at every step."""
    if op == ReduceOp.MAX:
        return contributions.amax(0)
    if op == ReduceOp.MIN:
        return contributions.amin(0)
    total = contributions[0].clone()
    for contribution in contributions[1:]:
        total = total * contribution if op == ReduceOp.PRODUCT else total.add_(contribution)
    return total.div_(len(contributions)) if op == ReduceOp.AVG else total


def op_of(options: Any) -> Any:
    return getattr(options, "reduceOp", options or ReduceOp.SUM)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as bytes, because Gloo has no bf16."""
    return tensor.view(-1).view(torch.uint8)


# From torch 2.15 the flight recorder needs the C++ backend of every group.  These have none, so it is turned off.
os.environ["TORCH_FR_BUFFER_SIZE"] = "0"
REHEARSED, BLOCKING, MIRRORED = (Backend(group.backend_name, group, split) for group in (Rehearsed, Blocking, Mirrored))
for backend in (REHEARSED, BLOCKING, MIRRORED):
    dist.Backend.register_backend(backend.name, backend.join, devices=["cpu", "cuda"])
