"""Whether arms keep to their criteria: a decision and its sentence.  In percentage points; a gap is positive below."""

import math
from collections.abc import Sequence

from msgspec import Struct

from megabatch.experiments.evidence import Arm, Claim, Criterion, CurveClaim, Study
from megabatch.runs.intervals import Gap, Interval, Spread, gap, paired_gap, spread

UNTOLD = "these seeds do not tell them apart"
EXACT_PLACES = 9  # rounding error is not a gap: 93.0 - 92.7 lies at a criterion of 0.3, not beyond it


class Verdict(Struct, frozen=True):
    holds: bool | None  # None: nothing can be said
    text: str  # one sentence, without its full stop


def top1_spread(arm: Arm) -> Spread | None:
    """In %.  None: a seed diverged, or there are none; a mean of the others would flatter the arm."""
    return spread(percents(arm)) if arm.runs and not arm.num_diverged else None


def top1_gap(study: Study, arm: Arm, baseline: Arm) -> Gap | None:
    """In points, seed by seed if the study is paired.  None: one of them has no mean."""
    if top1_spread(arm) is None or top1_spread(baseline) is None:
        return None
    if study.paired:
        ours, theirs = ({run.seed: 100 * run.top1 for run in of.runs if run.top1 is not None} for of in (arm, baseline))
        seeds = sorted(ours.keys() & theirs.keys())
        return paired_gap([ours[seed] for seed in seeds], [theirs[seed] for seed in seeds]) if seeds else None
    return gap(percents(arm), percents(baseline))


def percents(arm: Arm) -> list[float]:
    return [100 * top1 for top1 in arm.top1s]


def judge(study: Study, criterion: Criterion) -> Verdict:
    arm, baseline = study.arm(criterion.arm), study.arm(criterion.baseline)
    found = top1_gap(study, arm, baseline)
    if found is None:
        return judge_without_means(arm, baseline, criterion)
    if awaited := seeds_awaited(arm, baseline):
        return Verdict(
            None,
            f"so far {lies(arm, baseline, found)}; {bound(criterion)}: not judged before all seeds "
            f"are there ({awaited})",
        )
    size, most, upper = round(found.size, EXACT_PLACES), criterion.max_gap_points, criterion.max_upper_points
    holds = most is None or size <= most
    # As many places as show on which side of the criterion the gap lies.
    places = 2
    if most is not None:
        places = next(p for p in range(2, EXACT_PLACES + 1) if (round(size, p) <= most) == holds)
    if upper is not None:
        holds = holds and found.interval is not None and round(found.interval.high, EXACT_PLACES) < upper
    words = f"{bound(criterion)}: {'holds' if holds else 'does not hold'}"
    doubts = doubt(found, most, holds) if most is not None and upper is None else ""
    return Verdict(holds, f"{lies(arm, baseline, found, places)}; {words}{doubts}")


def bound(criterion: Criterion) -> str:
    most, upper = criterion.max_gap_points, criterion.max_upper_points
    bounds = [] if most is None else [f"{most:g}"]
    bounds += [] if upper is None else [f"an interval whose upper end lies below {upper:g}"]
    return f"the criterion is {', and '.join(bounds)}"


def seeds_awaited(*arms: Arm) -> str:
    """How many there are, where some are not there yet."""
    if all(arm.is_complete for arm in arms):
        return ""
    return "; ".join(f"{arm.name}: {len(arm.runs)} of {arm.num_seeds}" for arm in arms)


def lies(arm: Arm, other: Arm, found: Gap, places: int = 2) -> str:
    """Where the arm's mean lies, beside another's."""
    size = round(found.size, EXACT_PLACES)
    words = f"{arm.name} lies {points(size, places)} points below {other.name} ("
    if size < 0:
        words = f"{arm.name} lies {points(-size, places)} points above {other.name} (gap {points(size, places)}, "
    return words + (f"95 % interval {range_words(found.interval)})" if found.interval else "one seed, so no interval)")


