"""The section on settings: the command, changes to the recipe, all settings, and the environment."""

from collections import Counter
from collections.abc import Sequence
from importlib import resources
from typing import Any

from megabatch.io.toml import parse_toml
from megabatch.report.html import Child, Markup, tag
from megabatch.report.svg import folded, table
from megabatch.report.view import RunView
from megabatch.runs.comparison import is_listed
from megabatch.runs.settings import Value, flatten, is_same
from megabatch.text import one_line

LONGEST_VALUE = 200
LONGEST_CONFIG = 40_000  # characters shown
UNSET = "not set"


def shown(value: Any) -> str:
    if isinstance(value, str):
        return one_line(value, LONGEST_VALUE)
    if isinstance(value, float):
        return f"{value:.10g}"
    return one_line(str(value).lower() if isinstance(value, bool) else str(value), LONGEST_VALUE)


def built_in_recipe(name: str | None) -> dict[str, Value] | None:
    """Return the settings of a recipe that ships with megabatch."""
    for entry in resources.files("megabatch.recipes").iterdir():
        if entry.name == f"{name}.toml":
            return dict(flatten(parse_toml(entry.read_text("utf-8"))))
    return None


def differences(before: dict[str, Value], after: dict[str, Value]) -> list[tuple[str, str, str]]:
    """Return settings of the recipe that the run changed."""
    return [
        (key, shown(value), shown(after[key]) if key in after else UNSET)
        for key, value in before.items()
        if key != "name" and is_listed(key) and not is_same(after.get(key), value)
    ]


def additional_overrides(command: str, before: dict[str, Value], after: dict[str, Value]) -> list[tuple[str, str, str]]:
    """Return settings of the command line that the recipe leaves at their defaults."""
    keys = [word.partition("=")[0].strip("'\"") for word in command.split() if "=" in word]
    return [(key, "default", shown(after[key])) for key in dict.fromkeys(keys) if key in after and key not in before]


def recipe_block(view: RunView) -> Markup | None:
    if not view.config:
        return None
    before = built_in_recipe(view.recipe)
    parts: list[Child] = []
    recorded = view.environment.get("command")
    command = recorded if isinstance(recorded, str) else ""
    if command:
        parts += [tag("h3", "Command"), tag("pre", one_line(command), class_="command")]
    if before is not None:
        changed = [*differences(before, view.config), *additional_overrides(command, before, view.config)]
        parts.append(tag("h3", f"Changes to the recipe {view.recipe}"))
        parts.append(
            table(("setting", "recipe", "this run"), changed, left=(0, 1, 2))
            if changed
            else tag("p", "None.", class_="about")
        )
    elif view.recipe:
        parts += [
            tag("h3", "Recipe"),
            tag("p", f"{view.recipe} is not a built-in recipe. All its settings are below.", class_="about"),
        ]
    text = (
        view.config_text if len(view.config_text) <= LONGEST_CONFIG else view.config_text[:LONGEST_CONFIG] + "\n[...]"
    )
    parts.append(folded("All settings (config.toml)", tag("pre", text, tabindex="0")))
    return tag("div", *parts, class_="block")


def environment_block(view: RunView) -> Markup | None:
    rows: list[Sequence[str]] = []
    for key, value in view.environment.items():
        if key == "command":
            continue
        if isinstance(value, dict):
            rows += [(shown(name), shown(of)) for name, of in value.items()]
        elif isinstance(value, list):
            counted = Counter(map(shown, value)).items()
            rows.append((shown(key), ", ".join(f"{n} x {one}" if n > 1 else one for one, n in counted) or "none"))
        else:
            rows.append((shown(key), shown(value)))
    return tag("div", tag("h3", "Environment"), table(("", ""), rows, left=(0, 1)), class_="block") if rows else None
