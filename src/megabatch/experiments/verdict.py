"""Verdicts on criteria and claims of a study: a decision and a sentence.

Gaps are in percentage points and positive if an arm is below its baseline.  Curves are compared by their growth
f = last value / first value.  Factors multiply, so Welch's interval is computed on log f of the seeds, and the sentence
has the ratio of the geometric means.
"""

import math
from collections.abc import Sequence

from msgspec import Struct

from megabatch.experiments.evidence import Arm, Claim, Criterion, CurveClaim, Study
from megabatch.runs.intervals import Gap, Interval, Spread, gap, paired_gap, spread

UNDECIDED = "these seeds do not distinguish them"
EXACT_PLACES = 9  # rounding error is not a gap: 93.0 - 92.7 meets a criterion of 0.3


class Verdict(Struct, frozen=True):
    holds: bool | None  # None: undecided
    text: str  # one sentence without the full stop


def top1_spread(arm: Arm) -> Spread | None:
    """Return the spread in %; None if there are no seeds or one diverged: the mean of the others would be too good."""
    return spread(percents(arm)) if arm.runs and not arm.num_diverged else None


def top1_gap(study: Study, arm: Arm, baseline: Arm) -> Gap | None:
    """Return the gap in points, paired by seed if the study is; None if a mean is missing."""
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
            f"so far {compare_means(arm, baseline, found)}; {bound(criterion)}: not judged until all seeds are "
            f"complete ({awaited})",
        )
    size, most, upper = round(found.size, EXACT_PLACES), criterion.max_gap_points, criterion.max_upper_points
    holds = most is None or size <= most
    # Enough places to show on which side of the criterion the gap is.
    places = 2
    if most is not None:
        places = next(p for p in range(2, EXACT_PLACES + 1) if (round(size, p) <= most) == holds)
    if upper is not None:
        holds = holds and found.interval is not None and round(found.interval.high, EXACT_PLACES) < upper
    words = f"{bound(criterion)}: {'holds' if holds else 'does not hold'}"
    doubts = doubt(found, most, holds) if most is not None and upper is None else ""
    return Verdict(holds, f"{compare_means(arm, baseline, found, places)}; {words}{doubts}")


def bound(criterion: Criterion) -> str:
    most, upper = criterion.max_gap_points, criterion.max_upper_points
    bounds = [] if most is None else [f"{most:g}"]
    bounds += [] if upper is None else [f"an interval whose upper end is below {upper:g}"]
    return f"the criterion is {', and '.join(bounds)}"


def seeds_awaited(*arms: Arm) -> str:
    """Return the number of complete seeds per arm, or "" if all are complete."""
    if all(arm.is_complete for arm in arms):
        return ""
    return "; ".join(f"{arm.name}: {len(arm.runs)} of {arm.num_seeds}" for arm in arms)


def compare_means(arm: Arm, other: Arm, found: Gap, places: int = 2) -> str:
    """Return a clause that compares the mean of an arm with another's."""
    size = round(found.size, EXACT_PLACES)
    words = f"{arm.name} is {points(size, places)} points below {other.name} ("
    if size < 0:
        words = f"{arm.name} is {points(-size, places)} points above {other.name} (gap {points(size, places)}, "
    return words + (f"95 % interval {range_words(found.interval)})" if found.interval else "one seed, so no interval)")


def judge_published(arm: Arm) -> Verdict:
    """Judge whether the interval of the arm's mean contains the published result."""
    assert arm.published is not None
    spread, published = top1_spread(arm), 100 * arm.published
    if spread is None:
        return Verdict(None, f"{arm.name}: {divergence(arm)}: undecided")
    interval = f"95 % interval {range_words(spread.interval)}" if spread.interval else "one seed, so no interval"
    difference = spread.mean - published
    where = (
        f"{arm.name} reaches {points(spread.mean)} % ({interval}), {points(abs(difference))} points "
        f"{'below' if difference < 0 else 'above'} the published {points(published)} %"
    )
    if awaited := seeds_awaited(arm):
        return Verdict(None, f"so far {where}: not judged until all seeds are complete ({awaited})")
    if spread.interval is None:
        return Verdict(None, f"{where}: undecided")
    if spread.interval.high < published:
        return Verdict(False, f"{where}, which is not reached")
    return Verdict(True, f"{where}, which is {'reached' if published < spread.interval.low else 'within the interval'}")


def judge_claim(study: Study, claim: Claim) -> Verdict:
    """Judge whether this study agrees with a published result."""
    better, worse = study.arm(claim.better), study.arm(claim.worse)
    found = top1_gap(study, worse, better)
    if found is None:
        return judge_claim_without_means(better, worse, claim)
    where = compare_means(worse, better, found)
    if awaited := seeds_awaited(worse, better):
        return Verdict(None, f"so far {where}: not judged until all seeds are complete ({awaited})")
    if found.interval is None:
        return Verdict(None, f"{where}: undecided")
    is_apart = not found.interval.low <= 0 <= found.interval.high
    if claim.points == 0:
        return Verdict(not is_apart, f"{where}: {'disagrees' if is_apart else 'agrees, as far as these seeds show'}")
    if is_apart and found.size < 0:
        return Verdict(False, f"{where}: disagrees")
    if claim.points is None or found.interval.high >= claim.points:
        return Verdict(True, f"{where}: agrees") if is_apart else Verdict(None, f"{where}: {UNDECIDED}")
    words = "agrees, but by less:" if is_apart else f"{UNDECIDED};"
    return Verdict(is_apart, f"{where}: {words} a gap of {claim.points:g} points is excluded")


