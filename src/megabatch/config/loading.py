"""From a recipe and its `section.key=value` overrides to a RunConfig, checked before anything is started or written."""

import math
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from megabatch.config.messages import example, explain, show_value, suggest
from megabatch.config.recipes import read_recipe
from megabatch.config.schema import FIELDS, RunConfig, Settings, flatten, kind_of
from megabatch.errors import UserError

MARKS = ("interpolated", "extrapolated", "assumed")  # begins a mark; a colon and the reason follow


def load_config(recipe: str, overrides: Sequence[str] = ()) -> RunConfig:
    """The recipe (a name or a TOML file) with `section.key=value` overrides, or UserError."""
    settings = {"name": re.sub(r"[^\w.-]+", "-", Path(recipe).stem)} | read_recipe(recipe)
    for word in overrides:
        override(settings, word)
    check_keys(settings)
    check_complete(settings)
    settle_marks(settings, [word.partition("=")[0] for word in overrides])
    try:
        return msgspec.convert(settings, RunConfig)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, UserError):
            raise error.__cause__ from None
        raise UserError(explain(str(error), settings)) from None


def override(settings: Settings, word: str) -> None:
    """Applies one `section.key=value`.  The value is TOML; what is not TOML is a string."""
    key, equals, text = word.partition("=")
    if not equals:
        raise UserError(f"{word!r} is not an override; expected section.key=value, such as batch.global=512")
    *sections, name = key.split(".")
    place = settings
    for section in sections:
        place = place.setdefault(section, {})
        if not isinstance(place, dict):
            raise UserError(f"{word!r}: {section} is not a section; {suggest(key)}")
    place[name] = parse_value(text, wants_text=isinstance(kind_of(key), msgspec.inspect.StrType))


def parse_value(text: str, wants_text: bool) -> Any:
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return text if wants_text and not isinstance(value, str) else value  # run.dir=2026 is a folder


def check_keys(settings: Settings, prefix: str = "") -> None:
    for name, value in settings.items():
        key = prefix + name
        if key in FIELDS:
            continue
        members = [known for known in FIELDS if known.startswith(f"{key}.")]
        if isinstance(value, dict) and value:  # an unknown section is reported by its first member
            check_keys(value, f"{key}.")
        elif not members:
            raise UserError(f"{key}={show_value(value)}: there is no setting {key}; {suggest(key)}")
        elif not isinstance(value, dict):
            raise UserError(f"{key}={show_value(value)}: {key} is a section of {', '.join(members)}; give one of them")


def check_complete(settings: Settings) -> None:
    """What has no default must be there; and no number may be infinite or NaN."""
    given = dict(flatten(settings))
    missing = [key for key, member in FIELDS.items() if member.required and key not in given]
    if missing:
        raise UserError(f"{', '.join(missing)} must be set; {' '.join([example(key) for key in missing][:1])}")
    for key, value in given.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{key}={value}: expected a finite number; {example(key)}")


def settle_marks(settings: Settings, overridden: Sequence[str]) -> None:
    """Brings marks to dotted names, checks them, and drops those whose value is now the user's."""
    if not isinstance(settings.get("marks"), dict):
        return
    marks = dict(flatten(settings["marks"]))
    for key, text in marks.items():
        if key not in FIELDS:
            raise UserError(f"marks.{key}={show_value(text)}: there is no setting {key}; {suggest(key)}")
        if not isinstance(text, str) or not re.fullmatch(rf"({'|'.join(MARKS)}): \S.*", text):
            raise UserError(
                f"marks.{key}={show_value(text)}: a mark is one line that begins with {': or '.join(MARKS)}:, and says "
                f'why; for example marks.{key}="assumed: no source gives it"'
            )
    users = {
        key for key in marks for word in overridden if f"{word}.".startswith(f"{key}.") or key.startswith(f"{word}.")
    }
    settings["marks"] = {key: text for key, text in marks.items() if key not in users}


def marked_settings(config: RunConfig) -> dict[str, list[str]]:
    """The marked settings by the kind of their mark."""
    kinds = {kind: [key for key, text in config.marks.items() if text.startswith(f"{kind}:")] for kind in MARKS}
    return {kind: keys for kind, keys in kinds.items() if keys}
