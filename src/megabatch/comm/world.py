"""The ranks of a run, and the few collectives that the trainer asks of them directly.

One rank is the general case made small: it has a process group of its own, and nobody asks how many there are.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from msgspec import Struct

from megabatch.errors import UserError, require_one_of

BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


class Place(Struct, frozen=True):
    """Which rank this process is."""

    rank: int
    num_ranks: int
    local_rank: int


def discover() -> Place | None:
    """The place that torchrun gave this process; None if nobody started it as a rank."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    if not all(name in os.environ for name in names):
        return None
    return Place(*(int(os.environ[name]) for name in names))


def choose_device(name: str) -> str:
    """`auto` is cuda where there is one."""
    require_one_of("run.device", name, ["auto", *BACKENDS])
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("run.device='cuda', but torch finds no CUDA device here; nearest: run.device=cpu")
    return name


class World:
    """This rank among all ranks."""

    def __init__(self, rank: int, num_ranks: int, device: torch.device) -> None:
        self.rank, self.num_ranks, self.device = rank, num_ranks, device

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums in place over all ranks; bitwise the same on each."""
        dist.all_reduce(tensor)
        return tensor

    def start_sum(self, tensor: torch.Tensor) -> Callable[[], object]:
        """Starts `sum` in the background.  Call what it returns, to wait, before reading the tensor."""
        wait: Callable[[], object] = dist.all_reduce(tensor, async_op=True).wait
        return wait


@contextmanager
def connect(place: Place, device_type: str, store: "dist.Store | None" = None) -> Iterator[World]:  # type: ignore[name-defined]
    """Joins the ranks, and leaves them at the end.  Without a `store`, torchrun's variables say where they meet."""
    device = torch.device(device_type, place.local_rank) if device_type == "cuda" else torch.device(device_type)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        BACKENDS[device.type],
        rank=place.rank,
        world_size=place.num_ranks,
        store=store,
        timeout=timedelta(minutes=10),
        device_id=device if device.type == "cuda" else None,
    )
    try:
        yield World(place.rank, place.num_ranks, device)
    finally:
        dist.destroy_process_group()
