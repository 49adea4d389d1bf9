"""megabatch train: validates the recipe, starts ranks, or joins them if it was started as one."""

from typing import Annotated

import typer

from megabatch.cli.ranks import be_a_rank, start_ranks
from megabatch.cli.words import Ranks, Words, split_words
from megabatch.errors import UserError


def train(
    words: Words = None,
    ranks: Ranks = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be run, and end.")] = False,
) -> None:
    """Train a recipe to its end.

    [bold]megabatch train[/bold] fashion batch.global=512 optim.learning_rate=0.4 --ranks 2

    Under torchrun it joins the ranks that torchrun started.
    """
    from megabatch.cli.show import print_preview
    from megabatch.comm.world import discover
    from megabatch.config import load_config, recipe_name
    from megabatch.train.preview import choose_ranks
    from megabatch.train.run import run

    recipe, overrides = split_words(words)
    config = load_config(recipe, overrides)
    place = discover()
    if place and ranks not in (None, place.num_ranks):
        raise UserError(f"--ranks {ranks}, but this is one of {place.num_ranks} ranks already; leave --ranks out")
    if dry_run:
        print_preview(config, place.num_ranks if place else choose_ranks(config, ranks))
    elif place:
        be_a_rank(lambda: run(config, recipe_name(recipe), place))
    else:
        start_ranks(["train", recipe, *overrides], choose_ranks(config, ranks))
