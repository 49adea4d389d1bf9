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

SET = DataShape(num_train=10_000, num_test=2_000, num_classes=10, num_channels=1)  # 39.0625 steps of fashion's batch


def load(*overrides: str, recipe: str = "fashion") -> tuple[RunConfig, list[str]]:
    """The config, and the lines that were reported."""
    lines: list[str] = []
    return load_config(recipe, overrides, report=lines.append), lines


def learning_rates(config: RunConfig) -> list[float]:
    plan = plan_run(config, SET, num_ranks=1)
    return [plan_learning_rate(config, plan)(step) for step in range(plan.num_steps)]


@pytest.mark.parametrize(
    ("recipe", "epochs", "warmup"),
    [("fashion", 1, 1 / 12), ("fashion", 0.5, 1 / 24), ("resnet50-imagenet-64k", 1, 31 / 86)],
)
def test_epochs_that_leave_no_room_for_the_recipes_warmup_shorten_it_in_proportion_and_say_so(
    recipe: str, epochs: float, warmup: float
) -> None:
    config, lines = load(f"train.epochs={epochs}", recipe=recipe)
    assert config.schedule.warmup_epochs == pytest.approx(warmup)
    assert len(lines) == 1 and "\n" not in lines[0]
    assert lines[0].startswith(f"train.epochs={epochs} is no longer than the recipe's warm-up of ")
    assert f"schedule.warmup_epochs={warmup:.3g}" in lines[0]


def test_a_warmup_that_fits_is_left_alone() -> None:
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
def test_a_warmup_that_the_user_gives_is_not_shortened(overrides: list[str]) -> None:
    with pytest.raises(UserError, match=r"is no longer than schedule.warmup_epochs="):
        load(*overrides)


def test_a_section_that_is_given_as_a_whole_counts_as_its_settings() -> None:
    assert load("train={epochs=1}")[0].schedule.warmup_epochs == 1 / 12
    assert load("train={steps=7}")[0].train.steps == 7
    with pytest.raises(UserError, match=r"^train.epochs must be set"):
        load("train.epochs=3", "train={target_top1=0.5}")


def test_the_provenance_of_a_warmup_goes_when_it_is_shortened() -> None:
    assert "schedule.warmup_epochs" in load(recipe="fashion-3k")[0].provenance
    assert "schedule.warmup_epochs" not in load("train.epochs=2", recipe="fashion-3k")[0].provenance


def test_the_shortened_recipe_is_one_that_resolves_to_itself(tmp_path: Path) -> None:
    for override in ("train.epochs=1", "train.steps=20"):
        config = load(override)[0]
        (tmp_path / "again.toml").write_text(config.to_toml())
        assert load(recipe=str(tmp_path / "again.toml")) == (config, [])


@given(steps=st.integers(1, 3000))
def test_a_run_of_so_many_steps_is_the_run_of_as_many_epochs(steps: int) -> None:
    by_steps, by_epochs = load(f"train.steps={steps}")[0], load(f"train.epochs={steps * 256 / 10_000!r}")[0]
    assert plan_run(by_steps, SET, num_ranks=2) == plan_run(by_epochs, SET, num_ranks=2)
    assert learning_rates(by_steps) == learning_rates(by_epochs)
    assert preflight(by_steps, SET.num_train) == preflight(by_epochs, SET.num_train)


@given(steps=st.integers(1, 10**12), samples=st.integers(1, 10**9), batch=st.integers(1, 10**6))
def test_steps_are_neither_lost_nor_won_by_rounding(steps: int, samples: int, batch: int) -> None:
    config = load(f"train.steps={steps}", f"batch.global={batch}", "batch.micro=1")[0]
    shape = DataShape(num_train=samples, num_test=1, num_classes=2, num_channels=1)
    plan = plan_run(config, shape, num_ranks=1)
    assert plan.num_steps == steps and plan.should_evaluate_after(steps)
    resolved = in_epochs(config, samples)
    assert resolved.train.epochs is not None and resolved.schedule.warmup_epochs < resolved.train.epochs


def test_of_epochs_and_steps_the_last_that_is_given_decides_and_that_is_said() -> None:
    config, lines = load("train.epochs=3", "train.steps=5")
    assert plan_run(config, SET, num_ranks=1).num_steps == 5 and len(lines) == 1
    assert lines == ["train.epochs and train.steps are both given; the last counts: train.steps"]
    config, lines = load("train.steps=5", "train.epochs=3")
    assert plan_run(config, SET, num_ranks=1).num_steps == math.floor(3 * 10_000 / 256)
    assert (config.train.steps, len(lines)) == (None, 1)


def test_epochs_on_the_command_line_end_a_limit_of_steps_in_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "short.toml").write_text(load("train.steps=5")[0].to_toml())
    config, lines = load("train.epochs=2", recipe=str(tmp_path / "short.toml"))
    assert (config.train.epochs, config.train.steps, lines) == (2.0, None, [])


def test_steps_beside_a_warmup_of_the_users_own_must_leave_room_for_it() -> None:
    config = load("train.steps=20", "schedule.warmup_epochs=0.25")[0]
    assert in_epochs(config, SET.num_train).schedule.warmup_epochs == 0.25
    config = load("train.steps=20", "schedule.warmup_epochs=1")[0]
    with pytest.raises(
        UserError,
        match=r"^train.steps=20 makes 0.512 epochs of 10000 samples, no longer than schedule.warmup_epochs=1; "
        r"for example also schedule.warmup_epochs=0.128$",
    ):
        plan_run(config, SET, num_ranks=1)
    plan_run(load("train.steps=20", "schedule.warmup_epochs=0.128")[0], SET, num_ranks=1)


def test_a_recipe_may_give_steps_alone(tmp_path: Path) -> None:
    text = load()[0].to_toml().replace("epochs = 12.0\n", "steps = 100\n")
    (tmp_path / "mine.toml").write_text(text)
    config = load(recipe=str(tmp_path / "mine.toml"))[0]
    assert (config.train.epochs, config.train.steps, config.train.length) == (None, 100, "100 steps")
    assert plan_run(config, SET, num_ranks=1).num_steps == 100
    assert describe_epochs(config, SET.num_train) == "2.56 epochs"


def test_the_screen_says_what_became_of_the_warmup() -> None:
    assert describe_epochs(load()[0], SET.num_train) == "12 epochs"
    shortened = describe_epochs(load("train.steps=20")[0], SET.num_train)
    assert shortened == "0.512 epochs (of them warm-up 0.0427, shortened in proportion)"


def test_a_warning_of_a_short_warmup_does_not_advise_one_that_the_run_has_no_room_for() -> None:
    warnings = preflight(load("train.epochs=1")[0], SET.num_train).warnings
    assert len(warnings) == 1 and warnings[0].endswith("train.epochs=1 have no room for it: train for longer")
