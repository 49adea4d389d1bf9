"""Recipes: the built-in TOML files and those of a user."""

from copy import deepcopy
from difflib import get_close_matches
from importlib import resources
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from megabatch.config.schema import Settings, flatten
from megabatch.errors import UserError, nearest
from megabatch.io.toml import NotToml, parse_toml, read_toml
from megabatch.text import one_line

LONGEST_PATH = 300  # characters shown
RECIPES = resources.files("megabatch.recipes")


def recipe_names() -> list[str]:
    return sorted(entry.name.removesuffix(".toml") for entry in RECIPES.iterdir() if entry.name.endswith(".toml"))


class Published(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The published result that a recipe repeats, for `megabatch recipes`. It is not a setting."""

    source: str
    top1: Annotated[float, Meta(gt=0, le=1)] | None = None  # None: not published
    ranks: Annotated[int, Meta(ge=1)] | None = None  # GPUs or other devices of the run
    minutes: Annotated[float, Meta(gt=0)] | None = None


EXTENDS, PUBLISHED = "extends", "published"


def read_recipe(recipe: str) -> Settings:
    """Read a built-in recipe or a TOML file, with the settings of the built-in recipe that it extends."""
    settings = read_tables(recipe)
    settings.pop(PUBLISHED, None)
    return settings


def read_published(recipe: str) -> Published | None:
    found = read_tables(recipe).get(PUBLISHED)
    return None if found is None else msgspec.convert(found, Published)


def read_tables(recipe: str) -> Settings:
    own = parse_recipe(recipe)
    if EXTENDS not in own:
        return own
    base = own.pop(EXTENDS)
    if not isinstance(base, str) or base not in recipe_names() or base == recipe:
        shown = one_line(repr(base), LONGEST_PATH)
        raise UserError(
            f"{EXTENDS}={shown}: expected the name of a built-in recipe; nearest: "
            f'{EXTENDS}="{nearest(str(base), recipe_names())}"'
        )
    extended = read_tables(base)
    for key in ("about", PUBLISHED):
        extended.pop(key, None)
    forget_provenance(extended, own)
    return merge(extended, own)


def forget_provenance(extended: Settings, own: Settings) -> None:
    """Drop the provenance of settings that the extending recipe sets."""
    entries = extended.get("provenance", {})
    for section, values in own.items():
        if isinstance(values, dict) and isinstance(entries.get(section), dict):
            for name, _ in flatten(values):
                entries[section].pop(name.partition(".")[0], None)


def merge(base: Settings, own: Settings) -> Settings:
    """Return `base` with the values of `own`, table by table."""
    merged = deepcopy(base)
    for name, value in own.items():
        before = merged.get(name)
        merged[name] = merge(before, value) if isinstance(value, dict) and isinstance(before, dict) else value
    return merged


def parse_recipe(recipe: str) -> Settings:
    if recipe in recipe_names():
        return parse_toml((RECIPES / f"{recipe}.toml").read_text("utf-8"))
    try:
        return read_toml(recipe)
    except NotToml as error:
        raise UserError(f"{one_line(recipe, LONGEST_PATH)} is not TOML: {error}") from None
    except OSError as error:
        alike = get_close_matches(recipe[:LONGEST_PATH], recipe_names(), n=1)
        is_name = alike and "/" not in recipe and "." not in recipe
        remedy = f"nearest: {alike[0]}" if is_name else "check the path"
        raise UserError(
            f"recipe {one_line(repr(recipe), LONGEST_PATH)} is neither a built-in recipe (megabatch recipes) "
            f"nor a readable TOML or CSV file nor a folder of images ({error.strerror}); {remedy}"
        ) from None
