"""The recipes that come with megabatch, and those of a user: TOML files."""

from importlib import resources

from megabatch.config.schema import Settings
from megabatch.errors import UserError, nearest
from megabatch.io.toml import NotToml, parse_toml, read_toml
from megabatch.text import one_line

LONGEST_PATH = 300  # letters of one that are shown
RECIPES = resources.files("megabatch.recipes")


def recipe_names() -> list[str]:
    return sorted(entry.name.removesuffix(".toml") for entry in RECIPES.iterdir() if entry.name.endswith(".toml"))


def read_recipe(recipe: str) -> Settings:
    if recipe in recipe_names():
        return parse_toml((RECIPES / f"{recipe}.toml").read_text("utf-8"))
    try:
        return read_toml(recipe)
    except NotToml as error:
        raise UserError(f"{one_line(recipe, LONGEST_PATH)} is not TOML: {error}") from None
    except OSError as error:
        raise UserError(
            f"recipe {one_line(repr(recipe), LONGEST_PATH)} is neither one of `megabatch recipes` nor a readable TOML "
            f"file ({error.strerror}); nearest: {nearest(recipe, recipe_names())}"
        ) from None
