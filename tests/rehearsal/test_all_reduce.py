"""The all-reduce on accelerators: waits, the order of operations, and reports of missing ranks, on the fake CUDA."""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megabatch_lab.rehearsal import fake_cuda
from megabatch_lab.rehearsal.backends import REHEARSED, FakeWork, Rehearsed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from megabatch.comm import attach
from megabatch.comm.accelerator.streams import StreamReducer
from megabatch.comm.cpu.barrier import BarrierHeader
from megabatch.comm.cpu.workers import NodeWorker
from megabatch.comm.faults import failure, watchdog
from megabatch.comm.gradient_all_reduce import GradientAllReduce
from megabatch.comm.settings import CommSettings
from megabatch.comm.work import Work
from megabatch.planning.algorithms import ALGORITHMS
from megabatch.planning.topology import regular
from megabatch.ranks.backends import BACKENDS, cannot_split
from megabatch.ranks.world import World
from megabatch.telemetry.timeline import Timeline
from tests.support.processes import wait_until
from tests.support.rank_pool import RankPool, RanksFailed
from tests.support.rehearsals import mirrored, on

KIB = 1 / 1024  # as bucket_cap_mb: several buckets


def layers(width: int = 40) -> nn.Module:
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 30), nn.Tanh(), nn.Linear(30, 3))


@contextmanager
def all_reduce_of(world: World, algorithm: str, **settings: Any) -> Iterator[GradientAllReduce]:
    comm = CommSettings(algorithm=algorithm, **settings)
    with GradientAllReduce(
        layers(), None, world.device, comm, backend=world.backend, topology=world.topology
    ) as gradients:
        yield gradients


def start(
    gradients: GradientAllReduce, tensors: list[torch.Tensor], step: int = 0
) -> list[torch.futures.Future[torch.Tensor]]:
    plan, last = gradients.plan, len(tensors) - 1
    return [
        gradients.reducer.start(key, tensor, plan, BarrierHeader(step, key, len(tensor)), None, is_last=key == last)
        for key, tensor in enumerate(tensors)
    ]


class Issued:
    """Replaces `PhaseRunner` and records the issued parts of buckets."""

    def __init__(self) -> None:
        self.parts: list[tuple[int, str]] = []

    def scale(self, work: Work) -> None: ...

    def run(self, work: Work, phases: list[Any]) -> None:
        names = {id(getattr(work.phases, name)): name for name in ("before", "network", "after")}
        self.parts.append((work.key, names[id(phases)]))


def order_on_streams(world: World, algorithm: str, num_buckets: int) -> list[list[tuple[int, str]]]:
    """Return the order of work inside the node: on streams, and in the CPU's thread."""
    with all_reduce_of(world, algorithm) as gradients:
        reducer = gradients.reducer
        assert isinstance(reducer, StreamReducer)
        issued = Issued()
        reducer.runner = issued  # type: ignore[assignment]
        futures = start(gradients, [torch.ones(100, device=world.device) for _ in range(num_buckets)])
        assert all(future.done() for future in futures)
        by_thread = Issued()
        network = SimpleNamespace(queue=SimpleNamespace(put=lambda work: work and work.crossed.set()))
        node = NodeWorker(by_thread, network, Timeline())  # type: ignore[arg-type]
        for key in range(num_buckets):
            phases = reducer.phases_for(gradients.plan, 100)
            whole, is_last = torch.ones(100), key == num_buckets - 1
            header = BarrierHeader()
            node.queue.put(Work(key, whole, 0, 100, header, gradients.plan, phases, None, is_last, None))
        node.queue.put(None)
        node.thread.join()
    in_node = [part for part in issued.parts if part[1] != "network"]
    assert [key for key, part in issued.parts if part == "network"] == list(range(num_buckets))
    return [in_node, by_thread.parts]


@pytest.mark.parametrize("algorithm", ["torus", "hierarchical"])
@pytest.mark.parametrize("num_buckets", [1, 3, 4, 9])
def test_work_in_the_node_has_the_order_of_the_cpus_thread(ranks: RankPool, algorithm: str, num_buckets: int) -> None:
    ((streams, thread),) = ranks.run(order_on_streams, algorithm, num_buckets, num_ranks=1, join=mirrored(16, 4))
    assert streams == thread and len(streams) == 2 * num_buckets


def reduce_known_numbers(world: World, algorithm: str, dtype: str) -> tuple[list[Any], list[Any]]:
    """Reduce integers, whose sum does not depend on the order."""
    sizes = (1, 17, 100, 4099, 64, 33)
    with all_reduce_of(world, algorithm, dtype=dtype) as gradients:
        for _ in range(2):  # the first call compares layouts
            tensors = [torch.full((size,), float(world.rank + 1), device=world.device) for size in sizes]
            fake_cuda.reset()
            for future in start(gradients, tensors):
                future.wait()
            waits = fake_cuda.seen("sync", "hazard")
        gradients.raise_error()
        return [tensor.cpu().tolist() for tensor in tensors], [(wait.name, wait.where) for wait in waits]


