"""The words that `train` and `show` share: [RECIPE] [section.key=value ...] [--ranks N]."""

from collections.abc import Sequence
from typing import Annotated

import typer

DEFAULT_RECIPE = "fashion"

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RECIPE] [section.key=value]...",
        help="A recipe's name or TOML file (default: fashion), then settings that override it.",
        show_default=False,
    ),
]
Ranks = Annotated[
    int | None,
    typer.Option(help="Ranks to run on. Default: one per GPU, or per core, as far as they divide the microbatches."),
]


def split_words(words: Sequence[str] | None, default: str = DEFAULT_RECIPE) -> tuple[str, list[str]]:
    """The recipe, which may only come first, and the overrides."""
    words = list(words or [])
    if words and "=" not in words[0]:
        return words[0], words[1:]
    return default, words
