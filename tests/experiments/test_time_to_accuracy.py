"""Studies of the time to a top-1."""

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
from scipy import stats  # type: ignore[import-untyped]
from typer.testing import CliRunner

from megabatch.cli.app import app
from megabatch.config.loading import load_config, silent
from megabatch.errors import UserError
from megabatch.experiments.design import TimeCriterion, TimeDesign, read_any_design, read_design
from megabatch.experiments.time_to_accuracy import (
    ArmTimes,
    Evaluated,
    QuietTimes,
    SeedTime,
    TimeStudy,
    design_of_recipes,
    judge_time,
    page,
    read_quiet,
    read_seed,
    study_so_far,
    summarize,
    time_ratio,
    trials_of,
    write_time_study,
)

SLOW_S, FAST_S = [600.0, 660.0, 630.0], [300.0, 360.0, 330.0]
CRITERION = TimeCriterion(arm="fast", baseline="slow", least_ratio=1.4)


def seed(number: int, reached_s: float, top1: float = 0.8) -> SeedTime:
    curve = [Evaluated(reached_s / 2, 2.0, top1 - 0.3), Evaluated(reached_s, 4.0, top1), Evaluated(900.0, 6.0, 0.75)]
    return SeedTime(number, curve)


def study_of(slow: list[SeedTime], fast: list[SeedTime]) -> TimeStudy:
    return TimeStudy(
        name="times",
        title="Times",
        question="",
        setup="",
        command="c",
        target=0.8,
        num_seeds=3,
        settings=[],
        machine="m",
        arms=[ArmTimes("slow", "", [], [], slow), ArmTimes("fast", "", ["seed=1"], [], fast)],
        criteria=[CRITERION],
    )


def seeds(times_s: list[float]) -> list[SeedTime]:
    return [seed(number, time_s) for number, time_s in enumerate(times_s, 1)]


def study(*fast: SeedTime) -> TimeStudy:
    return study_of(seeds(SLOW_S), list(fast))


def test_the_first_evaluation_at_the_target_counts_with_means_and_intervals_over_seeds() -> None:
    found = study(*seeds(FAST_S))
    slow, fast = summarize(found)
    half = stats.t.ppf(0.975, 2) * np.std(SLOW_S, ddof=1) / 60 / math.sqrt(3)
    minutes = f"10.50 ({10.5 - half:.2f} to {10.5 + half:.2f})"
    assert slow == ["slow", "3 of 3", "4.0 (4.0 to 4.0)", minutes, "75.0 (75.0 to 75.0)", "1"]
    ratio = time_ratio(found, found.arms[1], found.arms[0])
    assert ratio is not None and ratio.interval is not None
    assert ratio.size == pytest.approx(stats.gmean(SLOW_S) / stats.gmean(FAST_S))
    welch = stats.ttest_ind(np.log(SLOW_S), np.log(FAST_S), equal_var=False).confidence_interval(0.95)
    assert (ratio.interval.low, ratio.interval.high) == pytest.approx((math.exp(welch.low), math.exp(welch.high)))
    assert fast[-1].startswith(f"{ratio.size:.2f} (")


def test_an_arm_with_a_seed_below_the_target_has_no_mean_and_no_ratio(tmp_path: Path) -> None:
    found = study(seed(1, 300.0), seed(2, 300.0), seed(3, 300.0, top1=0.79))
    assert summarize(found)[1] == ["fast", "2 of 3", "-", "-", "75.0 (75.0 to 75.0)", "-"]
    assert summarize(study(seed(1, 300.0)))[1] == ["fast", "1 of 1", "-", "-", "75.0", "-"]  # two seeds are to come
    written = write_time_study(found, tmp_path)
    assert [path.name for path in written] == [f"times.{suffix}" for suffix in ("json", "svg", "md")]
    assert msgspec.json.decode(written[0].read_bytes(), type=TimeStudy) == found
    assert "slow" in written[1].read_text() and "| fast | 2 of 3 | - | - |" in page(found)


@pytest.mark.parametrize(
    ("slow", "fast", "holds"),
    [
        (seeds(SLOW_S), seeds(FAST_S), True),
        (seeds(SLOW_S), seeds([1.4 * time_s for time_s in FAST_S]), False),  # 1.37 times as fast
        (seeds([300.0, 1200.0, 500.0]), seeds([290.0, 500.0, 300.0]), False),  # 1.61, but the interval includes 1
        (seeds(SLOW_S)[:2], seeds(FAST_S), None),
        ([*seeds(SLOW_S)[:2], seed(3, 600.0, top1=0.79)], seeds(FAST_S), True),
        (seeds(SLOW_S), [*seeds(FAST_S)[:2], seed(3, 300.0, top1=0.79)], False),
    ],
)
def test_a_criterion_holds_above_its_ratio_or_if_the_baseline_misses_the_target(
    slow: list[SeedTime], fast: list[SeedTime], holds: bool | None
) -> None:
    assert judge_time(study_of(slow, fast), CRITERION)[0] is holds


