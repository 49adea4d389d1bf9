"""Collectives of numbers and texts, which travel as tensors on the group's own device: nothing is pickled.

p ranks.  What a rank receives:
    gather_numbers     8 bytes of every rank for each number
    gather_texts       8 bytes of every rank, and the texts
    broadcast_text     the text
    first_difference   16 bytes in all; where texts differ, also 8 bytes of every rank, and two texts
    broadcast_tensors  the tensors, in one piece, or in pieces of PIECE_BYTES
"""

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from megabatch.torch_api import all_gather_single

PIECE_BYTES = 256 * 2**20  # that one broadcast carries
ALIGNED_BYTES = 64  # as torch's own allocations


class Difference(NamedTuple):
    """Between rank 0's text and that of the first rank that has another."""

    rank: int
    of_rank_0: str
    of_rank: str


def digest(text: str) -> int:
    """A hash that an int64 holds, and its negative."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 1


def gather(own: torch.Tensor, group: Any = None) -> torch.Tensor:
    """[p, n], of the n values that each rank brings."""
    gathered = own.new_empty(dist.get_world_size(group) * len(own))
    all_gather_single(gathered, own, group=group)
    return gathered.view(-1, len(own))


def gather_numbers(numbers: Sequence[int], device: torch.device, group: Any = None) -> list[list[int]]:
    gathered: list[list[int]] = gather(torch.tensor(numbers, dtype=torch.int64, device=device), group).tolist()
    return gathered


def gather_texts(text: str, device: torch.device, group: Any = None) -> list[str]:
    """Each rank fills its own place in what all have to say: few have much, and many nothing."""
    own = to_bytes(text, device)
    sizes = [size for (size,) in gather_numbers([len(own)], device, group)]
    texts = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
    begin = sum(sizes[: dist.get_rank(group)])
    texts[begin : begin + len(own)] = own
    if len(texts):
        dist.all_reduce(texts, dist.ReduceOp.MAX, group=group)
    return [to_text(part) for part in texts.split(sizes)]


def broadcast_text(text: str, device: torch.device, group: Any = None, source: int = 0) -> str:
    """That of the rank `source` of the group."""
    content = to_bytes(text, device)
    length = torch.tensor([len(content)], device=device)
    dist.broadcast(length, group=group, group_src=source)
    if dist.get_rank(group) != source:
        content = torch.empty(int(length.item()), dtype=torch.uint8, device=device)
    broadcast_pieces(content, group, source)
    return to_text(content)


def first_difference(text: str, device: torch.device, group: Any = None) -> Difference | None:
    """Of texts that should be the same on all ranks; None if they are."""
    own = digest(text)
    highest, lowest = all_reduce_max(torch.tensor([own, -own], device=device), group).tolist()
    if highest == -lowest:
        return None
    digests = gather_numbers([own], device, group)
    rank = next(rank for rank, other in enumerate(digests) if other != digests[0])
    return Difference(rank, broadcast_text(text, device, group), broadcast_text(text, device, group, source=rank))


def all_reduce_max(tensor: torch.Tensor, group: Any = None) -> torch.Tensor:
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
    return tensor


class Placed(NamedTuple):
    """Where a tensor lies in the bytes of all."""

    name: str
    shape: list[int]
    dtype: torch.dtype
    begin: int
    end: int


def lay_out(layout: dict[str, tuple[list[int], str]]) -> Iterator[Placed]:
    """One after another, each aligned, given shapes and the names of dtypes."""
    begin = 0
    for name, (shape, dtype_name) in layout.items():
        dtype = getattr(torch, dtype_name.removeprefix("torch."))
        end = begin + math.prod(shape) * dtype.itemsize
        yield Placed(name, shape, dtype, begin, end)
        begin = -(-end // ALIGNED_BYTES) * ALIGNED_BYTES


def broadcast_tensors(tensors: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """Rank 0's tensors, on all ranks; only rank 0 needs to bring any.  They share one memory: copy what is kept."""
    layout = {name: (list(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()}
    placed = list(lay_out(json.loads(broadcast_text(json.dumps(layout), device))))
    flat = torch.empty(placed[-1].end if placed else 0, dtype=torch.uint8, device=device)
    received = {each.name: flat[each.begin : each.end].view(each.dtype).view(each.shape) for each in placed}
    if dist.get_rank() == 0:
        for name, tensor in received.items():
            tensor.copy_(tensors[name])
    broadcast_pieces(flat)
    return received


def broadcast_pieces(content: torch.Tensor, group: Any = None, source: int = 0) -> None:
    for piece in content.split(PIECE_BYTES) if len(content) else ():
        dist.broadcast(piece, group=group, group_src=source)


def to_bytes(text: str, device: torch.device) -> torch.Tensor:
    content = np.frombuffer(text.encode(), dtype=np.uint8).copy()
    return torch.from_numpy(content).to(device)


def to_text(content: torch.Tensor) -> str:
    return content.cpu().numpy().tobytes().decode()
