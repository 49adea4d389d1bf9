"""megabatch doctor: what limits a run, and what to change."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from megabatch.cli.overrides import Ranks, Words, split_words
from megabatch.cli.ranks import be_a_rank, start_ranks

if TYPE_CHECKING:
    from megabatch.ranks.store import Notices
    from megabatch.train.doctor import Diagnosis


def doctor(
    words: Words = None,
    ranks: Ranks = None,
    seconds: Annotated[
        float, typer.Option(min=0.1, help="How long to run input, compute and both, each of them.")
    ] = 10.0,
) -> None:
    """Run a recipe's input alone, its compute alone and both; say what limits the run, and what to change."""
    from megabatch.config.loading import load_config
    from megabatch.data.sources import foresee_shape
    from megabatch.preflight.preview import choose_ranks
    from megabatch.ranks.discover import discover
    from megabatch.ranks.launch import NOTES
    from megabatch.train.doctor import diagnose

    place = discover()
    config = load_config(*split_words(words))
    if place is None:
        foresee_shape(config.data)  # what ranks would refuse is said at once
        arguments = ["doctor", f"{NOTES}/recipe.toml", "--seconds", str(seconds)]
        start_ranks(arguments, choose_ranks(config, ranks), files={"recipe.toml": config.to_toml()})
        return

    def work(notices: "Notices") -> int:
        diagnosis = diagnose(config, place, notices, seconds)
        if place.rank == 0:
            print_diagnosis(diagnosis)
        return 0

    be_a_rank(place, work)


def print_diagnosis(found: "Diagnosis") -> None:
    from rich.console import Console

    from megabatch.train.doctor import advise
    from megabatch.train.screen import describe_stages

    console = Console(highlight=False, soft_wrap=True)
    ranks = f"{found.num_ranks} rank{'s' * (found.num_ranks > 1)}"
    threads = f" x {found.decode_threads} decoding thread{'s' * (found.decode_threads > 1)}" * (
        found.decode_threads > 0
    )
    figures = {
        "input": f"{found.input_per_s:>8,.0f} images/s alone, {ranks}{threads}{describe_stages(found.spent)}",
        "compute": f"{found.compute_per_s:>8,.0f} images/s alone",
        "both": f"{found.both_per_s:>8,.0f} images/s, {found.waited.total:.1%} of the time waiting for images",
        "verdict": advise(found),
    }
    for name, text in figures.items():
        console.print(f"[bold]{name:<9}[/bold] ", end="")
        console.print(text, markup=False)
    sys.stdout.flush()
