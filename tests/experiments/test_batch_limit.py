"""The batch-limit study: its design, and its answer on invented results with a known curve."""

import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megabatch.cli.app import app
from megabatch.cli.study import cost_of
from megabatch.errors import UserError
from megabatch.experiments.batch_limit import (
    ACCURACY,
    NOISE,
    Limits,
    answer_lines,
    curve_of_study,
    design_of,
    epochs_to,
    limit_of,
    target_rows,
)
from megabatch.experiments.evidence import Arm, SeedRun, Study
from megabatch.experiments.page import page
from megabatch.experiments.plots import draw_plots
from megabatch.runs.reader import read_summary
from tests.support.made_up_run import make_run

BATCHES, TARGET, FEWEST, CRITICAL = [64, 256, 1024, 4096], 0.8, 5.0, 1000.0
NEVER = 1e9


def made_up_study(lost: float = NEVER, noise: float = CRITICAL) -> Study:
    """Return a study in which accuracy grows in proportion to epochs, and batches from `lost` on lose 3 points."""
    design = design_of("fashion", [f"train.target_top1={TARGET}"], Limits(batches=BATCHES, seeds=3))
    arms = []
    for batch, arm in zip(BATCHES, design.arms, strict=True):
        epochs, final = FEWEST * (1 + batch / CRITICAL), 0.9 - 0.03 * (batch >= lost)
        runs = [
            SeedRun(
                trial=f"{arm.name} {seed}",
                fingerprint="",
                seed=seed,
                top1=final + 1e-4 * seed,
                test_loss=1.0,
                wall_s=1.0,
                curves={
                    ACCURACY: [(epoch, min(final, TARGET * epoch / epochs)) for epoch in (1.0, epochs, 30.0)],
                    NOISE: [(1.0, 10.0), (FEWEST, noise), (30.0, 1e6)],  # the last is after the target
                },
            )
            for seed in (1, 2, 3)
        ]
        arms.append(
            Arm(
                name=arm.name,
                about="",
                settings=list(arm.settings),
                learning_rate=0.1,
                num_trials=0,
                num_seeds=3,
                runs=runs,
            )
        )
    return Study(
        name=design.name, title=design.title, question=design.question, command="c", setup=design.setup,
        baseline=design.baseline, arms=arms, criteria=list(design.criteria), took_s=1.0, versions={}, machine="",
        samples=design.samples,
    )  # fmt: skip


def test_design_has_an_arm_per_batch_with_two_microbatches_at_least() -> None:
    design = design_of("fashion", [], Limits(batches=[4096, 96, 1024]))
    assert [arm.name for arm in design.arms] == ["batch 96", "batch 1024", "batch 4096"]
    assert "batch.micro=32" in design.settings and design.baseline == "batch 96"
    middle = [arm.learning_rates[1] for arm in design.arms]
    assert middle == sorted(middle) and middle[2] / middle[1] == pytest.approx(4**0.75, rel=0.01)
    assert [criterion.max_upper_points for criterion in design.criteria] == [0.5, 0.5]


