"""A training that might be run, and what the simulator says of it.

An interval comes with every prediction.  Each input that is not known well (the device's speed, bandwidths, latencies,
jitter) is taken once at its low and once at its high end, while the others stay.  They are independent, so the squares
of what a step thereby gains or loses add up.  Buckets and plans stay as they were chosen.
"""

import math
from collections.abc import Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict, replace

from megabatch.planning.tuning import Bucket
from megabatch.simulate.cluster import Cluster, Cpu
from megabatch.simulate.compute import compute_by_curve, compute_by_profile
from megabatch.simulate.profile import Profile
from megabatch.simulate.step import AllReduceSettings, Compute, Step, in_use, run_step, simulate_step, slower
from megabatch.simulate.workload import Workload

# From a step to the end of training: evaluations, checkpoints, interruptions and money.
#
# Legend: T hours of steps and evaluations, M hours between interruptions of the whole job, C hours that a checkpoint
# holds it up, R hours for a restart.  Checkpoints every tau = sqrt(2 C M) cost least (Young 1974, Daly 2006): the job
# takes T + C floor(T/tau) + T/M (tau/2 + R), for checkpoints, steps that are lost with an interruption, and restarts.
# One that is shorter than tau writes none, and loses half of itself.


class RunLength(Struct, frozen=True, kw_only=True):
    """What a run goes through."""

    num_steps: int
    num_evaluations: int = 0
    test_images: int = 0


class Training(Struct, frozen=True, kw_only=True):
    steps_s: float
    evaluation_s: float
    faults_s: float  # checkpoints, repeated steps, restarts: as expected
    num_interruptions: float
    checkpoint_minutes: float | None  # between two
    usd: float | None

    @property
    def total_s(self) -> float:
        return self.steps_s + self.evaluation_s + self.faults_s


def train_for(length: RunLength, step_s: float, evaluation_s: float, num_ranks: int, cluster: Cluster) -> Training:
    steps_s = length.num_steps * step_s
    working_s = steps_s + length.num_evaluations * evaluation_s
    faults_s, num_interruptions, interval_s = 0.0, 0.0, math.inf
    faults = cluster.faults
    rate = faults.interruptions_per_rank_hour * num_ranks / 3600  # of the job, a second
    if rate:
        interval_s = math.sqrt(2 * faults.checkpoint_s / rate)
        lost_s = min(interval_s, working_s) / 2
        writing_s = faults.checkpoint_s * math.floor(working_s / interval_s) if interval_s else 0.0
        faults_s = writing_s + working_s * rate * (lost_s + 60 * faults.restart_minutes)
        num_interruptions = working_s * rate
    hours = (working_s + faults_s) / 3600
    price = cluster.price.usd_per_rank_hour
    return Training(
        steps_s=steps_s,
        evaluation_s=length.num_evaluations * evaluation_s,
        faults_s=faults_s,
        num_interruptions=num_interruptions,
        checkpoint_minutes=interval_s / 60 if 0 < interval_s <= working_s else None,
        usd=price * num_ranks * hours if price else None,
    )


class Scenario(Struct, frozen=True, kw_only=True):
    workload: Workload
    cluster: Cluster
    num_ranks: int
    batch_per_rank: int
    accumulation: int = 1  # microbatches, in which a rank takes its batch
    precision: str
    all_reduce: AllReduceSettings = AllReduceSettings()
    length: RunLength | None = None
    profile: Profile | None = None  # what a rank was recorded to take, instead of the cluster's curve

    @property
    def global_batch(self) -> int:
        return self.num_ranks * self.batch_per_rank

    @property
    def microbatch(self) -> float:
        return self.batch_per_rank / self.accumulation

    @property
    def compute(self) -> Compute:
        if self.profile:
            return compute_by_profile(self.profile, self.microbatch, self.accumulation)
        return compute_by_curve(self.workload, self.cluster, self.precision, self.microbatch, self.accumulation)

    @property
    def in_use(self) -> AllReduceSettings:
        """With the dtype that really travels."""
        return in_use(self.all_reduce, self.compute)


