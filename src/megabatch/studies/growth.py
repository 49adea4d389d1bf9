"""Whether a curve grows by a larger factor in one arm than in another.

f = last value / first value of a run's curve.  Factors multiply, so that log f of the seeds is compared, by Welch's
interval; what is said is the ratio of the geometric means.
"""

import math
from collections.abc import Sequence

from megabatch.intervals import gap
from megabatch.studies.evidence import Arm, CurveClaim, Study
from megabatch.studies.verdict import Verdict, divergence, seeds_awaited


def judge_curves(study: Study, claim: CurveClaim) -> Verdict:
    more, less = study.arm(claim.more), study.arm(claim.less)
    factors = {arm.name: log_growths(arm, claim.curve) for arm in (more, less)}
    for arm in (more, less):
        if not arm.runs or len(factors[arm.name]) < len(arm.runs):
            return Verdict(None, f"{arm.name}: {divergence(arm)}: cannot be told")
    found = gap(factors[less.name], factors[more.name])  # of the logarithms: how far `less` lies below
    where = (
        f"the {claim.curve} grows {fold(factors[more.name])}-fold in {more.name} "
        f"and {fold(factors[less.name])}-fold in {less.name}"
    )
    if found.interval is None:
        return Verdict(None, f"{where} (one seed, so no interval): cannot be told")
    low, high = math.exp(found.interval.low), math.exp(found.interval.high)
    where += f", {math.exp(found.size):.3g} times as much (95 % interval {low:.3g} to {high:.3g})"
    if awaited := seeds_awaited(more, less):
        return Verdict(None, f"so far {where}: not judged before all seeds are there ({awaited})")
    if low <= 1 <= high:
        return Verdict(None, f"{where}: these seeds do not tell them apart")
    return Verdict(low > 1, f"{where}: {'agrees' if low > 1 else 'disagrees'}")


def log_growths(arm: Arm, curve: str) -> list[float]:
    """Of every run whose curve has a first and a last value above 0."""
    values = [[value for _, value in run.curves.get(curve, []) if value is not None] for run in arm.runs]
    return [math.log(found[-1] / found[0]) for found in values if found and min(found[0], found[-1]) > 0]


def fold(logarithms: Sequence[float]) -> str:
    return f"{math.exp(math.fsum(logarithms) / len(logarithms)):.3g}"
