"""The collectives of accelerators against those of the CPU, with the same members and data, over Gloo."""

from typing import Any

import torch
import torch.distributed as dist

from megabatch.comm.accelerator.device_group import DeviceGroup
from megabatch.comm.cpu.process_group import ProcessGroup
from megabatch.planning.algorithms import ring
from megabatch.planning.plan import CommDtype, error_bound, padded_slice_of
from megabatch.planning.topology import ClusterShape
from megabatch.ranks.world import World
from megabatch.torch_api import default_store
from tests.support.rank_pool import RankPool

SIZES = (1, 15, 16, 17, 100, 1000, 4099)
SETTINGS: list[tuple[torch.dtype, CommDtype]] = [
    (torch.float32, "bf16"),
    (torch.float32, "fp16"),
    (torch.float64, "bf16"),
    (torch.bfloat16, "same"),
    (torch.float16, "same"),
]


def brought(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(100 * size + rank), dtype=torch.float64).to(dtype)


def groups_of(world: World, name: str) -> tuple[DeviceGroup, ProcessGroup]:
    store: Any = dist.PrefixStore(name, default_store())
    members, join = range(world.num_ranks), world.backend.join
    ours = DeviceGroup(dist.PrefixStore("ours", store), world.rank, members, 60.0, world.device, join)
    theirs = ProcessGroup(dist.PrefixStore("theirs", store), world.rank, members, 60.0, join, uses_backend=True)
    return ours, theirs


def compare(world: World) -> None:
    ours, theirs = groups_of(world, "compare")
    for dtype, travels in SETTINGS:
        for size in SIZES:
            device, cpu = brought(world.rank, size, dtype), brought(world.rank, size, dtype)
            ours.all_reduce(device, travels)
            theirs.all_reduce(cpu, travels)
            assert torch.equal(device, cpu), (dtype, travels, size)
            halves = brought(world.rank, size, dtype)
            ours.reduce_scatter(halves, travels)
            begin, end = padded_slice_of(size, world.num_ranks, world.rank)
            assert torch.equal(halves[begin:end], cpu[begin:end]), (dtype, travels, size)
            halves[:begin], halves[end:] = torch.nan, torch.nan
            ours.all_gather(halves, travels)
            assert torch.equal(halves, cpu), (dtype, travels, size)
    exact = torch.arange(1000.0) + world.rank
    ours.reduce_scatter(exact, "same")
    ours.all_gather(exact, "same")
    assert torch.equal(exact, world.num_ranks * torch.arange(1000.0) + sum(range(world.num_ranks)))
    ours.require_same(7, exact)
    world.all_reduce(torch.ones(1))
    ours.close()
    theirs.close()


def test_16_bit_collectives_are_bitwise_those_of_the_cpu(ranks: RankPool) -> None:
    for num_ranks in (2, 3, 4):
        ranks.run(compare, num_ranks=num_ranks)


def sums_by_backend(world: World, travels: CommDtype) -> list[list[torch.Tensor]]:
    """Return the sums of the backend on an accelerator and on the CPU."""
    ours, theirs = groups_of(world, "ring")
    found: list[list[torch.Tensor]] = [[], []]
    for size in SIZES:
        device, cpu = brought(world.rank, size, torch.float32), brought(world.rank, size, torch.float32)
        ours.backend_all_reduce(device, travels)
        for wait in theirs.backend_stages(cpu, travels):
            wait()
        found[0].append(device)
        found[1].append(cpu)
    world.all_reduce(torch.ones(1))
    ours.close()
    theirs.close()
    return found


def test_16_bit_all_reduce_of_the_backend_is_within_the_error_bound(ranks: RankPool) -> None:
    for travels in ("same", "bf16", "fp16"):
        plan = ring(ClusterShape.regular(1, 4), travels)
        assert plan
        for result in ranks.run(sums_by_backend, travels, num_ranks=4):
            for sums in result:
                for size, total in zip(SIZES, sums, strict=True):
                    parts = torch.stack([brought(rank, size, torch.float32).double() for rank in range(4)])
                    bounds = [error_bound(plan, 4, magnitude) for magnitude in parts.abs().sum(0).tolist()]
                    assert ((total.double() - parts.sum(0)).abs() <= torch.tensor(bounds)).all()
                    assert travels == "same" or not torch.equal(total, parts.sum(0).float()) or size < 100
