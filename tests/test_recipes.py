"""Every value of a recipe on ImageNet or CIFAR-10 is that of its source, or its provenance gives the reason."""

import math
from pathlib import Path
from typing import Any

import pytest

from megabatch.config.loading import load_config, settings_by_provenance
from megabatch.config.recipes import read_published, read_recipe, recipe_names
from megabatch.config.schema import FIELDS, flatten
from megabatch.errors import UserError
from megabatch.planning.batch import check_ranks

# Columns of the table of MLPerf's reference convergence points and submissions.
COLUMNS = (
    "batch.global",
    "optim.learning_rate",
    "schedule.warmup_epochs",
    "optim.momentum",
    "optim.weight_decay",
    "batch.micro",
    "train.epochs",
)
# None: interpolated or assumed.  Epochs are the horizon of the decay.
MLPERF = {
    "resnet50-imagenet-4k": (4096, 10, 5, 0.9, 2e-4, 64, 42),
    "resnet50-imagenet-8k": (8192, 17, 5, 0.9, 2e-4, 64, 44),
    "resnet50-imagenet-16k": (None, None, None, None, None, None, None),
    "resnet50-imagenet-32k": (32768, 21.2, 16, 0.94, 2.5e-5, 128, 58),
    "resnet50-imagenet-64k": (65536, 24.699, 31, 0.951807, 1e-4, 128, 89),
    "resnet50-mlperf-3200": (3200, 11, 2, 0.9, 5e-5, 400, 37),
    "resnet50-mlperf-20480": (20480, 22, 12, 0.9, 2.5e-5, 40, 52),
    "resnet50-mlperf-57344": (57344, 23, 32, 0.95, 2.5e-5, 32, 78),
    "resnet50-xeon-3264": (3264, 10.5, 2, 0.9, 5e-5, 102, 37),
    "resnet50-small-images-8k": (8192, 17, 5, 0.9, 2e-4, 64, None),
    "resnet50-small-images-32k": (32768, 21.2, 16, 0.94, 2.5e-5, 128, None),
}
LARS = {
    "optim.name": "lars",
    "optim.trust_coefficient": 0.001,
    "schedule.decay": "poly",
    "schedule.power": 2,
}
MLPERF_RULES = LARS | {
    "model.options": {"init": "mlperf", "zero_gamma": False},
    "data.image_size": 224,
    "data.crop_area": 0.05,
    "data.flip": True,
    "optim.eps": 0,
    "schedule.end": 1e-4,
    "loss.label_smoothing": 0.1,
    "train.target_top1": 0.759,
}
OURS = dict.fromkeys(("data.image_size", "data.sizes", "data.test_image_size", "data.center_crop"))
FFCV = {
    "model.options": {"blur_pool": "convolutions", "zero_gamma": False},
    "data.image_size": 192,
    "data.test_image_size": 256,
    "data.center_crop": 0.875,
    "data.test_views": "mirror",
    "data.crop_area": 0.08,
    "batch.global": 4096,
    "batch.micro": 512,
    "optim.name": "sgd",
    "optim.learning_rate": 1.7,
    "optim.momentum": 0.9,
    "optim.nesterov": False,
    "optim.weight_decay": 1e-4,
    "optim.groups": [{"parameters": ["*.downsample.1.*", "fc.bias"], "weight_decay": 1e-4}],
    "schedule.warmup_epochs": 2,
    "schedule.decay": "poly",
    "schedule.power": 1,
    "schedule.end": 0,
    "loss.label_smoothing": 0.1,
    "precision.name": "amp",
}
FIRST_EPOCH_AT_192 = {16: 12, 24: 19, 32: 25, 40: 32, 56: 45, 88: 71}
MOSAIC = {
    "model.options": {"blur_pool": "all", "init": "composer", "zero_gamma": False, "prior_bias": True},
    "data.image_size": 176,
    "data.sizes": {"from": 88, "to": 176, "start": 0.4, "end": 0.8, "multiple": 4},
    "data.test_image_size": 224,
    "data.crop_area": 0.08,
    "batch.global": 2048,
    "optim.learning_rate": 2.048,
    "optim.momentum": 0.875,
    "optim.nesterov": False,
    "optim.weight_decay": 5e-4,
    "optim.decoupled_decay": True,
    "optim.decay_all": True,
    "schedule.decay": "cosine",
    "schedule.end": 0,
    "loss.name": "bce",
    "loss.label_smoothing": 0.08,
    "train.ema_half_life_epochs": pytest.approx(100 * 2048 / 1_281_167, rel=1e-4),
    "train.ema_every_steps": 20,
}
# Of facebookresearch/deit and ConvNeXt, whose main.py have the same defaults.
META = {
    "data.image_size": 224,
    "data.center_crop": 0.875,
    "data.flip": True,
    "data.crop_area": 0.08,
    "data.augment.policy": "rand_augment_timm",
    "data.augment.magnitude": 9,
    "data.augment.magnitude_std": 0.5,
    "data.augment.increasing": True,
    "data.augment.erase": 0.25,
    "data.augment.erase_with": "noise",
    "data.augment.mixup": 0.8,
    "data.augment.cutmix": 1,
    "optim.name": "adamw",
    "optim.weight_decay": 0.05,
    "optim.eps": 1e-8,
    "schedule.decay": "cosine",
    "loss.label_smoothing": 0.1,
    "train.epochs": 300,
}
# NVCaffe, which does not give BatchNorm's span; for 64K, the abstract of Jia et al. 2018.
ALEXNET = {
    "8k": (8192, 10, 3.84, 0.9, 5e-4, None, 100),
    "16k": (16384, 24, 5, 0.9, 5e-4, None, 100),
    "32k": (32768, 32, 10, 0.9, 5e-4, None, 100),
    "64k": (65536, None, None, None, None, 64, 95),
}
NVCAFFE = {"data.image_size": 227, "data.flip": True, "loss.label_smoothing": 0}