class Simulated(Struct, frozen=True, kw_only=True):
    scenario: Scenario
    step: Step
    low_step_s: float
    high_step_s: float
    training: Training | None

    @property
    def images_per_s(self) -> float:
        return self.scenario.global_batch / self.step.total_s

    @property
    def low_images_per_s(self) -> float:
        return self.scenario.global_batch / self.high_step_s

    @property
    def high_images_per_s(self) -> float:
        return self.scenario.global_batch / self.low_step_s

    @property
    def efficiency(self) -> float:
        """Of as many ranks that would wait for nobody."""
        return self.step.computing_s / self.step.total_s

    @property
    def minutes(self) -> float | None:
        return self.training.total_s / 60 if self.training else None

    @property
    def rank_hours(self) -> float | None:
        return self.scenario.num_ranks * self.minutes / 60 if self.minutes is not None else None

    @property
    def plan(self) -> str:
        """As 'torus/fp16 (3 buckets, 51.1 MB)'."""
        return describe_plan(self.step.buckets)

    @property
    def row(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "ranks": self.scenario.num_ranks,
            "batch_per_rank": self.scenario.batch_per_rank,
            "batch": self.scenario.global_batch,
            "step_s": self.step.total_s,
            "low_step_s": self.low_step_s,
            "high_step_s": self.high_step_s,
            "images_per_s": self.images_per_s,
            "low_images_per_s": self.low_images_per_s,
            "high_images_per_s": self.high_images_per_s,
            "efficiency": self.efficiency,
            "forward_s": self.step.forward_s,
            "backward_s": self.step.backward_s,
            "update_s": self.step.update_s,
            "exposed_s": self.step.exposed_s,
            "jitter_s": self.step.jitter_s,
            "input_s": self.step.input_s,
            "all_reduce_s": self.step.all_reduce_s,
            "minutes": self.minutes,
            "rank_hours": self.rank_hours,
            "usd": self.training.usd if self.training else None,
            "plan": self.plan,
        }


def simulate(scenario: Scenario) -> Simulated:
    compute, cluster = scenario.compute, scenario.cluster
    step = simulate_step(compute, cluster, scenario.num_ranks, scenario.in_use)
    low_s, high_s = interval(compute, cluster, scenario, step)
    training = None
    if scenario.length:
        a_rank = math.ceil(scenario.length.test_images / scenario.num_ranks)
        evaluation_s = a_rank / scenario.batch_per_rank * step.forward_s
        training = train_for(scenario.length, step.total_s, evaluation_s, scenario.num_ranks, cluster)
    return Simulated(scenario=scenario, step=step, low_step_s=low_s, high_step_s=high_s, training=training)


def interval(compute: Compute, cluster: Cluster, scenario: Scenario, step: Step) -> tuple[float, float]:
    """The shortest and the longest step that are to be expected."""
    shape, all_reduce = cluster.shape(scenario.num_ranks), scenario.in_use
    given = cluster.uncertainty
    device = math.hypot(compute.uncertainty, given.device)

    def total_s(of_compute: Compute, of_cluster: Cluster) -> float:
        return run_step(of_compute, of_cluster, shape, all_reduce, step.buckets).total_s

    ends = [(total_s(slower(compute, 1 / (1 + device)), cluster), total_s(slower(compute, 1 + device), cluster))]
    for change, factor in (
        (with_bandwidth, given.bandwidth),
        (with_latency, 1 / given.latency),
        (with_jitter, 1 / given.jitter),
    ):
        ends.append((total_s(compute, change(cluster, factor)), total_s(compute, change(cluster, 1 / factor))))
    sooner_s = math.hypot(*(max(0.0, step.total_s - low_s) for low_s, _ in ends))
    later_s = math.hypot(*(max(0.0, high_s - step.total_s) for _, high_s in ends))
    return max(step.total_s - sooner_s, step.total_s / 2), step.total_s + later_s


def with_bandwidth(cluster: Cluster, factor: float) -> Cluster:
    node, network = cluster.node, cluster.network
    return replace(
        cluster,
        node=replace(node, gb_per_s=factor * node.gb_per_s),
        network=replace(network, gbps=factor * network.gbps),
        cpu=with_core_costs(cluster.cpu, "_s_per_byte", 1 / factor),
    )


def with_latency(cluster: Cluster, factor: float) -> Cluster:
    node, network, engine = cluster.node, cluster.network, cluster.engine
    return replace(
        cluster,
        node=replace(node, alpha_us=factor * node.alpha_us),
        network=replace(network, alpha_us=factor * network.alpha_us, switch_alpha_us=factor * network.switch_alpha_us),
        engine=replace(engine, base_us=factor * engine.base_us, coordinate_us=factor * engine.coordinate_us),
        cpu=with_core_costs(cluster.cpu, "step_s", factor),
    )


def with_core_costs(cpu: Cpu | None, ending: str, factor: float) -> Cpu | None:
    """With those costs times the factor whose names end so."""
    if cpu is None:
        return None
    changed = {name: factor * value for name, value in asdict(cpu.costs).items() if name.endswith(ending)}
    return replace(cpu, costs=replace(cpu.costs, **changed))


def with_jitter(cluster: Cluster, factor: float) -> Cluster:
    jitter = cluster.jitter
    return replace(
        cluster,
        jitter=replace(jitter, noise=factor * jitter.noise, stalls_per_step=factor * jitter.stalls_per_step),
    )


def describe_plan(buckets: Sequence[Bucket]) -> str:
    if not buckets:
        return "nothing to all-reduce"
    names = "+".join(dict.fromkeys(bucket.plan.name for bucket in buckets))
    megabytes = sum(bucket.num_bytes for bucket in buckets) / 1e6
    return f"{names}, {len(buckets)} bucket{'s' * (len(buckets) > 1)}, {megabytes:.1f} MB"
