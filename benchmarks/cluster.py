"""megabatch bench cluster: all-reduces of a model's gradients among hosts, ours against Gloo as DDP uses it.

Hosts are network namespaces with cards of a given rate (hosts.py), ranks are torchrun's.  Gradients have the shapes of
a real model's, lie one after another in backward order, and are all ready at once.  All arms work on the same memory,
one thread a rank, and take turns, the order turned every round.  A time is that of the slowest rank, from a barrier
until it has all sums; what counts is the median of the rounds.  Each arm's sums are checked before.
ours        buckets and plans as `choose` has them, through `Groups` and `Reducer`, as under `attach`
ddp_gloo    what DistributedDataParallel does, less its copies: its default buckets (1 MiB, then 25 MiB); for each, in
            order, a division by the number of ranks and an asynchronous dist.all_reduce of Gloo; a wait for all
per_tensor  an asynchronous dist.all_reduce of Gloo for each gradient, all started in order; a wait for all
The network card counts what our arm really sends to other hosts: if that is not what its plans say, the bench fails.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from msgspec import Struct

from benchmarks.host_ranks import RESULT, TASK, run_ranks
from benchmarks.hosts import hosts, require_tools
from benchmarks.report import print_lines, write
from benchmarks.setups import name_setup, read_models, read_rates, read_setups, read_wires, require_num_hosts
from megabatch.cli.ranks import be_a_rank
from megabatch.comm.barrier import Header
from megabatch.comm.discover import Place, discover
from megabatch.comm.groups import Groups
from megabatch.comm.notices import Notices
from megabatch.comm.reducer import Reducer
from megabatch.comm.settings import CommSettings, choose_plan
from megabatch.comm.world import World, connect
from megabatch.models.catalog import ModelSettings, build_model
from megabatch.planning.buckets import MIB, Gradient, ddp_buckets, fuse
from megabatch.planning.plan import BLOCK, Plan, Wire

DDP_CAPS_BYTES = [MIB, 25 * MIB]
TIMEOUT_S = 120.0

Arm = Callable[[], None]


class Task(Struct, frozen=True):
    """What ranks measure."""

    models: list[str]
    wires: list[Wire]
    rounds: int
    gbps: float
    stream_gbps: float
    num_hosts: int
    ranks_per_host: int | str


def run(
    num_hosts: int,
    setups: str | None,
    rates: str | None,
    wires: str | None,
    models: Sequence[str] | None,
    rounds: int,
    json_file: Path | None,
) -> None:
    """Starts hosts and ranks, and reports what they have measured."""
    require_num_hosts(num_hosts)
    chosen_setups = read_setups(setups or "2,4", num_hosts)
    chosen_rates = read_rates(rates or "1,2.5")
    chosen_wires = read_wires(wires or "fp32,bf16")
    chosen_models = read_models(models or ["resnet50", "alexnet"])
    require_tools()
    rows: list[dict[str, Any]] = []
    for gbps in chosen_rates:
        with hosts(num_hosts, gbps) as cluster:
            stream_gbps = cluster.stream_gbps()
            for ranks in chosen_setups:
                task = Task(chosen_models, chosen_wires, rounds, gbps, stream_gbps, num_hosts, name_setup(ranks))
                answer = run_ranks(cluster, ranks, "benchmarks.cluster", msgspec.json.encode(task))
                rows += json.loads(answer)
    print_lines([line(row) for row in rows])
    write(rows, json_file)


def run_rank(place: Place, notices: Notices, notes: Path) -> int:
    task = msgspec.json.decode((notes / TASK).read_bytes(), type=Task)
    with connect(place, "cpu", notices.store, TIMEOUT_S) as world:
        try:
            rows = [row for model in task.models for row in measure(model, task, world, place.local_rank == 0)]
        except BaseException:
            notices.is_first_to_fail()  # while the others still trust this rank
            raise
    if place.rank == 0:
        (notes / RESULT).write_text(json.dumps(rows))
    return 0


def gradient_sizes(model: str) -> list[int]:
    """Elements of each gradient, in backward order."""
    with torch.device("meta"):
        built = build_model(ModelSettings(name=model), 0, 1000, 3, 224)
    return [parameter.numel() for parameter in reversed(list(built.parameters()))]


class Gradients:
    """All of a model's, in one piece of memory; each begins at a cache line, as torch's own allocations do."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes
        self.begins = [0]
        for size in sizes:
            self.begins.append(self.begins[-1] + -(-size // BLOCK) * BLOCK)
        self.flat = torch.zeros(self.begins[-1])

    def bucket(self, indices: Sequence[int]) -> torch.Tensor:
        assert list(indices) == list(range(indices[0], indices[-1] + 1)), indices
        return self.flat[self.begins[indices[0]] : self.begins[indices[-1] + 1]]

    @property
    def described(self) -> list[Gradient]:
        return [Gradient(4 * size, "float32") for size in self.sizes]


def choose(
    groups: Groups, gradients: Sequence[Gradient], settings: CommSettings
) -> tuple[list[tuple[list[int], Plan]], float | None]:
    """Buckets with their plans, and the seconds that all of them should take, where that is known."""
    plan = choose_plan(settings, groups.topology, groups.may_share())
    groups.open({phase.axis for phase in plan.phases})
    return [(bucket, plan) for bucket in fuse(gradients, round(settings.bucket_mb * MIB))], None


class Ours:
    def __init__(self, world: World, gradients: Gradients, settings: CommSettings) -> None:
        self.groups = Groups(dist.group.WORLD, world.device, TIMEOUT_S)
        world.closing.callback(self.groups.close)
        chosen, self.predicted_s = choose(self.groups, gradients.described, settings)
        self.plans = [plan for _, plan in chosen]
        self.buckets = [gradients.bucket(indices) for indices, _ in chosen]
        self.reducer = Reducer(self.groups, lambda error, work, axis: error)
        world.closing.callback(self.reducer.close)
        self.step = 0

    def __call__(self) -> None:
        futures = []
        for key, (tensor, plan) in enumerate(zip(self.buckets, self.plans, strict=True)):
            header = Header(self.step, key, len(tensor))
            is_last = key == len(self.buckets) - 1
            futures.append(self.reducer.start(key, tensor, plan, header, None, is_last))
        for future in futures:
            future.wait()
        if self.reducer.error:
            raise self.reducer.error
        self.step += 1


def ddp_gloo(gradients: Gradients, num_ranks: int) -> Arm:
    buckets = [gradients.bucket(indices) for indices in ddp_buckets(gradients.described, DDP_CAPS_BYTES)]

    def reduce() -> None:
        works = [dist.all_reduce(bucket.div_(num_ranks), async_op=True) for bucket in buckets]
        for work in works:
            work.wait()

    return reduce


def per_tensor(gradients: Gradients) -> Arm:
    tensors = [gradients.bucket([index]) for index in range(len(gradients.sizes))]

    def reduce() -> None:
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        for work in works:
            work.wait()

    return reduce


def measure(model: str, task: Task, world: World, counts: bool) -> list[dict[str, Any]]:
    """A row for each wire."""
    gradients = Gradients(gradient_sizes(model))
    ours = {wire: Ours(world, gradients, CommSettings(wire=wire)) for wire in task.wires}
    arms: dict[str, Arm] = {f"ours_{wire}": arm for wire, arm in ours.items()}
    arms |= {"ddp_gloo": ddp_gloo(gradients, world.num_ranks), "per_tensor": per_tensor(gradients)}
    for name, arm in arms.items():
        check(name, arm, gradients.flat, world, 1 / world.num_ranks if name == "ddp_gloo" else 1.0)
    times: dict[str, list[float]] = {name: [] for name in arms}
    sent: dict[str, list[float]] = {name: [] for name in arms}
    names = list(arms)
    for turn in range(task.rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            seconds, num_bytes = time_call(arms[name], counts)
            times[name].append(seconds)
            sent[name].append(num_bytes)
    medians = {name: statistics.median(times[name]) for name in arms}
    rows = []
    for wire, arm in ours.items():
        ours_s = medians[f"ours_{wire}"]
        rows.append(
            {
                "model": model,
                "gbps": task.gbps,
                "hosts": task.num_hosts,
                "ranks_per_host": task.ranks_per_host,
                "wire": wire,
                "algorithm": "+".join(dict.fromkeys(plan.name.partition("/")[0] for plan in arm.plans)),
                "ours_s": ours_s,
                "ddp_gloo_s": medians["ddp_gloo"],
                "per_tensor_s": medians["per_tensor"],
                "predicted_s": arm.predicted_s,
                "bytes_counted": statistics.mean(sent[f"ours_{wire}"]),
                "ddp_ratio": medians["ddp_gloo"] / ours_s,
                "per_tensor_ratio": medians["per_tensor"] / ours_s,
                "stream_gbps": task.stream_gbps,
                "rounds": task.rounds,
            }
        )
    return rows


def check(name: str, arm: Arm, flat: torch.Tensor, world: World, scale: float) -> None:
    """Small whole numbers, whose sums even bf16 holds exactly.  Leaves zeros, which stay zeros."""
    period, chunk = 3, 3 << 20
    own = (torch.arange(chunk) + world.rank) % period
    total = sum((torch.arange(chunk) + rank) % period for rank in range(world.num_ranks)) * scale
    for part in flat.split(chunk):
        part.copy_(own[: len(part)])
    dist.barrier()
    arm()
    for part in flat.split(chunk):
        torch.testing.assert_close(part, total[: len(part)].float(), rtol=0 if scale == 1 else 1e-6, atol=0)
        part.zero_()


def time_call(arm: Arm, counts: bool) -> tuple[float, float]:
    """Seconds of the slowest rank, and bytes that all hosts together have sent."""
    sent = bytes_sent() if counts else 0
    dist.barrier()
    started_s = time.perf_counter()
    arm()
    elapsed_s = time.perf_counter() - started_s
    dist.barrier()
    found = torch.tensor([elapsed_s, (bytes_sent() if counts else 0) - sent], dtype=torch.float64)
    arrived = [torch.empty_like(found) for _ in range(dist.get_world_size())]
    dist.all_gather(arrived, found)
    seconds, num_bytes = torch.stack(arrived).T
    return seconds.max().item(), num_bytes.sum().item()


def bytes_sent() -> int:
    """By this host to others, since it was made."""
    cards = Path("/proc/self/net/dev").read_text().splitlines()
    return next(int(line.split(":")[1].split()[8]) for line in cards if line.strip().startswith("eth0:"))


def line(row: dict[str, Any]) -> dict[str, str]:
    shown = {name: str(row[name]) for name in ("model", "gbps", "hosts", "ranks_per_host", "wire", "algorithm")}
    shown |= {f"{name} s": f"{row[f'{name}_s']:.3f}" for name in ("ours", "ddp_gloo", "per_tensor")}
    shown |= {f"{name} / ours": f"{row[f'{name}_ratio']:.2f}" for name in ("ddp", "per_tensor")}
    return shown | {"MB counted": f"{row['bytes_counted'] / 1e6:.1f}"}


if __name__ == "__main__":
    place = discover()
    assert place
    be_a_rank(place, lambda notices: run_rank(place, notices, Path(sys.argv[1])))
