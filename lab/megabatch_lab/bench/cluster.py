"""megabatch bench cluster: an all-reduce of a model's gradients between hosts, compared with Gloo as DDP calls it.

Hosts are network namespaces with network cards of a given rate (hosts.py).  torchrun starts the ranks, one thread each.
Gradients have the shapes of a real model and are all ready at once.  All arms run in the same ranks, use the same
memory and take turns, with a rotated order every round.  A call takes from a barrier until the slowest rank has all
results; the median of the rounds is reported.  A check of each arm's results is also its warm-up.
ours        buckets and plans tuned as in a run, executed by the reducer of a run
ddp_gloo    the calls of DistributedDataParallel without its copies: for each of its default buckets (1 MiB, then
            25 MiB), a division by the number of ranks and an asynchronous Gloo all_reduce; then a wait for all
per_tensor  an asynchronous Gloo all_reduce per gradient, all started in order; then a wait for all
forced      (--compare) ours with one algorithm for all buckets, and buckets tuned for it
The peers send fp32, because Gloo rounds 16-bit sums at every hop.  `wire_limit_s` is the time of the busiest host's
bytes at the nominal rate.  `bytes_planned` is the traffic between hosts in our plans.  `bytes_counted` is the traffic
that the network cards counted while our arm ran.  If the two differ, the traffic took another path or there was other
traffic, and the bench fails.

With --train, the bench compares a training of AlexNet-BN on such hosts with stock DDP, measured as in bench train.  The
i-th rank of every host is bound to the i-th core.
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

from megabatch.comm.cpu.barrier import BarrierHeader
from megabatch.comm.cpu.workers import Reducer
from megabatch.comm.faults.failure import FirstError
from megabatch.comm.groups import AXES, Groups
from megabatch.comm.settings import CommSettings
from megabatch.comm.tune import tune
from megabatch.errors import UserError, require_one_of
from megabatch.models.catalog import MODELS
from megabatch.planning.algorithms import ALGORITHMS, candidate_plans
from megabatch.planning.buckets import MIB, ddp_buckets
from megabatch.planning.pipeline import Gradient, RecordedBackward
from megabatch.planning.plan import COMM_DTYPES, CommDtype
from megabatch.planning.topology import ClusterShape
from megabatch.planning.tuning import Tuning
from megabatch.ranks.discover import RankInfo, discover
from megabatch.ranks.lifecycle import run_as_rank
from megabatch.ranks.machine import usable_cores
from megabatch.ranks.store import RankStore
from megabatch.ranks.world import World, connect
from megabatch.telemetry.timeline import Timeline
from megabatch_lab.bench.gradient_sets import GradientSet, gradient_sizes
from megabatch_lab.bench.host_ranks import RESULT, TASK, run_ranks
from megabatch_lab.bench.hosts import Ranks, hosts
from megabatch_lab.bench.report import in_turns, print_lines, write
from megabatch_lab.bench.train import compare
from megabatch_lab.chaos.namespaces import require_tools

MIN_HOSTS, MAX_HOSTS = 2, 4
MAX_RANKS = 4  # per host
MAX_TRAINING_RANKS = 4  # in total: each holds AlexNet's 61 million parameters ten times
MIN_GBPS, MAX_GBPS = 0.01, 100.0
DDP_CAPS_BYTES = [MIB, 25 * MIB]
TIMEOUT_S = 120.0
STEPS_PER_BLOCK = 3  # of training
# Headers are 66 bytes per segment.  Barriers and TCP retransmissions weigh more in small sets.
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


class ClusterRequest(Struct, frozen=True, kw_only=True):
    """The parsed options of the command."""

    num_hosts: int
    setups: list[Ranks]
    rates_gbps: list[float]
    comm_dtypes: list[CommDtype]
    models: list[str]
    compares: bool  # also force each algorithm
    trains: bool  # train instead of only all-reducing


def read_request(
    num_hosts: int,
    ranks_per_host: str | None,
    gbps: str | None,
    comm_dtype: str | None,
    models: Sequence[str] | None,
    compares: bool,
    trains: bool,
) -> ClusterRequest:
    """Parse and check the command-line options before anything starts.  None stands for the default."""
    if not MIN_HOSTS <= num_hosts <= MAX_HOSTS:
        near = clamp(num_hosts, MIN_HOSTS, MAX_HOSTS)
        raise UserError(f"--hosts={num_hosts} must be {MIN_HOSTS} to {MAX_HOSTS}; nearest: --hosts={near}")
    if trains and (models or compares):
        raise UserError(
            f"--train always trains alexnet_bn and cannot be combined with {'--model' if models else '--compare'}; "
            "leave out one of them"
        )
    defaults = ("2", "1", "bf16") if trains else ("2,4", "1,2.5", "same,bf16")
    options = (ranks_per_host, gbps, comm_dtype)
    setups, rates, comm_dtypes = (option or usual for option, usual in zip(options, defaults, strict=True))
    request = ClusterRequest(
        num_hosts=num_hosts,
        setups=[read_setup(word, num_hosts) for word in setups.split(",")],
        rates_gbps=[read_rate(word) for word in rates.split(",")],
        comm_dtypes=[read_dtype(word) for word in comm_dtypes.split(",")],
        models=[] if trains else [read_model(name) for name in models or ("resnet50", "alexnet")],
        compares=compares,
        trains=trains,
    )
    for ranks in request.setups if trains else ():
        if sum(ranks) > MAX_TRAINING_RANKS:
            raise UserError(
                f"--train with --ranks-per-host={name_setup(ranks)} on {num_hosts} hosts has {sum(ranks)} ranks; "
                f"the limit is {MAX_TRAINING_RANKS}: use --hosts=2 --ranks-per-host=2"
            )
    return request


def read_setup(word: str, num_hosts: int) -> Ranks:
    """Parse the ranks of each host: on two hosts, 2 is (2, 2) and 2+1 is (2, 1)."""
    numbers = word.split("+")
    if not all(number.isdecimal() for number in numbers):
        raise UserError(
            f"--ranks-per-host={word!r} must be a number, or one number per host joined by +, "
            f"such as 2 or {'+'.join(['2', *['1'] * (num_hosts - 1)])}"
        )
    if len(numbers) not in (1, num_hosts):
        raise UserError(
            f"--ranks-per-host={word} has {len(numbers)} numbers for {num_hosts} hosts; "
            f"give {num_hosts} numbers, or --hosts={clamp(len(numbers), MIN_HOSTS, MAX_HOSTS)}"
        )
    near = [clamp(int(number), 1, MAX_RANKS) for number in numbers]
    if near != list(map(int, numbers)):
        raise UserError(
            f"--ranks-per-host={word}: each host must have 1 to {MAX_RANKS} ranks; "
            f"nearest: --ranks-per-host={'+'.join(map(str, near))}"
        )
    return tuple(near * num_hosts if len(near) == 1 else near)


def name_setup(ranks: Ranks) -> int | str:
    return ranks[0] if len(set(ranks)) == 1 else "+".join(map(str, ranks))


def read_rate(word: str) -> float:
    try:
        gbps = float(word)
    except ValueError:
        raise UserError(f"--gbps={word!r} must be numbers separated by commas, such as 1,2.5") from None
    if not MIN_GBPS <= gbps <= MAX_GBPS:
        near = MIN_GBPS if gbps < MIN_GBPS else MAX_GBPS
        raise UserError(f"--gbps={word} must be {MIN_GBPS:g} to {MAX_GBPS:g}; nearest: --gbps={near:g}")
    return gbps


def read_dtype(word: str) -> CommDtype:
    require_one_of("--comm-dtype", word, COMM_DTYPES)
    return next(dtype for dtype in COMM_DTYPES if dtype == word)


def read_model(name: str) -> str:
    require_one_of("--model", name, MODELS)
    return name


def clamp(number: int, least: int, most: int) -> int:
    return min(max(number, least), most)


class Task(Struct, frozen=True):
    """The measurements of one set of ranks."""

    request: ClusterRequest
    sizes: dict[str, list[int]]  # elements of each gradient, by model
    gbps: float
    stream_gbps: float
    ranks: Ranks
    rounds: int

    @property
    def columns(self) -> Row:
        """Return the columns that all rows share."""
        return {"gbps": self.gbps, "hosts": self.request.num_hosts, "ranks_per_host": name_setup(self.ranks)}


def run(request: ClusterRequest, rounds: int, json_file: Path | None) -> list[Row]:
    """Create hosts, start ranks on them, and print and return the rows that they measured."""
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
                write(rows, json_file)  # a later one may fail half an hour from now
    for row in rows if not request.trains else ():
        require_planned_bytes(row)
    return rows


def require_planned_bytes(row: Row) -> None:
    planned, counted = row["bytes_planned"], row["bytes_counted"]
    if abs(counted - planned) > BYTES_TOLERANCE * planned + BYTES_SLACK:
        place = f"{row['model']} at {row['gbps']:g} Gb/s, ranks per host {row['ranks_per_host']}, {row['comm_dtype']}"
        sys.exit(
            f"megabatch: {place}: hosts sent {counted:,.0f} bytes instead of the planned {planned:,}; the difference "
            f"must be at most {BYTES_TOLERANCE:.0%}: stop other traffic and measure again"
        )


def run_rank(info: RankInfo, store: RankStore, scratch: Path) -> int:
    """Run one rank of the bench and return its exit code.  Rank 0 writes the rows."""
    task = msgspec.json.decode((scratch / TASK).read_bytes(), type=Task)
    if task.request.trains:
        bind_to_core(info.local_rank)
    with connect(info, "cpu", store, TIMEOUT_S) as world:
        if task.request.trains:
            rows = [measure_training(comm_dtype, task, world) for comm_dtype in task.request.comm_dtypes]
        else:
            rows = [row for model in task.request.models for row in measure(model, task, world, info)]
    if info.rank == 0:
        (scratch / RESULT).write_text(json.dumps(rows))
    return 0


def bind_to_core(local_rank: int) -> None:
    """Bind this rank to a core, because hosts share the machine's cores.

    Unbound, the ranks of one host run while those of another wait, up to 0.4 s per step, and all-reduces wait for them.
    """
    cores = sorted(usable_cores())
    os.sched_setaffinity(0, {cores[local_rank % len(cores)]})


class Ours:
    """Our all-reduce of a gradient set.  All ranks create it, call it and close it together."""

    def __init__(self, gradients: GradientSet, groups: Groups, choose: Callable[[Reducer], Tuning]) -> None:
        self.reducer = Reducer(groups, FirstError(), Timeline())
        self.tuning = choose(self.reducer)
        self.buckets = [
            (gradients.bucket([int(name) for name in bucket.gradients]), bucket.plan) for bucket in self.tuning.buckets
        ]
        self.num_calls = 0

    def __call__(self) -> None:
        self.num_calls += 1
        last = len(self.buckets) - 1
        futures = [
            self.reducer.start(key, tensor, plan, BarrierHeader(self.num_calls, key, len(tensor)), None, key == last)
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
    """Return one row per comm dtype."""
    gradients = GradientSet(task.sizes[model])
    with ExitStack() as stack:
        groups = stack.enter_context(closing(Groups(dist.group.WORLD, torch.device("cpu"), TIMEOUT_S)))
        groups.open(AXES)

        def ours(settings: CommSettings) -> Ours:
            made = Ours(gradients, groups, partial(as_a_run_tunes, gradients, settings))
            stack.callback(made.close)
            return made

        chosen = {comm_dtype: ours(CommSettings(dtype=comm_dtype)) for comm_dtype in task.request.comm_dtypes}
        forced = {
            (name, comm_dtype): ours(CommSettings(algorithm=name, dtype=comm_dtype))
            for comm_dtype in chosen
            for name in (applying(groups.topology.shape, comm_dtype) if task.request.compares else ())
        }
        arms: dict[str, Arm] = {
            **{f"ours_{comm_dtype}": arm for comm_dtype, arm in chosen.items()},
            **{f"{name}_{comm_dtype}": arm for (name, comm_dtype), arm in forced.items()},
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
        for comm_dtype, arm in chosen.items():
            of_dtype = {name: arm for (name, other), arm in forced.items() if other == comm_dtype}
            row = make_row(model, comm_dtype, arm, task, times_s, sent[f"ours_{comm_dtype}"])
            rows.append(row | compare_forced(comm_dtype, of_dtype, times_s) if of_dtype else row)
        return rows


def applying(shape: ClusterShape, comm_dtype: CommDtype) -> list[str]:
    return [name for name, algorithm in ALGORITHMS.items() if algorithm(shape, comm_dtype)]


def take_turns(arms: dict[str, Arm], rounds: int, counts: bool) -> tuple[dict[str, float], dict[str, float]]:
    """Return the median seconds per call of each arm, and the mean bytes per call that all hosts send together."""
    times_s: dict[str, list[float]] = {name: [] for name in arms}
    sent: dict[str, list[float]] = {name: [] for name in arms}
    for name, _ in in_turns(arms, rounds):
        elapsed_s, num_bytes = time_call(arms[name], counts)
        times_s[name].append(elapsed_s)
        sent[name].append(num_bytes)
    return (
        {name: statistics.median(times_s[name]) for name in arms},
        {name: statistics.fmean(sent[name]) for name in arms},
    )


def time_call(arm: Arm, counts: bool) -> tuple[float, float]:
    """Return the seconds of the slowest rank and the bytes that all hosts sent.  One rank per host counts bytes."""
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
    """Return the bytes that this host's network card has sent since its creation."""
    cards = [text.split() for text in Path("/proc/self/net/dev").read_text().splitlines()]
    return next(int(words[9]) for words in cards if words[0] == "eth0:")


