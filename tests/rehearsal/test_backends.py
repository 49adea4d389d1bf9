from typing import Any

import pytest
import torch
import torch.distributed as dist
from megabatch_lab.rehearsal import backends
from megabatch_lab.rehearsal.counting_store import CountingStore

from megabatch.comm.accelerator.device_group import DeviceGroup
from megabatch.comm.groups import AXES, Groups
from megabatch.planning.topology import Axis, Topology, regular
from megabatch.ranks.world import World
from tests.support.rank_pool import RankPool
from tests.support.rehearsals import mirrored, on


def collectives(world: World) -> dict[str, Any]:
    """Return the result of each collective; rank r contributes 1 + r, or a row."""
    p, device = world.num_ranks, world.device
    own = torch.full((2,), 1.0 + world.rank, device=device)
    row = torch.arange(p, dtype=torch.float32, device=device) + 10 * world.rank
    gathered, scattered = torch.empty(2 * p, device=device), torch.empty(1, device=device)
    exchanged, root, highest = torch.empty(p, device=device), own.clone(), own.clone()
    dist.all_gather_into_tensor(gathered, own)
    dist.reduce_scatter_tensor(scattered, row)
    dist.all_to_all_single(exchanged, row)
    dist.broadcast(root, src=p - 1)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    to_root = own.clone()
    dist.reduce(to_root, dst=0)
    total = own.bfloat16()
    dist.all_reduce(total)
    objects = [None] * p
    dist.all_gather_object(objects, {"rank": world.rank})
    dist.barrier()
    return {
        "gathered": gathered.tolist(),
        "scattered": scattered.tolist(),
        "exchanged": exchanged.tolist(),
        "root": root.tolist(),
        "highest": highest.tolist(),
        "to_root": to_root.tolist(),
        "total": total.tolist(),
        "objects": objects,
    }


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_collectives_of_real_ranks(ranks: RankPool, device: str) -> None:
    for rank, found in enumerate(ranks.run(collectives, num_ranks=3, join=on(device))):
        assert found == {
            "gathered": [1, 1, 2, 2, 3, 3],
            "scattered": [30 + 3 * rank],
            "exchanged": [rank, 10 + rank, 20 + rank],
            "root": [3, 3],
            "highest": [3, 3],
            "to_root": [6, 6] if rank == 0 else [1 + rank] * 2,
            "total": [6, 6],
            "objects": [{"rank": other} for other in range(3)],
        }


def test_collectives_of_a_mirrored_rank(ranks: RankPool) -> None:
    (found,) = ranks.run(collectives, num_ranks=1, join=mirrored(4, 2))
    assert found == {
        "gathered": [1] * 8,
        "scattered": [0],
        "exchanged": [0] * 4,
        "root": [1, 1],
        "highest": [1, 1],
        "to_root": [4, 4],
        "total": [4, 4],
        "objects": [{"rank": 0}] * 4,
    }


def sum_of(world: World, values: list[float], dtype: torch.dtype) -> float:
    tensor = torch.tensor([values[world.rank]], dtype=dtype, device=world.device)
    return float(world.all_reduce(tensor).item())


def test_members_add_in_ascending_order_and_round_16_bits_at_every_addition(ranks: RankPool) -> None:
    """Check rounding: in fp16, 2,048 + 1 is 2,048, and 1 + 1 + 2,046 is 2,048."""
    for values, total in (([2048, 1, 1], 2048), ([1, 1, 2046], 2048), ([1e4, 6e4, -6e4], float("inf"))):
        assert ranks.run(sum_of, values, torch.float16, num_ranks=3, join=on("cuda")) == [total] * 3
    assert ranks.run(sum_of, [1e8, 1, -1e8], torch.float32, num_ranks=3, join=on("cuda")) == [0] * 3


def logged(world: World) -> list[backends.Collective]:
    backends.log.clear()
    world.all_reduce(torch.ones(100, device=world.device))
    dist.all_gather_into_tensor(torch.empty(4 * 50, device=world.device), torch.ones(50, device=world.device))
    return list(backends.log)


def test_collectives_are_logged_with_their_traffic(ranks: RankPool) -> None:
    (found,) = ranks.run(logged, num_ranks=1, join=mirrored(4, 2))
    assert found == [
        backends.Collective("allreduce", torch.float32, 100, 4, 0, 4 * 400 * 3 // 4),
        backends.Collective("allgather", torch.float32, 50, 4, 0, 2 * 200 * 3),
    ]


def members_of_groups(world: World) -> tuple[dict[str, int], dict[Axis, list[int]]]:
    """Open all groups twice, and return how they were made and the ranks of each of this rank's groups."""
    backends.made.clear()
    groups = Groups(None, world.device, 60.0, world.backend, world.topology)
    for _ in range(2):
        groups.open(AXES)
    members = {}
    for axis, group in groups.process_groups.items():
        assert isinstance(group, DeviceGroup)
        gathered = torch.zeros(group.num_members, device=world.device)
        group.group.all_gather_single(gathered, torch.tensor([float(world.rank)], device=world.device)).wait()
        members[axis] = [int(rank) for rank in gathered]
    groups.close()
    return dict(backends.made), members


IRREGULAR = Topology(((0,), (1, 2, 3)))


@pytest.mark.parametrize("topology", [regular(2, 2), Topology(((0, 3), (1, 2))), IRREGULAR])
def test_all_groups_are_split_from_the_first_one(ranks: RankPool, topology: Topology) -> None:
    for rank, (made, members) in enumerate(ranks.run(members_of_groups, num_ranks=4, join=on("cuda", topology))):
        expected = {axis: list(topology.members(axis, rank)) for axis in AXES}
        assert members == {axis: ranks for axis, ranks in expected.items() if len(ranks) > 1}
        assert made == {"connected": 0, "split": len(members)}


def test_store_counts_requests_and_bytes() -> None:
    store = CountingStore()
    prefixed = dist.PrefixStore("run", store)  # type: ignore[attr-defined]  # torch does not export it
    prefixed.set("key", "value")
    assert prefixed.get("key") == b"value" and prefixed.add("number", 2) == 2 and not prefixed.check(["other"])
    assert store.requests == {"set": 1, "get": 1, "add": 1, "check": 1}
    assert store.num_bytes == 2 * len("run/keyvalue") + len("run/number") + len("run/other")
