"""megabatch bench cluster: all-reduces of a model's gradients among hosts, ours against Gloo's as DDP calls it.

Hosts are network namespaces with cards of a given rate (hosts.py), and torchrun starts the ranks, one thread each.
Gradients have the shapes of a real model's and are all ready at once.  All arms live in the same ranks, work on the
same memory and take turns, the order turned every round.  A time is that of the slowest rank, from a barrier until it
has all sums; what counts is the median of the rounds.  Each arm's sums are checked first, which also warms it up.
ours        buckets and plans as a run tunes them, through the reducer of a run
ddp_gloo    what DistributedDataParallel does, less its copies: its default buckets (1 MiB, then 25 MiB); for each, in
            order, a division by the number of ranks and an asynchronous dist.all_reduce of Gloo; a wait for all
per_tensor  an asynchronous dist.all_reduce of Gloo for each gradient, all started in order; a wait for all
forced      (--compare) ours, with one algorithm for all buckets, and buckets tuned for it
The peers send fp32: Gloo's sums of 16 bits round at every hop.  `wire_limit_s` is what the busiest host's bytes take at
the nominal rate, `bytes_planned` what our plans send between hosts, and `bytes_counted` what the hosts' cards have
counted while our arm ran: if those differ, traffic took another way or more travelled, and the bench fails.

With --train: a training of AlexNet-BN on such hosts, our trainer against stock DDP, measured as by bench train, with
the i-th ranks of all hosts bound to the i-th core.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from msgspec import Struct

from megabatch.comm.cpu.barrier import Header
from megabatch.comm.cpu.workers import Reducer
from megabatch.comm.faults.failure import FirstError
from megabatch.comm.groups import AXES, Groups
from megabatch.comm.settings import CommSettings
from megabatch.comm.tune import tune
from megabatch.planning.algorithms import ALGORITHMS, candidate_plans
from megabatch.planning.buckets import MIB, ddp_buckets
from megabatch.planning.pipeline import Gradient, RecordedBackward
from megabatch.planning.plan import CommDtype
from megabatch.planning.topology import ClusterShape
from megabatch.planning.tuning import Tuning
from megabatch.ranks.discover import RankInfo, discover
from megabatch.ranks.lifecycle import be_a_rank
from megabatch.ranks.machine import usable_cores
from megabatch.ranks.store import RankStore
from megabatch.ranks.world import World, connect
from megabatch.telemetry.timeline import NoTimeline
from megabatch_lab.bench.gradient_sets import GradientSet, gradient_sizes
from megabatch_lab.bench.host_ranks import RESULT, TASK, run_ranks
from megabatch_lab.bench.hosts import hosts
from megabatch_lab.bench.report import print_lines, write
from megabatch_lab.bench.setups import Ranks, Request, name_setup
from megabatch_lab.bench.train import compare
from megabatch_lab.chaos.namespaces import require_tools

DDP_CAPS_BYTES = [MIB, 25 * MIB]
TIMEOUT_S = 120.0
STEPS_A_BLOCK = 3  # of training
# Headers are 66 bytes a segment; what barriers, and TCP where it sends something twice, add weighs more in small sets.
BYTES_TOLERANCE, BYTES_SLACK = 0.05, 256 << 10
TRAINING = [
    "model.name=alexnet_bn",
    "data.source=synthetic",
    "data.image_size=64",
    "data.synthetic.train=256",
    "data.synthetic.test=16",
    "data.synthetic.classes=1000",
    "batch.micro=8",
    "optim.learning_rate=0.01",
]

Arm = Callable[[], None]
Row = dict[str, Any]


class Task(Struct, frozen=True):
    """What one set of ranks measures."""

    request: Request
    sizes: dict[str, list[int]]  # of each model's gradients
    gbps: float
    stream_gbps: float
    ranks: Ranks
    rounds: int

    @property
    def columns(self) -> Row:
        """What all its rows have in common."""
        return {"gbps": self.gbps, "hosts": self.request.num_hosts, "ranks_per_host": name_setup(self.ranks)}


def run(request: Request, rounds: int, json_file: Path | None) -> list[Row]:
    """Makes hosts, starts ranks there, and reports what they have measured."""
    require_tools()
    sizes = {model: gradient_sizes(model) for model in request.models}
    rows: list[Row] = []
    for gbps in request.rates_gbps:
        with hosts(request.num_hosts, gbps) as cluster:
            stream_gbps = cluster.stream_gbps()
            for ranks in request.setups:
                task = Task(request, sizes, gbps, stream_gbps, ranks, rounds)
                answer = run_ranks(cluster, ranks, "megabatch_lab.bench.cluster", msgspec.json.encode(task))
                measured = json.loads(answer)
                print_lines([training_line(row) if request.trains else line(row) for row in measured])
                rows += measured
                write(rows, json_file)  # a later set-up may fail, half an hour on
    for row in rows if not request.trains else ():
        require_planned_bytes(row)
    return rows


def require_planned_bytes(row: Row) -> None:
    planned, counted = row["bytes_planned"], row["bytes_counted"]
    if abs(counted - planned) > BYTES_TOLERANCE * planned + BYTES_SLACK:
        place = f"{row['model']} at {row['gbps']:g} Gb/s, ranks per host {row['ranks_per_host']}, {row['wire']}"
        sys.exit(
            f"megabatch: {place}: hosts have sent {counted:,.0f} bytes, and the plans say {planned:,}; "
            f"more than {BYTES_TOLERANCE:.0%} apart, so these times are of something else"
        )


def run_rank(info: RankInfo, store: RankStore, scratch: Path) -> int:
    """One rank of the bench; rank 0 leaves the rows.  Returns the exit code."""
    task = msgspec.json.decode((scratch / TASK).read_bytes(), type=Task)
    if task.request.trains:
        bind_to_core(info.local_rank)
    with connect(info, "cpu", store.store, TIMEOUT_S) as world:
        try:
            if task.request.trains:
                rows = [measure_training(wire, task, world) for wire in task.request.wires]
            else:
                rows = [row for model in task.request.models for row in measure(model, task, world, info)]
        except BaseException:
            store.is_first_to_fail()  # while the others still trust this rank
            raise
    if info.rank == 0:
        (scratch / RESULT).write_text(json.dumps(rows))
    return 0


def bind_to_core(local_rank: int) -> None:
    """Hosts share the machine's cores.  Left to themselves, ranks of one host run while another's wait, up to 0.4 s a
    step, and all-reduces wait for the last."""
    cores = sorted(usable_cores())
    os.sched_setaffinity(0, {cores[local_rank % len(cores)]})


class Ours:
    """Our all-reduce of a whole set, by a choice of its own.  All ranks make it, call it and close it together."""

    def __init__(self, gradients: GradientSet, groups: Groups, choose: Callable[[Reducer], Tuning]) -> None:
        self.reducer = Reducer(groups, FirstError(), NoTimeline())
        self.tuning = choose(self.reducer)
        self.buckets = [
            (gradients.bucket([int(name) for name in bucket.gradients]), bucket.plan) for bucket in self.tuning.buckets
        ]
        self.num_calls = 0

    def __call__(self) -> None:
        self.num_calls += 1
        last = len(self.buckets) - 1
        futures = [
            self.reducer.start(key, tensor, plan, Header(self.num_calls, key, len(tensor)), None, key == last)
            for key, (tensor, plan) in enumerate(self.buckets)
        ]
        for future in futures:
            future.wait()
        self.reducer.failure.raise_error()

    def close(self) -> None:
        dist.barrier()
        self.reducer.close()


def as_a_run_tunes(gradients: GradientSet, settings: CommSettings, reducer: Reducer) -> Tuning:
    shape = reducer.groups.topology.shape
    plans = candidate_plans(settings.algorithm, settings.dtype, shape, in_memory=True, on_accelerators=False)
    return tune(reducer, plans, ready_at_once(gradients.described), settings)


def ready_at_once(gradients: Sequence[Gradient]) -> RecordedBackward:
    return RecordedBackward([str(index) for index in range(len(gradients))], gradients, [0.0] * len(gradients))


def ddp_gloo(gradients: GradientSet, num_ranks: int) -> Arm:
    buckets = [gradients.bucket(indices) for indices in ddp_buckets(gradients.described, DDP_CAPS_BYTES)]

    def reduce() -> None:
        works = [dist.all_reduce(bucket.div_(num_ranks), async_op=True) for bucket in buckets]
        for work in works:
            work.wait()

    return reduce


def per_tensor(gradients: GradientSet) -> Arm:
    tensors = [gradients.bucket([index]) for index in range(len(gradients.sizes))]

    def reduce() -> None:
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        for work in works:
            work.wait()

    return reduce


def measure(model: str, task: Task, world: World, info: RankInfo) -> list[Row]:
    """A row for each dtype that travels."""
    gradients = GradientSet(task.sizes[model])
    with ExitStack() as stack:
        groups = stack.enter_context(closing(Groups(dist.group.WORLD, torch.device("cpu"), TIMEOUT_S)))
        groups.open(AXES)

        def ours(settings: CommSettings) -> Ours:
            made = Ours(gradients, groups, partial(as_a_run_tunes, gradients, settings))
            stack.callback(made.close)
            return made

        chosen = {wire: ours(CommSettings(dtype=wire)) for wire in task.request.wires}
        forced = {
            (name, wire): ours(CommSettings(algorithm=name, dtype=wire))
            for wire in chosen
            for name in (applying(groups.topology.shape, wire) if task.request.compares else ())
        }
        arms: dict[str, Arm] = {
            **{f"ours_{wire}": arm for wire, arm in chosen.items()},
            **{f"{name}_{wire}": arm for (name, wire), arm in forced.items()},
            "ddp_gloo": ddp_gloo(gradients, world.num_ranks),
            "per_tensor": per_tensor(gradients),
        }
        for name, arm in arms.items():
            gradients.fill(world.rank)
            dist.barrier()
            arm()
            gradients.check(world.num_ranks, 1 / world.num_ranks if name == "ddp_gloo" else 1.0)
        times_s, sent = take_turns(arms, task.rounds, info.local_rank == 0)
        rows = []
        for wire, arm in chosen.items():
            of_wire = {name: arm for (name, other), arm in forced.items() if other == wire}
            row = make_row(model, wire, arm, task, times_s, sent[f"ours_{wire}"])
            rows.append(row | compare_forced(wire, of_wire, times_s) if of_wire else row)
        return rows


def applying(shape: ClusterShape, wire: CommDtype) -> list[str]:
    return [name for name, algorithm in ALGORITHMS.items() if algorithm(shape, wire)]


def take_turns(arms: dict[str, Arm], rounds: int, counts: bool) -> tuple[dict[str, float], dict[str, float]]:
    """For each arm the median seconds of a call, and the bytes that all hosts together send in one, on average."""
    names = list(arms)
    times_s: dict[str, list[float]] = {name: [] for name in names}
    sent: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            elapsed_s, num_bytes = time_call(arms[name], counts)
            times_s[name].append(elapsed_s)
            sent[name].append(num_bytes)
    return (
        {name: statistics.median(times_s[name]) for name in names},
        {name: statistics.fmean(sent[name]) for name in names},
    )


def time_call(arm: Arm, counts: bool) -> tuple[float, float]:
    """Seconds of the slowest rank, and the bytes that all hosts have sent: of each host, one rank counts."""
    sent_before = bytes_sent() if counts else 0
    dist.barrier()
    started_s = time.perf_counter()
    arm()
    elapsed_s = time.perf_counter() - started_s
    dist.barrier()
    num_bytes = bytes_sent() - sent_before if counts else 0
    found = torch.tensor([elapsed_s, num_bytes], dtype=torch.float64)
    of_ranks = [torch.empty_like(found) for _ in range(dist.get_world_size())]
    dist.all_gather(of_ranks, found)
    seconds, counted = torch.stack(of_ranks).T
    return seconds.max().item(), counted.sum().item()


def bytes_sent() -> int:
    """By this host's network card, since it was made."""
    cards = [text.split() for text in Path("/proc/self/net/dev").read_text().splitlines()]
    return next(int(words[9]) for words in cards if words[0] == "eth0:")


