"""A gap seed by seed: with the same initial weights and the same images, what a seed does to both arms falls out.

d_i = baseline_i - arm_i for every seed i that both have;  mean(d) +- t(n - 1) * s(d) / sqrt(n)          Student 1908
"""

from collections.abc import Mapping

from megabatch.studies.statistics import Gap, spread


def paired_gap(arm: Mapping[int, float], baseline: Mapping[int, float]) -> Gap | None:
    """How far the arm lies below the baseline, by seed; None if they have no seed in common."""
    differences = [baseline[seed] - arm[seed] for seed in sorted(arm.keys() & baseline.keys())]
    if not differences:
        return None
    found = spread(differences)
    return Gap(found.mean, found.interval)
