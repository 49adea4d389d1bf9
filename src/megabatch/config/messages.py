"""Error messages about settings: the value, the rule, the remedy."""

import difflib
import math
from collections.abc import Iterator
from typing import Any

import msgspec

from megabatch.config.recipes import read_recipe
from megabatch.config.schema import FIELDS, Settings, kind_of
from megabatch.errors import LONGEST_QUOTED, nearest, plain_rule
from megabatch.text import one_line


def suggest(key: str) -> str:
    """Suggest the setting most similar to `key`, first without sections, because users forget them."""
    key = key[:LONGEST_QUOTED]
    name = key.rpartition(".")[2]
    by_name = {known.rpartition(".")[2]: known for known in FIELDS}
    by_initials = {"".join(part[0] for part in known.split("_")): known for known in by_name if "_" in known}  # lr
    close = [by_initials[name]] if name in by_initials else difflib.get_close_matches(name, by_name, n=1, cutoff=0.8)
    return f"nearest: {by_name[close[0]] if close else nearest(key, FIELDS)}"


def explain(error: str, settings: Settings) -> str:
    """Turn msgspec's "Expected `float` > 0.0 - at `$.optim.learning_rate`" into value, rule and remedy."""
    rule, _, path = error.partition(" - at `$")
    path = path.strip("`.").partition("[")[0]  # report the list, not its member
    path = next((key for key in FIELDS if path.startswith(f"{key}.")), path)  # and the table of a setting
    if rule.startswith("Invalid enum value"):
        rule = f"Expected {' or '.join(choices(path))}"
    value: Any = settings
    for name in path.split("."):
        value = value[name] if isinstance(value, dict) else value
    return f"{show_key(path)}={show_value(value)}: {plain_rule(rule)}; {remedy(path, value)}"


def choices(key: str) -> Iterator[str]:
    """Yield the values of a setting with fixed choices."""
    kind = FIELDS[key].type
    for member in kind.types if isinstance(kind, msgspec.inspect.UnionType) else (kind,):
        if isinstance(member, msgspec.inspect.LiteralType):
            yield from map(str, member.values)
        elif isinstance(member, msgspec.inspect.BoolType):
            yield from ("true", "false")
        elif isinstance(member, msgspec.inspect.DictType):
            yield "a table"
        elif not isinstance(member, msgspec.inspect.NoneType):
            yield "a number"


def remedy(key: str, value: Any) -> str:
    """Return the bound that `value` exceeds, the nearest integer, or an example."""
    kind = kind_of(key)
    if isinstance(value, int | float) and not isinstance(value, bool):
        lowest, highest = getattr(kind, "ge", None), getattr(kind, "le", None)
        if lowest is not None and value < lowest:
            return f"nearest: {key}={lowest}"
        if highest is not None and value > highest:
            return f"nearest: {key}={highest}"
        if isinstance(kind, msgspec.inspect.IntType) and isinstance(value, float):
            return f"nearest: {key}={round(value)}"
    return example(key)


def example(key: str) -> str:
    """Return an example of the setting: its value in the default recipe, or its default."""
    value: Any = read_recipe("fashion")
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    if value is None and key in FIELDS and FIELDS[key].default not in (msgspec.NODEFAULT, None):
        value = FIELDS[key].default
    value = list(value) if isinstance(value, tuple) else value
    return f"for example {key}={show_value(value)}" if value is not None else f"remove {key} to use its default"


def show_key(key: str) -> str:
    """Return a setting's name, cut if it is long."""
    return one_line(key, LONGEST_QUOTED)


def show_value(value: Any) -> str:
    """Return a value as in TOML, cut in the middle so that the rule and the remedy stay visible."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and abs(value) >= 2**64:  # Python refuses to print thousands of digits
        return f"{'-' * (value < 0)}1e{math.log10(abs(value)):.0f}"
    return one_line(repr(value) if isinstance(value, int | float | str | dict | list) else str(value), LONGEST_QUOTED)
