"""The reference of settings: docs/settings.md, and `megabatch settings`."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from megabatch.cli.app import app
from megabatch.config.loading import load_config
from megabatch.config.messages import choices
from megabatch.config.schema import FIELDS
from megabatch.config.settings_page import CHOICES, DEFAULTS, MEANINGS, all_settings, page
from megabatch.errors import UserError

PAGE = Path(__file__).parents[2] / "docs/settings.md"


def test_every_setting_has_a_meaning_and_no_other_has() -> None:
    assert len(FIELDS) > 20
    assert set(MEANINGS) == set(FIELDS), "src/megabatch/config/settings_page.py says what each setting means"
    assert set(DEFAULTS) < set(FIELDS)
    assert all(FIELDS[key].default is None or key == "name" for key in DEFAULTS), "the schema has their default"


def test_the_page_is_that_of_the_schema() -> None:
    assert PAGE.read_text() == page(), "megabatch settings --markdown > docs/settings.md"


@pytest.mark.parametrize("key", sorted(CHOICES))
def test_choices_are_those_that_a_recipe_may_have(key: str) -> None:
    with pytest.raises(UserError) as refusal:
        load_config("smoke", [f"{key}=nonsense"])
    said = str(refusal.value).partition("is not one of ")[2].partition("; nearest")[0]
    assert set(said.split(", ")) == {choice for choice in CHOICES[key] if ":" not in choice}


def test_the_page_names_types_ranges_and_defaults() -> None:
    rows = {setting.name: (setting.takes, setting.default) for setting in all_settings()}
    assert rows["optim.momentum"] == ("number in [0, 1)", "`0.9`")
    assert rows["batch.global"] == ("integer in [1, 2^30]", "must be set")
    assert rows["comm.bucket_mb"] == ("number in (0, 1e6] or `auto`", "`auto`")
    assert rows["data.flip"] == ("`true`, `false`", "`false`")
    assert rows["data.on_error"][0] == ", ".join(f"`{choice}`" for choice in choices("data.on_error"))
    assert all(takes and default for takes, default in rows.values())


def test_a_part_is_printed_without_markup() -> None:
    said = CliRunner().invoke(app, ["settings", "checkpoint"], catch_exceptions=False).output
    assert said.splitlines()[0] == "checkpoint.every_steps  integer in [0, 1e12]; default: 0"
    assert "`" not in said and "](" not in said and "optim" not in said


@pytest.mark.parametrize("words", [["nonsense"], ["optim", "--markdown"]])
def test_what_there_is_not_is_one_line(words: list[str]) -> None:
    with pytest.raises(UserError, match=r"; "):
        CliRunner().invoke(app, ["settings", *words], catch_exceptions=False)
