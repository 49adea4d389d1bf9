"""megabatch bench simulator --part here: compare the simulator with this machine, on clusters it was not fitted to.

Hosts are network namespaces (hosts.py) that share the machine's cores.  One invocation runs three stages:
    fit       measure the costs of cores and network (fit_cores.py): all-reduces of ResNet-50's gradients on two hosts
              of one and of two ranks, at 1 and 2.5 Gb/s and without a limit; barriers on one host; an exchange over
              plain TCP (exchange_stream.py).  For training: on one host, the profile and the steps of a rank with a
              core to itself, and steps with a rank on every core; and steps on two hosts at 1 Gb/s
    predict   the shapes of ALL_REDUCES and TRAININGS, by planning (choose, price, merge, pass_through)
    measure   those all-reduces, with the predicted plans and buckets, and those trainings (simulated_ranks.py)
`error` is predicted / measured - 1.  The order of two algorithms is scored if they ran on the same hosts with the same
model and dtype and their measured times differ by more than 10 %: the faster one must be predicted to be faster.
"""

import itertools
import math
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct
from msgspec.structs import asdict, replace

from megabatch.planning.algorithms import ALGORITHMS, plan_name
from megabatch.planning.buckets import MIB
from megabatch.planning.choosing import choose
from megabatch.planning.cost import Link
from megabatch.planning.pipeline import ELEMENT_BYTES, PART_BYTES, Gradient, RecordedBackward
from megabatch.planning.plan import CommDtype, axes_of
from megabatch.planning.topology import Axis, ClusterShape, Topology
from megabatch.planning.tuning import Bucket, Tuning
from megabatch.simulate.cluster import Cluster, Cpu, Device, EngineSettings, Network, Node
from megabatch.simulate.cores import CoreCosts, Cores, StepTime, core_seconds, gaps_of_nodes
from megabatch.simulate.step import AllReduceSettings, Compute, choose_cut, run_without_contention, time_on_cores
from megabatch_lab.bench.cluster import applying, ready_at_once
from megabatch_lab.bench.fit_cores import TimedAllReduce, Unlimited, fit_costs
from megabatch_lab.bench.gradient_sets import gradient_sizes
from megabatch_lab.bench.host_ranks import run_ranks
from megabatch_lab.bench.hosts import Ranks, hosts
from megabatch_lab.bench.report import print_lines, write
from megabatch_lab.bench.simulated_ranks import (
    MICROBATCH,
    AllReduces,
    ArmTask,
    Barriers,
    Measured,
    Recording,
    Steps,
    Task,
)
from megabatch_lab.chaos.namespaces import require_tools

BOTH: tuple[CommDtype, ...] = ("same", "bf16")
NO_LIMIT_GBPS = 100.0  # far more than TCP reaches on these cores
BASE_MODEL = "resnet50"
BASE: list[tuple[Ranks, float]] = [((1, 1), 1.0), ((1, 1), 2.5), ((2, 2), 1.0), ((2, 2), 2.5)]
BASE_OF_CORES: Ranks = (2, 2)  # without a network limit
EXCHANGE, BY_TENSOR = "flat in stages", "flat by tensor"
EXCHANGE_HOSTS, EXCHANGE_GBPS, EXCHANGE_ATTEMPTS = 4, 1.0, 5
PROFILE_S = 5.0
DIFFERS = 1.1  # the order of two algorithms is scored if their times differ by more


class Case(NamedTuple):
    """Hosts, and the model whose gradients they all-reduce."""

    ranks: Ranks
    gbps: float
    model: str
    dtypes: tuple[CommDtype, ...]