@pytest.mark.parametrize("dtype", ["same", "bf16"])
@pytest.mark.parametrize("algorithm", [*ALGORITHMS, "ring"])
def test_every_plan_reduces_on_streams_without_waits_of_the_host(ranks: RankPool, algorithm: str, dtype: str) -> None:
    for sums, waits in ranks.run(reduce_known_numbers, algorithm, dtype, num_ranks=4, join=on("cuda", regular(2, 2))):
        assert all(set(tensor) == {10.0} for tensor in sums)
        assert waits == []


def fail_in_the_third(world: World) -> tuple[list[bool], str]:
    with all_reduce_of(world, "torus") as gradients:
        reducer = gradients.reducer
        assert isinstance(reducer, StreamReducer)
        with patch.object(reducer.runner, "scale", side_effect=[None, None, ValueError("no memory is left")]):
            futures = start(gradients, [torch.ones(100, device=world.device) for _ in range(3)])
        with pytest.raises(ValueError, match="no memory is left") as caught:
            gradients.raise_error()
        return [future.done() for future in futures], str(caught.value)


def test_error_completes_all_buckets_and_is_raised_unchanged(ranks: RankPool) -> None:
    ((are_done, text),) = ranks.run(fail_in_the_third, num_ranks=1, join=mirrored(16, 4))
    assert are_done == [True] * 3 and text == "no memory is left"


def attach_elsewhere(world: World) -> tuple[set[int], list[list[float]]]:
    """Attach to a model on another device than the current one."""
    device = torch.device("cuda", world.rank + 2)
    torch.manual_seed(0)
    ddp = DistributedDataParallel(layers().to(device), bucket_cap_mb=KIB)
    torch.accelerator.set_device_index(0)
    with (
        patch.dict(BACKENDS, cuda=REHEARSED),
        fake_cuda.traced() as traced,
        attach(ddp, algorithm="torus", dtype="bf16"),
    ):
        for _ in range(3):
            ddp(torch.ones(5, 6, device=device)).sum().backward()
        assert torch.accelerator.current_device_index() == 0
    ours = [seen for seen in traced if seen.where.startswith("comm/")]  # without DDP's broadcast of its rebuilt buckets
    launched = {seen.device for seen in ours if seen.kind in ("launch", "allocation")}
    return launched, [parameter.grad.flatten().tolist() for parameter in ddp.parameters()]  # type: ignore[union-attr]


def test_model_on_another_device_than_the_current_one_stays_there(ranks: RankPool) -> None:
    results = ranks.run(attach_elsewhere, num_ranks=2, join=on("cuda"))
    assert [devices for devices, _ in results] == [{2}, {3}]
    assert results[0][1] == results[1][1]


def wait_for_one(world: World, late: int) -> float:
    with all_reduce_of(world, "flat") as gradients:
        for step in range(4):
            if world.rank == late and step:
                time.sleep(0.2)
            for future in start(gradients, [torch.ones(10, device=world.device) for _ in range(2)]):
                future.wait()
        torch.accelerator.synchronize()
        return gradients.waited_s


def test_last_rank_has_waited_least(ranks: RankPool) -> None:
    for late in (0, 2):
        waited_s = ranks.run(wait_for_one, late, num_ranks=3, join=on("cuda"))
        assert min(range(3), key=waited_s.__getitem__) == late


def write_timeline(world: World, algorithm: str, path: str) -> list[str]:
    """Write the timeline of three steps of three buckets."""
    with all_reduce_of(world, algorithm, timeline=True) as gradients:
        timeline = gradients.timeline
        for step in range(3):
            for future in start(gradients, [torch.ones(100, device=world.device) for _ in range(3)], step):
                future.wait()
        torch.accelerator.synchronize()
        timeline.write(Path(f"{path}-{world.rank}"))
        return [str(phase) for phase in gradients.plan.phases]


@pytest.mark.parametrize("algorithm", ["flat", "torus"])
def test_timeline_shows_phases_between_ready_and_reduced(ranks: RankPool, algorithm: str, tmp_path: Path) -> None:
    join = on("cuda", regular(2, 2))
    all_phases = ranks.run(write_timeline, algorithm, str(tmp_path / "rank"), num_ranks=4, join=join)
    for rank, phases in enumerate(all_phases):
        rows = [row for row in json.loads((tmp_path / f"rank-{rank}").read_text())["traceEvents"] if row["ph"] != "M"]
        for step in (1, 2, 3):
            for bucket in ("bucket 0", "bucket 1", "bucket 2"):
                of_bucket = [row for row in rows if row["args"]["step"] == step and row["name"].startswith(bucket)]
                (ready,) = [row for row in of_bucket if row["ph"] == "i"]
                (reduced,) = [row for row in of_bucket if row["ph"] == "e"]
                spans = sorted((row for row in of_bucket if row["ph"] == "X"), key=lambda row: float(row["ts"]))
                assert [row["name"] for row in spans] == [f"{bucket}: {phase}" for phase in phases]
                assert ready["ts"] <= spans[0]["ts"] and spans[-1]["ts"] + spans[-1]["dur"] <= reduced["ts"] + 0.01


