"""Every setting with invalid values: one line, or a valid run."""

import io
import math
import sys
import tomllib
from contextlib import redirect_stdout
from typing import Any

import msgspec
import pytest

from megabatch.cli.app import main
from megabatch.cli.show import print_preview
from megabatch.config.loading import load_config
from megabatch.config.messages import choices
from megabatch.config.schema import FIELDS, RunConfig, flatten, kind_of
from megabatch.errors import UserError
from megabatch.preflight.preview import preview
from megabatch.text import is_plain

VALUES = ["-1", "0", "1e308", "1e-320", "nan", "inf", "1" + 30 * "0", "''", "'x'", "true", "[]"]
SMALL = ["data.synthetic.train=256", "data.synthetic.test=16"]
NUMBERS = (msgspec.inspect.IntType, msgspec.inspect.FloatType)
# Settings that accept any plain text, such as paths of files that do not have to exist for a plan.
FREE_TEXTS = {"about", "name", "model.weights", "data.source", "run.dir"}


def silent(line: str) -> None:
    pass


def load(override: str) -> RunConfig:
    return load_config("smoke", [*SMALL, override], report=silent)


def bounds(key: str) -> tuple[float, float]:
    kind: Any = kind_of(key)
    low = kind.ge if kind.ge is not None else kind.gt
    high = kind.le if kind.le is not None else kind.lt
    assert low is not None and high is not None, f"{key} has no bounds"
    return low, high


def choices_of(key: str) -> list[str]:
    """Return the choices that the error message lists."""
    if not isinstance(kind_of(key), msgspec.inspect.StrType):
        return list(choices(key))
    with pytest.raises(UserError, match=r"is not one of") as refusal:
        load(f"{key}=none-of-them")
    return str(refusal.value).partition("is not one of ")[2].partition(";")[0].split(", ")


def check_accepted(config: RunConfig, key: str, text: str) -> None:
    """Check that an accepted value is the given one, within its bounds, and makes a valid run."""
    value = dict(flatten(msgspec.to_builtins(config)))[key]
    kind = kind_of(key)
    given = text if isinstance(kind, msgspec.inspect.StrType) else tomllib.loads(f"v = {text}")["v"]
    assert value == (given.strip("'") if isinstance(given, str) else given), "parsed as another value"
    if isinstance(value, int | float) and not isinstance(value, bool):
        low, high = bounds(key)
        assert math.isfinite(value) and low <= value <= high
    elif isinstance(value, str):
        assert is_plain(value) and (key in FREE_TEXTS or value in choices_of(key))
    again = msgspec.convert(tomllib.loads(config.to_toml()), RunConfig)
    assert again == config, "config.toml does not round-trip"

    seen = preview(config, 1, needs_images=False)
    plan = seen.plan
    assert plan.num_steps >= 1 and plan.accumulation * plan.microbatch == plan.global_batch
    steps = {0, *(round(part * (plan.num_steps - 1) / 50) for part in range(51))}
    rates = [seen.learning_rate(step) for step in steps]
    assert all(math.isfinite(rate) and 0 < rate <= config.optim.learning_rate for rate in rates)
    assert 0 < seen.memory.total < 2**63


def check_preview(config: RunConfig) -> None:
    with redirect_stdout(io.StringIO()) as shown:
        print_preview(config, 1, ["smoke"], needs_images=False)
    assert all(letter.isprintable() or letter == "\n" for letter in shown.getvalue())


@pytest.mark.parametrize("key", FIELDS)
def test_every_value_is_accepted_or_refused_in_one_line(key: str) -> None:
    for text in VALUES:
        try:
            config = load(f"{key}={text}")
            check_accepted(config, key, text)
            if text in ("0", "true", "[]"):
                check_preview(config)
        except UserError as refusal:
            line = str(refusal)
            assert key in line and line.isprintable() and len(line) < 500, line
            assert ";" in line, f"no remedy: {line}"


@pytest.mark.parametrize("key", [key for key in FIELDS if isinstance(kind_of(key), NUMBERS)])
def test_every_number_has_bounds_that_are_valid_values(key: str) -> None:
    low, high = bounds(key)
    for value in (low, high):
        try:
            check_accepted(load(f"{key}={value}"), key, str(value))
        except UserError as refusal:  # an open bound, or one that contradicts other settings
            assert ";" in str(refusal)
    for beyond in (low - 1, 2 * high):
        with pytest.raises(UserError, match=key.replace(".", r"\.")):
            load(f"{key}={beyond}")


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e308", "1" + 30 * "0", "-1"])
def test_numbers_that_no_run_can_have_are_refused(text: str) -> None:
    for key in FIELDS.keys() - FREE_TEXTS:
        with pytest.raises(UserError):
            load(f"{key}={text}")


@pytest.mark.parametrize(
    "pair",
    [
        ["data.crop_padding=16"],
        ["schedule.end=0.2"],
        ["schedule.warmup_epochs=4"],
        ["optim.head_learning_rate=1e5", "optim.learning_rate=1e-9"],
        ["batch.micro=48"],
        ["optim.nesterov=true", "optim.momentum=0"],
        ["precision.name=fp64", "precision.loss_scale=8"],
    ],
)
def test_contradictory_settings_are_refused(pair: list[str]) -> None:
    with pytest.raises(UserError, match=r"[=:].*;"):
        load_config("smoke", pair, report=silent)


@pytest.mark.parametrize("words", [["train.epochs=1e308"], ["name=.."], ["run.dir=''"], ["comm.timeout_s=nan"]])
def test_the_command_ends_with_one_line_and_exit_code_2(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["megabatch", "train", "smoke", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    out, errors = capfd.readouterr()
    assert out.startswith("starting ") and out.count("\n") == 1
    assert len(errors.splitlines()) == 1 and words[0].partition("=")[0] in errors