ALL_REDUCES = [
    Case((1, 1, 1), 1.0, "alexnet", ("bf16",)),
    Case((2, 2, 2), 2.5, "resnet50", BOTH),
    Case((1, 1, 1, 1), 2.5, "resnet50", BOTH),
    Case((2, 2, 2, 2), 1.0, "resnet18", BOTH),
    Case((2, 1), 1.0, "alexnet", BOTH),
    Case((3, 1, 2), 2.5, "resnet50", BOTH),
    Case((2, 2), 0.5, "resnet50", BOTH),
    Case((2, 2), 5.0, "alexnet", BOTH),
    Case((4, 4), 2.5, "resnet50", BOTH),
    Case((2, 1, 1), 5.0, "resnet18", BOTH),
    Case((1, 1, 1, 1), 0.5, "resnet18", ("bf16",)),
]
TRAINED = "alexnet_bn"
BASE_STEPS = [Case((1, 1), 1.0, TRAINED, ("bf16",)), Case((2, 2), 1.0, TRAINED, ("bf16",))]
TRAININGS = [
    Case((1, 1, 1), 1.0, TRAINED, ("bf16",)),
    Case((2, 1), 1.0, TRAINED, ("bf16",)),
    Case((2, 2), 5.0, TRAINED, ("bf16",)),
    Case((1, 1, 1, 1), 2.5, TRAINED, ("bf16",)),
    Case((2, 2), 0.5, TRAINED, ("bf16",)),
]


class Row(Struct, frozen=True, kw_only=True):
    kind: str  # all-reduce, or step (of training)
    ranks: str  # per host, joined by +
    gbps: float
    model: str
    comm_dtype: CommDtype
    algorithm: str
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


class Score(NamedTuple):
    median_error: float  # of absolute errors
    worst_error: float
    num_ordered: int  # pairs of algorithms predicted in the right order
    num_pairs: int


class BaseTimes(NamedTuple):
    """The measurements of one element of BASE."""

    timed: dict[str, TimedAllReduce]  # by arm, such as torus/bf16
    stream_share: float  # of the nominal rate that one plain TCP stream reached; 1 without a limit


class TrainingTimes(NamedTuple):
    """Measurements of a training of TRAINED on one host."""

    backward: RecordedBackward  # of a rank with a core to itself
    other_s: float  # the rest of its step
    crowding: float  # slowdown of a rank when all cores compute, since they share the memory bandwidth


def run_here(rounds: int, json_file: Path | None) -> list[Row]:
    """Fit, predict and measure; return the rows of the clusters that nothing was fitted to."""
    require_tools()
    num_cores = len(os.sched_getaffinity(0))
    barrier_s = measure((num_cores,), NO_LIMIT_GBPS, Barriers())[0].memory_step_s
    limited, unlimited = [], []
    for ranks, gbps in BASE:  # the cores' speed varies over time, so their costs are measured in between
        unlimited.append(measure_base(BASE_OF_CORES, NO_LIMIT_GBPS, rounds))
        limited.append(measure_base(ranks, gbps, rounds))
    costs = fit_base(limited, median_of(unlimited), measure_exchange_gaps(), barrier_s, num_cores)
    training = measure_training(rounds, costs, num_cores)
    costs = fit_steps([measure_step(case, "bf16", training, costs, num_cores, rounds) for case in BASE_STEPS], costs)
    print_lines([{"cost": name, "fitted": f"{value:.3g}"} for name, value in asdict(costs).items()])
    rows: list[Row] = []
    for case in ALL_REDUCES:
        rows += all_reduce_rows(case, costs, num_cores, rounds)
        write([as_json(row) for row in rows], json_file)  # a later one may fail minutes from now
    for case in TRAININGS:
        rows += [step_row(case, dtype, training, costs, num_cores, rounds) for dtype in case.dtypes]
        write([as_json(row) for row in rows], json_file)
    return rows


def as_json(row: Row) -> dict[str, Any]:
    return asdict(row) | {"error": row.error}


def here_tables(rows: Sequence[Row]) -> dict[str, list[dict[str, str]]]:
    return {
        "this machine": [line(row) for row in rows],
        "scores on this machine": [score_line(name, score(of_kind)) for name, of_kind in by_kind(rows).items()],
    }


