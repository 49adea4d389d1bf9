import contextlib
import gc
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from megabatch.comm.cpu import shared_memory
from megabatch.comm.cpu.barrier import BarrierHeader, MissingRank, RankMismatch, Unmapped
from megabatch.comm.cpu.shared_memory import CACHE_BYTES, SMALL_BYTES, SharedBuffer, SharedMemory
from megabatch.errors import UserError
from megabatch.planning.plan import slices
from megabatch.ranks.world import World
from megabatch.torch_api import default_store
from tests.support.rank_pool import RankPool, RanksFailed

SMALL = SMALL_BYTES // 4  # elements of fp32
CHUNK = CACHE_BYTES // 4  # the largest, that of one rank
SIZES = (0, 1, 2, 3, 15, 16, 17, 63, 64, 65, SMALL, SMALL + 1, 10_007, 3 * CHUNK, 3 * CHUNK + 77)
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def join(world: World, **settings: float) -> SharedMemory:
    store = default_store()
    return SharedMemory(dist.PrefixStore("test", store), world.rank, world.num_ranks, **settings)  # type: ignore


def numbers(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor of a rank, which every rank can compute."""
    return torch.randn(size, generator=torch.Generator().manual_seed(1000 * rank + size)).to(dtype)


def in_order(parts: list[torch.Tensor], scale: float = 1.0) -> torch.Tensor:
    """Return the reference: the sum in rank order, with 16-bit floats summed in fp32 and rounded once."""
    wide = torch.float64 if parts[0].dtype == torch.float64 else torch.float32
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return (total * scale).to(parts[0].dtype)


def check_while_summing(world: World) -> list[bool]:
    """Check `is_finite` for finite tensors and for tensors with one bad element.  Return the result of each case."""
    said = []
    with join(world) as memory:
        for size in (SMALL, 10_007, 3 * CHUNK + 77):
            tensor = torch.empty(size)
            buffer = memory.share(tensor)
            begin, end = slices(size, world.num_ranks)[world.rank]
            for bad in (None, torch.nan, torch.inf, -torch.inf):
                for spoiler, at in ((0, 0), (world.num_ranks - 1, size - 1)):
                    operations = {
                        "all_reduce": partial(memory.all_reduce, buffer, checks=True),
                        "all_gather": partial(memory.all_gather, buffer, checks=True),
                        "broadcast": partial(memory.broadcast, buffer, spoiler, checks=True),
                    }
                    for name, operate in operations.items():
                        tensor.fill_(1e3)
                        if bad is not None and world.rank == spoiler:
                            assert name != "all_gather" or begin <= at < end
                            tensor[at] = bad
                        operate()
                        said.append(memory.is_finite == (bad is None))
            memory.all_reduce(buffer)
            said.append(not memory.is_finite)  # without `checks` it is False
    return said


def test_all_ranks_know_of_inf_and_nan_in_any_slice(ranks: RankPool) -> None:
    for said in ranks.run(check_while_summing, num_ranks=3):
        assert all(said) and len(said) == 3 * (4 * 2 * 3 + 1)


def every_operation(world: World, dtype: torch.dtype) -> None:
    rank, num_ranks = world.rank, world.num_ranks
    with join(world) as memory:
        for size in SIZES:
            parts = [numbers(rank, size, dtype) for rank in range(num_ranks)]
            total, cuts = in_order(parts), slices(size, num_ranks)
            begin, end = cuts[rank]
            root = size % num_ranks
            tensor = parts[rank].clone()
            buffer = memory.share(tensor)

            def fill(tensor: torch.Tensor = tensor, own: torch.Tensor = parts[rank]) -> None:
                tensor.copy_(own)
                memory.barrier.wait()

            for _ in range(3):
                fill()
                memory.all_reduce(buffer)
                assert torch.equal(tensor, total)
            fill()
            memory.all_reduce(buffer, scale=0.3)
            assert torch.equal(tensor, in_order(parts, 0.3))
            fill()
            memory.reduce_scatter(buffer)
            assert torch.equal(tensor[begin:end], total[begin:end])
            fill()
            memory.all_gather(buffer)
            assert torch.equal(tensor, torch.cat([part[b:e] for part, (b, e) in zip(parts, cuts, strict=True)]))
            fill()
            memory.reduce(buffer, root)
            assert rank != root or torch.equal(tensor, total)
            fill()
            memory.broadcast(buffer, root)
            assert torch.equal(tensor, parts[root])


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_operation_is_bitwise_the_sum_in_rank_order_for_any_size(ranks: RankPool, dtype: torch.dtype) -> None:
    for num_ranks in range(1, ranks.size + 1):
        ranks.run(every_operation, dtype, num_ranks=num_ranks)


def sum_at(world: World, places: list[tuple[int, int]]) -> list[torch.Tensor]:
    """Sum the same 40 numbers at several places (begin, size) of a tensor."""
    found = []
    with join(world) as memory:
        for begin, size in places:
            tensor = numbers(7 + world.rank, size, torch.float32)
            tensor[begin : begin + 40] = numbers(world.rank, 40, torch.float32)
            memory.all_reduce(memory.share(tensor))
            found.append(tensor[begin : begin + 40].clone())
    return found


def test_sum_does_not_depend_on_its_place_in_the_tensor(ranks: RankPool) -> None:
    """DDP rebuilds its buckets after the first backward, which moves gradients and must not change them."""
    places = [(0, 40), (3, 100), (1000, SMALL), (SMALL, 2 * SMALL), (10_000, 3 * CHUNK), (2 * CHUNK - 20, 3 * CHUNK)]
    for results in zip(*ranks.run(sum_at, places, num_ranks=3), strict=True):
        assert all(torch.equal(result, results[0]) for result in results)
    first, *others = ranks.run(sum_at, places, num_ranks=3)[0]
    assert all(torch.equal(first, other) for other in others)


def share_the_middle(world: World) -> None:
    base = torch.full((10_000,), float(world.rank))
    begin = 10 + 7 * world.rank  # another place on each rank
    view = base.view(100, 100)
    part = base[begin : begin + 5000]
    with join(world) as memory:
        memory.all_reduce(memory.share(part.view(50, 100)))
        total = sum(range(world.num_ranks))
        assert base[begin : begin + 5000].eq(total).all()
        assert base[:begin].eq(world.rank).all() and base[begin + 5000 :].eq(world.rank).all()
        assert view[30, 30] == total and view.data_ptr() == base.data_ptr()  # the view moved into shared memory too
        memory.all_reduce(memory.share(base))  # its storage is shared already
        assert part[2500] == view[30, 30] == total * world.num_ranks


def test_views_move_with_the_tensor_and_the_rest_of_its_storage_is_unchanged(ranks: RankPool) -> None:
    for num_ranks in range(1, ranks.size + 1):
        ranks.run(share_the_middle, num_ranks=num_ranks)


def gradients_through_ddp(world: World) -> tuple[list[torch.Tensor], list[int]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(50, 60), nn.ReLU(), nn.Linear(60, 70), nn.Linear(70, 4))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.01, gradient_as_bucket_view=True)
    buffers: dict[int, SharedBuffer] = {}
    sizes = []
    with join(world) as memory:

        def hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore
            tensor = bucket.buffer()
            if not tensor.is_shared():  # DDP has rebuilt the bucket
                buffers[bucket.index()] = memory.share(tensor, BarrierHeader(bucket=bucket.index()))
            memory.all_reduce(buffers[bucket.index()], scale=1 / world.num_ranks)
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            future.set_result(tensor)
            return future

        ddp.register_comm_hook(None, hook)
        x = numbers(world.rank, 3 * 50, torch.float32).view(3, 50)
        for _ in range(4):
            ddp.zero_grad()
            ddp(x).square().sum().backward()
            assert all(parameter.grad.is_shared() for parameter in model.parameters())  # type: ignore[union-attr]
            sizes.append(len(buffers))
        return [parameter.grad.clone() for parameter in model.parameters()], sizes  # type: ignore[union-attr]


def test_ddp_buckets_are_in_shared_memory_and_gradients_are_their_views(ranks: RankPool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(50, 60), nn.ReLU(), nn.Linear(60, 70), nn.Linear(70, 4))
    for num_ranks in (2, 3):
        x = torch.stack([numbers(rank, 3 * 50, torch.float32).view(3, 50) for rank in range(num_ranks)])
        model.zero_grad()
        (model(x).square().sum() / num_ranks).backward()
        results = ranks.run(gradients_through_ddp, num_ranks=num_ranks)
        assert results[0][1] == [1, 2, 2, 2]  # buckets: rebuilt after the first backward
        for gradients, _ in results:
            for gradient, first, parameter in zip(gradients, results[0][0], model.parameters(), strict=True):
                assert torch.equal(gradient, first)
                torch.testing.assert_close(gradient, parameter.grad)


def mapped() -> int:
    return sum("/dev/shm/torch_" in line for line in Path("/proc/self/maps").read_text().splitlines())


def share_and_drop(world: World) -> tuple[int, int, int, int]:
    gc.collect()  # exceptions of earlier tests
    before = mapped()
    with join(world) as memory:
        joined, files = mapped(), len(list(Path("/proc/self/fd").iterdir()))
        for size in (100, 10_000, 10_000):
            tensor = torch.ones(size)
            buffer = memory.share(tensor)
            memory.all_reduce(buffer)
        held = mapped() - joined
        buffer.close()
        del tensor
        dropped = mapped() - joined
        leaked = len(list(Path("/proc/self/fd").iterdir())) - files
    del memory, buffer
    return held, dropped, leaked, mapped() - before


def test_deleted_buffer_frees_its_memory_and_files(ranks: RankPool) -> None:
    # Three maps are held: the last tensor of this rank and those of two peers.
    assert ranks.run(share_and_drop, num_ranks=3) == [(3, 0, 0, 0)] * 3


def disagree(world: World) -> list[str]:
    said = []
    with join(world) as memory:
        buffers = [memory.share(torch.ones(size)) for size in (4096, 1024)]
        odd = world.rank == 1
        attempts = [
            lambda: memory.all_reduce(buffers[odd], BarrierHeader(step=7, bucket=3 if odd else 2)),
            lambda: memory.all_reduce(buffers[0], BarrierHeader(bucket=5, layout=2**64 - 1 if odd else 10)),
            lambda: memory.broadcast(buffers[0], root=0) if odd else memory.all_gather(buffers[0]),
            lambda: memory.all_reduce(buffers[0], scale=0.5 if odd else 0.25),
            lambda: memory.share(torch.ones(3 if odd else 5, dtype=torch.float64 if odd else torch.int32)),
        ]
        for attempt in attempts:
            try:
                attempt()
            except RankMismatch as error:
                said.append(str(error))
        # All ranks have raised the error, so all can continue.
        memory.all_reduce(buffers[1])
    return said


def test_every_rank_names_the_mismatched_ranks_and_fields(ranks: RankPool) -> None:
    rule = "; all ranks must exchange the same tensors in the same order: "
    for said in ranks.run(disagree, num_ranks=3):
        assert [line.partition(rule)[0] for line in said] == [
            "ranks 0, 2 in all_reduce of bucket 2, buffer 1, elements 4,096, "
            "rank 1 in all_reduce of bucket 3, buffer 2, elements 1,024",
            "ranks 0, 2 in all_reduce of bucket 5, layout 000000000000000a, "
            "rank 1 in all_reduce of bucket 5, layout ffffffffffffffff",
            "ranks 0, 2 in all_gather of bucket 0, rank 1 in broadcast of bucket 0",
            "ranks 0, 2 in all_reduce of bucket 0, scale 0.25, rank 1 in all_reduce of bucket 0, scale 0.5",
            "ranks 0, 2 in share of bucket 0, elements 5, dtype int32, "
            "rank 1 in share of bucket 0, elements 3, dtype float64",
        ]


@contextlib.contextmanager
def missing(said: list[str]) -> Iterator[None]:
    try:
        yield
    except MissingRank as error:
        said.append(str(error))


def come_late(world: World) -> list[str]:
    said: list[str] = []
    store = default_store()
    memory = SharedMemory(store, world.rank, world.num_ranks, timeout_s=1.0, names=[4, 5, 6])
    with memory:
        buffer = memory.share(torch.ones(4096))
        if world.rank != 2:
            with missing(said):
                memory.all_reduce(buffer, BarrierHeader(step=3, bucket=8))
            with missing(said):
                memory.all_reduce(buffer)
        world.all_reduce(torch.ones(1))  # waits until all others have aborted
    return said


def test_missing_rank_is_named_with_the_operation_that_waits(ranks: RankPool) -> None:
    first, second, late = ranks.run(come_late, num_ranks=3)
    assert late == []
    for said in (first, second):
        assert "lost another rank" in said[1]
    reports = {said[0].partition(" while")[0] for said in (first, second)}
    assert "rank 6 did not arrive within 1 s" in reports
    assert reports <= {"rank 6 did not arrive within 1 s", "rank 4 has left", "rank 5 has left"}
    assert first[0].endswith("while the others wait in all_reduce of bucket 8")


def leave_early(world: World) -> list[str]:
    said: list[str] = []
    with join(world) as memory:
        buffer = memory.share(torch.ones(4096))
        memory.all_reduce(buffer)
        if world.rank != 1:
            with missing(said):
                memory.reduce(buffer, root=0)
    return [line.partition(" while")[0] for line in said]


def test_rank_that_leaves_is_noticed_at_once(ranks: RankPool) -> None:
    assert ranks.run(leave_early, num_ranks=2) == [["rank 1 has left"], []]


def cannot_map(world: World) -> str:
    with join(world) as memory:
        memory.share(torch.ones(10))
        if world.rank == 1:

            def refuse(pid: int, descriptor: int, num_bytes: int) -> torch.UntypedStorage:
                raise RuntimeError("no room\nat all")

            shared_memory.map_storage, kept = refuse, shared_memory.map_storage
        try:
            memory.share(torch.ones(10), BarrierHeader(bucket=9))
        except Unmapped as error:
            return str(error)
        finally:
            if world.rank == 1:
                shared_memory.map_storage = kept
        return ""


def test_rank_that_cannot_map_is_named_by_all(ranks: RankPool) -> None:
    first, second = ranks.run(cannot_map, num_ranks=2)
    assert re.fullmatch(r"rank 1 cannot share bucket 9 of 40 bytes; /dev/shm has [\d,]+ left: enlarge .*", first)
    assert second.startswith("rank 1 cannot share bucket 9 of 40 bytes (no room); ")


def wait_beside_a_thread(world: World) -> tuple[float, int]:
    """Return the CPU seconds that the waiting thread used in a second, and the progress of another thread."""
    counted = 0
    done = threading.Event()

    def count() -> None:
        nonlocal counted
        while not done.is_set():
            counted += 1
            time.sleep(0.001)

    with join(world) as memory:
        buffer = memory.share(torch.ones(4096))
        if world.rank == 0:
            thread = threading.Thread(target=count)
            thread.start()
            began_s = time.thread_time()
            memory.all_reduce(buffer)
            burnt_s = time.thread_time() - began_s
            done.set()
            thread.join()
            assert memory.waited_s > 0.5
            return burnt_s, counted
        time.sleep(1.0)
        memory.all_reduce(buffer)
        return 0.0, 0


def test_waiting_rank_releases_its_core_and_the_interpreter(ranks: RankPool) -> None:
    burnt_s, counted = ranks.run(wait_beside_a_thread, num_ranks=2)[0]
    assert burnt_s < 0.3
    assert counted > 20


@pytest.mark.parametrize(
    "tensor", [torch.ones(4, 4).t(), torch.ones(4, device="meta"), torch.ones(4, dtype=torch.complex64)]
)
def test_tensor_that_cannot_be_shared_is_rejected(tensor: torch.Tensor) -> None:
    with (
        SharedMemory(dist.HashStore(), 0, 1) as memory,  # type: ignore[attr-defined]
        pytest.raises(UserError, match=r"contiguous.*CPU.*real"),
    ):
        memory.share(tensor)


def share_without_end(world: World, dies: int | None) -> None:
    with join(world) as memory:
        for turn in range(10**9):
            # torch creates a file and then removes its name: a kill between the two would leave it.  As in a real run,
            # there are few shares among many sums.
            buffer = memory.share(torch.ones(100_000))
            for _ in range(200):
                memory.all_reduce(buffer, BarrierHeader(step=turn))
            if turn == 3 and world.rank == dies:
                os.kill(os.getpid(), signal.SIGKILL)


def leftover_segments(pids: list[int]) -> list[str]:
    """Return the files of these processes in /dev/shm.  torch names a file after its process."""
    return [
        path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(tuple(f"torch_{p}_" for p in pids))
    ]


def whoami(world: World) -> int:
    return os.getpid()


def test_killed_rank_is_named_and_leaves_nothing_in_dev_shm(ranks: RankPool) -> None:
    """The last test of this file, because the pool must start again."""
    pids = ranks.run(whoami, num_ranks=4)
    assert leftover_segments(pids) == []
    with pytest.raises(RanksFailed, match=r"MissingRank: ranks? (2 has died|[01] has left)") as caught:
        ranks.run(share_without_end, 2, num_ranks=3)  # each has shared and freed memory by then
    assert "rank 2 has died while" in str(caught.value)
    assert leftover_segments(pids) == []
    pids = ranks.run(whoami, num_ranks=4)
    with pytest.raises(RanksFailed, match="no answer from ranks"):
        ranks.run(share_without_end, None, num_ranks=4, timeout_s=2)  # the pool kills them while they work
    assert leftover_segments(pids) == []
