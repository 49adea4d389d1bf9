"""Whether the members of a process group are about to exchange the same tensor.

Largest and smallest are the same on all members, so all of them come to the same conclusion by one small all-reduce,
however many they are; only if they differ does everybody ask everybody.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megabatch.comm.cpu.barrier import RankMismatch
from megabatch.torch_api import ALL_GATHER

Run = Callable[..., None]  # an operation of a process group, by name


def require_same(run: Run, names: Sequence[int], layout: int, flat: torch.Tensor) -> None:
    """Waits for the result on the host, so it is for tensors that come for the first time."""
    own = torch.tensor([layout, len(flat)], device=flat.device)
    bounds = torch.cat([own, -own])
    run("allreduce", [bounds], largest())
    *most, least_layout, least_size = bounds.tolist()
    if most == [-least_layout, -least_size]:
        return
    arrived = torch.empty(2 * len(names), dtype=own.dtype, device=flat.device)
    run(ALL_GATHER, arrived, own)
    raise RankMismatch(mismatch(names, arrived.view(-1, 2).tolist()))


def largest() -> Any:
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    return options


def mismatch(names: Sequence[int], brought: Sequence[Sequence[int]]) -> str:
    """Which ranks have brought which layout and size."""
    ranks_with: dict[tuple[int, ...], list[str]] = {}
    for name, words in zip(names, brought, strict=True):
        ranks_with.setdefault(tuple(words), []).append(str(name))
    said = [
        f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)} with {size:,} elements, layout {layout:016x}"
        for (layout, size), ranks in ranks_with.items()
    ]
    return f"{', '.join(said)}; all ranks must exchange the same tensors in the same order"
