"""The all-reduce on accelerators: who waits for whom, what is issued in which order, and what is said of ranks that do
not come.  On a CUDA that is not there (lab/megabatch_lab/rehearsal)."""

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
from megabatch_lab.rehearsal.backends import REHEARSED, Rehearsed
from megabatch_lab.rehearsal.backends import Work as RehearsedWork
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from megabatch.comm import attach
from megabatch.comm.accelerator.streams import StreamReducer
from megabatch.comm.cpu.barrier import Header
from megabatch.comm.cpu.workers import NodeWorker
from megabatch.comm.faults import failure, watchdog
from megabatch.comm.gradient_all_reduce import GradientAllReduce
from megabatch.comm.settings import CommSettings
from megabatch.comm.work import Work
from megabatch.planning.algorithms import ALGORITHMS
from megabatch.planning.topology import regular
from megabatch.ranks.backends import BACKENDS
from megabatch.ranks.world import World
from megabatch.telemetry.timeline import NoTimeline, Timeline
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
        gradients.reducer.start(key, tensor, plan, Header(step, key, len(tensor)), None, is_last=key == last)
        for key, tensor in enumerate(tensors)
    ]


class Issued:
    """Stands for `PhaseRunner`: keeps which part of which bucket was issued."""

    def __init__(self) -> None:
        self.parts: list[tuple[int, str]] = []

    def scale(self, work: Work) -> None: ...

    def run(self, work: Work, phases: list[Any]) -> None:
        names = {id(getattr(work.phases, name)): name for name in ("before", "network", "after")}
        self.parts.append((work.key, names[id(phases)]))


def order_on_streams(world: World, algorithm: str, num_buckets: int) -> list[list[tuple[int, str]]]:
    """Of what is done in the node: on streams, and by the CPU's thread."""
    with all_reduce_of(world, algorithm) as gradients:
        reducer = gradients.reducer
        assert isinstance(reducer, StreamReducer)
        issued = Issued()
        reducer.runner = issued  # type: ignore[assignment]
        futures = start(gradients, [torch.ones(100, device=world.device) for _ in range(num_buckets)])
        assert all(future.done() for future in futures)
        by_thread = Issued()
        network = SimpleNamespace(queue=SimpleNamespace(put=lambda work: work and work.crossed.set()))
        node = NodeWorker(by_thread, network, NoTimeline())  # type: ignore[arg-type]
        for key in range(num_buckets):
            phases = reducer.phases_for(gradients.plan, 100)
            whole, is_last = torch.ones(100), key == num_buckets - 1
            node.queue.put(Work(key, whole, 0, 100, Header(), gradients.plan, phases, None, is_last, None))
        node.queue.put(None)
        node.thread.join()
    in_node = [part for part in issued.parts if part[1] != "network"]
    assert [key for key, part in issued.parts if part == "network"] == list(range(num_buckets))
    return [in_node, by_thread.parts]


@pytest.mark.parametrize("algorithm", ["torus", "hierarchical"])
@pytest.mark.parametrize("num_buckets", [1, 3, 4, 9])
def test_the_node_works_in_the_order_of_the_cpus_thread(ranks: RankPool, algorithm: str, num_buckets: int) -> None:
    ((streams, thread),) = ranks.run(order_on_streams, algorithm, num_buckets, num_ranks=1, join=mirrored(16, 4))
    assert streams == thread and len(streams) == 2 * num_buckets


def sum_known_numbers(world: World, algorithm: str, dtype: str) -> tuple[list[Any], list[Any]]:
    """Whole numbers, so that every order has the same sum."""
    sizes = (1, 17, 100, 4099, 64, 33)
    with all_reduce_of(world, algorithm, dtype=dtype) as gradients:
        for _ in range(2):  # the first time, layouts are compared
            tensors = [torch.full((size,), float(world.rank + 1), device=world.device) for size in sizes]
            fake_cuda.reset()
            for future in start(gradients, tensors):
                future.wait()
            waits = fake_cuda.seen("sync", "hazard")
        gradients.raise_error()
        assert gradients.exposed_wait_s is None or gradients.exposed_wait_s >= 0
        return [tensor.cpu().tolist() for tensor in tensors], [(wait.name, wait.where) for wait in waits]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("algorithm", [*ALGORITHMS, "ring"])
def test_every_plan_sums_on_streams_and_the_host_waits_for_nothing(ranks: RankPool, algorithm: str, dtype: str) -> None:
    for sums, waits in ranks.run(sum_known_numbers, algorithm, dtype, num_ranks=4, join=on("cuda", regular(2, 2))):
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


def test_nobody_waits_for_a_bucket_after_an_error_and_it_is_raised_as_itself(ranks: RankPool) -> None:
    ((are_done, text),) = ranks.run(fail_in_the_third, num_ranks=1, join=mirrored(16, 4))
    assert are_done == [True] * 3 and text == "no memory is left"


def attach_elsewhere(world: World) -> tuple[set[int], list[list[float]]]:
    """The model is on another device than the current one, which nobody has set."""
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
    ours = [seen for seen in traced if seen.where.startswith("comm/")]  # DDP broadcasts its rebuilt buckets
    launched = {seen.device for seen in ours if seen.kind in ("launch", "allocation")}
    return launched, [parameter.grad.flatten().tolist() for parameter in ddp.parameters()]  # type: ignore[union-attr]


def test_a_model_on_another_device_than_the_current_one_stays_there(ranks: RankPool) -> None:
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


