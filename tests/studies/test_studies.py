"""What the studies promise on paper, held to their designs."""

from itertools import pairwise

import pytest
from typer.testing import CliRunner

from megabatch.cli import app
from megabatch.config.loading import load_config
from megabatch.config.resolve import make_model
from megabatch.data.shapes import FASHION_MNIST_10K, FULL_FASHION_MNIST
from megabatch.studies.conduct import search_trial, seed_trial
from megabatch.studies.studies import ABLATION, LARGE_BATCH, PRECISION, STUDIES

CONFIGS = {
    name: {arm.name: load_config(design.recipe, seed_trial(design, arm, 1.0, 1).overrides) for arm in design.arms}
    for name, design in STUDIES.items()
}


@pytest.mark.parametrize("name", STUDIES)
def test_arms_have_equal_epochs_and_differ_in_what_they_say(name: str) -> None:
    configs = CONFIGS[name].values()
    assert len({config.train.epochs for config in configs}) == 1
    assert (
        len({(config.data.source, config.schedule.warmup_epochs, config.batch.microbatch) for config in configs}) == 1
    )
    rates = [(arm.grid, arm.learning_rate_of, arm.learning_rate_times) for arm in STUDIES[name].arms]
    told_apart = {(config.to_toml(), rate) for config, rate in zip(configs, rates, strict=True)}
    assert len(told_apart) == len(STUDIES[name].arms)


@pytest.mark.parametrize("name", STUDIES)
def test_every_search_is_as_fine(name: str) -> None:
    grids = [arm.grid for arm in STUDIES[name].arms if arm.grid]
    steps = [high / low for grid in grids for low, high in pairwise(grid)]
    assert steps == pytest.approx([steps[0]] * len(steps)) and len({*map(len, grids)}) == 1


@pytest.mark.parametrize("name", STUDIES)
def test_help_counts_the_runs(name: str) -> None:
    said = CliRunner().invoke(app, ["study", name, "--help"], env={"COLUMNS": "200"}).output
    assert f"{STUDIES[name].num_trials} runs" in said


@pytest.mark.parametrize("name", STUDIES)
def test_setups_name_the_values_of_their_recipes(name: str) -> None:
    design, config = STUDIES[name], next(iter(CONFIGS[name].values()))
    assert f"{config.train.epochs:g} epochs" in design.setup
    assert f"{config.schedule.warmup_epochs:g} of them warm-up" in design.setup
    assert f"BatchNorm over {config.batch.microbatch} images" in design.setup
    assert f"{design.trials} full runs" in design.setup
    assert config.optim.momentum == 0.9 and config.optim.weight_decay == 5e-4 and config.schedule.power == 2


def test_large_batch_is_of_the_issue() -> None:
    configs, design = CONFIGS["large-batch"], LARGE_BATCH
    assert next(iter(configs.values())).train.epochs >= 30 and design.seeds == 5
    assert all(config.data.source == "fashion-mnist" for config in configs.values())
    assert round(FULL_FASHION_MNIST.num_train / configs["LARS, 3,072"].batch.global_batch) == 20
    held_out = load_config(design.recipe, search_trial(design, design.arms[0], 0.1).overrides).data.validation
    assert round(held_out * FULL_FASHION_MNIST.num_train) == 5000
    config = configs["LARS, 3,072"]
    model = make_model(config, FULL_FASHION_MNIST)
    assert f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters" in design.setup


def test_20_steps_an_epoch_everywhere() -> None:
    for design in (ABLATION, PRECISION):
        for config in CONFIGS[design.name].values():
            assert round(FASHION_MNIST_10K.num_train / config.batch.global_batch) == 20
