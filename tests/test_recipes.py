"""Every value of an ImageNet recipe is that of its source, or its provenance says what it rests on."""

import pytest

from megabatch.config.loading import load_config, settings_by_provenance
from megabatch.config.recipes import read_recipe, recipe_names
from megabatch.config.schema import FIELDS, flatten
from megabatch.errors import UserError

# MLPerf reference convergence points, LARS; of the epochs the most.  The columns are COLUMNS.
RESNET50 = {
    "4k": (4096, 10, 5, 0.9, 2e-4, 64, 42),
    "8k": (8192, 17, 5, 0.9, 2e-4, 64, 44),
    "16k": (16384, None, None, None, None, None, None),
    "32k": (32768, 21.2, 16, 0.94, 2.5e-5, 128, 57),
    "64k": (65536, 24.699, 31, 0.951807, 1e-4, 128, 86),
    "256": (None, None, None, None, None, None, None),
}
# Public code on which Jia et al. 2018 build, and for 64K their abstract; neither gives BatchNorm's span (batch.micro).
ALEXNET = {
    "8k": (8192, 10, 4, 0.9, 5e-4, None, 100),
    "16k": (16384, 24, 5, 0.9, 5e-4, None, 100),
    "32k": (32768, 32, 10, 0.9, 5e-4, None, 100),
    "64k": (65536, None, None, None, None, None, 95),
}
COLUMNS = (
    "batch.global",
    "optim.learning_rate",
    "schedule.warmup_epochs",
    "optim.momentum",
    "optim.weight_decay",
    "batch.micro",
    "train.epochs",
)
LARS = {
    "optim.name": "lars",
    "optim.variant": "you2017",
    "optim.trust_coefficient": 0.001,
    "schedule.decay": "poly",
    "schedule.power": 2,
}
SOURCES = {
    **{
        f"resnet50-imagenet-{size}": dict(zip(COLUMNS, row, strict=True))
        | ({} if size == "256" else LARS | {"optim.eps": 0, "schedule.end": 1e-4, "train.target_top1": 0.759})
        | {"model.name": "resnet50", "data.source": "imagenet"}
        for size, row in RESNET50.items()
    },
    **{
        f"alexnet-bn-imagenet-{size}": dict(zip(COLUMNS, row, strict=True))
        | LARS
        | {"model.name": "alexnet_bn", "data.source": "imagenet"}
        | ({"train.target_top1": 0.587} if size == "64k" else {})
        for size, row in ALEXNET.items()
    },
}


def test_the_recipes_are_those_that_were_promised() -> None:
    assert {name for name in recipe_names() if "imagenet" in name} == set(SOURCES)
    assert {"fashion-128", "fashion-3k", "fashion-8k"} <= set(recipe_names())


@pytest.mark.parametrize("name", SOURCES)
def test_every_value_is_the_source_s_or_has_a_provenance(name: str) -> None:
    given = {
        key: value for key, value in flatten(read_recipe(name)) if key in FIELDS and key not in ("about", "provenance")
    }
    provenance = load_config(name).provenance
    for key, value in given.items():
        told = SOURCES[name].get(key)
        assert (key in provenance) if told is None else value == told, key
    assert {key for key, told in SOURCES[name].items() if told is not None} <= set(given)
    assert set(provenance) <= set(given)


def test_between_two_rows_is_interpolated_and_beyond_them_extrapolated() -> None:
    between, beyond = load_config("resnet50-imagenet-16k"), load_config("alexnet-bn-imagenet-64k")
    assert {"optim.learning_rate", "train.epochs", "batch.micro"} <= set(
        settings_by_provenance(between)["interpolated"]
    )
    assert {"optim.learning_rate", "schedule.warmup_epochs"} <= set(settings_by_provenance(beyond)["extrapolated"])
    assert 12.8 < between.optim.learning_rate < 21.2 and beyond.optim.learning_rate > 32


def provenance_after(*overrides: str) -> dict[str, str]:
    return load_config("fashion-3k", overrides).provenance


def test_a_provenance_is_dropped_when_the_user_gives_the_value() -> None:
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
            r"^provenance.seed='guessed': expected .* begins with interpolated: or extrapolated: or assumed:",
        ),
        ("provenance.seed=assumed:", r"for example provenance.seed=\"assumed: no source gives it\"$"),
        ('provenance.seed="assumed: x\\ny"', r"one line"),
        ("provenance.seed=3", r"^provenance.seed=3: expected one line"),
        ("provenance=3", r"^provenance=3: expected object"),
    ],
)
def test_a_wrong_provenance_is_one_line_with_the_value_the_rule_and_the_remedy(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as refusal:
        load_config("fashion", [override])
    assert "\n" not in str(refusal.value)


def test_settings_are_sorted_by_the_kind_of_their_provenance() -> None:
    config = load_config("fashion", ["provenance.seed=extrapolated: x", "provenance.about=assumed: x"])
    assert settings_by_provenance(config) == {"extrapolated": ["seed"], "assumed": ["about"]}
