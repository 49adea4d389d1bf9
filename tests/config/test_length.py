import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megabatch.config.loading import load_config
from megabatch.config.reference_results import preflight
from megabatch.config.resolve import describe_epochs, in_epochs, plan_learning_rate, plan_run
from megabatch.config.schema import RunConfig
from megabatch.data.sources.shapes import DataShape
from megabatch.errors import UserError

SET = DataShape(num_train=10_000, num_test=2_000, num_classes=10, num_channels=1)  # 39.0625 steps per epoch


def load(*overrides: str, recipe: str = "fashion") -> tuple[RunConfig, list[str]]:
    """Return the config and the reported lines."""
    lines: list[str] = []
    return load_config(recipe, overrides, report=lines.append), lines


def learning_rates(config: RunConfig) -> list[float]:
    plan = plan_run(config, SET, num_ranks=1)
    return [plan_learning_rate(config, plan)(step) for step in range(plan.num_steps)]


@pytest.mark.parametrize(
    ("recipe", "epochs", "warmup"),
    [("fashion", 1, 1 / 12), ("fashion", 0.5, 1 / 24), ("resnet50-imagenet-64k", 1, 31 / 89)],
)
def test_a_short_run_shortens_its_warmup_in_proportion_and_reports_it(
    recipe: str, epochs: float, warmup: float
) -> None:
    config, lines = load(f"train.epochs={epochs}", recipe=recipe)
    assert config.schedule.warmup_epochs == pytest.approx(warmup)
    assert len(lines) == 1 and "\n" not in lines[0]
    assert lines[0].startswith(f"train.epochs={epochs} is not longer than the recipe's warm-up of ")
    assert f"schedule.warmup_epochs={warmup:.3g}" in lines[0]


def test_a_warmup_that_fits_is_unchanged() -> None:
    config, lines = load("train.epochs=1.5")
    assert (config.schedule.warmup_epochs, lines) == (1.0, [])


@pytest.mark.parametrize(
    "overrides",
    [
        ["train.epochs=1", "schedule.warmup_epochs=1"],
        ["train.epochs=1", "schedule={warmup_epochs=2}"],
        ["schedule.warmup_epochs=12"],
    ],
)
def test_a_warmup_that_the_user_sets_is_not_shortened(overrides: list[str]) -> None:
    with pytest.raises(UserError, match=r"is not longer than schedule.warmup_epochs="):
        load(*overrides)


def test_setting_a_section_counts_as_setting_its_keys() -> None:
    assert load("train={epochs=1}")[0].schedule.warmup_epochs == 1 / 12
    assert load("train={steps=7}")[0].train.steps == 7
    with pytest.raises(UserError, match=r"^train.epochs must be set"):
        load("train.epochs=3", "train={target_top1=0.5}")


def test_a_shortened_warmup_loses_its_provenance() -> None:
    assert "schedule.warmup_epochs" in load(recipe="fashion-3k")[0].provenance
    assert "schedule.warmup_epochs" not in load("train.epochs=2", recipe="fashion-3k")[0].provenance


def test_the_shortened_recipe_resolves_to_itself(tmp_path: Path) -> None:
    for override in ("train.epochs=1", "train.steps=20"):
        config = load(override)[0]
        (tmp_path / "again.toml").write_text(config.to_toml())
        assert load(recipe=str(tmp_path / "again.toml")) == (config, [])


@given(steps=st.integers(1, 3000))
def test_train_steps_equal_the_corresponding_epochs(steps: int) -> None:
    by_steps, by_epochs = load(f"train.steps={steps}")[0], load(f"train.epochs={steps * 256 / 10_000!r}")[0]
    assert plan_run(by_steps, SET, num_ranks=2) == plan_run(by_epochs, SET, num_ranks=2)
    assert learning_rates(by_steps) == learning_rates(by_epochs)
    assert preflight(by_steps, SET.num_train) == preflight(by_epochs, SET.num_train)


@given(steps=st.integers(1, 10**12), samples=st.integers(1, 10**9), batch=st.integers(1, 10**6))
def test_rounding_changes_no_number_of_steps(steps: int, samples: int, batch: int) -> None:
    config = load(f"train.steps={steps}", f"batch.global={batch}", "batch.micro=1")[0]
    shape = DataShape(num_train=samples, num_test=1, num_classes=2, num_channels=1)
    plan = plan_run(config, shape, num_ranks=1)
    assert plan.num_steps == steps and plan.should_evaluate_after(steps)
    resolved = in_epochs(config, samples)
    assert resolved.train.epochs is not None and resolved.schedule.warmup_epochs < resolved.train.epochs


def test_the_last_of_epochs_and_steps_is_used_and_reported() -> None:
    config, lines = load("train.epochs=3", "train.steps=5")
    assert plan_run(config, SET, num_ranks=1).num_steps == 5 and len(lines) == 1
    assert lines == ["train.epochs and train.steps are both set; the last one is used: train.steps"]
    config, lines = load("train.steps=5", "train.epochs=3")
    assert plan_run(config, SET, num_ranks=1).num_steps == math.floor(3 * 10_000 / 256)
    assert (config.train.steps, len(lines)) == (None, 1)


def test_epochs_on_the_command_line_replace_steps_in_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "short.toml").write_text(load("train.steps=5")[0].to_toml())
    config, lines = load("train.epochs=2", recipe=str(tmp_path / "short.toml"))
    assert (config.train.epochs, config.train.steps, lines) == (2.0, None, [])


def test_steps_must_be_longer_than_a_warmup_that_the_user_sets() -> None:
    config = load("train.steps=20", "schedule.warmup_epochs=0.25")[0]
    assert in_epochs(config, SET.num_train).schedule.warmup_epochs == 0.25
    config = load("train.steps=20", "schedule.warmup_epochs=1")[0]
    with pytest.raises(
        UserError,
        match=r"^train.steps=20 is 0.512 epochs .*for example schedule.warmup_epochs=0.128$",
    ):
        plan_run(config, SET, num_ranks=1)
    plan_run(load("train.steps=20", "schedule.warmup_epochs=0.128")[0], SET, num_ranks=1)


def test_a_recipe_may_set_only_steps(tmp_path: Path) -> None:
    text = load()[0].to_toml().replace("epochs = 12.0\n", "steps = 100\n")
    (tmp_path / "mine.toml").write_text(text)
    config = load(recipe=str(tmp_path / "mine.toml"))[0]
    assert (config.train.epochs, config.train.steps, config.train.length) == (None, 100, "100 steps")
    assert plan_run(config, SET, num_ranks=1).num_steps == 100
    assert describe_epochs(config, SET.num_train) == "2.56 epochs"


def test_the_screen_shows_a_shortened_warmup() -> None:
    assert describe_epochs(load()[0], SET.num_train) == "12 epochs"
    shortened = describe_epochs(load("train.steps=20")[0], SET.num_train)
    assert shortened == "0.512 epochs (warm-up shortened to 0.0427)"


def test_a_warning_about_a_short_warmup_does_not_suggest_one_longer_than_the_run() -> None:
    warnings = preflight(load("train.epochs=1")[0], SET.num_train).warnings
    assert len(warnings) == 1 and warnings[0].endswith("train.epochs=1 is too short for it; train for longer")