def test_the_rank_that_comes_last_has_waited_least(ranks: RankPool) -> None:
    for late in (0, 2):
        waited_s = ranks.run(wait_for_one, late, num_ranks=3, join=on("cuda"))
        assert min(range(3), key=waited_s.__getitem__) == late


def exposures(world: World) -> list[float | None]:
    seen = []
    with all_reduce_of(world, "torus") as gradients:
        for _ in range(3):
            for future in start(gradients, [torch.ones(10, device=world.device) for _ in range(4)]):
                future.wait()
            seen.append(gradients.exposed_wait_s)
        torch.accelerator.synchronize()
        seen.append(gradients.exposed_wait_s)
    return seen


def test_what_is_exposed_is_known_when_the_device_has_come_so_far(ranks: RankPool) -> None:
    for first, *_, last in ranks.run(exposures, num_ranks=4, join=on("cuda", regular(2, 2))):
        assert first is None and last is not None and last > 0.0


def write_timeline(world: World, algorithm: str, path: str) -> list[str]:
    """Of three steps of three buckets."""
    with all_reduce_of(world, algorithm, timeline=True) as gradients:
        timeline = gradients.timeline
        assert isinstance(timeline, Timeline)
        for step in range(3):
            for future in start(gradients, [torch.ones(100, device=world.device) for _ in range(3)], step):
                future.wait()
        torch.accelerator.synchronize()
        timeline.write(Path(f"{path}-{world.rank}"))
        return [str(phase) for phase in gradients.plan.phases]


@pytest.mark.parametrize("algorithm", ["flat", "torus"])
def test_a_timeline_shows_what_streams_did_between_ready_and_reduced(
    ranks: RankPool, algorithm: str, tmp_path: Path
) -> None:
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


# Ranks that do not come.


class Abortable(Rehearsed):
    """As NCCL's: to abort it ends what is on the way, and whoever waits for the device comes back."""

    has_aborted = False

    def gather_flat(self, out: torch.Tensor, flat: torch.Tensor) -> RehearsedWork:
        begun = super().gather_flat(out, flat)

        def finish() -> None:
            while not begun.is_completed():
                if self.has_aborted:
                    raise RuntimeError("aborted")
                time.sleep(0.005)
            begun.wait()

        return RehearsedWork([], finish)

    def abort(self) -> None:
        self.has_aborted = True


def hang(world: World, lacks: str, stderr: str) -> tuple[str, str]:
    """Rank 1 does not come in its third step.  What is written, unless the process group comes back, is the last."""
    torch.ops.rehearsal.set_lag(0)  # what the host has launched, the device has done
    torch.manual_seed(0)
    backend = REHEARSED._replace(join=Rehearsed if stderr else Abortable)
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
                    if lacks == "beats":  # as if its process were stopped, or its host gone
                        wait_until(lambda: gradients.failure.watchdog.num_beats > 1)
                        gradients.failure.watchdog.ended.set()
                    world.all_reduce(torch.ones(1, device=world.device))  # until all others have aborted
                    if lacks == "beats":
                        return "silent", ""
                out.backward()
                ddp.zero_grad()
        said = ("nothing", "")
    except Exception as error:
        said = type(error).__name__, str(error)
    if world.rank != 1 or lacks == "everything":
        world.all_reduce(torch.ones(1, device=world.device))
    return said


def test_a_rank_that_hangs_is_named_with_parameters_that_it_lacks(ranks: RankPool) -> None:
    first, _, third = ranks.run(hang, "gradients", "", num_ranks=3, join=on("cuda"))
    for kind, text in (first, third):
        assert kind == "MissingRank" and text.startswith("step 2, bucket 0: other ranks did not come within 2 s"), text
        assert "rank 1 has reduced 0 buckets of step 2 and has no gradient yet of 0.weight, 0.bias, " in text, text


def test_a_rank_of_which_nothing_is_heard_is_missed_before_the_timeout(ranks: RankPool) -> None:
    first, _, third = ranks.run(hang, "beats", "", num_ranks=3, join=on("cuda"))
    for kind, text in (first, third):
        assert kind == "MissingRank", text
    assert first[1].startswith("step 2, bucket 0: rank 1 has not been heard of for "), first
    assert "another rank has aborted" in third[1] and "rank 1 says nothing" in third[1], third


def test_a_rank_that_raises_is_missed_before_the_timeout(ranks: RankPool) -> None:
    first, second, third = ranks.run(hang, "everything", "", num_ranks=3, join=on("cuda"))
    assert second == ("ValueError", "this image is broken")
    for kind, text in (first, third):
        assert kind == "MissingRank" and "rank 1 has aborted: ValueError: this image is broken" in text, text


def test_a_process_that_its_device_does_not_let_go_of_ends_with_the_line(ranks: RankPool, tmp_path: Path) -> None:
    """Last in this file: the pool must start again."""
    with pytest.raises(RanksFailed, match="its process ended without a word"):
        ranks.run(hang, "gradients", str(tmp_path / "stderr"), num_ranks=3, join=on("cuda"))
    lines = {rank: (tmp_path / f"stderr-{rank}").read_text() for rank in (0, 2)}
    for rank, line in lines.items():
        assert line.startswith(f"megabatch: rank {rank}: step 2, bucket 0: other ranks did not come within 2 s")
        assert line.count("\n") == 1 and "; rank 1 has " in line
    # The other one may come to it so late that rank 1 has ended because of the first.
    lacks = "has reduced 0 buckets of step 2 and has no gradient yet of 0.weight, "
    assert any(lacks in line for line in lines.values())
