"""megabatch train: validates the recipe, starts ranks, or joins them if it was started as one."""

import sys
import traceback
from typing import TYPE_CHECKING, Annotated

import typer

from megabatch.cli.words import Ranks, Words, split_words
from megabatch.errors import UserError

if TYPE_CHECKING:
    from megabatch.comm.world import Place
    from megabatch.config import RunConfig


def train(
    words: Words = None,
    ranks: Ranks = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be run, and end.")] = False,
) -> None:
    """Train a recipe to its end.

    [bold]megabatch train[/bold] fashion batch.global=512 optim.learning_rate=0.4 --ranks 2

    Under torchrun it joins the ranks that torchrun started.
    """
    from megabatch.comm.launch import RankFailed, Stopped, launch
    from megabatch.comm.world import choose_device, discover
    from megabatch.config import load_config
    from megabatch.planning.batch import check_ranks
    from megabatch.train.preview import default_ranks

    recipe, overrides = split_words(words)
    config = load_config(recipe, overrides)
    place = discover()
    if place:
        sys.exit(run_rank(config, recipe, place))
    device = choose_device(config.run.device)
    num_ranks = default_ranks(config.batch, device) if ranks is None else ranks
    check_ranks(config.batch, num_ranks)
    if dry_run:
        from megabatch.cli.show import print_preview

        print_preview(config, num_ranks)
        return
    try:
        launch(["train", recipe, *overrides], num_ranks)
    except RankFailed as failed:
        if failed.exit_code in (130, 143):  # it was asked to stop, and has said so
            sys.exit(failed.exit_code)
        print(failed.trace, end="", file=sys.stderr)
        where = "" if failed.exit_code == 2 else f"rank {failed.rank}: "
        print(f"megabatch: {where}{failed}", file=sys.stderr)
        sys.exit(2 if failed.exit_code == 2 else 1)
    except Stopped as stopped:
        sys.exit(128 + stopped.signal_number)


def run_rank(config: "RunConfig", recipe: str, place: "Place") -> int:
    """One rank.  Its launcher speaks for it; without ours, it speaks for itself."""
    from megabatch.comm.launch import die_with_launcher, report_failure, was_launched
    from megabatch.config import recipe_name
    from megabatch.train.run import run

    if was_launched():
        die_with_launcher()
    try:
        return run(config, recipe_name(recipe), place)
    except UserError as error:
        code = 2
        report_failure(code, str(error))
        if not was_launched():
            raise
    except Exception as error:
        code = 1
        report_failure(code, f"{type(error).__name__}: {error}", traceback.format_exc())
        if not was_launched():
            raise
    return code