def make_row(
    model: str, comm_dtype: CommDtype, arm: Ours, task: Task, times_s: dict[str, float], counted: float
) -> Row:
    ours_s = times_s[f"ours_{comm_dtype}"]
    crossing = arm.tuning.bytes_crossing
    return {
        "model": model,
        **task.columns,
        "comm_dtype": comm_dtype,
        "algorithm": arm.tuning.algorithms.replace(f"/{comm_dtype}", ""),
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


def compare_forced(comm_dtype: CommDtype, forced: dict[str, Ours], times_s: dict[str, float]) -> Row:
    forced_s = {name: times_s[f"{name}_{comm_dtype}"] for name in forced}
    return {
        "forced_s": forced_s,
        "forced_predicted_s": {name: arm.tuning.predicted_s for name, arm in forced.items()},
        "best_forced_ratio": times_s[f"ours_{comm_dtype}"] / min(forced_s.values()),
    }


def measure_training(comm_dtype: CommDtype, task: Task, world: World) -> Row:
    overrides = [*TRAINING, f"batch.global={8 * world.num_ranks}", f"comm.dtype={comm_dtype}"]
    measured = compare(overrides, STEPS_PER_BLOCK, task.rounds, world)
    speeds = {name: measured[name] for name in ("ours_images_per_s", "stock_ddp_images_per_s", "ratio", "rounds")}
    return {"model": "alexnet_bn", **task.columns, "comm_dtype": comm_dtype, **speeds, "stream_gbps": task.stream_gbps}


def line(row: Row) -> dict[str, str]:
    shown = common_columns(row) | {
        "plan": row["algorithm"],
        "ours s": f"{row['ours_s']:.3f}",
        "ddp gloo / ours": f"{row['ddp_ratio']:.2f}",
        "per tensor / ours": f"{row['per_tensor_ratio']:.2f}",
        "network limit / ours": f"{row['wire_limit_s'] / row['ours_s']:.2f}",
        "predicted / ours": f"{row['predicted_s'] / row['ours_s']:.2f}",
    }
    return shown | ({"ours / best forced": f"{row['best_forced_ratio']:.2f}"} if "forced_s" in row else {})


def training_line(row: Row) -> dict[str, str]:
    names = {"ours": "ours", "stock_ddp": "stock ddp"}
    speeds = {f"{shown} images/s": f"{row[f'{name}_images_per_s']:.2f}" for name, shown in names.items()}
    return common_columns(row) | speeds | {"ours / stock ddp": f"{row['ratio']:.2f}"}


def common_columns(row: Row) -> dict[str, str]:
    per_host = row["ranks_per_host"]
    ranks = per_host if isinstance(per_host, str) else "+".join([str(per_host)] * row["hosts"])
    return {"model": row["model"], "Gb/s": f"{row['gbps']:g}", "ranks": ranks, "comm_dtype": row["comm_dtype"]}


if __name__ == "__main__":
    info = discover()
    assert info
    run_as_rank(info, lambda store: run_rank(store.info, store, Path(sys.argv[1])))