def judge_claim(study: Study, claim: Claim) -> Verdict:
    """Whether what was found elsewhere is found here."""
    better, worse = study.arm(claim.better), study.arm(claim.worse)
    found = top1_gap(study, worse, better)
    if found is None:
        return judge_claim_without_means(better, worse, claim)
    where = lies(worse, better, found)
    if awaited := seeds_awaited(worse, better):
        return Verdict(None, f"so far {where}: not judged before all seeds are there ({awaited})")
    if found.interval is None:
        return Verdict(None, f"{where}: cannot be told")
    is_apart = not found.interval.low <= 0 <= found.interval.high
    if claim.points == 0:
        return Verdict(not is_apart, f"{where}: {'disagrees' if is_apart else 'agrees, as far as these seeds tell'}")
    if is_apart and found.size < 0:
        return Verdict(False, f"{where}: disagrees")
    if claim.points is None or found.interval.high >= claim.points:
        return Verdict(True, f"{where}: agrees") if is_apart else Verdict(None, f"{where}: {UNTOLD}")
    words = "agrees, but by less:" if is_apart else f"{UNTOLD};"
    return Verdict(is_apart, f"{where}: {words} a gap of {claim.points:g} points is excluded")


def judge_claim_without_means(better: Arm, worse: Arm, claim: Claim) -> Verdict:
    """An arm that diverges is worse than one that does not."""
    for arm, other, agrees in ((worse, better, claim.points != 0), (better, worse, False)):
        if has_diverged(arm) and top1_spread(other):
            return Verdict(agrees, f"{arm.name}: {divergence(arm)}: {'agrees' if agrees else 'disagrees'}")
    lacking = better if top1_spread(better) is None else worse
    return Verdict(None, f"{lacking.name}: {divergence(lacking)}: cannot be told")


def judge_without_means(arm: Arm, baseline: Arm, criterion: Criterion) -> Verdict:
    ending = bound(criterion)
    if has_diverged(arm):
        return Verdict(False, f"{arm.name}: {divergence(arm)}; {ending}: does not hold")
    lacking = baseline if top1_spread(baseline) is None else arm
    return Verdict(None, f"{arm.name}: {ending}: cannot be told, {lacking.name}: {divergence(lacking)}")


def has_diverged(arm: Arm) -> bool:
    """True if a seed has, or if no rate was found at which it would not."""
    is_lost = arm.is_searched and arm.tuned and all(run.top1 is None for run in arm.tuned)
    return bool(arm.num_diverged or (not arm.runs and is_lost))


def divergence(arm: Arm) -> str:
    """How many seeds diverged; if there are none, what became of the search."""
    if arm.runs:
        return f"{arm.num_diverged} of {len(arm.runs)} diverged"
    if has_diverged(arm):
        return "diverged at every rate"
    return "not run" if arm.is_searched else "search under way"


def gap_words(found: Gap) -> str:
    """Its size and interval, for a table."""
    return points(found.size) + (f" ({range_words(found.interval)})" if found.interval else "")


def range_words(interval: Interval) -> str:
    return f"{points(interval.low)} to {points(interval.high)}"


def points(value: float, places: int = 2) -> str:
    return f"{round(value, places) + 0.0:.{places}f}"  # + 0.0: never -0.00


def doubt(found: Gap, most: float, holds: bool) -> str:
    """What the interval leaves open."""
    if found.interval is None:
        return ", as far as one seed can say"
    if holds and round(found.interval.high, EXACT_PLACES) > most:
        return ", but the interval reaches beyond the criterion: these seeds do not exclude a larger gap"
    if not holds and round(found.interval.low, EXACT_PLACES) <= most:
        return ", but the interval reaches within the criterion: these seeds do not exclude a smaller gap"
    return ""


def rate_at_edge(arm: Arm) -> str | None:
    """Says when the chosen rate is the smallest or largest tried: a better one may lie beyond."""
    # With another momentum, a rate is as fast as another one is: compared are those that are as fast.
    rates = [as_fast(run.learning_rate, run.momentum) for run in arm.tuned]
    if arm.learning_rate is None or len(set(rates)) < 2:
        return None
    rate = as_fast(arm.learning_rate, arm.momentum)
    if rate not in (min(rates), max(rates)):
        return None
    end = "smallest" if rate == min(rates) else "largest"
    return f"the {end} that was tried: a better one may lie beyond"


def as_fast(rate: float, momentum: float | None) -> float:
    return rate if momentum is None else round(rate / (1 - momentum), EXACT_PLACES)


# Whether a curve grows by a larger factor in one arm than in another.
#
# f = last value / first value of a run's curve.  Factors multiply, so that log f of the seeds is compared, by Welch's
# interval; what is said is the ratio of the geometric means.


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
