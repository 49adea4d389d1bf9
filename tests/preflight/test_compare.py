import math

import msgspec
import pytest
import torch
from torch import nn

from megabatch.config.loading import load_config
from megabatch.config.recipes import recipe_names
from megabatch.config.reference_results import (
    QUANTITIES,
    REFERENCE_RESULTS,
    Findings,
    Quantity,
    ReferenceResult,
    expected_range,
    preflight,
    require_known,
)
from megabatch.config.schema import RunConfig
from megabatch.data.catalog import infer_shape
from megabatch.data.sources.shapes import KNOWN_SETS
from megabatch.errors import UserError
from megabatch.experiments.search import HELD_OUT
from megabatch.training.fit import fit

NEEDS_NO_IMAGES = {*KNOWN_SETS, "synthetic"}
MLPERF = [result for result in REFERENCE_RESULTS if (result.model, result.optimizer) == ("resnet50", "lars")]


def findings(recipe: str, *overrides: str) -> Findings:
    config = load_config(recipe, overrides)
    return preflight(config, infer_shape(config.data).num_train)


@pytest.mark.parametrize("name", [name for name in recipe_names() if load_config(name).data.source in NEEDS_NO_IMAGES])
def test_every_built_in_recipe_passes(name: str) -> None:
    found = findings(name)
    assert not found.warnings
    assert found.references and not found.references[0].startswith("none")


@pytest.mark.parametrize("name", ["fashion", "fashion-128", "fashion-3k", "resnet50-imagenet-64k"])
def test_trial_on_held_out_images_is_judged_as_its_recipe(name: str) -> None:
    num_trained = math.floor((1 - HELD_OUT) * infer_shape(load_config(name).data).num_train)
    assert preflight(load_config(name, [f"data.validation={HELD_OUT!r}"]), num_trained) == findings(name)


@pytest.mark.parametrize("result", MLPERF[1:-1], ids=lambda result: str(result.batch))
@pytest.mark.parametrize("quantity", QUANTITIES, ids=lambda quantity: quantity.setting)
def test_each_result_is_within_the_range_of_the_others(quantity: Quantity, result: ReferenceResult) -> None:
    others = [other for other in MLPERF if other is not result]
    expected, value = expected_range(quantity, others, result.batch), quantity.reference(result)
    assert expected is not None and value is not None
    assert expected.low <= expected.good <= expected.high
    assert expected.low * (1 - 1e-9) <= value <= expected.high * (1 + 1e-9)


def test_at_a_reference_result_its_value_is_recommended() -> None:
    for result in MLPERF:
        for quantity in QUANTITIES:
            known = expected_range(quantity, MLPERF, result.batch)
            assert known is not None and known.results == [result]
            assert known.good == pytest.approx(quantity.reference(result))


def test_between_two_results_the_value_is_interpolated_in_log_log() -> None:
    known = expected_range(QUANTITIES[0], MLPERF, 16_384)
    assert known is not None and known.good == pytest.approx(14.497, abs=1e-3)
    assert [line.split(",")[0] for line in known_lines("resnet50-imagenet-16k")] == ["batch 13", "batch 32"]


def known_lines(recipe: str) -> list[str]:
    return findings(recipe).references


@pytest.mark.parametrize(
    ("words", "warning"),
    [
        (
            ["optim.learning_rate=100"],
            "optim.learning_rate=100 at batch 65,536: known to converge: 12.3 to 49.4 (24.699 at 65,536: MLPerf "
            "reference convergence point); for example optim.learning_rate=24.7",
        ),
        (
            ["optim.trust_coefficient=0.01"],
            "optim.learning_rate=24.699 with optim.trust_coefficient=0.01 at batch 65,536: known to converge: "
            "1.23 to 4.94 (24.699 at 65,536: MLPerf reference convergence point); for example optim.learning_rate=2.47",
        ),
        (
            ["schedule.warmup_epochs=5"],
            "schedule.warmup_epochs=5 at batch 65,536: known to converge: 15.5 to 62 (31 at 65,536: MLPerf "
            "reference convergence point); for example schedule.warmup_epochs=31",
        ),
        (
            ["optim.momentum=0.9"],
            "optim.momentum=0.9 at batch 65,536: known to converge: 0.904 to 0.976 (0.951807 at 65,536: MLPerf "
            "reference convergence point); for example optim.momentum=0.952",
        ),
        (
            ["optim.weight_decay=0"],
            "optim.weight_decay=0 at batch 65,536: known to converge: 2e-05 to 0.0005 (0.0001 at 65,536: MLPerf "
            "reference convergence point); for example optim.weight_decay=0.0001",
        ),
        (
            ["batch.micro=8"],
            "batch.micro=8 is the span of BatchNorm; known to converge: 32 (Goyal et al. 2017) to 512 (ffcv); "
            "nearest: batch.micro=32",
        ),
        (
            ["train.epochs=60"],
            "train.epochs=60 at batch 65,536: about 83 epochs are expected to reach 75.9% (MLPerf reference "
            "convergence points); for example train.epochs=83",
        ),
        (
            ["batch.global=131072", "train.epochs=140"],
            "batch.global=131072 makes 9.8 steps per epoch; known to converge: at least 18.9 (MLPerf reference "
            "convergence point, batch 67,840); nearest: batch.global=67840",
        ),
    ],
)
def test_value_outside_the_known_range_is_one_warning_with_a_remedy(words: list[str], warning: str) -> None:
    assert findings("resnet50-imagenet-64k", *words).warnings == [warning]
    remedy = warning.rpartition(" ")[2]
    assert not findings("resnet50-imagenet-64k", *words, remedy).warnings  # the remedy fixes it


