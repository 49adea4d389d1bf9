"""Check that the members of a process group are about to exchange the same tensor.

One small all-reduce gives all members the maximum and the minimum, so all reach the same conclusion.  Only if these
differ, an all-gather collects the values of all members for the message.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megabatch.comm.cpu.barrier import RankMismatch
from megabatch.text import name_ranks
from megabatch.torch_api import ALL_GATHER

Run = Callable[..., None]  # an operation of a process group, by name


def require_same(run: Run, names: Sequence[int], layout: int, flat: torch.Tensor) -> None:
    """Raise RankMismatch if layout or size differ between members.  Blocks the host, so call it once per bucket."""
    own = torch.tensor([layout, len(flat)], device=flat.device)
    bounds = torch.cat([own, -own])
    run("allreduce", [bounds], max_options())
    *most, least_layout, least_size = bounds.tolist()
    if most == [-least_layout, -least_size]:
        return
    arrived = torch.empty(2 * len(names), dtype=own.dtype, device=flat.device)
    run(ALL_GATHER, arrived, own)
    raise RankMismatch(describe_mismatch(names, arrived.view(-1, 2).tolist()))


def max_options() -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    return options


def describe_mismatch(names: Sequence[int], values: Sequence[Sequence[int]]) -> str:
    """Return a message with the ranks of each layout and size."""
    ranks_with: dict[tuple[int, ...], list[int]] = {}
    for name, value in zip(names, values, strict=True):
        ranks_with.setdefault(tuple(value), []).append(name)
    parts = [
        f"{name_ranks(ranks)} with {size:,} elements, layout {layout:016x}"
        for (layout, size), ranks in ranks_with.items()
    ]
    return f"{', '.join(parts)}; all ranks must exchange the same tensors in the same order"
