from pathlib import Path

import msgspec
import pytest

from megabatch.config.loading import load_config
from megabatch.config.recipes import recipe_names
from megabatch.config.schema import RunConfig
from megabatch.errors import UserError

MINIMAL = """
[model]
name = "small_cnn"
[data]
source = "synthetic"
image_size = 16
[batch]
global = 8
micro = 4
[optim]
learning_rate = 0.1
[train]
epochs = 1
"""


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_loads_and_has_a_description(name: str) -> None:
    assert load_config(name).about


def test_the_default_recipe_is_the_documented_one() -> None:
    config = load_config("fashion")
    assert (config.batch.global_batch, config.batch.microbatch) == (256, 64)


def test_overrides_reach_every_kind_of_setting() -> None:
    config = load_config(
        "fashion",
        [
            "batch.global=512",
            "optim.learning_rate=1",
            "optim.nesterov=false",
            "model.name=small_cnn",
            "model.options.width=8",
            'data.source="a b.npz"',
            "data.synthetic.classes=3",
            "seed=7",
            "run.dir=2026",
        ],
    )
    assert config.batch.global_batch == 512
    assert config.optim.learning_rate == 1.0 and not config.optim.nesterov
    assert config.model.name == "small_cnn" and config.model.options == {"width": 8}
    assert config.data.source == "a b.npz" and config.data.synthetic.classes == 3
    assert config.seed == 7 and config.run.dir == "2026"


def test_the_resolved_recipe_resolves_to_itself(tmp_path: Path) -> None:
    config = load_config("fashion", ["optim.momentum=0.8", "model.options.width=8"])
    (tmp_path / "again.toml").write_text(config.to_toml())
    assert load_config(str(tmp_path / "again.toml")) == config


def test_a_recipe_file_needs_only_settings_without_a_default(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(MINIMAL)
    assert load_config(str(tmp_path / "mine.toml")).optim.momentum == 0.9


@pytest.mark.parametrize(
    ("override", "message"),
    [
        # A wrong key.
        ("optim.lerning_rate=1", r"optim.lerning_rate=1: there is no setting .*nearest: optim.learning_rate"),
        ("optimizer.momentum=0.8", r"there is no setting optimizer.momentum; nearest: optim.momentum"),
        ("learning_rate=1", r"there is no setting learning_rate; nearest: optim.learning_rate"),
        ("optim.lr=1", r"there is no setting optim.lr; nearest: optim.learning_rate"),
        ("batch.size=3", r"there is no setting batch.size; nearest: "),
        ("comm.format=bf16", r"^comm.format='bf16': there is no setting comm.format; nearest: "),
        ("comm={fusion_mb=3}", r"^comm.fusion_mb=3: there is no setting comm.fusion_mb; nearest: comm.bucket_mb$"),
        ("optim.trust=0.02", r"^optim.trust=0.02: there is no setting optim.trust; nearest: "),
        ("marks.seed=assumed: x", r"^marks.seed='assumed: x': there is no setting marks.seed; nearest: "),
        ("optim=3", r"optim=3: optim is a section; set one of optim.name, optim.learning_rate, "),
        ("seed.x=3", r"'seed.x=3': seed is not a section; nearest: seed"),
        ("batch.global", r"'batch.global' is not an override; expected section.key=value"),
        # A wrong type.
        ("optim.learning_rate=fast", r"optim.learning_rate='fast': expected a number, got text; for example .*=0.2"),
        ("batch.global=64.5", r"batch.global=64.5: expected an integer, got a number; nearest: batch.global=64"),
        (
            "optim.nesterov=1",
            r"optim.nesterov=1: expected true or false, got an integer; remove optim.nesterov to use its default",
        ),
        # A wrong value.
        ("optim.learning_rate=-1", r"optim.learning_rate=-1: expected a number > 0; for example"),
        ("optim.learning_rate=inf", r"optim.learning_rate=inf: expected a finite number; for example"),
        ("train.epochs=nan", r"train.epochs=nan: expected a finite number; for example train.epochs=12"),
        ("seed=1979-05-27", r"seed=1979-05-27: expected an integer"),
        ("optim.momentum=-0.5", r"optim.momentum=-0.5: expected a number >= 0; nearest: optim.momentum=0"),
        ("train.target_top1=90", r"train.target_top1=90: expected a number <= 1; nearest: train.target_top1=1"),
        ("batch.micro=0", r"batch.micro=0: expected an integer >= 1; nearest: batch.micro=1"),
        (
            "batch.global=250",
            r"batch.global=250 is not a whole number of microbatches of 64; nearest: batch.global=256",
        ),
        ("optim.name=sdg", r"optim.name='sdg' is not one of sgd, lars, adamw, lamb, muon; nearest: optim.name=sgd"),
        ("data.on_error=ignore", r"data.on_error='ignore': expected raise or skip; for example data.on_error='raise'"),
        ("loss.class_weights=none", r"loss.class_weights='none': expected auto or a table; remove loss.class_weights"),
        ("comm.bucket_mb=big", r"comm.bucket_mb='big': expected a number or auto; for example comm.bucket_mb='auto'"),
        ("optim.variant=lark", r"optim.variant='lark' is not one of you2017, .*nearest: optim.variant=larc"),
        ("optim.trust_coefficient=0", r"optim.trust_coefficient=0: expected a number > 0; for example .*=0.001"),
        ("precision.name=fp23", r"precision.name='fp23' is not one of .*nearest: precision.name=fp32"),
        ("schedule.decay=polly", r"nearest: schedule.decay=poly"),
        ("model.name=small_resent", r"nearest: model.name=small_resnet"),
        (
            "schedule.warmup_epochs=12",
            r"train.epochs=12 is not longer than schedule.warmup_epochs=12; for example schedule.warmup_epochs=3",
        ),
        ("train.steps=0", r"train.steps=0: expected an integer >= 1; nearest: train.steps=1"),
        ("model.options=3", r"model.options=3: expected a table, got an integer"),
    ],
)
def test_a_wrong_override_is_refused_with_value_rule_and_remedy_in_one_line(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as refusal:
        load_config("fashion", [override])
    assert "\n" not in str(refusal.value)


def test_a_missing_setting_error_has_an_example(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(MINIMAL.replace("global = 8", ""))
    with pytest.raises(UserError, match=r"^batch.global must be set; for example batch.global=256$"):
        load_config(str(path))
    path.write_text("")
    with pytest.raises(UserError, match=r"^model.name, data.source, .*must be set.*model.name="):
        load_config(str(path))


def test_an_unreadable_recipe_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"recipe 'fashon' .*nearest: fashion"):
        load_config("fashon")
    (tmp_path / "broken.toml").write_text("[model\n")
    with pytest.raises(UserError, match=r"broken.toml is not TOML: .*line 1"):
        load_config(str(tmp_path / "broken.toml"))
    with pytest.raises(UserError, match=r"Is a directory"):
        load_config(str(tmp_path))


def test_a_loaded_config_is_frozen() -> None:
    config = load_config("fashion")
    with pytest.raises(AttributeError):
        config.seed = 3  # type: ignore[misc]
    assert msgspec.structs.replace(config, seed=3) == msgspec.convert(
        msgspec.to_builtins(config) | {"seed": 3}, RunConfig
    )
