"""What a step loses because it waits for the slowest rank.  p ranks.

Noise: the step times of a rank spread by a factor sigma; the slowest of p normal ones lies sigma sqrt(2 ln p) above the
mean.  Stalls: a rank is held up with probability q a step (a page fault, a link that retries, garbage collection), for
an exponential time of mean D; all wait for the longest of the p q that are expected, about D ln(1 + p q).  The first
hardly grows with p and the second does, as the logs of large runs show.
"""

import math

from megabatch.simulate.cluster import Jitter


def jitter_s(jitter: Jitter, num_ranks: int, computing_s: float) -> float:
    noise_s = computing_s * jitter.noise * math.sqrt(2 * math.log(num_ranks))
    others = num_ranks - 1  # for one's own stalls nobody waits
    return noise_s + jitter.stall_ms / 1e3 * math.log1p(others * jitter.stalls_per_step)
