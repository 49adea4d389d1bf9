"""What a step loses because it waits for the slowest rank.  p ranks, k of them in a node.

Noise: the step times of a rank spread by a factor sigma, and the slowest of p lies sigma m(p) above the mean; m(p)
is the expected maximum of p normal numbers (Blom 1958: the quantile at (p - 3/8) / (p + 1/4)).
Stalls: a rank is held up with probability q a step (a page fault, a link that retries, garbage collection), for
an exponential time of mean D; all wait for the longest of the p q that are expected, about D ln(1 + p q).
The first hardly grows with p and the second does, as the logs of large runs show.

A device's speed was measured on whole nodes, so only what lies beyond a node is counted.
"""

import math
from statistics import NormalDist

from megabatch.planning.topology import ClusterShape
from megabatch.simulate.cluster import Jitter


def jitter_s(jitter: Jitter, shape: ClusterShape, computing_s: float) -> float:
    p, k = shape.num_ranks, shape.largest_node
    noise_s = computing_s * jitter.noise * (slowest_of(p) - slowest_of(k))
    return noise_s + jitter.stall_ms / 1e3 * math.log1p((p - k) * jitter.stalls_per_step)


def slowest_of(num_ranks: int) -> float:
    """The expected maximum of so many normal numbers, in deviations."""
    return NormalDist().inv_cdf((num_ranks - 0.375) / (num_ranks + 0.25))
