"""The study of the time that recipes need to reach a top-1."""

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
from scipy import stats
from typer.testing import CliRunner

from megabatch.cli.app import app
from megabatch.errors import UserError
from megabatch.experiments.time_to_accuracy import (
    Evaluated,
    RecipeTimes,
    SeedTime,
    TimeStudy,
    in_turns,
    page,
    read_seed,
    summarize,
    time_ratio,
    times_so_far,
    trials_of,
    write_time_study,
)

SLOW_S, FAST_S = [600.0, 660.0, 630.0], [300.0, 360.0, 330.0]


def seed(number: int, reached_s: float, top1: float = 0.8) -> SeedTime:
    curve = [Evaluated(reached_s / 2, 2.0, top1 - 0.3), Evaluated(reached_s, 4.0, top1), Evaluated(900.0, 6.0, 0.75)]
    return SeedTime(number, curve)


def study(*fast: SeedTime) -> TimeStudy:
    slow = [seed(number, time_s) for number, time_s in enumerate(SLOW_S, 1)]
    recipes = [RecipeTimes("slow", slow), RecipeTimes("fast", list(fast))]
    return TimeStudy(command="c", target=0.8, num_seeds=3, overrides=[], machine="m", recipes=recipes)


def test_the_first_evaluation_at_the_target_counts_with_means_and_intervals_over_seeds() -> None:
    found = study(*(seed(number, time_s) for number, time_s in enumerate(FAST_S, 1)))
    slow, fast = summarize(found)
    half = stats.t.ppf(0.975, 2) * np.std(SLOW_S, ddof=1) / 60 / math.sqrt(3)
    assert slow == ["slow", "3 of 3", f"10.50 ({10.5 - half:.2f} to {10.5 + half:.2f})", "4.0 (4.0 to 4.0)", "1"]
    ratio = time_ratio(found, found.recipes[1], found.recipes[0])
    assert ratio is not None and ratio[1] is not None
    assert ratio[0] == pytest.approx(stats.gmean(SLOW_S) / stats.gmean(FAST_S))
    welch = stats.ttest_ind(np.log(SLOW_S), np.log(FAST_S), equal_var=False).confidence_interval(0.95)
    assert (ratio[1].low, ratio[1].high) == pytest.approx((math.exp(welch.low), math.exp(welch.high)))
    assert fast[-1].startswith(f"{ratio[0]:.2f} (")


def test_a_recipe_with_a_seed_below_the_target_has_no_mean_and_no_ratio(tmp_path: Path) -> None:
    found = study(seed(1, 300.0), seed(2, 300.0), seed(3, 300.0, top1=0.79))
    assert summarize(found)[1] == ["fast", "2 of 3", "-", "-", "-"]
    assert summarize(study(seed(1, 300.0)))[1] == ["fast", "1 of 1", "-", "-", "-"]  # two seeds are to come
    written = write_time_study(found, tmp_path)
    assert [path.name for path in written] == [f"time-to-accuracy.{suffix}" for suffix in ("json", "svg", "md")]
    assert msgspec.json.decode(written[0].read_bytes(), type=TimeStudy) == found
    assert "slow" in written[1].read_text() and "| fast | 2 of 3 | - | - | - |" in page(found)


def test_recipes_take_turns_and_the_curve_is_read_from_the_rows_of_a_run(tmp_path: Path) -> None:
    trials = trials_of(["smoke", "fashion"], ["train.epochs=2"], 0.5, 2)
    assert [trial.name for trial in in_turns(trials)] == [
        *("seed-1-smoke", "seed-1-fashion", "seed-2-smoke", "seed-2-fashion")
    ]
    assert trials["smoke"][1].overrides == ("train.epochs=2", "seed=2", "train.target_top1=0.5")
    row = {"kind": "evaluation", "top1": 0.6, "top5": 1.0, "test_loss": 0.3, "class_top1": [0.6], "times": {}}
    row |= {"samples_evaluated": 10, "step": 3, "epoch": 1.0, "wall_s": 4.0}
    (tmp_path / "seed-1-smoke").mkdir()
    (tmp_path / "seed-1-smoke/metrics.jsonl").write_bytes(msgspec.json.encode(row) + b"\n")
    assert read_seed(tmp_path / "seed-1-smoke", 1) == SeedTime(1, [Evaluated(4.0, 1.0, 0.6)])
    smoke, fashion = times_so_far(trials, tmp_path, {"seed-1-smoke"})
    assert len(smoke.runs) == 1 and not fashion.runs
    with pytest.raises(UserError, match="'smoke' is given twice"):
        trials_of(["smoke", "smoke"], [], 0.5, 1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["time-to-accuracy"], "study time-to-accuracy needs recipes; for example"),
        (["time-to-accuracy", "alexnet-bn-imagenet-8k"], "no --target, and the first recipe has no train.target_top1"),
        (["time-to-accuracy", "fashion", "--target", "75.9"], "--target 75.9: expected a top-1 above 0 and at most 1"),
        (["large-batch", "fashion"], "fashion has no effect on study large-batch; it belongs to batch-limit or"),
    ],
)
def test_a_wrong_argument_is_one_line(words: list[str], message: str) -> None:
    error = CliRunner().invoke(app, ["study", *words]).exception
    assert isinstance(error, UserError) and message in str(error)
