import msgspec
import pytest

from megabatch.experiments.evidence import Criterion
from megabatch.experiments.verdict import judge, judge_claim, judge_published, rate_at_edge
from tests.support.made_up_study import BASELINE, TRIAL, arm, pair, searched, study, untrained

BASE = [0.9300, 0.9310, 0.9290]  # in points, a deviation of 0.1


@pytest.mark.parametrize(
    ("trial", "holds", "sentence"),
    [
        # By hand: deviations of 0.01 and 0.1 give 2.04 degrees of freedom, and half an interval of 4.24 * 0.058.
        (
            [0.9288, 0.9289, 0.9287],
            True,
            "0.12 points below SGD at 128 (95 % interval -0.13 to 0.37); the criterion is 0.5: holds",
        ),
        ([0.9310, 0.9311, 0.9309], True, "0.10 points above SGD at 128 (gap -0.10, 95 % interval -0.35 to 0.15)"),
        ([0.9200, 0.9201, 0.9199], False, "1.00 points below SGD at 128"),
        ([0.9249, 0.9250, 0.9251], True, "0.50 points below"),  # at the criterion
        ([0.9249, 0.9249, 0.9251], False, "0.503 points below"),  # 0.50 would hide the side
    ],
)
def test_criterion_depends_on_the_mean(trial: list[float], holds: bool, sentence: str) -> None:
    made = pair(BASE, trial, max_gap_points=0.5)
    verdict = judge(made, made.criteria[0])
    assert verdict.holds is holds
    assert verdict.text.startswith(f"{TRIAL} is {sentence}")
    assert ("does not hold" in verdict.text) is not holds


@pytest.mark.parametrize(
    ("most", "upper", "holds", "ends"),
    [
        # The interval of the first case above, -0.13 to 0.37 around 0.12.
        (0.5, 0.38, True, "; the criterion is 0.5, and an interval whose upper end is below 0.38: holds"),
        (0.5, 0.36, False, "; the criterion is 0.5, and an interval whose upper end is below 0.36: does not hold"),
        (0.1, 0.38, False, "below 0.38: does not hold"),
        (None, 0.38, True, "; the criterion is an interval whose upper end is below 0.38: holds"),
        (None, 0.36, False, "below 0.36: does not hold"),
    ],
)
def test_a_criterion_may_bound_the_interval(most: float | None, upper: float, holds: bool, ends: str) -> None:
    made = pair(BASE, [0.9288, 0.9289, 0.9287])
    criterion = Criterion(arm=TRIAL, baseline=BASELINE, max_gap_points=most, max_upper_points=upper)
    verdict = judge(made, criterion)
    assert verdict.holds is holds and verdict.text.endswith(ends)
    one = pair(BASE, [0.9288])
    assert not judge(one, criterion).holds  # one seed has no interval


def test_gaps_of_a_paired_study_are_paired_by_seed() -> None:
    made = msgspec.structs.replace(pair([0.90, 0.92, 0.94], [0.899, 0.917, 0.938]), paired=True)
    # By hand: differences 0.1, 0.3 and 0.2 points, and t(2) = 4.303.
    assert "is 0.20 points below SGD at 128 (95 % interval -0.05 to 0.45)" in judge(made, made.criteria[0]).text


def test_nothing_is_judged_before_all_seeds_are_complete() -> None:
    made = pair(BASE, BASE)
    waiting = msgspec.structs.replace(made.arms[1], num_seeds=5)
    made = msgspec.structs.replace(made, arms=[made.arms[0], waiting])
    for verdict in (judge(made, made.criteria[0]), judge_claim(made, made.claims[0])):
        assert verdict.holds is None and verdict.text.startswith("so far ")
        assert f"not judged until all seeds are complete ({TRIAL}: 3 of 5; {BASELINE}: 3 of 3)" in verdict.text


UNDECIDED = "these seeds do not distinguish them"


@pytest.mark.parametrize(
    ("baseline", "trial", "holds", "begins", "ends"),
    [
        (BASE, [0.92, 0.921, 0.919], True, "is 1.00 points below", "(95 % interval 0.77 to 1.23): agrees"),
        (BASE, [0.94, 0.941, 0.939], False, "is 1.00 points above", "95 % interval -1.23 to -0.77): disagrees"),
        (BASE, [0.93, 0.931, 0.928], None, "is 0.03 points below", f"(95 % interval -0.28 to 0.35): {UNDECIDED}"),
        (
            BASE,
            [0.9302, 0.9303, 0.9301],
            False,
            "is 0.02 points above",
            f"95 % interval -0.27 to 0.23): {UNDECIDED}; a gap of 0.3 points is excluded",
        ),
        ([0.93], [0.92], None, "is 1.00 points below", "(one seed, so no interval): undecided"),
    ],
)
def test_claim_agrees_if_the_seeds_distinguish_the_arms(
    baseline: list[float], trial: list[float], holds: bool | None, begins: str, ends: str
) -> None:
    made = pair(baseline, trial)
    verdict = judge_claim(made, made.claims[0])
    assert verdict.holds is holds
    assert verdict.text.startswith(f"{TRIAL} {begins} {BASELINE} ") and verdict.text.endswith(ends)