def measure(ranks: Ranks, gbps: float, task: Task) -> tuple[Measured, float]:
    """Run the task on new hosts; return its result and the share of the rate that a plain TCP stream reached."""
    with hosts(len(ranks), gbps) as cluster:
        share = cluster.stream_gbps() / gbps if gbps < NO_LIMIT_GBPS else 1.0
        answer = run_ranks(cluster, ranks, "megabatch_lab.bench.simulated_ranks", msgspec.json.encode(task))
    return msgspec.json.decode(answer, type=Measured), share


def measure_base(ranks: Ranks, gbps: float, rounds: int) -> BaseTimes:
    """Measure every algorithm with all gradients in one bucket."""
    sizes, topology, is_limited = gradient_sizes(BASE_MODEL), topology_of(ranks), gbps < NO_LIMIT_GBPS
    whole = sum(gradient.num_bytes for gradient in described(sizes)) / MIB
    arms = [
        ArmTask(plan_name(name, dtype), fused_to(whole, sizes, name, dtype, topology))
        for dtype in BOTH
        for name in distinct(topology.shape, dtype)
    ]
    if not is_limited:
        arms += [
            ArmTask(EXCHANGE, fused_to(whole, sizes, "flat", "same", topology), in_stages=True),
            ArmTask(BY_TENSOR, fused_to(0.0, sizes, "flat", "same", topology)),
        ]
    measured, share = measure(ranks, gbps, AllReduces(sizes, arms, rounds))
    timed = {
        arm.name: TimedAllReduce(
            plan=arm.tuning.buckets[0].plan,
            dtype=dtype_between_hosts(arm.tuning),
            shape=topology.shape,
            num_elements=[bucket.num_elements for bucket in arm.tuning.buckets],
            gbps=gbps if is_limited else math.inf,
            taken_s=measured.taken_s[arm.name],
        )
        for arm in arms
    }
    return BaseTimes(timed, share)


def dtype_between_hosts(tuning: Tuning) -> CommDtype:
    return next(phase.dtype for phase in tuning.buckets[0].plan.phases if phase.axis != "node")


def measure_exchange_gaps() -> float:
    """Measure the bandwidth that an exchange over plain TCP leaves idle, relative to a single stream."""
    with hosts(EXCHANGE_HOSTS, EXCHANGE_GBPS) as cluster:
        stream_gbps = cluster.stream_gbps()
        exchange_gbps = statistics.median(cluster.exchange_gbps(PART_BYTES) for _ in range(EXCHANGE_ATTEMPTS))
    return max(0.0, stream_gbps / exchange_gbps - 1) / gaps_of_nodes(EXCHANGE_HOSTS)


def median_of(base: Sequence[BaseTimes]) -> BaseTimes:
    """Return the median of repeated measurements."""
    timed = {
        arm: replace(one, taken_s=statistics.median(times.timed[arm].taken_s for times in base))
        for arm, one in base[0].timed.items()
    }
    return base[0]._replace(timed=timed)


def fit_base(
    limited: Sequence[BaseTimes], unlimited: BaseTimes, exchange_gaps: float, barrier_s: float, num_cores: int
) -> CoreCosts:
    return fit_costs(
        Unlimited(
            ring=unlimited.timed["flat"],
            small=unlimited.timed[BY_TENSOR],
            exchange_s=unlimited.timed[EXCHANGE].taken_s,
            exchange_16=unlimited.timed["flat/bf16"],
            memory=unlimited.timed["torus"],
        ),
        [timed for times in limited for timed in times.timed.values()],
        num_cores,
        wire_share=statistics.median(times.stream_share for times in limited),
        exchange_gaps=exchange_gaps,
        memory_step_s=barrier_s,
    )


def distinct(shape: ClusterShape, dtype: CommDtype) -> list[str]:
    """Return the applicable algorithms.  With one rank per host, hierarchical equals torus and is left out."""
    return [name for name in applying(shape, dtype) if name != "hierarchical" or shape.largest_node > 1]


def topology_of(ranks: Ranks) -> Topology:
    ends = list(itertools.accumulate(ranks))
    return Topology(tuple(tuple(range(end - size, end)) for size, end in zip(ranks, ends, strict=True)))


