"""The designs of the studies match their descriptions."""

from itertools import pairwise

import msgspec
import pytest
from typer.testing import CliRunner

from megabatch.cli.app import app
from megabatch.config.loading import load_config, silent
from megabatch.config.resolve import make_model, plan_run
from megabatch.data.sources.shapes import FASHION_MNIST_10K, FULL_FASHION_MNIST, DataShape
from megabatch.experiments.design import Design, TimeDesign, known_studies, read_any_design
from megabatch.experiments.plan import SearchPoint, search_trial, seed_trial
from megabatch.experiments.search import HELD_OUT

ALL = {name: read_any_design(name) for name in known_studies()}
STUDIES = {name: design for name, design in ALL.items() if isinstance(design, Design)}
CONFIGS = {
    name: {
        arm.name: load_config(design.recipe, seed_trial(design, arm, SearchPoint(1.0), 1).overrides, report=silent)
        for arm in design.arms
    }
    for name, design in STUDIES.items()
}


@pytest.mark.parametrize("name", STUDIES)
def test_arms_have_equal_epochs_and_differ_only_as_stated(name: str) -> None:
    configs = CONFIGS[name].values()
    alike = {
        (
            arm.baseline,
            config.model.name,
            config.train.epochs,
            config.data.source,
            config.schedule.warmup_epochs,
            config.batch.microbatch,
        )
        for arm, config in zip(STUDIES[name].arms, configs, strict=True)
    }
    assert len(alike) == len({arm.baseline for arm in STUDIES[name].arms})
    rates = [(arm.learning_rates, arm.learning_rate_of, arm.learning_rate_times) for arm in STUDIES[name].arms]
    told_apart = {(config.to_toml(), rate) for config, rate in zip(configs, rates, strict=True)}
    assert len(told_apart) == len(STUDIES[name].arms)


@pytest.mark.parametrize("name", STUDIES)
def test_every_search_has_the_same_resolution(name: str) -> None:
    grids = [arm.learning_rates for arm in STUDIES[name].arms if arm.learning_rates]
    steps = [high / low for grid in grids for low, high in pairwise(grid)]
    assert steps == pytest.approx(steps[:1] * len(steps)) and len({*map(len, grids)}) <= 1


def test_without_a_name_the_studies_are_listed_with_their_runs() -> None:
    output = CliRunner().invoke(app, ["study"], env={"COLUMNS": "200"}).output
    for name, design in ALL.items():
        assert f"{name}  {design.num_trials} runs: {design.title}" in output


@pytest.mark.parametrize("name", [name for name, design in STUDIES.items() if design.search])
def test_setups_name_the_values_of_their_recipes(name: str) -> None:
    design, config = STUDIES[name], next(iter(CONFIGS[name].values()))
    assert design.search
    assert f"{config.train.epochs:g} epochs" in design.setup
    assert f"{config.schedule.warmup_epochs:g} of them warm-up" in design.setup
    assert f"BatchNorm over {config.batch.microbatch} images" in design.setup
    assert f"{design.search.trials} full runs" in design.setup
    assert config.optim.momentum == 0.9 and config.optim.weight_decay == 5e-4 and config.schedule.power == 2
    assert f"{design.seeds} seeds" in design.setup or f"{design.seeds} for the others" in design.setup


def test_image_sizes_differ_only_in_sides_and_epochs() -> None:
    design = ALL["image-sizes"]
    assert isinstance(design, TimeDesign)
    configs = {
        arm.name: load_config(design.recipe, (*design.settings, *arm.settings), report=silent) for arm in design.arms
    }
    alike = {
        msgspec.structs.replace(
            config,
            train=msgspec.structs.replace(config.train, epochs=30),
            data=msgspec.structs.replace(config.data, image_size=64, sizes=[], test_image_size=64),
        ).to_toml()
        for config in configs.values()
    }
    assert len(alike) == 1 and {config.data.test_side for config in configs.values()} == {64}
    assert [config.train.epochs for config in configs.values()] == [30, 11.3, 15, 30, 30]


def test_large_batch_matches_its_issue() -> None:
    configs, design = CONFIGS["large-batch"], STUDIES["large-batch"]
    epochs = next(iter(configs.values())).train.epochs
    assert epochs and epochs >= 30 and design.seeds == 5
    assert all(config.data.source == "fashion-mnist" for config in configs.values())
    assert round(FULL_FASHION_MNIST.num_train / configs["LARS, 3,072"].batch.global_batch) == 20
    trial = search_trial(design, design.arms[0], SearchPoint(0.1))
    held_out = load_config(design.recipe, trial.overrides).data.validation
    assert held_out == HELD_OUT and round(held_out * FULL_FASHION_MNIST.num_train) == 5000
    config = configs["LARS, 3,072"]
    model = make_model(config, FULL_FASHION_MNIST)
    assert f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters" in design.setup


def test_large_batch_90_has_the_steps_of_the_paper() -> None:
    configs, design = CONFIGS["large-batch-90"], STUDIES["large-batch-90"]
    shape = DataShape(num_train=20_000, num_test=10_000, num_classes=10, num_channels=1)
    assert [*configs] == [
        *("Nesterov, 64", "LARS, 1,024", "Nesterov, 1,024", "linear scaling, 1,024", "LARS with all decay, 1,024"),
        "LARS, 4,096",
    ]
    for name, config in configs.items():
        assert (config.data.source, config.data.train_per_class) == ("fashion-mnist", 2_000)
        assert (config.model.name, config.model.options) == ("small_resnet", {"width": 8})
        assert (config.loss.label_smoothing, config.data.flip, config.schedule.decay) == (0.1, True, "poly")
        assert f"{config.batch.global_batch:,}" == name.rpartition(", ")[2].rpartition(" ")[2] or "1,024" in name
    plan = plan_run(configs["LARS, 1,024"], shape, num_ranks=1)
    assert 1_755 <= plan.num_steps <= 1_759
    assert [design.num_seeds(arm) for arm in design.arms] == [8, 8, 5, 5, 5, 5] and design.num_trials == 66
    assert [len(arm.momenta) for arm in design.arms] == [0, 2, 0, 0, 2, 2]
    (criterion,) = design.criteria
    assert (criterion.max_gap_points, criterion.max_upper_points) == (0.3, 0.5)
    model = make_model(configs["LARS, 1,024"], shape)
    assert f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters" in design.setup


def test_every_arm_has_20_steps_per_epoch() -> None:
    for name in ("ablation", "precision"):
        for config in CONFIGS[name].values():
            assert round(FASHION_MNIST_10K.num_train / config.batch.global_batch) == 20