class Abortable(Rehearsed):
    """Like NCCL: an abort ends collectives in flight, and waits for the device return."""

    has_aborted = False

    def gather_flat(self, out: torch.Tensor, flat: torch.Tensor) -> FakeWork:
        work = super().gather_flat(out, flat)

        def finish() -> None:
            while not work.is_completed():
                if self.has_aborted:
                    raise RuntimeError("aborted")
                time.sleep(0.005)
            work.wait()

        return FakeWork([], finish)

    def abort(self) -> None:
        self.has_aborted = True


def hang(world: World, lacks: str, stderr: str) -> tuple[str, str]:
    """Rank 1 does not join in its third step.  With `stderr`, the process group cannot abort and the process ends."""
    torch.ops.rehearsal.set_lag(0)  # the device has no delay
    torch.manual_seed(0)
    backend = REHEARSED._replace(join=Rehearsed if stderr else Abortable, split=cannot_split)
    if stderr:
        sys.stderr, failure.LEFT_WITHIN_S = Path(f"{stderr}-{world.rank}").open("w"), 0.1  # noqa: SIM115
    model = layers().to(world.device)
    ddp = DistributedDataParallel(model, bucket_cap_mb=KIB)
    comm = CommSettings(algorithm="flat", timeout_s=600.0 if lacks == "beats" else 2.0)
    watchdog.SILENT_S, watchdog.LOOK_EVERY_S = (0.5, 0.1) if lacks == "beats" else (15.0, 2.0)
    gradients = GradientAllReduce(model, None, world.device, comm, backend=backend)
    ddp.register_comm_hook(gradients, lambda state, bucket: state.start_bucket(bucket))
    try:
        with gradients:
            for step in range(3):
                out = ddp(torch.ones(5, 6, device=world.device)).sum()
                if step == 2 and world.rank == 1:
                    if lacks == "everything":
                        raise ValueError("this image is broken")
                    if lacks == "beats":  # as if its process were stopped or its host lost
                        wait_until(lambda: gradients.failure.watchdog.store.check(["beat/1"]))
                        gradients.failure.watchdog.ended.set()
                    world.all_reduce(torch.ones(1, device=world.device))  # waits until all others have aborted
                    if lacks == "beats":
                        return "silent", ""
                out.backward()
                ddp.zero_grad()
        raised = ("nothing", "")
    except Exception as error:
        raised = type(error).__name__, str(error)
    if world.rank != 1 or lacks == "everything":
        world.all_reduce(torch.ones(1, device=world.device))
    return raised


def test_hanging_rank_is_named_with_its_missing_gradients(ranks: RankPool) -> None:
    first, _, third = ranks.run(hang, "gradients", "", num_ranks=3, join=on("cuda"))
    for kind, text in (first, third):
        assert kind == "MissingRank" and text.startswith("step 2, bucket 0: other ranks did not arrive within "), text
        assert "rank 1 has reduced 0 buckets of step 2 and has no gradient yet for 0.weight, 0.bias, " in text, text


def test_silent_rank_is_detected_before_the_timeout(ranks: RankPool) -> None:
    first, _, third = ranks.run(hang, "beats", "", num_ranks=3, join=on("cuda"))
    for kind, text in (first, third):
        assert kind == "MissingRank", text
    assert first[1].startswith("step 2, bucket 0: rank 1 has sent no heartbeat for "), first
    assert "another rank has aborted" in third[1] and "rank 1 does not respond" in third[1], third


def test_rank_that_raises_is_detected_before_the_timeout(ranks: RankPool) -> None:
    first, second, third = ranks.run(hang, "everything", "", num_ranks=3, join=on("cuda"))
    assert second == ("ValueError", "this image is broken")
    for kind, text in (first, third):
        assert kind == "MissingRank" and "rank 1 has aborted: ValueError: this image is broken" in text, text


def test_process_stuck_in_its_device_ends_with_one_line(ranks: RankPool, tmp_path: Path) -> None:
    """The last test of this file, because the pool must start again."""
    with pytest.raises(RanksFailed, match="its process exited without a message"):
        ranks.run(hang, "gradients", str(tmp_path / "stderr"), num_ranks=3, join=on("cuda"))
    lines = {rank: (tmp_path / f"stderr-{rank}").read_text() for rank in (0, 2)}
    for rank, line in lines.items():
        assert line.startswith(f"megabatch: rank {rank}: step 2, bucket 0: other ranks did not arrive within 2 s")
        assert line.count("\n") == 1 and "; rank 1 has " in line
    # The second rank may be so late that rank 1 has already ended because of the first.
    lacks = "has reduced 0 buckets of step 2 and has no gradient yet for 0.weight, "
    assert any(lacks in line for line in lines.values())
