"""Comparisons of a job on a cluster: algorithms, improvements, changes, and the ranks needed to finish in time.

The ladder is that of Jia et al. 2018; each line adds one improvement to those before it:
    per-tensor ring   a ring for every gradient as soon as it is ready, in fp32
    + fusion          the buckets that end communication soonest
    + hierarchical    reduce in the node, all-reduce among leaders, broadcast in the node
    + hybrid          a plan for each bucket, chosen for the earliest end of all
    + 16 bits         16-bit gradients, which halve the bytes
Compute is the same in all of them: autocast (amp) has gradients in fp32 and computes in 16 bits.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from megabatch.errors import UserError
from megabatch.planning.algorithms import ALGORITHMS
from megabatch.planning.pipeline import ELEMENT_BYTES
from megabatch.planning.plan import BACKEND_ALGORITHMS
from megabatch.simulate.cluster import Cluster
from megabatch.simulate.compute import CURVES, memory_bytes
from megabatch.simulate.job import Job
from megabatch.simulate.scenario import Scenario, Simulated, simulate, with_jitter, with_latency
from megabatch.simulate.step import (
    AllReduceSettings,
    Prices,
    SimulatedStep,
    candidates,
    in_use,
    run_step,
    simulate_step,
)

WORTH = 0.005  # relative gain in images/s; smaller ones are not printed
AUTO = "auto"
LARGEST_SEARCH = 16_384  # ranks


class Variant(NamedTuple):
    """The same job with other settings, at some or all rank counts."""

    label: str
    varied: dict[str, Any]  # the settings that differ, for JSON
    results: list[Simulated]

    def results_at(self, num_ranks: int) -> list[Simulated]:
        return [result for result in self.results if result.scenario.num_ranks == num_ranks]


class Change(NamedTuple):
    label: str
    gained: float  # images/s
    share: float  # relative to images/s without the change


class Losses(NamedTuple):
    """Shares of the step time; they add up to 1."""

    computing: float
    latency: float  # exposed all-reduces that would vanish without latency
    carrying: float  # the other exposed all-reduces, due to bandwidth
    jitter: float
    images: float  # waiting for input


def run_all(job: Job, cluster: Cluster, ranks: Sequence[int]) -> list[Simulated]:
    scenarios = [job.scenario(cluster, num_ranks) for num_ranks in ranks]  # all first, to raise errors early
    return [simulate(scenario) for scenario in scenarios]


def compare(job: Job, cluster: Cluster, ranks: Sequence[int]) -> list[Variant]:
    """Simulate every algorithm at the rank counts to which it applies, and last the choice per bucket.

    Without rounding, flat is the backend's all-reduce, whose algorithms are listed one by one.
    """
    variants = []
    for algorithm in (*BACKEND_ALGORITHMS, *ALGORITHMS, AUTO):
        forced = replace(job, all_reduce=job.all_reduce._replace(algorithm=algorithm))
        scenarios = [forced.scenario(cluster, num_ranks) for num_ranks in ranks]
        applying = [each.num_ranks for each in scenarios if applies(each.in_use, cluster, each.num_ranks)]
        if applying:
            variants.append(Variant(algorithm, {"algorithm": algorithm}, run_all(forced, cluster, applying)))
    return variants


def applies(all_reduce: AllReduceSettings, cluster: Cluster, num_ranks: int) -> bool:
    """Return True if the algorithm applies; `all_reduce` has the comm dtype in use."""
    is_ring = (all_reduce.algorithm, all_reduce.dtype) == ("flat", "same") and "ring" in cluster.engine_sums
    if num_ranks == 1 or is_ring:
        return all_reduce.algorithm == AUTO
    try:
        return bool(candidates(cluster, cluster.shape(num_ranks), all_reduce))
    except UserError:
        return False


def exposed_by_algorithm(scenario: Scenario) -> dict[str, float]:
    """Return the exposed seconds of a step with one algorithm for all buckets, least first."""
    exposed_s = {}
    compute, cluster, num_ranks = scenario.compute, scenario.cluster, scenario.num_ranks
    for algorithm in (*BACKEND_ALGORITHMS, *ALGORITHMS):
        forced = in_use(scenario.all_reduce._replace(algorithm=algorithm), compute)
        if applies(forced, cluster, num_ranks):
            exposed_s[algorithm] = simulate_step(compute, cluster, num_ranks, forced).exposed_s
    return dict(sorted(exposed_s.items(), key=lambda found: found[1]))


def ladder(job: Job, cluster: Cluster, ranks: Sequence[int]) -> list[Variant]:
    if cluster.engine.sums and "ring" not in cluster.engine.sums:
        raise UserError(
            f"--ladder starts with a ring, but {cluster.name} has engine.sums={', '.join(cluster.engine.sums)}; "
            "add engine.sums=['ring']"
        )
    ring = "ring" if cluster.engine.sums else "flat"  # on CPUs our flat plan is the backend's ring
    wide, narrow = ladder_precisions(job, cluster)
    rungs = [
        ("per-tensor ring", wide, AllReduceSettings(algorithm=ring, overlap="layer")),
        ("+ fusion", wide, AllReduceSettings(algorithm=ring, overlap="fused")),
        ("+ hierarchical", wide, AllReduceSettings(algorithm="hierarchical", overlap="fused")),
        ("+ hybrid", wide, AllReduceSettings(algorithm=AUTO, overlap="fused")),
        ("+ 16 bits", narrow, AllReduceSettings(algorithm=AUTO, overlap="fused", dtype="fp16")),
    ]
    variants = []
    for label, precision, all_reduce in rungs:
        varied = {"improvement": label, "precision": precision, "comm_dtype": all_reduce.dtype}
        varied |= {"overlap": all_reduce.overlap, "algorithm": all_reduce.algorithm}
        results = run_all(replace(job, precision=precision, all_reduce=all_reduce), cluster, ranks)
        variants.append(Variant(label, varied, results))
    return variants


def ladder_precisions(job: Job, cluster: Cluster) -> tuple[str, str]:
    """Return the precisions with fp32 and with 16-bit gradients; equal if the cluster has no 16-bit curve."""
    curves = cluster.device.curves
    if job.profile:
        return job.profile.precision, job.profile.precision
    if CURVES["amp"] in curves:
        return "amp", CURVES["amp"]
    precision = "fp32" if "fp32" in curves else next(iter(curves))
    return precision, precision


def changes(simulated: Simulated) -> list[Change]:
    """Return the gain of each single change, largest first, without negligible ones."""
    before = simulated.images_per_s
    gains = [
        Change(label, after - before, after / before - 1)
        for label, scenario in changed_scenarios(simulated.scenario)
        if may_gain(simulated, scenario)
        for after in [scenario.global_batch / changed_step(simulated, scenario).total_s]
    ]
    return sorted((change for change in gains if change.share > WORTH), key=lambda change: -change.share)


def may_gain(simulated: Simulated, changed: Scenario) -> bool:
    """Return False if the gain is negligible for any choice of buckets and plans."""
    before, step, cluster = simulated.scenario, simulated.step, changed.cluster
    computes_alike = (changed.batch_per_rank, cluster.jitter) == (before.batch_per_rank, before.cluster.jitter)
    # In parts, a larger bucket may be done sooner, so the bound below does not hold.
    if not computes_alike or cluster.engine.in_parts or cluster.cpu:
        return True
    least_s = step.computing_s + step.jitter_s + least_exposed_s(changed)
    return step.total_s / least_s - 1 > WORTH


def least_exposed_s(scenario: Scenario) -> float:
    """Return a lower bound: the bucket of the last gradient takes at least as long as that gradient would."""
    if scenario.num_ranks == 1:
        return 0.0
    compute, cluster = scenario.compute, scenario.cluster
    shape, all_reduce = cluster.shape(scenario.num_ranks), in_use(scenario.all_reduce, compute)
    prices = Prices(cluster, shape, all_reduce.dtype)
    ready_s, last = max(zip(compute.backward.ready_s, compute.backward.gradients, strict=True))
    size = ELEMENT_BYTES[last.dtype]
    plans = [plan for group in candidates(cluster, shape, all_reduce) for plan in group]
    taken_s = min(sum(prices.of(plan, last.num_bytes // size, size)[:3]) for plan in plans)
    return max(0.0, ready_s + taken_s - compute.backward_s)


def changed_step(simulated: Simulated, changed: Scenario) -> SimulatedStep:
    """Simulate the changed step, choosing buckets and plans again only if the change affects them."""
    before, step = simulated.scenario, simulated.step
    compute, cluster, num_ranks = changed.compute, changed.cluster, changed.num_ranks
    if changed == replace(before, cluster=replace(before.cluster, jitter=cluster.jitter, input=cluster.input)):
        return run_step(compute, cluster, cluster.shape(num_ranks), changed.all_reduce, step.buckets)
    return simulate_step(compute, cluster, num_ranks, changed.all_reduce)


def changed_scenarios(scenario: Scenario) -> list[tuple[str, Scenario]]:
    cluster, all_reduce = scenario.cluster, scenario.all_reduce
    doubled = replace(scenario, batch_per_rank=2 * scenario.batch_per_rank)
    if scenario.accumulation > 1 or not fits(doubled):
        doubled = replace(doubled, accumulation=2 * scenario.accumulation)
    faster = with_gbps(cluster, 2 * cluster.network.gbps)
    result = [
        (f"twice the network: network.gbps={faster.network.gbps:g}", replace(scenario, cluster=faster)),
        ("half of all latencies", replace(scenario, cluster=with_latency(cluster, 0.5))),
        ("no jitter: no rank is slower than another", replace(scenario, cluster=with_jitter(cluster, 0.0))),
        (f"twice the batch: {doubled.batch_per_rank:,} images per rank, {doubled.global_batch:,} in all", doubled),
    ]
    if all_reduce.overlap in ("none", "layer"):
        result.append(("fused all-reduces that overlap with backward", with_settings(scenario, overlap=AUTO)))
    if cluster.input.images_per_s:
        read = replace(cluster.input, images_per_s=2 * cluster.input.images_per_s)
        label = f"images read twice as fast: input.images_per_s={read.images_per_s:g}"
        result.append((label, replace(scenario, cluster=replace(cluster, input=read))))
    if scenario.in_use.dtype == "same":
        result.append(("16 bits between nodes: --comm-dtype fp16", with_settings(scenario, dtype="fp16")))
    return result


def with_gbps(cluster: Cluster, gbps: float) -> Cluster:
    return replace(cluster, network=replace(cluster.network, gbps=gbps))


def with_settings(scenario: Scenario, **changed: str) -> Scenario:
    return replace(scenario, all_reduce=scenario.all_reduce._replace(**changed))  # type: ignore[arg-type]


def fits(scenario: Scenario) -> bool:
    needed = memory_bytes(scenario.workload, scenario.precision, scenario.microbatch)
    return needed <= scenario.cluster.device.memory_gb * 1e9


def losses(simulated: Simulated) -> Losses:
    scenario, step = simulated.scenario, simulated.step
    total_s = step.total_s
    instant = with_latency(scenario.cluster, 0.0)
    shape = instant.shape(scenario.num_ranks)
    carrying_s = run_step(scenario.compute, instant, shape, scenario.in_use, step.buckets).exposed_s
    return Losses(
        computing=step.computing_s / total_s,
        latency=(step.exposed_s - carrying_s) / total_s,
        carrying=carrying_s / total_s,
        jitter=step.jitter_s / total_s,
        images=step.input_s / total_s,
    )


class Search(NamedTuple):
    found: Simulated | None  # the fewest ranks that finish in time
    fastest: Simulated  # of all simulated rank counts
    most_ranks: int  # that were simulated


def smallest_within(job: Job, cluster: Cluster, seconds: float) -> Search:
    """Find the fewest whole nodes whose ranks share the batch evenly and finish in time.

    Doubles the ranks until they finish in time, then bisects, assuming that more ranks are faster.
    """
    size = cluster.node.ranks
    sharing = [count for count in range(size, max(size, LARGEST_SEARCH) + 1, size) if job.can_share(count)]
    if not sharing:
        raise UserError(
            f"--within: no number of whole nodes of {size} ranks divides batch.global={job.global_batch} evenly; "
            "give a batch per rank instead, for example --batch-per-rank 64"
        )
    counts = [count for count in sharing if can_run(job, cluster, count)]
    counts = counts or sharing[-1:]  # simulating it raises the reason
    tried: dict[int, Simulated] = {}

    def is_in_time(place: int) -> bool:
        tried[place] = simulate(job.scenario(cluster, counts[place]))
        minutes = tried[place].minutes
        assert minutes is not None, "--within needs a job with a length"
        return 60 * minutes <= seconds

    places = doubling_places(counts)
    reached = next((index for index, place in enumerate(places) if is_in_time(place)), None)
    found = None
    if reached is not None:
        before = places[reached - 1] if reached else -1
        found = tried[first_true(is_in_time, before, places[reached])]
    fastest = min(tried.values(), key=lambda each: each.minutes or 0.0)
    return Search(found, fastest, counts[max(tried)])


def can_run(job: Job, cluster: Cluster, num_ranks: int) -> bool:
    """Return False if the microbatch does not fit on the device, or the run is shorter than one step."""
    try:
        job.scenario(cluster, num_ranks)
    except UserError:
        return False
    return True


def doubling_places(counts: Sequence[int]) -> list[int]:
    """Return the indices of the first count, of each that is at least twice the previous one, and of the last."""
    places = [0]
    for place, count in enumerate(counts):
        if count >= 2 * counts[places[-1]]:
            places.append(place)
    return places if places[-1] == len(counts) - 1 else [*places, len(counts) - 1]


def first_true(holds: Callable[[int], bool], before: int, at: int) -> int:
    """Return the first place in (before, at] at which a monotone condition holds; it holds at `at`."""
    while at - before > 1:
        middle = (before + at) // 2
        if holds(middle):
            at = middle
        else:
            before = middle
    return at
