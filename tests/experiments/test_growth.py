import math

import msgspec
import pytest

from megabatch.experiments.evidence import Arm, CurveClaim, Study
from megabatch.experiments.verdict import judge_curves
from tests.support.made_up_study import BASELINE, TRIAL, pair, untrained

CLAIM = CurveClaim(text="It grows.", curve="variance", more=TRIAL, less=BASELINE)


def with_factors(arm: Arm, factors: list[float | None]) -> Arm:
    runs = [
        msgspec.structs.replace(run, curves={"variance": [(1.0, 0.5), (2.0, 9.0), (3.0, factor and 0.5 * factor)]})
        for run, factor in zip(arm.runs, factors, strict=True)
    ]
    return msgspec.structs.replace(arm, runs=runs)


def made(more: list[float | None], less: list[float | None]) -> Study:
    study = pair([0.9] * len(less), [0.9] * len(more))
    arms = [with_factors(study.arm(BASELINE), less), with_factors(study.arm(TRIAL), more)]
    return msgspec.structs.replace(study, arms=arms)


@pytest.mark.parametrize(
    ("more", "less", "holds", "ends"),
    [
        ([8.0, 8.8, 7.3], [2.0, 2.2, 1.8], True, ": agrees"),
        ([2.0, 2.2, 1.8], [8.0, 8.8, 7.3], False, ": disagrees"),
        ([8.0, 1.0], [2.0, 2.5], None, ": these seeds do not distinguish them"),
        ([8.0], [2.0], None, "(one seed, so no interval): undecided"),
    ],
)
def test_growth_is_compared_by_its_factor(
    more: list[float | None], less: list[float | None], holds: bool | None, ends: str
) -> None:
    verdict = judge_curves(made(more, less), CLAIM)
    assert verdict.holds is holds and verdict.text.endswith(ends)
    means = [math.prod(factors) ** (1 / len(factors)) for factors in (more, less)]  # type: ignore[arg-type]
    assert f"grows {means[0]:.3g}-fold in {TRIAL} and {means[1]:.3g}-fold in {BASELINE}" in verdict.text
    assert len(more) == 1 or f"{means[0] / means[1]:.3g} times as much" in verdict.text


def test_missing_curves_are_not_judged() -> None:
    study = pair([0.9, 0.9], [0.9, 0.9])
    later = msgspec.structs.replace(study, arms=[study.arms[0], untrained(TRIAL)])
    assert judge_curves(later, CLAIM).text == f"{TRIAL}: not run: undecided"
    waiting = made([8.0, 8.8], [2.0, 2.2])
    waiting = msgspec.structs.replace(
        waiting, arms=[waiting.arms[0], msgspec.structs.replace(waiting.arms[1], num_seeds=3)]
    )
    verdict = judge_curves(waiting, CLAIM)
    assert verdict.holds is None and f"({TRIAL}: 2 of 3; {BASELINE}: 2 of 2)" in verdict.text
