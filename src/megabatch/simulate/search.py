"""How many ranks a job needs to be done within a time."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from megabatch.errors import UserError
from megabatch.simulate.cluster import Cluster
from megabatch.simulate.job import Job
from megabatch.simulate.scenario import Simulated, simulate

LARGEST_SEARCH = 16_384  # ranks


class Search(NamedTuple):
    found: Simulated | None  # the smallest that finishes in time
    fastest: Simulated  # of all that were tried
    most_ranks: int  # that were tried


def smallest_within(job: Job, cluster: Cluster, seconds: float) -> Search:
    """The fewest whole nodes whose ranks share the batch evenly and finish in time.

    Doubles until one does, then bisects: between the two, more ranks are taken to be faster.
    """
    size = cluster.node.ranks
    sharing = [count for count in range(size, max(size, LARGEST_SEARCH) + 1, size) if job.can_share(count)]
    if not sharing:
        raise UserError(
            f"--within: no number of whole nodes of {size} ranks shares batch.global={job.global_batch} evenly; "
            "for example --batch-per-rank 64"
        )
    counts = [count for count in sharing if can_run(job, cluster, count)] or sharing[-1:]  # which then says why not
    tried: dict[int, Simulated] = {}

    def is_in_time(place: int) -> bool:
        tried[place] = simulate(job.scenario(cluster, counts[place]))
        minutes = tried[place].minutes
        assert minutes is not None, "a job without a length has no end"
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
    """False where a microbatch of few ranks is too large for the device, or the batch of many for a single step."""
    try:
        job.scenario(cluster, num_ranks)
    except UserError:
        return False
    return True


def doubling_places(counts: Sequence[int]) -> list[int]:
    """Places of the first count, of those at least twice the one before, and of the last."""
    places = [0]
    for place, count in enumerate(counts):
        if count >= 2 * counts[places[-1]]:
            places.append(place)
    return places if places[-1] == len(counts) - 1 else [*places, len(counts) - 1]


def first_true(holds: Callable[[int], bool], before: int, at: int) -> int:
    """The first place after `before` where it holds, as it does `at`; where it holds, it holds for all that follow."""
    while at - before > 1:
        middle = (before + at) // 2
        if holds(middle):
            at = middle
        else:
            before = middle
    return at