def described(sizes: Sequence[int]) -> list[Gradient]:
    return [Gradient(size * ELEMENT_BYTES["fp32"], "fp32") for size in sizes]


def fused_to(bucket_mb: float, sizes: Sequence[int], name: str, dtype: CommDtype, topology: Topology) -> Tuning:
    plan = ALGORITHMS[name](topology.shape, dtype)
    assert plan
    unknown: dict[Axis, Link] = {axis: Link(0.0, 0.0, 0.0) for axis in axes_of([plan])}
    return choose(ready_at_once(described(sizes)), [plan], topology, unknown, bucket_mb=bucket_mb)


def all_reduce_rows(case: Case, costs: CoreCosts, num_cores: int, rounds: int) -> list[Row]:
    sizes, topology = gradient_sizes(case.model), topology_of(case.ranks)
    cluster, shape = cluster_of(costs, case.gbps, num_cores), topology.shape
    at_once = Compute(0.0, ready_at_once(described(sizes)), 0.0)
    cuts: dict[tuple[str, CommDtype], list[Bucket]] = {
        (name, dtype): choose_cut(at_once, cluster, shape, AllReduceSettings(dtype=dtype, algorithm=name))
        for dtype in case.dtypes
        for name in distinct(shape, dtype)
    }
    arms = [
        ArmTask(
            "/".join(key),
            Tuning(topology=topology, links={}, backward_s=0.0, buckets=buckets, caps_mb=[], in_parts=True),
        )
        for key, buckets in cuts.items()
    ]
    measured, _ = measure(case.ranks, case.gbps, AllReduces(sizes, arms, rounds))
    return [
        make_row("all-reduce", case, dtype, name, arm.tuning.predicted_s, measured.taken_s[arm.name])
        for (name, dtype), arm in zip(cuts, arms, strict=True)
    ]


def cluster_of(costs: CoreCosts, gbps: float, num_cores: float, crowding: float = 1.0) -> Cluster:
    """Return the hosts of this machine as a cluster of the simulator."""
    return Cluster(
        name="hosts of this machine",
        device=Device(name="cpu", stack="this", memory_gb=1, memory_gb_per_s=1, curves={}),
        node=Node(ranks=1, gb_per_s=1, alpha_us=0),
        network=Network(nics=1, gbps=gbps, efficiency=1, alpha_us=0, kind="tcp"),
        engine=EngineSettings(name="gloo", base_us=0, sums=(), in_parts=True),
        cpu=Cpu(cores=num_cores, hosts_on_machine=True, crowding=crowding, costs=costs),
    )


def measure_training(rounds: int, costs: CoreCosts, num_cores: int) -> TrainingTimes:
    profile = measure((1,), NO_LIMIT_GBPS, Recording(PROFILE_S))[0].profile
    assert profile
    alone_s, beside_s = (
        measure((num_ranks,), NO_LIMIT_GBPS, Steps("same", rounds))[0].taken_s["same"] for num_ranks in (1, num_cores)
    )
    backward = profile.backward(MICROBATCH)
    # On one host, all-reduces are work of the cores that is not hidden.
    shape = ClusterShape.regular(1, num_cores)
    plan = ALGORITHMS["torus"](shape, "same")
    assert plan
    num_elements = sum(gradient.num_bytes for gradient in backward.gradients) // ELEMENT_BYTES["fp32"]
    reducing_s = core_seconds(plan, shape, num_elements, costs, Cores({num_cores: 1}, num_cores)) / num_cores
    return TrainingTimes(
        backward,
        max(profile.forward_s(MICROBATCH) + profile.update_s, alone_s - max(backward.ready_s)),
        max(1.0, (beside_s - reducing_s) / alone_s),
    )


class MeasuredStep(NamedTuple):
    predicted: StepTime
    taken_s: float