@pytest.mark.parametrize(("batch", "rate"), [(128, 0.1), (64, 0.05), (1024, 0.8)])
def test_rate_of_sgd_scales_with_batches_beyond_the_known_ones(batch: int, rate: float) -> None:
    def rate_warnings(rate: float) -> list[str]:
        found = findings("fashion", f"batch.global={batch}", f"optim.learning_rate={rate}")
        return [line for line in found.warnings if line.startswith("optim.learning_rate")]

    assert not rate_warnings(rate)
    assert rate_warnings(rate / 2.1) and rate_warnings(rate * 2.1)


def test_default_rate_at_a_batch_of_4096_is_a_warning() -> None:
    """Such a run ends at a top-1 of 0.64 instead of 0.90."""
    warnings = findings("fashion", "batch.global=4096").warnings
    assert [line.split("=")[0] for line in warnings] == ["optim.learning_rate", "batch.global"]


def test_lars_below_the_known_batches_may_use_lower_rates_and_less_warm_up() -> None:
    words = ["batch.global=512", "batch.micro=64", "optim.learning_rate=2", "schedule.warmup_epochs=0"]
    assert not findings("resnet50-imagenet-4k", *words).warnings


@pytest.mark.parametrize(
    "words", [["model.name=small_cnn"], ["optim.name=lars", "optim.variant=larc"], ["model.weights=a.pth"]]
)
def test_unknown_family_is_one_line(words: list[str]) -> None:
    found = findings("fashion", *words)
    assert not found.warnings and len(found.references) == 1
    assert found.references[0].startswith("none: there is no reference result of ")


@pytest.mark.parametrize(
    ("recipe", "words", "message"),
    [
        (
            "fashion",
            ["model.name=small_cnn"],
            r"--strict: there is no reference result of small_cnn on fashion-mnist-10k with sgd; ",
        ),
        ("fashion", ["batch.global=4096"], r"--strict: optim.learning_rate=0.2 .*; for example .* \(1 more: --dry-run"),
        ("resnet50-imagenet-64k", ["optim.momentum=0.9"], r"--strict: optim.momentum=0.9 .*momentum=0.952$"),
    ],
)
def test_strict_rejects_unknown_settings(recipe: str, words: list[str], message: str) -> None:
    config = load_config(recipe, words)
    with pytest.raises(UserError, match=message) as refusal:
        require_known(config, infer_shape(config.data).num_train)
    assert "\n" not in str(refusal.value)
    require_known(load_config(recipe), infer_shape(load_config(recipe).data).num_train)


def test_strict_rejects_a_user_defined_network_in_python() -> None:
    images = (torch.zeros(8, 1, 8, 8, dtype=torch.uint8), torch.arange(8))
    with pytest.raises(UserError, match=r"^--strict: .*no reference result .*:Flatten .*with sgd;"):
        fit(nn.Flatten(), images, images, strict=True)


@pytest.mark.parametrize("result", [result for result in REFERENCE_RESULTS if result.source.startswith("megabatch, ")])
def test_reference_result_matches_its_recipe(result: ReferenceResult) -> None:
    recipe, _, batch = result.source.removeprefix("megabatch, ").partition(":")[0].partition(" at ")
    config = load_config(
        recipe, [f"batch.global={batch}", f"optim.learning_rate={result.learning_rate}"] if batch else []
    )
    assert values_of(config) == {
        **{key: value for key, value in msgspec.to_builtins(result).items() if key not in ("source", "top1")},
        "weight_decay": result.weight_decay or 0.0,  # None: the results do not give it
    }


def test_rates_of_one_family_can_be_compared() -> None:
    families = {(result.model, result.data, result.optimizer): result.trust_coefficient for result in REFERENCE_RESULTS}
    assert all(
        result.trust_coefficient == families[result.model, result.data, result.optimizer]
        for result in REFERENCE_RESULTS
    )


CIFAR10 = 50_000  # training images, which do not come with megabatch


def values_of(config: RunConfig) -> dict[str, object]:
    return {
        "model": config.model.name,
        "data": config.data.source,
        "optimizer": config.optim.name,
        "samples": CIFAR10 if config.name == "cifar10" else infer_shape(config.data).num_train,
        "batch": config.batch.global_batch,
        "learning_rate": config.optim.learning_rate,
        "trust_coefficient": config.optim.trust_coefficient,
        "warmup_epochs": config.schedule.warmup_epochs,
        "momentum": config.optim.momentum,
        "weight_decay": config.optim.weight_decay,
        "bn_span": config.batch.microbatch,
        "epochs": f"{config.train.epochs:g}",
    }


def test_imagenet_is_known_under_any_name_by_its_size() -> None:
    words = ["data.source=synthetic", "data.synthetic.classes=1000"]
    recipe = "resnet50-imagenet-64k"
    assert findings(recipe, *words, "data.synthetic.train=1281167").references == findings(recipe).references
    assert (
        findings(recipe, *words, "data.synthetic.train=1000000")
        .references[0]
        .startswith("none: there is no reference result")
    )