def columns(row: tuple[float | None, ...]) -> dict[str, Any]:
    return dict(zip(COLUMNS, row, strict=True))


def half_life(decay: float, every: int, batch: int) -> Any:
    """Return the epochs of ImageNet after which an average with this decay has half of its past."""
    return pytest.approx(math.log(0.5) / math.log(decay) * every * batch / 1_281_167, rel=1e-4)


def decay_of(learning_rate: float) -> Any:
    """Return the weight decay for a mean loss; the source divides 2e-6 x 2,000 by the rate of its summed loss."""
    return pytest.approx(2e-6 * 2000 / learning_rate / 2000, rel=1e-3)


AIRBENCH_BIAS = {"learning_rate": pytest.approx(0.053 * 2000), "momentum": 0.85}
AIRBENCH_HEAD = {"learning_rate": pytest.approx(0.67 * 2000), "momentum": 0.85}
INTEL = {"model.options": {"init": "torchvision", "zero_gamma": False}, "data.crop_area": 0.08}
SOURCES: dict[str, dict[str, Any]] = {
    **{
        name: MLPERF_RULES
        | columns(row)
        | (INTEL if "xeon" in name else {})
        | {"optim.variant": "you2017" if "imagenet" in name or "small" in name else "outside"}
        | (OURS if "small" in name else {})
        | ({"optim.groups": [{"parameters": ["fc.bias"], "weight_decay": row[4]}]} if "-mlperf-" in name else {})
        for name, row in MLPERF.items()
    },
    **{
        f"resnet50-ffcv-{epochs}": FFCV
        | {"train.epochs": epochs, "data.sizes": [[0, 160], [pytest.approx(first / epochs, abs=1e-6), 192]]}
        for epochs, first in FIRST_EPOCH_AT_192.items()
    },
    "resnet50-mosaic-mild": MOSAIC | {"train.epochs": 36, "schedule.warmup_epochs": 8, "batch.micro": None},
    # int(90 x 0.32) epochs; the warm-up is not scaled
    "resnet50-mosaic-mild-28": MOSAIC
    | {"train.epochs": 28, "schedule.warmup_epochs": 8, "batch.micro": 2048 // 8, "train.evaluate_every": 3},
    "resnet50-imagenet-256": {
        "data.image_size": 224,
        "data.flip": True,
        "data.crop_area": 0.08,
        "batch.global": 256,
        "batch.micro": 32,
        "optim.name": "sgd",
        "optim.learning_rate": 0.1,
        "optim.momentum": 0.9,
        "optim.nesterov": True,
        "optim.weight_decay": 1e-4,
        "train.epochs": 90,
    },
    "resnet50-rsb-a3": {
        "data.image_size": 160,
        "data.test_image_size": 224,
        "data.center_crop": 0.95,
        "data.augment.magnitude": 6,
        "data.augment.magnitude_std": 0.5,
        "data.augment.mixup": 0.1,
        "data.augment.cutmix": 1,
        "batch.global": 2048,
        "optim.name": "lamb",
        "optim.learning_rate": 8e-3,
        "optim.weight_decay": 0.02,
        "schedule.warmup_epochs": 5,
        "schedule.decay": "cosine",
        "schedule.end": 1e-6,
        "loss.name": "bce",
        "loss.target_threshold": 0.2,
        "train.epochs": 100,
    },
    "resnet50-torchvision-v2": {
        "data.image_size": 176,
        "data.test_image_size": 224,
        "data.center_crop": pytest.approx(224 / 232, abs=1e-4),
        "data.augment.policy": "trivial_augment_wide",
        "data.augment.erase": 0.1,
        "data.augment.repeats": 4,
        "data.augment.mixup": 0.2,
        "data.augment.cutmix": 1,
        "batch.global": 8 * 128,
        "batch.micro": 128,
        "optim.learning_rate": 0.5,
        "optim.momentum": 0.9,
        "optim.weight_decay": 2e-5,
        "optim.groups": [{"parameters": ["fc.bias"], "weight_decay": 2e-5}],
        "schedule.warmup_epochs": 5,
        "schedule.decay": "cosine",
        "loss.label_smoothing": 0.1,
        "train.epochs": 600,
        "train.ema_every_steps": 32,
        # alpha = (1 - 0.99998) x 8 x 128 x 32 / 600, applied every 32 steps
        "train.ema_half_life_epochs": half_life(1 - 2e-5 * 1024 * 32 / 600, 32, 1024),
    },
    "deit-small": META
    | {
        "model.options": {"model_name": "deit_small_patch16_224", "drop_path_rate": 0.1},
        "data.augment.repeats": 3,
        "batch.global": 4 * 256,
        "batch.micro": 256,
        "optim.learning_rate": 5e-4 * 1024 / 512,
        "schedule.warmup_epochs": 5,
        "schedule.end": 1e-5,
    },
    "convnext-tiny": META
    | {
        "model.options": {"model_name": "convnext_tiny", "drop_path_rate": 0.1},
        "batch.global": 4 * 8 * 128,
        "batch.micro": 128,
        "optim.learning_rate": 4e-3,
        "schedule.warmup_epochs": 20,
        "schedule.end": 1e-6,
        "train.ema_half_life_epochs": half_life(0.9999, 1, 4096),
    },
    # KellerJordan/cifar10-airbench, airbench94_muon.py.  Its loss is a sum over 2,000 images; ours is the mean.
    "cifar10": {
        "data.crop_padding": 2,
        "data.padding_mode": "reflect",
        "data.flip": "alternating",
        "data.test_views": "mirror-shift",
        "batch.global": 2000,
        "batch.micro": None,
        "optim.name": "muon",
        "optim.learning_rate": 0.24,
        "optim.momentum": 0.6,
        "optim.muon.others": "sgd",
        "optim.muon.others_learning_rate": pytest.approx(0.053 * 2000),
        "optim.groups": [
            {"parameters": ["*.bias"], "momentum": 0.85, "weight_decay": decay_of(0.053)},
            {"parameters": ["0.bias"], **AIRBENCH_BIAS, "weight_decay": decay_of(0.053), "until": 3 / 8},
            {"parameters": ["7.weight"], **AIRBENCH_HEAD, "weight_decay": decay_of(0.67)},
        ],
        "schedule.decay": "poly",
        "schedule.power": 1,
        "loss.label_smoothing": 0.2,
        "train.epochs": 8,
    },
    "resnet50-imagenet-64k-paper": {"batch.global": 65536, "batch.micro": 32, "train.epochs": 90},
    **{
        f"alexnet-bn-imagenet-{size}": columns(row)
        | LARS
        | {"optim.variant": "you2017", "precision.name": "fp16"}
        | (NVCAFFE if size != "64k" else dict.fromkeys(NVCAFFE) | {"train.target_top1": 0.587})
        for size, row in ALEXNET.items()
    },
}


def given_by(name: str) -> dict[str, Any]:
    settings = read_recipe(name)
    return {key: value for key, value in flatten(settings) if key in FIELDS and key not in ("about", "provenance")}


def test_every_recipe_on_imagenet_and_cifar10_is_compared_with_its_source() -> None:
    published = {"imagenet", "cifar-10-batches-bin"}
    assert {name for name in recipe_names() if load_config(name).data.source in published} == set(SOURCES)


@pytest.mark.parametrize("name", SOURCES)
def test_every_value_has_a_line_of_provenance_and_published_values_equal_their_source(name: str) -> None:
    given, config = given_by(name), load_config(name)
    assert set(given) == set(config.provenance)
    published = {key for key, text in config.provenance.items() if text.startswith("published: ")}
    for key, expected in SOURCES[name].items():
        assert (key in published) == (expected is not None), key
        assert expected is None or given[key] == expected, key


@pytest.mark.parametrize("name", SOURCES)
def test_every_such_recipe_names_the_result_that_it_repeats(name: str) -> None:
    published, config = read_published(name), load_config(name)
    assert published is not None and published.source
    assert (published.top1 is None) == published.source.startswith(("none: ", "borisgin", "databricks"))
    if published.ranks:
        each = 2 if name == "resnet50-mlperf-57344" else 1  # GPUs of a BatchNorm
        check_ranks(config.batch, published.ranks // each)
    if config.train.target_top1 and published.top1:
        assert config.train.target_top1 <= published.top1


def test_the_papers_runs_start_on_its_numbers_of_gpus() -> None:
    for name, ranks in (("alexnet-bn-imagenet-64k", 1_024), ("resnet50-imagenet-64k-paper", 2_048)):
        config = load_config(name)
        check_ranks(config.batch, ranks)
        assert config.batch.global_batch == 65_536 and config.batch.num_microbatches == ranks
        assert {"optim.learning_rate", "schedule.warmup_epochs"} <= {
            key for keys in settings_by_provenance(config).values() for key in keys
        }


def test_a_recipe_extends_another_and_drops_the_provenance_of_its_settings(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text(
        'extends = "resnet50-imagenet-32k"\n[optim]\nlearning_rate = 20.0\n[published]\nsource = "mine"\n'
    )
    ours, base = load_config(str(recipe)), load_config("resnet50-imagenet-32k")
    assert (ours.optim.learning_rate, ours.optim.momentum, ours.train.epochs) == (20.0, 0.94, 58)
    assert set(base.provenance) - set(ours.provenance) == {"optim.learning_rate"}
    assert (ours.about, ours.name) == ("", "mine")
    for wrong in ('"no-such"', '"mine.toml"', "3"):
        recipe.write_text(f"extends = {wrong}\n")
        with pytest.raises(UserError, match=r"^extends=.*built-in recipe; nearest: extends="):
            load_config(str(recipe))


def test_values_between_sources_are_interpolated_and_beyond_them_extrapolated() -> None:
    between, beyond = load_config("resnet50-imagenet-16k"), load_config("alexnet-bn-imagenet-64k")
    assert {"optim.learning_rate", "train.epochs", "batch.micro"} <= set(
        settings_by_provenance(between)["interpolated"]
    )
    assert {"optim.learning_rate", "schedule.warmup_epochs"} <= set(settings_by_provenance(beyond)["extrapolated"])
    assert 12.8 < between.optim.learning_rate < 21.2 and beyond.optim.learning_rate > 32


def provenance_after(*overrides: str) -> dict[str, str]:
    return load_config("fashion-3k", overrides).provenance


def test_a_provenance_is_dropped_when_the_user_sets_the_value() -> None:
    before = provenance_after()
    after = provenance_after("optim.momentum=0.9", "batch.global=6144")
    assert "optim.momentum" in before
    assert after == {key: text for key, text in before.items() if key != "optim.momentum"}
    section = provenance_after('optim={name="sgd", learning_rate=0.1}')
    assert section and not any(key.startswith("optim.") for key in section)
    assert "model.options" in provenance_after("provenance.model.options=assumed: why not")
    assert "model.options" not in provenance_after("provenance.model.options=assumed: why not", "model.options.width=8")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "provenance.optim.lr=assumed: x",
            r"^provenance.optim.lr='assumed: x': there is no setting optim.lr; nearest: optim.learn",
        ),
        (
            "provenance.seed=guessed",
            r"^provenance.seed='guessed': expected published: or interpolated: or extrapolated: or assumed:",
        ),
        ("provenance.seed=assumed:", r"for example provenance.seed=\"assumed: no source gives it\"$"),
        ('provenance.seed="assumed: x\\ny"', r"line breaks"),
        ("provenance.seed=3", r"^provenance.seed=3: expected published:"),
        ("provenance=3", r"^provenance=3: expected a table"),
    ],
)
def test_a_wrong_provenance_error_has_value_rule_and_remedy_in_one_line(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as refusal:
        load_config("fashion", [override])
    assert "\n" not in str(refusal.value)


def test_settings_are_grouped_by_kind_of_provenance() -> None:
    config = load_config("fashion", ["provenance.seed=extrapolated: x", "provenance.about=assumed: x"])
    assert settings_by_provenance(config) == {"extrapolated": ["seed"], "assumed": ["about"]}
