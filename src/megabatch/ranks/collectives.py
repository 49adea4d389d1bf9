"""Collectives of numbers and texts, sent as tensors on the device of the group. Nothing is pickled.

p ranks.  Bytes that each rank receives:
    gather_numbers     8 bytes per rank and number
    gather_texts       8 bytes per rank, and the texts
    broadcast_text     the text
    first_difference   16 bytes; if texts differ, also 8 bytes per rank and two texts
    broadcast_tensors  the tensors, in pieces of at most PIECE_BYTES
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

PIECE_BYTES = 256 * 2**20  # the largest single broadcast
ALIGNED_BYTES = 64  # as torch aligns its allocations


class Difference(NamedTuple):
    """Rank 0's text and that of the first rank whose text differs."""

    rank: int
    of_rank_0: str
    of_rank: str


def digest(text: str) -> int:
    """Return a 63-bit hash, so that it and its negative fit into an int64."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 1


def gather(own: torch.Tensor, group: Any = None) -> torch.Tensor:
    """Return a tensor [p, n] of the n values of each rank."""
    gathered = own.new_empty(dist.get_world_size(group) * len(own))
    all_gather_single(gathered, own, group=group)
    return gathered.view(-1, len(own))


def gather_numbers(numbers: Sequence[int], device: torch.device, group: Any = None) -> list[list[int]]:
    gathered: list[list[int]] = gather(torch.tensor(numbers, dtype=torch.int64, device=device), group).tolist()
    return gathered


def gather_texts(text: str, device: torch.device) -> list[str]:
    """Return the texts of all ranks. Each rank fills its part of one buffer: most texts are empty, a few are long."""
    own = to_bytes(text, device)
    sizes = [size for (size,) in gather_numbers([len(own)], device)]
    texts = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
    begin = sum(sizes[: dist.get_rank()])
    texts[begin : begin + len(own)] = own
    if len(texts):
        dist.all_reduce(texts, dist.ReduceOp.MAX)
    return [to_text(part) for part in texts.split(sizes)]


def broadcast_text(text: str, device: torch.device, group: Any = None, source: int = 0) -> str:
    """Return the text of rank `source` of the group on all its ranks."""
    content = to_bytes(text, device)
    length = torch.tensor([len(content)], device=device)
    dist.broadcast(length, group=group, group_src=source)
    if dist.get_rank(group) != source:
        content = torch.empty(int(length.item()), dtype=torch.uint8, device=device)
    broadcast_pieces(content, group, source)
    return to_text(content)


def first_difference(text: str, device: torch.device) -> Difference | None:
    """Compare a text that should be the same on all ranks; return None if it is."""
    own = digest(text)
    highest, lowest = all_reduce_max(torch.tensor([own, -own], device=device)).tolist()
    if highest == -lowest:
        return None
    digests = gather_numbers([own], device)
    rank = next(rank for rank, other in enumerate(digests) if other != digests[0])
    return Difference(rank, broadcast_text(text, device), broadcast_text(text, device, source=rank))


def all_reduce_max(tensor: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor


def all_reduce_often(tensor: torch.Tensor, count: int) -> None:
    """Sum the tensor in place `count` times.  On an accelerator, nothing here waits for the results."""
    for _ in range(count):
        dist.all_reduce(tensor)


class TensorSpan(NamedTuple):
    """The bytes of one tensor in the buffer of all."""

    name: str
    shape: list[int]
    dtype: torch.dtype
    begin: int
    end: int


def tensor_spans(layout: dict[str, tuple[list[int], str]]) -> Iterator[TensorSpan]:
    """Place tensors of the given shapes and dtypes one after another, each aligned."""
    begin = 0
    for name, (shape, dtype_name) in layout.items():
        dtype = getattr(torch, dtype_name.removeprefix("torch."))
        end = begin + math.prod(shape) * dtype.itemsize
        yield TensorSpan(name, shape, dtype, begin, end)
        begin = -(-end // ALIGNED_BYTES) * ALIGNED_BYTES


def broadcast_tensors(tensors: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """Return rank 0's tensors on all ranks. They share one allocation: clone the ones that you keep."""
    layout = {name: (list(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()}
    spans = list(tensor_spans(json.loads(broadcast_text(json.dumps(layout), device))))
    flat = torch.empty(spans[-1].end if spans else 0, dtype=torch.uint8, device=device)
    received = {span.name: flat[span.begin : span.end].view(span.dtype).view(span.shape) for span in spans}
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
