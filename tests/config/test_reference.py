"""The reference of all settings: docs/settings.md and `megabatch settings`."""

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


def test_settings_and_meanings_match() -> None:
    assert len(FIELDS) > 20
    assert set(MEANINGS) == set(FIELDS), "add the meaning of each setting to src/megabatch/config/settings_page.py"
    assert set(DEFAULTS) < set(FIELDS)
    assert all(FIELDS[key].default is None or key == "name" for key in DEFAULTS), "the schema has their default"


def test_the_page_matches_the_schema() -> None:
    assert PAGE.read_text() == page(), "megabatch settings --markdown > docs/settings.md"


@pytest.mark.parametrize("key", sorted(CHOICES))
def test_listed_choices_match_the_accepted_ones(key: str) -> None:
    with pytest.raises(UserError) as refusal:
        load_config("smoke", [f"{key}=nonsense"])
    choices = str(refusal.value).partition("is not one of ")[2].partition("; nearest")[0]
    assert set(choices.split(", ")) == {choice for choice in CHOICES[key] if ":" not in choice}


def test_the_page_names_types_ranges_and_defaults() -> None:
    rows = {setting.name: (setting.takes, setting.default) for setting in all_settings()}
    assert rows["optim.momentum"] == ("number in [0, 1)", "`0.9`")
    assert rows["batch.global"] == ("integer in [1, 2^30]", "must be set")
    assert rows["comm.bucket_mb"] == ("number in (0, 1e6] or `auto`", "`auto`")
    assert rows["data.flip"] == ("`true`, `false` or `alternating`", "`false`")
    assert rows["data.on_error"][0] == ", ".join(f"`{choice}`" for choice in choices("data.on_error"))
    assert all(takes and default for takes, default in rows.values())


def test_a_section_is_printed_without_markup() -> None:
    output = CliRunner().invoke(app, ["settings", "checkpoint"], catch_exceptions=False).output
    assert output.splitlines()[0] == "checkpoint.every_steps  integer in [0, 1e12]; default: 0"
    assert "`" not in output and "](" not in output and "optim" not in output


@pytest.mark.parametrize("words", [["nonsense"], ["optim", "--markdown"]])
def test_unknown_settings_are_refused_in_one_line(words: list[str]) -> None:
    with pytest.raises(UserError, match=r"; "):
        CliRunner().invoke(app, ["settings", *words], catch_exceptions=False)