def judge_claim_without_means(better: Arm, worse: Arm, claim: Claim) -> Verdict:
    """Judge arms without means.  An arm that diverges is worse than one that does not."""
    for arm, other, agrees in ((worse, better, claim.points != 0), (better, worse, False)):
        if has_diverged(arm) and top1_spread(other):
            return Verdict(agrees, f"{arm.name}: {divergence(arm)}: {'agrees' if agrees else 'disagrees'}")
    lacking = better if top1_spread(better) is None else worse
    return Verdict(None, f"{lacking.name}: {divergence(lacking)}: undecided")


def judge_without_means(arm: Arm, baseline: Arm, criterion: Criterion) -> Verdict:
    ending = bound(criterion)
    if has_diverged(arm):
        return Verdict(False, f"{arm.name}: {divergence(arm)}; {ending}: does not hold")
    lacking = baseline if top1_spread(baseline) is None else arm
    return Verdict(None, f"{arm.name}: {ending}: undecided, {lacking.name}: {divergence(lacking)}")


def has_diverged(arm: Arm) -> bool:
    """Return whether a seed diverged, or every learning rate of the search did."""
    is_lost = arm.is_searched and arm.tuned and all(run.top1 is None for run in arm.tuned)
    return bool(arm.num_diverged or (not arm.runs and is_lost))


def divergence(arm: Arm) -> str:
    """Return the number of diverged seeds, or without seeds the state of the search."""
    if arm.runs:
        return f"{arm.num_diverged} of {len(arm.runs)} diverged"
    if has_diverged(arm):
        return "diverged at every learning rate"
    return "not run" if arm.is_searched else "search in progress"


def gap_words(found: Gap) -> str:
    """Return the size and interval of a gap for a table."""
    return points(found.size) + (f" ({range_words(found.interval)})" if found.interval else "")


def range_words(interval: Interval) -> str:
    return f"{points(interval.low)} to {points(interval.high)}"


def points(value: float, places: int = 2) -> str:
    return f"{round(value, places) + 0.0:.{places}f}"  # + 0.0: never -0.00


def doubt(found: Gap, most: float, holds: bool) -> str:
    """Return a caveat if the interval crosses the criterion."""
    if found.interval is None:
        return ", as far as one seed shows"
    if holds and round(found.interval.high, EXACT_PLACES) > most:
        return ", but the interval extends beyond the criterion: these seeds do not exclude a larger gap"
    if not holds and round(found.interval.low, EXACT_PLACES) <= most:
        return ", but the interval extends below the criterion: these seeds do not exclude a smaller gap"
    return ""


def rate_at_edge(arm: Arm) -> str | None:
    """Return a warning if the chosen learning rate is the smallest or largest that was tried."""
    # Learning rates of different momenta are compared at equal speed.
    rates = [as_fast(run.learning_rate, run.momentum) for run in arm.tuned]
    if arm.learning_rate is None or len(set(rates)) < 2:
        return None
    rate = as_fast(arm.learning_rate, arm.momentum)
    if rate not in (min(rates), max(rates)):
        return None
    end = "smallest" if rate == min(rates) else "largest"
    return f"the {end} that was tried: a better one may be beyond it"


def as_fast(rate: float, momentum: float | None) -> float:
    return rate if momentum is None else round(rate / (1 - momentum), EXACT_PLACES)


def judge_curves(study: Study, claim: CurveClaim) -> Verdict:
    more, less = study.arm(claim.more), study.arm(claim.less)
    factors = {arm.name: log_growths(arm, claim.curve) for arm in (more, less)}
    for arm in (more, less):
        if not arm.runs or len(factors[arm.name]) < len(arm.runs):
            return Verdict(None, f"{arm.name}: {divergence(arm)}: undecided")
    found = gap(factors[less.name], factors[more.name])  # of the logarithms: how far `less` is below
    where = (
        f"the {claim.curve} grows {fold(factors[more.name])}-fold in {more.name} "
        f"and {fold(factors[less.name])}-fold in {less.name}"
    )
    if found.interval is None:
        return Verdict(None, f"{where} (one seed, so no interval): undecided")
    low, high = math.exp(found.interval.low), math.exp(found.interval.high)
    where += f", {math.exp(found.size):.3g} times as much (95 % interval {low:.3g} to {high:.3g})"
    if awaited := seeds_awaited(more, less):
        return Verdict(None, f"so far {where}: not judged until all seeds are complete ({awaited})")
    if low <= 1 <= high:
        return Verdict(None, f"{where}: {UNDECIDED}")
    return Verdict(low > 1, f"{where}: {'agrees' if low > 1 else 'disagrees'}")


def log_growths(arm: Arm, curve: str) -> list[float]:
    """Return log f of every run whose curve has a positive first and last value."""
    values = [[value for _, value in run.curves.get(curve, []) if value is not None] for run in arm.runs]
    return [math.log(found[-1] / found[0]) for found in values if found and min(found[0], found[-1]) > 0]


def fold(logarithms: Sequence[float]) -> str:
    return f"{math.exp(math.fsum(logarithms) / len(logarithms)):.3g}"