def make_row(model: str, wire: CommDtype, arm: Ours, task: Task, times_s: dict[str, float], counted: float) -> Row:
    ours_s = times_s[f"ours_{wire}"]
    crossing = arm.tuning.bytes_crossing
    return {
        "model": model,
        **task.columns,
        "wire": wire,
        "algorithm": arm.tuning.algorithms.replace(f"/{wire}", ""),
        "ours_s": ours_s,
        "ddp_gloo_s": times_s["ddp_gloo"],
        "per_tensor_s": times_s["per_tensor"],
        "ddp_ratio": times_s["ddp_gloo"] / ours_s,
        "per_tensor_ratio": times_s["per_tensor"] / ours_s,
        "predicted_s": arm.tuning.predicted_s,
        "wire_limit_s": 8 * max(crossing) / (1e9 * task.gbps),
        "bytes_planned": sum(crossing),
        "bytes_counted": counted,
        "stream_gbps": task.stream_gbps,
        "tcp": Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip(),
        "rounds": task.rounds,
    }


def compare_forced(wire: CommDtype, forced: dict[str, Ours], times_s: dict[str, float]) -> Row:
    forced_s = {name: times_s[f"{name}_{wire}"] for name in forced}
    return {
        "forced_s": forced_s,
        "forced_predicted_s": {name: arm.tuning.predicted_s for name, arm in forced.items()},
        "best_forced_ratio": times_s[f"ours_{wire}"] / min(forced_s.values()),
    }