def test_quiet_times_count_steps_by_side_and_evaluations() -> None:
    quiet = [QuietTimes(32, [0.1, 0.3], [1.0, 2.0]), QuietTimes(64, [0.5, 0.5], [3.0, 6.0])]
    curve = [Evaluated(99.0, 1.0, 0.5, {32: 10}), Evaluated(999.0, 2.0, 0.8, {32: 15, 64: 5})]
    arm = ArmTimes("growing", "", [], quiet, [SeedTime(1, curve)])
    assert arm.quiet_s(arm.runs[0], 0) == pytest.approx(10 * 0.1 + 1.0)
    assert arm.quiet_s(arm.runs[0], 1) == pytest.approx(15 * 0.1 + 5 * 0.5 + 2 * 1.0)
    assert "| growing | 32 | 100.0, 300.0 | 1000.0, 2000.0 |" in page(
        msgspec.structs.replace(study(), arms=[arm], criteria=[])
    )


def row(kind: str, **values: object) -> bytes:
    common = {"kind": kind, "epoch": 1.0, "wall_s": 4.0, "times": {}, "loss": 1.0, "lr": 0.1, "loss_scale": 1.0}
    common |= {"skipped": False, "image_size": 32, "images_per_s": 1.0, "data_wait_s": 0.0, "comm_wait_s": 0.0}
    common |= {"straggler": 0, "straggler_delay_s": 0.0, "evaluated": False}
    common |= {"top1": 0.6, "top5": 1.0, "test_loss": 0.3, "class_top1": [0.6], "samples_evaluated": 10, "step": 3}
    return msgspec.json.encode(common | values) + b"\n"


def test_arms_take_turns_and_their_curves_are_read_from_the_rows_of_runs(tmp_path: Path) -> None:
    design = design_of_recipes(["smoke", "fashion"], ["train.epochs=2"], 0.5, 2)
    trials = trials_of(design)
    assert [trial.name for trial in trials.in_turns()] == [
        *("seed-1-smoke", "seed-1-fashion", "seed-2-smoke", "seed-2-fashion")
    ]
    assert trials.seeds["smoke"][1].overrides == ("train.epochs=2", "seed=2", "train.target_top1=0.5")
    (tmp_path / "seed-1-smoke").mkdir()
    rows = [row("step"), row("step", image_size=64), row("evaluation")]
    (tmp_path / "seed-1-smoke/metrics.jsonl").write_bytes(b"".join(rows))
    assert read_seed(tmp_path / "seed-1-smoke", 1) == SeedTime(1, [Evaluated(4.0, 1.0, 0.6, {32: 1, 64: 1})])
    found = study_so_far(design, trials, tmp_path, {"seed-1-smoke"}, {"command": "c", "machine": "m"})
    assert [len(arm.runs) for arm in found.arms] == [1, 0]
    steps = [row("step", times={"forward": time_s, "evaluation": 7.0}) for time_s in [9.0] * 5 + [0.1, 0.4, 0.2]]
    rows = [*steps, row("evaluation", times={"evaluation": 0.5})]
    (tmp_path / "seed-1-smoke/metrics.jsonl").write_bytes(b"".join(rows))
    assert read_quiet([tmp_path / "seed-1-smoke"], 64) == QuietTimes(64, [pytest.approx(0.2)], [0.5])  # type: ignore[list-item]
    with pytest.raises(UserError, match="'smoke' is given twice"):
        design_of_recipes(["smoke", "smoke"], [], 0.5, 2)


DESIGN = """
title = "Sides"
recipe = "photos"
settings = ["data.crop_padding=8", "schedule.warmup_epochs=3"]
target = 0.5
seeds = 2
quiet_steps = 20
[[arm]]
name = "fixed"
[[arm]]
name = "small"
settings = ["data.image_size=32", "data.test_image_size=64", "data.crop_padding=4"]
[[arm]]
name = "growing"
settings = ["data.sizes=[[0, 32], [0.5, 64]]"]
"""


def test_quiet_runs_train_each_side_separately_and_equal_ones_are_shared(tmp_path: Path) -> None:
    (tmp_path / "sides.toml").write_text(DESIGN)
    with pytest.raises(UserError, match="study sides compares times"):
        read_design(str(tmp_path / "sides.toml"))
    design = read_any_design(str(tmp_path / "sides.toml"))
    assert isinstance(design, TimeDesign)
    trials = trials_of(design)
    names = [trial.name for trial in trials.in_turns()]
    assert names[:4] == ["quiet-1-fixed-64", "quiet-1-small-32", "quiet-2-fixed-64", "quiet-2-small-32"]
    assert names[6] == "seed-1-fixed" and len(names) == 6 + 6
    trial = trials.quiet["growing"][32][0]
    data = load_config(trial.recipe, trial.overrides, report=silent).data
    assert (data.image_size, data.sizes, data.test_side, data.crop_padding) == (32, [], 64, 4)
    (tmp_path / "sides.toml").write_text(DESIGN.replace('"growing"', '"Small"'))
    with pytest.raises(UserError, match="its folder name 'small'"):
        read_any_design(str(tmp_path / "sides.toml"))


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