def measure_step(
    case: Case, dtype: CommDtype, training: TrainingTimes, costs: CoreCosts, num_cores: int, rounds: int
) -> MeasuredStep:
    shape = topology_of(case.ranks).shape
    evenly = even_cores(shape, num_cores)
    backward, other_s, most_crowding = training
    # Cores other than the busiest one compute in proportion to their ranks.
    crowding = 1 + (most_crowding - 1) * (evenly - 1) / max(1, num_cores - 1)
    cluster = cluster_of(replace(costs, step_unhidden=0.0), case.gbps, evenly, crowding)
    assert cluster.cpu
    compute = Compute(other_s, backward, max(backward.ready_s))
    settings = AllReduceSettings(dtype=dtype)
    step = run_without_contention(compute, cluster, shape, settings, choose_cut(compute, cluster, shape, settings))
    measured, _ = measure(case.ranks, case.gbps, Steps(dtype, rounds))
    return MeasuredStep(time_on_cores(step, cluster.cpu, shape), measured.taken_s[dtype])


def fit_steps(steps: Sequence[MeasuredStep], costs: CoreCosts) -> CoreCosts:
    """Return the costs with the fitted share of the shorter of network and cores that steps do not hide."""
    parts = [(taken_s - max(step)) / min(step) for step, taken_s in steps]
    return replace(costs, step_unhidden=min(1.0, max(0.0, statistics.fmean(parts))))


def step_row(
    case: Case, dtype: CommDtype, training: TrainingTimes, costs: CoreCosts, num_cores: int, rounds: int
) -> Row:
    predicted, taken_s = measure_step(case, dtype, training, costs, num_cores, rounds)
    return make_row("step", case, dtype, "auto", predicted.seconds(costs.step_unhidden), taken_s)


def even_cores(shape: ClusterShape, num_cores: int) -> float:
    """Return the number of evenly loaded cores that would take as long as these.

    The i-th rank of every host is bound to the i-th core, and all ranks wait for the core with the most ranks.
    """
    most = sum(math.ceil(size / num_cores) * count for size, count in shape.node_sizes)
    return shape.num_ranks / most


def make_row(kind: str, case: Case, dtype: CommDtype, algorithm: str, predicted_s: float, measured_s: float) -> Row:
    return Row(
        kind=kind,
        ranks="+".join(map(str, case.ranks)),
        gbps=case.gbps,
        model=case.model,
        comm_dtype=dtype,
        algorithm=algorithm,
        predicted_s=predicted_s,
        measured_s=measured_s,
    )


def by_kind(rows: Sequence[Row]) -> dict[str, list[Row]]:
    kinds = list(dict.fromkeys(row.kind for row in rows))
    return {kind: [row for row in rows if row.kind == kind] for kind in kinds} | {"all": list(rows)}


def score(rows: Sequence[Row]) -> Score:
    errors = [abs(row.error) for row in rows]
    pairs = [pair for pair in itertools.combinations(rows, 2) if is_comparison(*pair)]
    return Score(statistics.median(errors), max(errors), sum(is_ordered(*pair) for pair in pairs), len(pairs))


def is_comparison(one: Row, other: Row) -> bool:
    """Return True if these are two algorithms for the same task and one took clearly longer."""
    same = all(getattr(one, name) == getattr(other, name) for name in ("kind", "ranks", "gbps", "model", "comm_dtype"))
    return same and max(one.measured_s, other.measured_s) > DIFFERS * min(one.measured_s, other.measured_s)


def is_ordered(one: Row, other: Row) -> bool:
    return (one.predicted_s - other.predicted_s) * (one.measured_s - other.measured_s) > 0


def line(row: Row) -> dict[str, str]:
    return {
        "operation": row.kind,
        "ranks": row.ranks,
        "Gb/s": f"{row.gbps:g}",
        "model": row.model,
        "comm_dtype": row.comm_dtype,
        "algorithm": row.algorithm,
        "predicted s": f"{row.predicted_s:.3f}",
        "measured s": f"{row.measured_s:.3f}",
        "error": f"{row.error:+.1%}",
    }


def score_line(name: str, found: Score) -> dict[str, str]:
    return {
        "of": name,
        "median error": f"{found.median_error:.1%}",
        "worst": f"{found.worst_error:.1%}",
        "pairs in order": f"{found.num_ordered} of {found.num_pairs}",
    }
