"""The time of one training step.

A step consists of:
    compute   forward and backward of every microbatch; the last backward yields gradients layer by layer
    exposed   the part of the all-reduces (planning/pipeline.py) that backward does not hide
    jitter    waiting for the slowest rank
    input     waiting for images, if a node reads them too slowly
The update is part of the device's t0.

`overlap` decides how gradients are cut into buckets:
    none    one bucket after backward, so that nothing is hidden
    layer   one bucket per gradient, as soon as it is ready
    fused   the buckets that end communication soonest (planning/buckets.py), or buckets of a given size

Jitter, with p ranks of which k share a node:
    speed   Speeds of ranks have a relative deviation sigma.  The slowest of p is sigma m(p) below the mean; m(p) is
            the expected maximum of p normal numbers (Blom 1958: the quantile at (p - 3/8) / (p + 1/4)).
    stalls  A rank stalls with probability q per step (a page fault, a link that retries, garbage collection) for an
            exponential time of mean D.  All wait for the longest of the p q expected stalls: about D ln(1 + p q).
The first hardly grows with p, the second does, as in the logs of large runs.  The speed of a device was measured on
whole nodes and contains their jitter, so only the jitter of more than one node is added.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from megabatch.errors import UserError
from megabatch.planning.algorithms import ALGORITHMS, shared_memory
from megabatch.planning.backend_cost import backend_plans, price_backend
from megabatch.planning.choosing import choose_buckets, price
from megabatch.planning.pipeline import Costs, RecordedBackward, exposed_s, pass_through
from megabatch.planning.plan import CommDtype, Plan
from megabatch.planning.topology import ClusterShape
from megabatch.planning.tuning import Bucket
from megabatch.simulate.cluster import Cluster, Cpu, Jitter
from megabatch.simulate.cores import StepTime, core_seconds, cores_of

Overlap = Literal["auto", "none", "layer", "fused"]
OVERLAPS: tuple[Overlap, ...] = ("auto", "none", "layer", "fused")
ONE_BUCKET_MB, ONE_GRADIENT_MB = 1e9, 0.0  # size limits


def jitter_s(jitter: Jitter, shape: ClusterShape, computing_s: float) -> float:
    p, k = shape.num_ranks, shape.largest_node
    noise_s = computing_s * jitter.noise * (slowest_of(p) - slowest_of(k))
    return noise_s + jitter.stall_ms / 1e3 * math.log1p((p - k) * jitter.stalls_per_step)


def slowest_of(num_ranks: int) -> float:
    """Return the expected maximum of `num_ranks` standard normal numbers."""
    return NormalDist().inv_cdf((num_ranks - 0.375) / (num_ranks + 0.25))


class Compute(NamedTuple):
    """The computation of one rank in a step."""

    forward_s: float  # of one microbatch
    backward: RecordedBackward  # of one microbatch
    backward_s: float
    num_images: float = 0.0  # in all microbatches
    accumulation: int = 1  # microbatches
    update_s: float = 0.0  # if it is not part of the others
    uncertainty: float = 0.0  # relative, for nine in ten

    @property
    def total_s(self) -> float:
        return self.accumulation * (self.forward_s + self.backward_s) + self.update_s


class AllReduceSettings(NamedTuple):
    dtype: CommDtype = "same"
    algorithm: str = "auto"
    overlap: Overlap = "auto"
    bucket_mb: float | None = None


class SimulatedStep(Struct, frozen=True, kw_only=True):
    """The seconds of a step by cause."""

    forward_s: float
    backward_s: float
    update_s: float
    exposed_s: float  # all-reduces that backward does not hide
    jitter_s: float  # waiting for the slowest rank
    input_s: float  # waiting for images
    all_reduce_s: float  # all buckets, hidden or not
    buckets: list[Bucket]

    @property
    def computing_s(self) -> float:
        return self.forward_s + self.backward_s + self.update_s

    @property
    def total_s(self) -> float:
        return self.computing_s + self.exposed_s + self.jitter_s + self.input_s


def simulate_step(compute: Compute, cluster: Cluster, num_ranks: int, all_reduce: AllReduceSettings) -> SimulatedStep:
    """Simulate a step with the buckets and plans of `choose_cut`."""
    shape = cluster.shape(num_ranks)
    return run_step(compute, cluster, shape, all_reduce, choose_cut(compute, cluster, shape, all_reduce))


def in_use(all_reduce: AllReduceSettings, compute: Compute) -> AllReduceSettings:
    """Return the settings with the comm dtype in use: 16-bit gradients have no other."""
    dtype = compute.backward.gradients[0].dtype
    return all_reduce._replace(dtype=dtype) if dtype in ("fp16", "bf16") else all_reduce


def choose_cut(compute: Compute, cluster: Cluster, shape: ClusterShape, all_reduce: AllReduceSettings) -> list[Bucket]:
    if shape.num_ranks == 1:
        return []
    slowed, all_reduce = on_cores(compute, cluster, shape), in_use(all_reduce, compute)
    backward = slowed.backward
    bucket_mb = all_reduce.bucket_mb
    match all_reduce.overlap:
        case "none":
            backward = backward._replace(ready_s=[slowed.backward_s] * len(backward.ready_s))
            bucket_mb = ONE_BUCKET_MB
        case "layer":
            bucket_mb = ONE_GRADIENT_MB
    forced = "" if all_reduce.algorithm == "auto" else f"--algorithm {all_reduce.algorithm}"
    prices = Prices(cluster, shape, all_reduce.dtype)
    choices = [
        choose_buckets(backward, plans, prices.of, bucket_mb=bucket_mb, forced=forced)[0]
        for plans in candidates(cluster, shape, all_reduce)
    ]
    return min(choices, key=lambda buckets: run_step(compute, cluster, shape, all_reduce, buckets).exposed_s)


def candidates(cluster: Cluster, shape: ClusterShape, all_reduce: AllReduceSettings) -> list[list[Plan]]:
    """Return the backend's plans and ours.

    A step takes its plans from one of the two groups: the backend's plans use node and network at once, while ours
    leave one of them to another bucket.
    """
    algorithm, dtype = all_reduce.algorithm, all_reduce.dtype
    # Without rounding, our flat plan is the backend's ring.
    is_ring = dtype == "same" and "ring" in cluster.engine_sums
    names = [name for name in ALGORITHMS if algorithm in ("auto", name) and not (name == "flat" and is_ring)]
    plans = [ALGORITHMS[name](shape, dtype) for name in names]
    if cluster.cpu and shape.num_nodes == 1:  # ranks of one node always exchange through shared memory
        plans = [shared_memory(shape)]
    ours = [plan for plan in plans if plan and plan.phases]
    sums = [kind for kind in cluster.engine_sums if algorithm in ("auto", "flat", kind)]
    groups = [group for group in (backend_plans(shape, dtype, sums), ours) if group]
    if not groups:
        reason = "its engine does not have this all-reduce"
        if algorithm == "torus":
            reason = "its nodes have different numbers of ranks"
        elif algorithm in cluster.engine_sums:
            reason = "they are all in one node"
        raise UserError(
            f"--algorithm {algorithm} does not apply to {shape.num_ranks} ranks of {cluster.name}: {reason}; "
            "nearest: --algorithm auto"
        )
    return [list({plan.phases: plan for plan in group}.values()) for group in groups]  # on one node, ours are equal


def on_cores(compute: Compute, cluster: Cluster, shape: ClusterShape) -> Compute:
    """Return the computation slowed by ranks that share its cores."""
    if not cluster.cpu:
        return compute
    turns = cluster.cpu.crowding * cores_of(shape, cluster.cpu.cores, cluster.cpu.hosts_on_machine).turns
    return slower(compute, turns)


def slower(compute: Compute, factor: float) -> Compute:
    backward = compute.backward
    return compute._replace(
        forward_s=factor * compute.forward_s,
        backward_s=factor * compute.backward_s,
        update_s=factor * compute.update_s,
        backward=backward._replace(ready_s=[factor * ready_s for ready_s in backward.ready_s]),
    )


def time_on_cores(step: SimulatedStep, cpu: Cpu, shape: ClusterShape) -> StepTime:
    """Add the work of all-reduces to the cores that compute, for a step simulated without it."""
    cores = cores_of(shape, cpu.cores, cpu.hosts_on_machine)
    reducing_s = sum(core_seconds(b.plan, shape, b.num_elements, cpu.costs, cores) for b in step.buckets)
    return StepTime(step.computing_s + step.exposed_s, step.computing_s + reducing_s / cores.num_cores)


class Prices:
    """The prices of plans on a cluster."""

    def __init__(self, cluster: Cluster, shape: ClusterShape, dtype: CommDtype) -> None:
        self.shape, self.engine, self.links = shape, cluster.collectives, cluster.links(shape, dtype)
        self.in_parts = cluster.engine.in_parts

    def of(self, plan: Plan, num_elements: int, element_bytes: int) -> Costs:
        if plan.is_backends:
            return price_backend(plan, self.shape, self.engine, num_elements, element_bytes)
        before_s, crossing_s, after_s, crosses = price(
            plan, self.shape, self.links, num_elements, element_bytes, self.in_parts
        )
        base_s, network = self.engine.base_s, plan.network  # base_s once per phase
        return Costs(
            before_s + base_s * network.start,
            crossing_s + base_s * (network.stop - network.start),
            after_s + base_s * (len(plan.phases) - network.stop),
            crosses,
        )


def run_step(
    compute: Compute,
    cluster: Cluster,
    shape: ClusterShape,
    all_reduce: AllReduceSettings,
    buckets: Sequence[Bucket],
) -> SimulatedStep:
    """Simulate a step with the given buckets and plans, which may have been chosen for slightly different links."""
    step = run_without_contention(compute, cluster, shape, all_reduce, buckets)
    if cluster.cpu and buckets:
        taken_s = time_on_cores(step, cluster.cpu, shape).seconds(cluster.cpu.costs.step_unhidden)
        step = replace(step, exposed_s=taken_s - step.computing_s)
    # The images of the next step are read during this one.
    rate = cluster.input.images_per_s
    reading_s = shape.largest_node * compute.num_images / rate if rate else 0.0
    return replace(step, input_s=max(0.0, reading_s - step.total_s))


def run_without_contention(
    compute: Compute,
    cluster: Cluster,
    shape: ClusterShape,
    all_reduce: AllReduceSettings,
    buckets: Sequence[Bucket],
) -> SimulatedStep:
    """Simulate a step whose all-reduces use no compute cores and whose images are ready."""
    compute, all_reduce = on_cores(compute, cluster, shape), in_use(all_reduce, compute)
    prices = Prices(cluster, shape, all_reduce.dtype)
    costs = [prices.of(bucket.plan, bucket.num_elements, bucket.element_bytes) for bucket in buckets]
    ready = dict(zip(compute.backward.names, compute.backward.ready_s, strict=True))
    is_hidden = all_reduce.overlap != "none"
    ready_s = [max(ready[name] for name in b.gradients) if is_hidden else compute.backward_s for b in buckets]
    passages = pass_through(ready_s, costs)
    return SimulatedStep(
        forward_s=compute.accumulation * compute.forward_s,
        backward_s=compute.accumulation * compute.backward_s,
        update_s=compute.update_s,
        exposed_s=exposed_s(passages, compute.backward_s) if passages else 0.0,
        jitter_s=jitter_s(cluster.jitter, shape, compute.total_s),
        input_s=0.0,
        all_reduce_s=sum(sum(cost[:3]) for cost in costs),
        buckets=list(buckets),
    )
