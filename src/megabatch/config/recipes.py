"""The recipes that come with megabatch, and those of a user: TOML files."""

import tomllib
from importlib import resources
from pathlib import Path

from megabatch.config.schema import Settings
from megabatch.errors import UserError, nearest

RECIPES = resources.files("megabatch.recipes")


def recipe_names() -> list[str]:
    return sorted(entry.name.removesuffix(".toml") for entry in RECIPES.iterdir() if entry.name.endswith(".toml"))


def read_recipe(recipe: str) -> Settings:
    if recipe in recipe_names():
        return tomllib.loads((RECIPES / f"{recipe}.toml").read_text())
    path = Path(recipe)
    try:
        return tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is not TOML: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"recipe {recipe!r} is neither one of `megabatch recipes` nor a readable TOML file "
            f"({getattr(error, 'strerror', None) or error}); nearest: {nearest(recipe, recipe_names())}"
        ) from None
