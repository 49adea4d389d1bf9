"""megabatch train: validates the recipe, starts ranks, or joins them if it was started as one."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from megabatch.cli.overrides import DEFAULT_RECIPE, Ranks, Words, split_words
from megabatch.cli.ranks import be_a_rank, start_ranks
from megabatch.errors import UserError


def train(
    words: Words = None,
    ranks: Ranks = None,
    resume: Annotated[
        str,
        typer.Option(
            metavar="auto|never|PATH",
            help="Go on with an unfinished run of this recipe; begin anew; or go on with the run or checkpoint PATH.",
        ),
    ] = "auto",
    retune: Annotated[
        bool, typer.Option("--retune", help="Choose anew how a run that goes on fuses and sums its gradients.")
    ] = False,
    max_restarts: Annotated[int, typer.Option(min=0, help="Times to restart the ranks after one has failed.")] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be run, and end.")] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse a recipe that lies outside what is known to converge.")
    ] = False,
) -> None:
    """Train a recipe to its end.

    [bold]megabatch train[/bold] fashion batch.global=512 optim.learning_rate=0.4 --ranks 2

    Under torchrun, srun or mpiexec it joins the ranks that they have started.
    """
    from megabatch.cli.show import print_preview
    from megabatch.config.loading import load_config
    from megabatch.config.schema import RunConfig
    from megabatch.data.sources import foresee_shape
    from megabatch.preflight.compare import require_known
    from megabatch.preflight.preview import choose_ranks
    from megabatch.ranks.discover import discover
    from megabatch.ranks.launch import NOTES
    from megabatch.train.resume import choose_start, newest_whole
    from megabatch.train.run import run

    def resolve() -> RunConfig:
        recipe, overrides = split_words(words, default=recipe_of(resume))
        if place and ranks not in (None, place.num_ranks):
            raise UserError(f"--ranks {ranks}, but this is one of {place.num_ranks} ranks already; leave --ranks out")
        config = load_config(recipe, overrides)
        if strict:
            require_known(config, foresee_shape(config.data).num_train)
        return config

    place = discover()
    if place and not dry_run:
        be_a_rank(place, lambda notices: run(resolve(), place, resume, notices, retune))
    config = resolve()
    if dry_run:
        print_preview(config, place.num_ranks if place else choose_ranks(config, ranks))
    else:
        num_ranks = choose_ranks(config, ranks)
        # What ranks would refuse is said at once; and a folder is indexed before they all want it.
        foresee_shape(config.data)
        choose_start(config, resume, partial(newest_whole, report=ignore))
        # Ranks read what was resolved here: a file may change, and a pipe can be read only once.
        arguments = ["train", f"{NOTES}/recipe.toml", "--resume", resume, *["--retune"] * retune]
        start_ranks(arguments, num_ranks, max_restarts, {"recipe.toml": config.to_toml()})


def ignore(damage: str) -> None:
    """Rank 0 will report it."""


def recipe_of(resume: str) -> str:
    """The recipe of a run to go on with, if `resume` is the path of one."""
    folders = [Path(resume), *Path(resume).resolve().parents[:2]] if resume not in ("auto", "never") else []
    recipes = [folder / "config.toml" for folder in folders]
    return next((str(recipe) for recipe in recipes if recipe.is_file()), DEFAULT_RECIPE)