@pytest.mark.parametrize(
    ("overrides", "batches", "problem"),
    [
        ([], [64, 256], "2 different batches"),
        (["batch.micro=48"], [96, 192, 256], "whole number of microbatches of 48"),
        ([], [100, 257, 1000], "at least 8 images, two per batch; nearest: --batches 96,256,992, or give"),
        ([], [8, 16, 32], "two per batch; give batch.micro=4"),
    ],
)
def test_batches_that_cannot_be_studied_are_rejected(overrides: list[str], batches: list[int], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        design_of("fashion", overrides, Limits(batches=batches))


def test_recipe_without_a_target_is_rejected() -> None:
    with pytest.raises(UserError, match=r"no train\.target_top1.* for example train\.target_top1=0\.85"):
        design_of("photos", ["data.source=photos"], Limits(batches=BATCHES))


def test_curve_and_limit_are_those_of_the_results() -> None:
    study = made_up_study(lost=4096)
    found, curve = limit_of(study), curve_of_study(study)
    assert found.largest == 1024 and not found.never
    assert curve.fewest == pytest.approx(FEWEST, rel=0.1) and curve.critical == pytest.approx(CRITICAL, rel=0.2)
    assert found.forecast and found.forecast.critical == CRITICAL
    assert any("largest batch within the margin is 1,024" in line for line in answer_lines(study))
    assert answer_lines(study)[0][1:] in page(study, draw_plots(study))


def test_target_that_was_never_reached_gives_no_curve() -> None:
    study = made_up_study()
    for arm in study.arms[1:]:
        arm.runs[0].curves[ACCURACY] = [(30.0, TARGET - 0.01)]
    assert limit_of(study).never == BATCHES[1:]
    assert target_rows(study)[2][1:] == ["not reached", "-", "-", "-", f"{FEWEST * (1 + 256 / CRITICAL):.1f}"]
    with pytest.raises(UserError, match="has 1 batch that reached the target"):
        curve_of_study(study)


def test_study_in_progress_has_no_answer_yet() -> None:
    study = made_up_study()
    study.arms[-1].runs.clear()
    assert answer_lines(study) == [] and target_rows(study)[-1][1] == "not run"


def test_table_has_the_steps_to_the_target() -> None:
    study = made_up_study()
    head, *rows = target_rows(study)
    assert head[0] == "to 80.0%" and len(rows) == 4
    for row, batch in zip(rows, BATCHES, strict=True):
        epochs = FEWEST * (1 + batch / CRITICAL)  # of 10,000 images
        assert row[1:4] == [f"{epochs:.1f}", f"{epochs:.1f} to {epochs:.1f}", f"{epochs * 1e4 / batch:,.0f}"]


def test_epochs_are_between_two_evaluations() -> None:
    assert epochs_to([(1.0, 0.4), (2.0, 0.6), (3.0, 0.5)], 0.5) == pytest.approx(1.5)
    assert epochs_to([(1.0, 0.4)], 0.5) is None and epochs_to([(2.0, 0.8)], 0.4) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["batch-limit", "--batches", "64,128,256"], "a recipe is missing"),
        (["batch-limit", "fashion"], "--batches is missing"),
        (["batch-limit", "fashion", "--batches", "64,many"], "expected integers"),
        (["large-batch", "fashion"], "it belongs to batch-limit"),
    ],
)
def test_commands_without_batches_are_rejected(words: list[str], problem: str) -> None:
    with pytest.raises(UserError) as refused:
        CliRunner().invoke(app, ["study", *words], catch_exceptions=False)
    assert problem in str(refused.value) and "\n" not in str(refused.value)


def test_cost_counts_the_images_of_all_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    design = design_of("fashion", ["train.epochs=10"], Limits(batches=BATCHES, seeds=2, trials=3))
    text = cost_of(design)  # 4 batches x 5 runs x 10 epochs of 10,000 images, in whole steps
    images = float(text.split()[0])
    assert 1.9 <= images <= 2.0 and text.endswith("0.6 hours at 1,000 images/s in all, an assumed speed")
    summary = read_summary(make_run(Path("runs/fashion-001"), steps=4))
    assert summary and summary.images_per_s
    hours = 1e6 * images / summary.images_per_s / 3600
    assert f"{hours:,.1f} hours" in cost_of(design) and cost_of(design).endswith("the speed of runs/fashion-001")


def test_forecast_is_as_uncertain_as_its_seeds() -> None:
    study = made_up_study()
    for run, factor in zip(study.arms[0].runs, (0.5, 1, 2), strict=True):
        run.curves[NOISE] = [(1.0, factor * CRITICAL)]
    found = limit_of(study).forecast
    assert found and found.doubt(CRITICAL) == pytest.approx(math.log(4) / 4)


def test_misfit_does_not_shrink_with_more_seeds() -> None:
    curve, repeated = (curve_of_study(with_misfit(made_up_study(), copies)) for copies in (1, 4))
    assert 0.01 < curve.misfit == pytest.approx(repeated.misfit)


def with_misfit(study: Study, copies: int) -> Study:
    """Return the study with batch 256 off the curve, and with each run several times."""
    study.arms[1].runs[:] = study.arms[2].runs
    for arm in study.arms:
        arm.runs[:] = copies * arm.runs
    return study
