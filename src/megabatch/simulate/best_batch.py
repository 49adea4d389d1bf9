"""The global batch that reaches an accuracy soonest for each number of ranks, and the best number of ranks.

Idea: a larger batch makes better use of a rank and waits less, but needs more epochs (`planning.epochs`).  For every
candidate the step is simulated as for any job.  Candidates give each rank from the smallest span of BatchNorm that is
known to converge upwards, in steps of about 3 %, up to the largest known batch.  The microbatch is the largest divisor
of a rank's images within the known spans that fits on the device.
A number of ranks has one price per hour, so its fastest batch is also its cheapest.
Interval: the relative doubts of epochs and of the step are independent, so their squares add up.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from megabatch.errors import UserError
from megabatch.planning.epochs import EpochCurve
from megabatch.simulate.cluster import Cluster
from megabatch.simulate.compute import memory_bytes
from megabatch.simulate.job import Job
from megabatch.simulate.scenario import Scenario, Simulated, simulate, stages_of, training_of
from megabatch.simulate.step import run_step, simulate_step

Goal = Literal["time", "cost"]
STEP = 1.03  # ratio of two candidates


class Spans(NamedTuple):
    """The smallest and the largest number of images per BatchNorm that are known to converge."""

    low: int
    high: int


class Candidate(Struct, frozen=True, kw_only=True):
    """A batch at a number of ranks, trained to the target."""

    batch: int
    epochs: float
    simulated: Simulated
    low_minutes: float
    high_minutes: float

    @property
    def minutes(self) -> float:
        minutes = self.simulated.minutes
        assert minutes is not None
        return minutes

    @property
    def usd(self) -> float | None:
        return self.simulated.training.usd if self.simulated.training else None

    @property
    def row(self) -> dict[str, Any]:
        scenario = self.simulated.scenario
        return self.simulated.row | {
            "batch": self.batch,
            "microbatch": int(scenario.microbatch),
            "epochs": self.epochs,
            "low_minutes": self.low_minutes,
            "high_minutes": self.high_minutes,
        }


def at_batch(job: Job, curve: EpochCurve, batch: int, microbatch: int) -> Job:
    """Return the job at another batch, as long as the curve has it."""
    num_steps = math.ceil(curve.epochs(batch) * job.num_train / batch)
    return replace(job, global_batch=batch, microbatch=microbatch, epochs=None, num_steps=num_steps)


def candidate(job: Job, cluster: Cluster, curve: EpochCurve, num_ranks: int, batch: int, microbatch: int) -> Candidate:
    """Simulate one batch."""
    sized = at_batch(job, curve, batch, microbatch)
    simulated = simulate(sized.scenario(cluster, num_ranks))
    assert simulated.minutes is not None and sized.num_steps is not None
    step_s = simulated.step.total_s
    below = math.hypot(curve.doubt(batch), step_s / simulated.low_step_s - 1)
    above = math.hypot(curve.doubt(batch), simulated.high_step_s / step_s - 1)
    return Candidate(
        batch=batch,
        epochs=sized.num_steps * batch / job.num_train,
        simulated=simulated,
        low_minutes=simulated.minutes / (1 + below),
        high_minutes=simulated.minutes * (1 + above),
    )


def best_batch(job: Job, cluster: Cluster, curve: EpochCurve, spans: Spans, num_ranks: int) -> Candidate | None:
    """Return the best batch, or None if even the smallest batch of these ranks is beyond the known ones."""
    sizes = candidate_sizes(job, cluster, curve, spans, num_ranks)
    if not sizes:
        return None
    scenarios = [
        (size, micro, at_batch(job, curve, num_ranks * size, micro).scenario(cluster, num_ranks))
        for size, micro in sizes
    ]
    # Buckets take nearly all of the time to choose, and hardly depend on the batch: all candidates are ranked with
    # those of the middle one, and the best is then simulated with its own.
    middle = scenarios[len(scenarios) // 2][2]
    shape = cluster.shape(num_ranks)
    buckets = simulate_step(middle.compute, cluster, num_ranks, middle.in_use).buckets

    def total_s(scenario: Scenario) -> float:
        step = run_step(scenario.compute, cluster, shape, scenario.in_use, buckets)
        training = training_of(scenario, step, stages_of(scenario, step))
        assert training is not None
        return training.total_s

    size, microbatch, _ = min(scenarios, key=lambda each: total_s(each[2]))
    return candidate(job, cluster, curve, num_ranks, num_ranks * size, microbatch)


def candidate_sizes(
    job: Job, cluster: Cluster, curve: EpochCurve, spans: Spans, num_ranks: int
) -> list[tuple[int, int]]:
    """Return images per rank, ascending, each with its microbatch."""
    most = min(job.num_train, curve.largest) // num_ranks
    if most < spans.low:
        return []
    highest = largest_microbatch(job, cluster, spans)
    sizes, size = list[tuple[int, int]](), float(spans.low)
    while size <= most:
        images = round_to_microbatches(int(size), spans, highest)
        if images <= most and (not sizes or images > sizes[-1][0]):
            sizes.append((images, microbatch_of(images, spans, highest)))
        size = max(size * STEP, size + 1)
    return sizes


def largest_microbatch(job: Job, cluster: Cluster, spans: Spans) -> int:
    """Return the largest span that fits on the device; raise UserError if the smallest one does not."""
    available = 1e9 * cluster.device.memory_gb
    fitting = [
        size
        for size in range(spans.low, spans.high + 1)
        if memory_bytes(job.workload, job.precision, size) <= available
    ]
    if not fitting:
        needed = memory_bytes(job.workload, job.precision, spans.low) / 1e9
        raise UserError(
            f"--batch auto: {spans.low} images, the smallest span of BatchNorm that is known to converge, need "
            f"{needed:,.1f} GB, but {cluster.device.name} has {cluster.device.memory_gb:g}; use another cluster"
        )
    return fitting[-1]


def round_to_microbatches(images: int, spans: Spans, highest: int) -> int:
    """Return the nearest number of images below that has a divisor within the spans."""
    while microbatch_of(images, spans, highest) == 0:
        images -= 1
    return images


def microbatch_of(images: int, spans: Spans, highest: int) -> int:
    """Return the largest divisor within the spans, or 0."""
    return next((size for size in range(min(highest, images), spans.low - 1, -1) if images % size == 0), 0)


class Limits(NamedTuple):
    seconds: float | None = None
    usd: float | None = None

    def allow(self, found: Candidate) -> bool:
        in_time = self.seconds is None or 60 * found.minutes <= self.seconds
        return in_time and (self.usd is None or (found.usd is not None and found.usd <= self.usd))


def choose(found: Sequence[Candidate], limits: Limits, goal: Goal) -> Candidate | None:
    """Return the cheapest or the fastest of the candidates within the limits; None if there are none."""
    allowed = [each for each in found if limits.allow(each)]
    if goal == "time":
        return min(allowed, key=lambda each: each.minutes, default=None)
    # Without a price, the cost is that of the ranks' time.
    return min(allowed, key=lambda each: each.simulated.rank_hours or 0.0, default=None)


def refine(
    job: Job, cluster: Cluster, curve: EpochCurve, spans: Spans, found: Sequence[Candidate], limits: Limits, goal: Goal
) -> list[Candidate]:
    """Add the last number of whole nodes within the limits, between the chosen candidate and the next one beyond them.

    Bisects, assuming that more ranks are faster and cost more.
    """
    chosen = choose(found, limits, goal)
    if chosen is None:
        return [*found]
    # The cheapest has the fewest ranks that are fast enough, the fastest the most that are cheap enough.
    place = found.index(chosen) + (-1 if goal == "cost" else 1)
    if not 0 <= place < len(found) or limits.allow(found[place]):
        return [*found]
    size, best = cluster.node.ranks, chosen
    inside, outside = (each.simulated.scenario.num_ranks // size for each in (chosen, found[place]))
    while abs(outside - inside) > 1:
        middle = (inside + outside) // 2
        tried = best_batch(job, cluster, curve, spans, middle * size)
        if tried and limits.allow(tried):
            inside, best = middle, tried
        else:
            outside = middle
    added = [] if best is chosen else [best]
    return sorted([*found, *added], key=lambda each: each.simulated.scenario.num_ranks)


def best_batches(
    job: Job, cluster: Cluster, curve: EpochCurve, spans: Spans, ranks: Iterable[int]
) -> tuple[list[Candidate], list[int]]:
    """Return the best batch of each number of ranks, and the numbers whose batches are all beyond the known ones."""
    best = {num_ranks: best_batch(job, cluster, curve, spans, num_ranks) for num_ranks in ranks}
    found = [each for each in best.values() if each is not None]
    if not found:
        least = min(best)
        raise UserError(
            f"--batch auto: {least:,} ranks with at least {spans.low} images each make batches of "
            f"{least * spans.low:,}, beyond the largest known one, {curve.largest:,} ({curve.source}); "
            f"nearest: --ranks {max(1, curve.largest // spans.low)}"
        )
    return found, [num_ranks for num_ranks, each in best.items() if each is None]