def measure_training(wire: CommDtype, task: Task, world: World) -> Row:
    overrides = [*TRAINING, f"batch.global={8 * world.num_ranks}", f"comm.dtype={wire}"]
    measured = compare(overrides, STEPS_A_BLOCK, task.rounds, world)
    speeds = {name: measured[name] for name in ("ours_images_per_s", "stock_ddp_images_per_s", "ratio", "rounds")}
    return {"model": "alexnet_bn", **task.columns, "wire": wire, **speeds, "stream_gbps": task.stream_gbps}


def line(row: Row) -> dict[str, str]:
    shown = first_words(row) | {
        "plan": row["algorithm"],
        "ours s": f"{row['ours_s']:.3f}",
        "ddp gloo / ours": f"{row['ddp_ratio']:.2f}",
        "per tensor / ours": f"{row['per_tensor_ratio']:.2f}",
        "of wire's limit": f"{row['wire_limit_s'] / row['ours_s']:.2f}",
        "predicted / ours": f"{row['predicted_s'] / row['ours_s']:.2f}",
    }
    return shown | ({"ours / best forced": f"{row['best_forced_ratio']:.2f}"} if "forced_s" in row else {})


def training_line(row: Row) -> dict[str, str]:
    names = {"ours": "ours", "stock_ddp": "stock ddp"}
    speeds = {f"{shown} images/s": f"{row[f'{name}_images_per_s']:.2f}" for name, shown in names.items()}
    return first_words(row) | speeds | {"ours / stock ddp": f"{row['ratio']:.2f}"}


def first_words(row: Row) -> dict[str, str]:
    per_host = row["ranks_per_host"]
    ranks = per_host if isinstance(per_host, str) else "+".join([str(per_host)] * row["hosts"])
    return {"model": row["model"], "Gb/s": f"{row['gbps']:g}", "ranks": ranks, "wire": row["wire"]}


if __name__ == "__main__":
    info = discover()
    assert info
    be_a_rank(info, lambda store: run_rank(store.info, store, Path(sys.argv[1])))
