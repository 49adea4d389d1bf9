"""The ranks of a run, and the few collectives that the trainer asks of them directly.

One rank is the general case made small: it has a process group of its own, and nobody asks how many there are.
"""

import gc
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megabatch.errors import UserError, require_one_of
from megabatch.planning.topology import Topology
from megabatch.ranks.backends import BACKENDS, Backend
from megabatch.ranks.discover import RankInfo, discover
from megabatch.ranks.store import RankStore


def choose_device(name: str) -> str:
    """`auto` is cuda where there is one."""
    require_one_of("run.device", name, ["auto", *BACKENDS])
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("run.device='cuda', but torch finds no CUDA device here; nearest: run.device=cpu")
    return name


class World:
    """This rank among all ranks.  What is opened on it (`closing`) is closed before it leaves them."""

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        device: torch.device,
        backend: Backend | None = None,  # that of the device
        topology: Topology | None = None,  # None: ranks ask each other for their hosts
    ) -> None:
        self.rank, self.num_ranks, self.device = rank, num_ranks, device
        self.backend, self.topology = backend or BACKENDS[device.type], topology
        self.closing = ExitStack()

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums in place over all ranks; bitwise the same on each."""
        dist.all_reduce(tensor)
        return tensor

    def all_gather(self, value: object) -> list[Any]:
        """The values that all ranks have brought, in rank order, on all ranks."""
        values: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(values, value)
        return values

    def broadcast_text(self, text: str) -> str:
        """Rank 0's text, on all ranks."""
        content = torch.tensor(list(text.encode()), dtype=torch.uint8, device=self.device)
        length = torch.tensor([len(content)], device=self.device)
        dist.broadcast(length, src=0)
        if self.rank != 0:
            content = torch.empty(int(length.item()), dtype=torch.uint8, device=self.device)
        dist.broadcast(content, src=0)
        return bytes(content.tolist()).decode()

    def broadcast_tensors(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Rank 0's tensors, on all ranks and on their devices; only rank 0 needs to bring any."""
        layout = {name: (list(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()}
        layout = json.loads(self.broadcast_text(json.dumps(layout)))
        received = {}
        for name, (shape, dtype) in layout.items():
            dtype = getattr(torch, dtype.removeprefix("torch."))
            empty = torch.empty(shape, dtype=dtype, device=self.device)
            tensor = empty.copy_(tensors[name]) if self.rank == 0 else empty
            dist.broadcast(tensor, src=0)
            received[name] = tensor
        return received


def current_rank() -> RankInfo:
    """Which of the ranks that exist this process is; it may be alone."""
    info = discover()
    if info is None and dist.is_initialized():
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        return RankInfo(rank, num_ranks, rank, num_ranks)
    return info or RankInfo(0, 1, 0, 1)


@contextmanager
def connect(
    info: RankInfo,
    device_type: str,
    store: "dist.Store | None" = None,  # type: ignore[name-defined]
    timeout_s: float = 600.0,
    backend: Backend | None = None,
    topology: Topology | None = None,
) -> Iterator[World]:
    """Joins the ranks, and leaves them at the end.  A script that has joined them already stays joined."""
    device = torch.device(device_type, info.local_rank) if device_type == "cuda" else torch.device(device_type)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    world = World(info.rank, info.num_ranks, device, backend, topology)
    if dist.is_initialized():
        with world.closing:
            yield world
        return
    dist.init_process_group(
        world.backend.name,
        rank=info.rank,
        world_size=info.num_ranks,
        store=store or RankStore(info).store,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if device.type == "cuda" else None,
    )
    try:
        with world.closing:
            yield world
    finally:
        gc.collect()  # what nobody holds any more goes before the group, while its threads can still end in order
        dist.destroy_process_group()
