"""From a recipe and its `section.key=value` overrides to a RunConfig, checked before anything is started or written."""

import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import date, time
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from megabatch.config.length import EPOCHS, STEPS, dotted_keys, settle_length
from megabatch.config.messages import example, explain, remedy, show_key, show_value, suggest
from megabatch.config.recipes import read_recipe
from megabatch.config.schema import FIELDS, LONGEST_NAME, RunConfig, Settings, flatten, kind_of
from megabatch.errors import UserError
from megabatch.io.toml import DEEPEST, NotToml, TooMuch, parse_toml
from megabatch.text import is_plain, print_line

# What every value of a recipe is, whatever it is of: a finite number, plain text, a list or table of those.

PATHS = ("data.source", "data.also", "model.weights", "run.dir")
LONGEST_FILE_NAME = 255  # bytes, of what lies between slashes
LONGEST_TEXT = 4096  # letters: as long as a path may be


def check_values(settings: Settings, prefix: str = "") -> None:
    """Before anything is computed or printed with them."""
    for name, value in settings.items():
        key = prefix + name
        if not is_plain(name):
            raise UserError(
                f"{show_key(key)}: a name of a setting holds control characters or bytes that are no text; "
                "remove them, or the setting"
            )
        for found, leaf in leaves(key, value):
            check_leaf(found, leaf)


def leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What is no table, with its dotted name, and the names of tables in lists; at most `toml.DEEPEST` deep."""
    if isinstance(value, dict):
        check_values(value, f"{key}.")
    elif isinstance(value, list):
        for member in value:
            yield from leaves(key, member)
    else:
        yield key, value


def check_leaf(key: str, value: Any) -> None:
    shown = f"{show_key(key)}={show_value(value)}"
    if isinstance(value, str) and not is_plain(value):
        raise UserError(f"{shown}: expected one line of text without control characters; leave them out")
    if isinstance(value, str) and len(value) > LONGEST_TEXT:
        raise UserError(f"{shown}: {len(value):,} letters are more than {LONGEST_TEXT:,}; shorten it")
    if isinstance(value, str) and key in PATHS and max(map(len, os.fsencode(value).split(b"/"))) > LONGEST_FILE_NAME:
        raise UserError(f"{shown}: the name of a file or folder has at most {LONGEST_FILE_NAME} bytes; give another")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise UserError(f"{shown}: expected a whole number of 64 bits; {remedy(key, value)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{shown}: expected a finite number; {example(show_key(key))}")
    if isinstance(value, date | time) and key not in FIELDS:  # else its type is said
        raise UserError(f"{shown}: expected text, a number, true or false, and not a date; write it in quotes")


# The [provenance] of a recipe: which of its values no source gives, and what they rest on instead.
#
# optim.learning_rate = "interpolated: 12.8 at 13,056 and 21.2 at 32,768, log-log"

KINDS = ("interpolated", "extrapolated", "assumed")  # what an entry begins with; a colon and the reason follow


def settle_provenance(settings: Settings, overridden: Sequence[str]) -> None:
    """Brings the entries to dotted names, checks them, and drops those whose value the user has overridden."""
    if not isinstance(settings.get("provenance"), dict):
        return  # whatever else it is, msgspec refuses it
    entries = dict(flatten(settings["provenance"]))
    for key, text in entries.items():
        check_entry(key, text)
    settings["provenance"] = {
        key: text for key, text in entries.items() if not any(overlap(key, other) for other in overridden)
    }


def check_entry(key: str, text: object) -> None:
    entry = f"provenance.{show_key(key)}={show_value(text)}"
    if key not in FIELDS:
        raise UserError(f"{entry}: there is no setting {show_key(key)}; {suggest(key)}")
    if not isinstance(text, str) or not re.fullmatch(rf"({'|'.join(KINDS)}): \S.*", text):
        raise UserError(
            f"{entry}: expected one line that begins with {': or '.join(KINDS)}:, and says why; "
            f'for example provenance.{key}="assumed: no source gives it"'
        )


def overlap(key: str, other: str) -> bool:
    """Whether the two are the same setting, or one is a section of the other."""
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")


def settings_by_provenance(config: RunConfig) -> dict[str, list[str]]:
    """The settings that no source gives, by the kind of their provenance."""
    kinds = {kind: [key for key, text in config.provenance.items() if text.startswith(f"{kind}:")] for kind in KINDS}
    return {kind: keys for kind, keys in kinds.items() if keys}


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
