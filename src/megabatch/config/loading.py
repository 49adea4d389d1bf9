"""From a recipe and its `section.key=value` overrides to a RunConfig, checked before anything is started or written."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from megabatch.config.length import EPOCHS, STEPS, dotted_keys, settle_length
from megabatch.config.messages import example, explain, show_key, show_value, suggest
from megabatch.config.provenance import settle_provenance
from megabatch.config.recipes import read_recipe
from megabatch.config.schema import FIELDS, LONGEST_NAME, RunConfig, Settings, flatten, kind_of
from megabatch.config.values import check_values
from megabatch.errors import UserError
from megabatch.text import is_plain, print_line
from megabatch.toml import DEEPEST, NotToml, TooMuch, parse_toml


class Override(NamedTuple):
    """One `section.key=value`."""

    text: str
    key: str
    value: Any


def print_to_stderr(line: str) -> None:
    print_line(f"megabatch: {line}", to_stderr=True)


def silent(line: str) -> None:
    """Drop a line that another rank or an earlier command printed."""


def load_config(
    recipe: str,
    overrides: Sequence[str] = (),
    *,
    report: Callable[[str], None] = print_to_stderr,
    needs_source: bool = True,
) -> RunConfig:
    """The recipe (a name or a TOML file) with `section.key=value` overrides, or UserError.

    `report` is called with one line if the overrides give both epochs and steps, and with one if they shorten the run
    so much that its warm-up has to be shortened too.  Without `needs_source` a recipe that gives no data.source is
    complete, with "" in its place.
    """
    settings: Settings = {"name": default_name(recipe), **read_recipe(recipe)}
    recipe_epochs = dict(flatten(settings)).get(EPOCHS)
    given = [parse_override(text) for text in overrides]
    for override in given:
        apply_override(settings, override)
    check_values(settings)
    check_keys(settings)
    if not needs_source and isinstance(settings.setdefault("data", {}), dict):
        settings["data"].setdefault("source", "")
    overridden = [key for override in given for key in dotted_keys(override.key, override.value)]
    changed = settle_length(settings, overridden, recipe_epochs, report)
    check_complete(settings)
    settle_provenance(settings, [*(override.key for override in given), *changed])
    try:
        return msgspec.convert(settings, RunConfig)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, UserError):
            raise error.__cause__ from None
        raise UserError(explain(str(error), settings)) from None


def default_name(recipe: str) -> str:
    """Of a recipe in a file that gives none: the file's, as far as it can be one."""
    return re.sub(r"[^\w.-]+", "-", Path(recipe).stem).lstrip(".-")[:LONGEST_NAME] or "recipe"


def parse_override(text: str) -> Override:
    key, equals, value_text = text.partition("=")
    if not equals:
        raise UserError(f"{show_value(text)} is not an override; expected section.key=value, such as batch.global=512")
    if key.count(".") >= DEEPEST:
        raise UserError(f"{show_key(key)}: there is no such setting; {suggest(key)}")
    if not is_plain(text):
        raise UserError(
            f"{show_key(key)}={show_value(value_text)}: expected one line of text without control characters; "
            "leave them out"
        )
    try:
        value = parse_value(value_text, wants_text=isinstance(kind_of(key), msgspec.inspect.StrType))
    except TooMuch as error:
        raise UserError(f"{show_key(key)}={show_value(value_text)}: {error}; give less") from None
    return Override(text, key, value)


def parse_value(text: str, wants_text: bool) -> Any:
    """The value as TOML; what is not TOML is a string."""
    try:
        value = parse_toml(f"value = {text}")["value"]
    except NotToml as error:
        if isinstance(error, TooMuch) and not wants_text:
            raise
        return text
    return text if wants_text and not isinstance(value, str) else value  # run.dir=2026 is a folder


def apply_override(settings: Settings, override: Override) -> None:
    *sections, name = override.key.split(".")
    members = settings
    for section in sections:
        members = members.setdefault(section, {})
        if not isinstance(members, dict):
            raise UserError(
                f"{show_value(override.text)}: {show_key(section)} is not a section; {suggest(override.key)}"
            )
    members[name] = override.value


def check_keys(settings: Settings, prefix: str = "") -> None:
    """Every key is a setting, or a section of settings."""
    for name, value in settings.items():
        key = prefix + name
        if "." in name:
            raise UserError(f"{show_key(key)}: a name in quotes has a dot in it; write it without quotes")
        if key in FIELDS:
            continue
        members = [known for known in FIELDS if known.startswith(f"{key}.")]
        if isinstance(value, dict) and value:  # an unknown section is reported by its first member
            check_keys(value, f"{key}.")
        elif not members:
            raise UserError(f"{show_key(key)}={show_value(value)}: there is no setting {show_key(key)}; {suggest(key)}")
        elif not isinstance(value, dict):
            raise UserError(f"{key}={show_value(value)}: {key} is a section of {', '.join(members)}; give one of them")


def check_complete(settings: Settings) -> None:
    """What has no default is set."""
    given = dict(flatten(settings))
    missing = [key for key, member in FIELDS.items() if member.required and key not in given]
    missing += [EPOCHS] * (EPOCHS not in given and STEPS not in given)
    if missing:
        raise UserError(f"{', '.join(missing)} must be set; {example(missing[0])}")
