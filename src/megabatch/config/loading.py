"""Loading of a recipe with `section.key=value` overrides into a RunConfig, checked before a run starts or writes."""

import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import date, time
from pathlib import Path
from typing import Any

import msgspec

from megabatch.config.length import EPOCHS, STEPS, dotted_keys, settle_length
from megabatch.config.messages import example, explain, remedy, show_key, show_value, suggest
from megabatch.config.recipes import read_recipe
from megabatch.config.schema import FIELDS, LONGEST_NAME, RunConfig, Settings, flatten, kind_of
from megabatch.errors import UserError
from megabatch.io.toml import DEEPEST, Override, parse_override, set_dotted
from megabatch.text import expand_home, is_plain, print_line

PATHS = ("data.source", "data.also", "model.weights", "run.dir")
LONGEST_FILE_NAME = 255  # bytes of a path component
LONGEST_TEXT = 4096  # characters, the longest path


def check_values(settings: Settings, prefix: str = "") -> None:
    """Check that values are finite numbers, plain text, or lists and tables of those."""
    for name, value in settings.items():
        key = prefix + name
        if not is_plain(name):
            raise UserError(f"{show_key(key)}: the name has control characters or invalid UTF-8; remove them")
        for found, leaf in leaves(key, value):
            check_leaf(found, leaf)


def leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield all values that are not tables, and check the tables; parse_toml limits the depth."""
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
        raise UserError(f"{shown}: control characters and line breaks are not allowed; remove them")
    if isinstance(value, str) and len(value) > LONGEST_TEXT:
        raise UserError(f"{shown}: {len(value):,} characters; the limit is {LONGEST_TEXT:,}")
    if isinstance(value, str) and key in PATHS and max(map(len, os.fsencode(value).split(b"/"))) > LONGEST_FILE_NAME:
        raise UserError(f"{shown}: a file name has at most {LONGEST_FILE_NAME} bytes; use a shorter one")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise UserError(f"{shown}: expected a 64-bit integer; {remedy(key, value)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{shown}: expected a finite number; {example(show_key(key))}")
    if isinstance(value, date | time) and key not in FIELDS:  # otherwise msgspec reports the type
        raise UserError(f"{shown}: dates are not supported; put it in quotes")


# [provenance] of a recipe gives the source of a value or the reason for it, for example:
# optim.learning_rate = "interpolated: 12.8 at 13,056 and 21.2 at 32,768, log-log"
GUESSES = ("interpolated", "extrapolated", "assumed")
KINDS = ("published", *GUESSES)


def settle_provenance(settings: Settings, overridden: Sequence[str]) -> None:
    """Flatten the entries to dotted names, check them, and drop those whose value the user overrides."""
    if not isinstance(settings.get("provenance"), dict):
        return  # msgspec refuses other types
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
            f"{entry}: expected {': or '.join(KINDS)}: followed by the reason; "
            f'for example provenance.{key}="assumed: no source gives it"'
        )


def overlap(key: str, other: str) -> bool:
    """Return whether both are the same setting, or one is a section of the other."""
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")


def settings_by_provenance(config: RunConfig) -> dict[str, list[str]]:
    """Return the settings without a published source, by the kind of their provenance."""
    kinds = {kind: [key for key, text in config.provenance.items() if text.startswith(f"{kind}:")] for kind in GUESSES}
    return {kind: keys for kind, keys in kinds.items() if keys}


def print_to_stderr(line: str) -> None:
    print_line(f"megabatch: {line}", to_stderr=True)


def silent(line: str) -> None:
    """Ignore a line that another rank or an earlier command printed."""


def load_config(
    recipe: str,
    overrides: Sequence[str] = (),
    *,
    report: Callable[[str], None] = print_to_stderr,
    needs_source: bool = True,
) -> RunConfig:
    """Load a recipe and apply overrides.

    Args:
        recipe: A built-in name (`megabatch recipes`) or the path of a TOML file.
        overrides: Settings as `section.key=value`; later ones win.
        report: Called with one line if the overrides set both epochs and steps, and with one if the warm-up is
            shortened because the run is too short for it. Prints to standard error by default.
        needs_source: If False, data.source may be missing and is then "".

    Returns:
        The checked settings.

    Raises:
        UserError: A name or value is not valid. The message has the value, the rule and the remedy on one line.

    Examples:
        >>> config = megabatch.load_config("fashion", ["batch.global=512", "optim.learning_rate=0.4"])
    """
    recipe = expand_home(recipe)
    settings: Settings = {"name": default_name(recipe), **read_recipe(recipe)}
    recipe_epochs = dict(flatten(settings)).get(EPOCHS)
    given = [parse_setting(text) for text in overrides]
    for override in given:
        in_the_way = set_dotted(settings, override.key, override.value)
        if in_the_way is not None:
            shown = f"{show_value(override.text)}: {show_key(in_the_way)}"
            raise UserError(f"{shown} is not a section; {suggest(override.key)}")
    check_values(settings)
    check_keys(settings)
    expand_paths(settings)
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


def expand_paths(settings: Settings) -> None:
    """Replace `~` at the start of paths by the home folder, since shells do not in `section.key=~/photos`."""
    for key in PATHS:
        section, _, name = key.partition(".")
        table = settings.get(section)
        if not isinstance(table, dict) or name not in table:
            continue
        given = table[name]
        if isinstance(given, str):
            table[name] = expand_home(given)
        elif isinstance(given, list):
            table[name] = [expand_home(path) if isinstance(path, str) else path for path in given]


def default_name(recipe: str) -> str:
    """Return a valid recipe name made from the name of the file."""
    return re.sub(r"[^\w.-]+", "-", Path(recipe).stem).lstrip(".-")[:LONGEST_NAME] or "recipe"


def parse_setting(text: str) -> Override:
    """Parse an override of a recipe; settings that take text are not parsed as TOML numbers."""
    override = parse_override(text, lambda key: isinstance(kind_of(key), msgspec.inspect.StrType), "batch.global=512")
    if override.key.count(".") >= DEEPEST:
        raise UserError(f"{show_key(override.key)}: there is no such setting; {suggest(override.key)}")
    return override


def check_keys(settings: Settings, prefix: str = "") -> None:
    """Check that every key is a setting or a section."""
    for name, value in settings.items():
        key = prefix + name
        if "." in name:
            raise UserError(f"{show_key(key)}: a quoted name contains a dot; remove the quotes")
        if key in FIELDS:
            continue
        members = [known for known in FIELDS if known.startswith(f"{key}.")]
        if isinstance(value, dict) and value:  # an unknown section is reported by its first member
            check_keys(value, f"{key}.")
        elif not members:
            raise UserError(f"{show_key(key)}={show_value(value)}: there is no setting {show_key(key)}; {suggest(key)}")
        elif not isinstance(value, dict):
            raise UserError(f"{key}={show_value(value)}: {key} is a section; set one of {', '.join(members)}")


def check_complete(settings: Settings) -> None:
    """Check that all settings without a default are set."""
    given = dict(flatten(settings))
    missing = [key for key, member in FIELDS.items() if member.required and key not in given]
    missing += [EPOCHS] * (EPOCHS not in given and STEPS not in given)
    if missing:
        raise UserError(f"{', '.join(missing)} must be set; {example(missing[0])}")
