"""A training run on a cluster, and the simulator's prediction for it.

Every prediction has an interval.  Each uncertain input (the device's speed, bandwidths, latencies, jitter) is set to
its low and to its high end while the others stay.  The inputs are independent, so the squares of the resulting changes
of the step time add up.  Buckets and plans stay as chosen.

From a step to the end of training.  Legend: T hours of steps and evaluations, M hours between interruptions of the job,
C hours for a checkpoint, R hours for a restart.  Checkpoints every tau = sqrt(2 C M) cost least (Young 1974, Daly
2006).  The job takes T + C floor(T/tau) + T/M (tau/2 + R), for checkpoints, steps lost to interruptions, and restarts.
A job shorter than tau writes no checkpoint, and an interruption loses half of it.
"""

import math
from collections.abc import Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict, replace

from megabatch.planning.sizes import Stage
from megabatch.planning.tuning import Bucket
from megabatch.simulate.cluster import Cluster, Cpu
from megabatch.simulate.compute import compute_by_curve, compute_by_profile, memory_bytes
from megabatch.simulate.profile import Profile
from megabatch.simulate.step import AllReduceSettings, Compute, SimulatedStep, in_use, run_step, simulate_step, slower
from megabatch.simulate.workload import Workload, scaled


class RunLength(Struct, frozen=True, kw_only=True):
    num_steps: int
    num_evaluations: int = 0
    test_images: int = 0
    stages: list[Stage] = []  # steps by the side of training images; []: all have the workload's
    test_side: int | None = None  # of test images; None: the workload's


class SimulatedTraining(Struct, frozen=True, kw_only=True):
    steps_s: float
    evaluation_s: float
    faults_s: float  # expected time of checkpoints, repeated steps and restarts
    num_interruptions: float
    checkpoint_minutes: float | None  # between two checkpoints
    usd: float | None

    @property
    def total_s(self) -> float:
        return self.steps_s + self.evaluation_s + self.faults_s


def train_for(
    length: RunLength, steps_s: float, evaluation_s: float, num_ranks: int, cluster: Cluster
) -> SimulatedTraining:
    working_s = steps_s + length.num_evaluations * evaluation_s
    faults_s, num_interruptions, interval_s = 0.0, 0.0, math.inf
    faults = cluster.faults
    rate = faults.interruptions_per_rank_hour * num_ranks / 3600  # interruptions of the job per second
    if rate:
        interval_s = math.sqrt(2 * faults.checkpoint_s / rate)
        lost_s = min(interval_s, working_s) / 2
        writing_s = faults.checkpoint_s * math.floor(working_s / interval_s) if interval_s else 0.0
        faults_s = writing_s + working_s * rate * (lost_s + 60 * faults.restart_minutes)
        num_interruptions = working_s * rate
    hours = (working_s + faults_s) / 3600
    price = cluster.price.usd_per_rank_hour
    return SimulatedTraining(
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
    accumulation: int = 1  # microbatches per rank and step
    precision: str
    all_reduce: AllReduceSettings = AllReduceSettings()
    length: RunLength | None = None
    profile: Profile | None = None  # recorded compute times, instead of the cluster's curve

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

    def compute_at(self, side: int) -> Compute:
        """Return the compute time for images of another side.  Times of a profile grow with the area."""
        if side == self.workload.image_size:
            return self.compute
        workload = scaled(self.workload, side)
        if self.profile:
            compute = self.compute
            area = (side / self.workload.image_size) ** 2
            return slower(compute, area)._replace(update_s=compute.update_s)
        return replace(self, workload=workload).compute

    @property
    def in_use(self) -> AllReduceSettings:
        """The settings with the comm dtype in use."""
        return in_use(self.all_reduce, self.compute)


class StageStep(Struct, frozen=True, kw_only=True):
    """A step with training images of one side."""

    stage: Stage
    step: SimulatedStep
    memory_bytes: float  # of a rank


class Simulated(Struct, frozen=True, kw_only=True):
    scenario: Scenario
    step: SimulatedStep  # with the largest training images
    stages: list[StageStep] = []  # if the side of training images changes
    low_step_s: float
    high_step_s: float
    training: SimulatedTraining | None

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
        """The throughput relative to ranks that never wait."""
        return self.step.computing_s / self.step.total_s

    @property
    def minutes(self) -> float | None:
        return self.training.total_s / 60 if self.training else None

    @property
    def rank_hours(self) -> float | None:
        return self.scenario.num_ranks * self.minutes / 60 if self.minutes is not None else None

    @property
    def plan(self) -> str:
        """A summary such as "torus/fp16, 3 buckets, 51.1 MB"."""
        return describe_plan(self.step.buckets)

    @property
    def row(self) -> dict[str, Any]:
        """The values for JSON."""
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
        } | ({"stages": [self.stage_row(each) for each in self.stages]} if self.stages else {})

    def stage_row(self, each: StageStep) -> dict[str, Any]:
        return {
            "side": each.stage.side,
            "steps": each.stage.num_steps,
            "step_s": each.step.total_s,
            "images_per_s": self.scenario.global_batch / each.step.total_s,
            "memory_bytes": each.memory_bytes,
        }


def simulate(scenario: Scenario) -> Simulated:
    compute, cluster = scenario.compute, scenario.cluster
    step = simulate_step(compute, cluster, scenario.num_ranks, scenario.in_use)
    low_s, high_s = interval(compute, cluster, scenario, step)
    stages = stages_of(scenario, step)
    training = training_of(scenario, step, stages)
    return Simulated(
        scenario=scenario, step=step, stages=stages, low_step_s=low_s, high_step_s=high_s, training=training
    )


def stages_of(scenario: Scenario, largest: SimulatedStep) -> list[StageStep]:
    """Simulate a step of each stage with the buckets and plans of the largest images, as in a run."""
    shape = scenario.cluster.shape(scenario.num_ranks)
    return [
        StageStep(
            stage=stage,
            step=run_step(scenario.compute_at(stage.side), scenario.cluster, shape, scenario.in_use, largest.buckets),
            memory_bytes=memory_bytes(scaled(scenario.workload, stage.side), scenario.precision, scenario.microbatch),
        )
        for stage in (scenario.length.stages if scenario.length else [])
    ]


def training_of(scenario: Scenario, step: SimulatedStep, stages: Sequence[StageStep] = ()) -> SimulatedTraining | None:
    """Return the whole training, given a step with the largest images and the stages with others."""
    length = scenario.length
    if not length:
        return None
    steps_s = math.fsum(each.stage.num_steps * each.step.total_s for each in stages)
    images_per_rank = math.ceil(length.test_images / scenario.num_ranks)
    forward_s = step.forward_s
    if length.test_side:
        forward_s *= scenario.compute_at(length.test_side).forward_s / scenario.compute.forward_s
    return train_for(
        length,
        steps_s or length.num_steps * step.total_s,
        images_per_rank / scenario.batch_per_rank * forward_s,
        scenario.num_ranks,
        scenario.cluster,
    )


def interval(compute: Compute, cluster: Cluster, scenario: Scenario, step: SimulatedStep) -> tuple[float, float]:
    """Return the shortest and the longest expected step."""
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
    """Multiply the costs whose names have this ending by the factor."""
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
