"""Process groups for rehearsals, where there is no NCCL: of real processes, and of one process that stands for all.

    connect(info, "cuda", store, backend=REHEARSED)                      real ranks
    connect(RankInfo(0, 2048, 0, 8), "cuda", dist.HashStore(), backend=MIRRORED, topology=regular(256, 8))

rehearsed  tensors travel over Gloo.  Members add in ascending order, in the tensor's type, so that bits are defined and
           16 bits are rounded at every addition, as by an engine's ring.
mirrored   one process is rank r of p, and every collective gives what it would if all ranks held what this one holds.
           Rank 0, as a rule: what a rank receives from rank 0 as a pickled object, the others do not hold.

Both log what they were asked for, and of CUDA tensors each counts as one launch on the current stream.  The host would
not wait for those with NCCL: here it does, in `Work.wait`, and that is not counted.
"""

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from megabatch.ranks.backends import Backend
from megabatch.torch_api import ALL_GATHER, ALL_TO_ALL, foreach_copy_
from megabatch_lab.rehearsal.fake_cuda import host_view

Tensors = list[torch.Tensor]


class Collective(NamedTuple):
    op: str
    dtype: torch.dtype
    num_elements: int  # that this rank brings
    num_members: int
    stream: int  # 0 is the default one, or the host
    num_bytes: int  # that this rank sends and receives, by an algorithm that needs fewest


log: list[Collective] = []


class Work(dist.Work):
    """What Gloo has begun, and what is to be done when it has ended."""

    def __init__(self, begun: Sequence[Any] = (), finish: Callable[[], object] = int) -> None:
        super().__init__()
        self.begun, self.unfinished = begun, [finish]

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self.begun)

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self.begun:
            work.wait(timeout) if timeout else work.wait()
        while self.unfinished:
            self.unfinished.pop()()
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(None)
        return future


def all_of(works: list[Work]) -> Work:
    return Work(works, int)