def test_claim_may_agree_in_sign_but_not_in_size() -> None:
    made = pair(BASE, [0.92, 0.921, 0.919])  # 0.77 to 1.23 points
    for size, ends in ((11.3, ": agrees, but by less: a gap of 11.3 points is excluded"), (1.2, ": agrees")):
        verdict = judge_claim(made, msgspec.structs.replace(made.claims[0], points=size))
        assert verdict.holds and verdict.text.endswith(ends)


@pytest.mark.parametrize(
    ("trial", "holds", "ends"),
    [
        ([0.92, 0.921, 0.919], False, ": disagrees"),
        ([0.94, 0.941, 0.939], False, ": disagrees"),
        ([0.93, 0.931, 0.928], True, ": agrees, as far as these seeds show"),
        ([0.93, None], False, f"{TRIAL}: 1 of 2 diverged: disagrees"),
    ],
)
def test_claim_of_equal_arms(trial: list[float | None], holds: bool, ends: str) -> None:
    made = pair(BASE, trial)
    verdict = judge_claim(made, msgspec.structs.replace(made.claims[0], points=0))
    assert verdict.holds is holds and verdict.text.endswith(ends)


def test_an_arm_that_diverges_is_worse_than_one_that_does_not() -> None:
    for baseline, trial, holds, text in (
        (BASE, [0.93, None], True, f"{TRIAL}: 1 of 2 diverged: agrees"),
        ([0.93, None], BASE, False, f"{BASELINE}: 1 of 2 diverged: disagrees"),
        ([0.93, None], [None], None, f"{BASELINE}: 1 of 2 diverged: undecided"),
    ):
        made = pair(baseline, trial)
        verdict = judge_claim(made, made.claims[0])
        assert (verdict.holds, verdict.text) == (holds, text)


def test_interval_beyond_the_criterion_is_reported() -> None:
    for trial, doubt in [(0.9285, "larger"), (0.9269, "smaller")]:
        made = pair(BASE, [trial, trial + 0.001, trial - 0.001])
        verdict = judge(made, made.criteria[0])
        assert verdict.text.endswith(f"these seeds do not exclude a {doubt} gap")
    clear = pair(BASE, [0.95, 0.951, 0.949])
    assert judge(clear, clear.criteria[0]).text.endswith("the criterion is 0.3: holds")


def test_diverged_seeds_are_counted_and_leave_no_mean() -> None:
    made = pair(BASE, [0.93, None, None])
    verdict = judge(made, made.criteria[0])
    assert verdict.holds is False and "2 of 3 diverged" in verdict.text and "lies" not in verdict.text
    made = pair([0.93, None], [0.93, 0.93])
    verdict = judge(made, made.criteria[0])
    assert verdict.holds is None and f"undecided, {BASELINE}: 1 of 2 diverged" in verdict.text


def test_an_arm_without_runs_is_not_judged_unless_every_rate_diverged() -> None:
    unsearched = untrained("later")
    lost = untrained("lost", [searched(1.0, None), searched(2.0, None)])
    made = study([arm(BASELINE, BASE), unsearched, lost])
    later, failed = (judge(made, criterion) for criterion in made.criteria)
    assert later.holds is None and "later: not run" in later.text
    assert failed.holds is False and "lost: diverged at every learning rate" in failed.text


def test_single_seed_is_reported() -> None:
    made = pair(BASE, [0.93])
    verdict = judge(made, made.criteria[0])
    assert verdict.holds and "one seed, so no interval" in verdict.text and verdict.text.endswith("one seed shows")


@pytest.mark.parametrize(
    ("published", "holds", "ends"),
    [
        # By hand: a deviation of 0.1 in three seeds gives an interval of 4.30 * 0.1 / sqrt(3) = 0.25 on each side.
        (
            0.9310,
            True,
            "93.00 % (95 % interval 92.75 to 93.25), 0.10 points below the published 93.10 %, which is within",
        ),
        (0.9274, True, "0.26 points above the published 92.74 %, which is reached"),
        (0.9326, False, "0.26 points below the published 93.26 %, which is not reached"),
    ],
)
def test_a_published_result_is_compared_with_the_interval(published: float, holds: bool, ends: str) -> None:
    verdict = judge_published(msgspec.structs.replace(arm(BASELINE, BASE), published=published))
    assert verdict.holds is holds and ends in verdict.text
    unfinished = judge_published(msgspec.structs.replace(arm(BASELINE, BASE), published=published, num_seeds=5))
    assert unfinished.holds is None and "3 of 5" in unfinished.text


def test_rate_at_the_edge_of_the_search_is_reported() -> None:
    assert rate_at_edge(arm(TRIAL, [], rate=0.2)) is None
    assert "smallest" in str(rate_at_edge(arm(TRIAL, [], rate=0.1)))
    assert "largest" in str(rate_at_edge(arm(TRIAL, [], rate=0.8)))
    # A rate of 0.1 with momentum 0.95 is as fast as 0.2 with 0.9, which is between 0.1 and 0.4.
    tuned = [searched(0.1, 0.9, 0.9), searched(0.4, 0.9, 0.9), searched(0.1, 0.91, 0.95)]
    chosen = msgspec.structs.replace(arm(TRIAL, [], rate=0.1), tuned=tuned, num_trials=3, momentum=0.95)
    assert rate_at_edge(chosen) is None
    assert "smallest" in str(rate_at_edge(msgspec.structs.replace(chosen, momentum=0.9)))