class Group(dist.ProcessGroup):
    """What megabatch, DDP and torch's object collectives ask for, by four primitives on flat tensors of the host."""

    backend_name = ""

    def __init__(self, store: Any, index: int, size: int, timeout: timedelta) -> None:
        super().__init__(index, size)
        self.index, self.num_members, self.title = index, size, ""

    def reduce_flat(self, flat: torch.Tensor, op: Any, root: int | None) -> Work:
        """In place, at all members or at the root alone."""
        raise NotImplementedError

    def gather_flat(self, out: torch.Tensor, flat: torch.Tensor) -> Work:
        """Everybody's, one after another."""
        raise NotImplementedError

    def broadcast_flat(self, flat: torch.Tensor, root: int) -> Work:
        raise NotImplementedError

    def exchange_flat(self, out: torch.Tensor, flat: torch.Tensor, received: list[int], sent: list[int]) -> Work:
        """All-to-all; how many elements from and to each."""
        raise NotImplementedError

    def begin(
        self, op: str, tensor: torch.Tensor, num_copies: float, outs: Sequence[torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Logs it; a tensor of the host on the same bytes.  `num_copies` of the tensor are sent and received."""
        stream = 0
        if tensor.is_cuda:
            stream = torch.accelerator.current_stream(tensor.device).stream_id
            read, written = ([], [tensor]) if outs is None else ([tensor], outs)
            torch.ops.rehearsal.launch(f"rehearsal::{op}", read, written)
        num_bytes = round(num_copies * tensor.nbytes)
        log.append(Collective(op, tensor.dtype, tensor.numel(), self.num_members, stream, num_bytes))
        return host_view(tensor)

    def all_reduce_one(self, tensor: torch.Tensor, op: Any) -> Work:
        host = self.begin("allreduce", tensor, 4 * (1 - 1 / self.num_members))
        flat = host.contiguous().view(-1)
        work = self.reduce_flat(flat, op, None)
        return Work([work], lambda: host.copy_(flat.view(host.shape)))

    # The names are torch's: dist.ProcessGroup looks them up.
    def allreduce(self, tensors: Tensors, opts: Any = None) -> Work:
        return all_of([self.all_reduce_one(tensor, op_of(opts)) for tensor in tensors])

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Work:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Tensors, opts: Any) -> Work:
        (tensor,) = tensors
        host = self.begin("reduce", tensor, 1)
        flat = host.contiguous().view(-1)
        work = self.reduce_flat(flat, op_of(opts), opts.rootRank)
        return Work([work], lambda: host.copy_(flat.view(host.shape)))

    def broadcast(self, tensors: Tensors, opts: Any) -> Work:
        (tensor,) = tensors
        host = self.begin("broadcast", tensor, 1)
        flat = host.contiguous().view(-1)
        work = self.broadcast_flat(flat, opts.rootRank)
        return Work([work], lambda: host.copy_(flat.view(host.shape)))

    def gather_one(self, outs: Tensors, tensor: torch.Tensor, op: str = "allgather") -> Work:
        """Into one tensor, or into one for each member."""
        own = self.begin(op, tensor, 2 * (self.num_members - 1), outs).contiguous().view(-1)
        hosts = [host_view(out) for out in outs]
        is_whole = len(hosts) == 1 and hosts[0].is_contiguous()
        arrived = hosts[0].view(-1) if is_whole else own.new_empty(self.num_members * len(own))
        work = self.gather_flat(arrived, own)
        if is_whole:
            return work
        parts = arrived.view(len(outs), -1).unbind()
        return Work([work], lambda: foreach_copy_([host.view(-1) for host in hosts], parts))

    def allgather(self, outs: list[Tensors], tensors: Tensors, opts: Any = None) -> Work:
        return all_of([self.gather_one(out, tensor) for out, tensor in zip(outs, tensors, strict=True)])

    def all_gather_single(self, out: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Work:
        return self.gather_one([out], tensor)

    def all_gather_single_coalesced(self, outs: Tensors, tensors: Tensors, opts: Any = None) -> Work:
        return all_of([self.gather_one([out], tensor) for out, tensor in zip(outs, tensors, strict=True)])

    def gather(self, outs: list[Tensors], tensors: Tensors, opts: Any) -> Work:
        (tensor,) = tensors
        everybody = outs[0] if self.index == opts.rootRank else [torch.empty_like(tensor) for _ in range(self.size())]
        return self.gather_one(everybody, tensor, "gather")

    def all_to_all_single(
        self, out: torch.Tensor, tensor: torch.Tensor, received: list[int], sent: list[int], opts: Any = None
    ) -> Work:
        host = self.begin("alltoall", tensor, 2 * (1 - 1 / self.num_members), [out])
        even = [len(host) // self.num_members] * self.num_members
        return self.exchange_flat(host_view(out), host, received or even, sent or even)

    def reduce_scatter_single(self, out: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Work:
        flat = self.begin("reduce_scatter", tensor, 2 * (1 - 1 / self.num_members), [out]).reshape(-1).clone()
        work, own = self.reduce_flat(flat, op_of(opts), None), flat.view(self.num_members, -1)[self.index]
        return Work([work], lambda: host_view(out).copy_(own.view(out.shape)))

    def reduce_scatter(self, outs: Tensors, tensors: list[Tensors], opts: Any = None) -> Work:
        whole = [torch.cat([host_view(tensor).reshape(-1) for tensor in each]) for each in tensors]
        return all_of([self.reduce_scatter_single(out, each, opts) for out, each in zip(outs, whole, strict=True)])

    def barrier(self, opts: Any = None) -> Work:
        self.begin("barrier", torch.empty(0), 0)
        return self.gather_flat(torch.zeros(self.num_members), torch.zeros(1))

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    alltoall_base = all_to_all_single
    _reduce_scatter_base = reduce_scatter_single

    def getBackendName(self) -> str:
        return self.backend_name

    def _get_backend(self, device: torch.device) -> Any:
        return self  # which is asked whether it can be split

    supports_splitting = False

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]  # where objects travel

    def _set_group_name(self, name: str) -> None:
        self.title = name

    @property
    def group_name(self) -> str:
        return self.title


class Rehearsed(Group):
    backend_name = "rehearsed"

    def __init__(self, store: Any, index: int, size: int, timeout: timedelta) -> None:
        super().__init__(store, index, size, timeout)
        self.gloo = dist.ProcessGroupGloo(store, index, size, timeout)

    def reduce_flat(self, flat: torch.Tensor, op: Any, root: int | None) -> Work:
        arrived = flat.new_empty(self.num_members * len(flat))
        work = self.gather_flat(arrived, flat)
        if root not in (None, self.index):
            return work
        return Work([work], lambda: flat.copy_(combined(arrived.view(self.num_members, -1), op)))

    def gather_flat(self, out: torch.Tensor, flat: torch.Tensor) -> Work:
        return Work([getattr(self.gloo, ALL_GATHER)(as_bytes(out), as_bytes(flat))] if len(flat) else [])

    def broadcast_flat(self, flat: torch.Tensor, root: int) -> Work:
        options = dist.BroadcastOptions()
        options.rootRank = root
        return Work([self.gloo.broadcast([as_bytes(flat)], options)] if len(flat) else [])

    def exchange_flat(self, out: torch.Tensor, flat: torch.Tensor, received: list[int], sent: list[int]) -> Work:
        sizes = [[number * flat.element_size() for number in numbers] for numbers in (received, sent)]
        return Work([getattr(self.gloo, ALL_TO_ALL)(as_bytes(out), as_bytes(flat), *sizes)])


class Mirrored(Group):
    """Nothing here loops over ranks, however many there are."""

    backend_name = "mirrored"

    def reduce_flat(self, flat: torch.Tensor, op: Any, root: int | None) -> Work:
        if root in (None, self.index) and op == ReduceOp.SUM:
            flat.mul_(self.num_members)
        elif root in (None, self.index) and op == ReduceOp.PRODUCT:
            flat.pow_(self.num_members)
        return Work()

    @torch.no_grad()
    def gather_one(self, outs: Tensors, tensor: torch.Tensor, op: str = "allgather") -> Work:
        if len(outs) == 1:
            return super().gather_one(outs, tensor, op)
        self.begin(op, tensor, 2 * (self.num_members - 1), outs)
        foreach_copy_(outs, [tensor] * len(outs))
        return Work()

    def gather_flat(self, out: torch.Tensor, flat: torch.Tensor) -> Work:
        out.view(self.num_members, -1).copy_(flat)
        return Work()

    def broadcast_flat(self, flat: torch.Tensor, root: int) -> Work:
        return Work()

    def exchange_flat(self, out: torch.Tensor, flat: torch.Tensor, received: list[int], sent: list[int]) -> Work:
        begin = sum(sent[: self.index])
        return self.gather_flat(out, flat[begin : begin + sent[self.index]])


def combined(contributions: torch.Tensor, op: Any) -> torch.Tensor:
    """In ascending order of members, rounded at every step."""
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
    """Gloo has no bf16."""
    return tensor.view(-1).view(torch.uint8)


# torch's flight recorder asks every group for its backend in C++ (from 2.15), and these have none: it is turned off.
os.environ["TORCH_FR_BUFFER_SIZE"] = "0"
REHEARSED, MIRRORED = (Backend(group.backend_name, group) for group in (Rehearsed, Mirrored))
for backend in (REHEARSED, MIRRORED):
    dist.Backend.register_backend(backend.name, backend.join, devices=["cpu", "cuda"])
