"""megabatch doctor: what limits a run, and what to change."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from megabatch.cli.overrides import MOST, Arguments, Ranks, choose_ranks, require_named_model, split_arguments_or_run
from megabatch.errors import UserError
from megabatch.ranks.lifecycle import be_a_rank, start_ranks

if TYPE_CHECKING:
    from megabatch.preflight.doctor import Diagnosis
    from megabatch.ranks.store import RankStore


def doctor(
    given: Arguments = None,
    ranks: Ranks = None,
    seconds: Annotated[
        float, typer.Option(min=0.1, max=MOST, help="How long to run input, compute and both, each of them.")
    ] = 10.0,
) -> None:
    """Run a recipe's input alone, its compute alone and both; say what limits the run, and what to change.

    In place of a recipe it takes the folder of a run, for the recipe and the images of that run.
    """
    from megabatch.config.loading import load_config, print_to_stderr, silent
    from megabatch.data.catalog import FROM_PYTHON, infer_shape, load_data_set
    from megabatch.preflight.doctor import diagnose
    from megabatch.ranks.discover import discover
    from megabatch.ranks.launch import RECIPE

    info = discover()
    recipe, overrides = split_arguments_or_run(given)
    config = load_config(recipe, overrides, report=silent if info and info.rank else print_to_stderr)
    require_named_model(config, recipe, overrides)
    if config.data.source.startswith(FROM_PYTHON):
        raise UserError(f"{recipe} is of a run from Python, where its model and images are; give another")
    if info is None:
        load_data_set(config.data)  # reports a wrong source before ranks start
        arguments = ["doctor", RECIPE, "--seconds", str(seconds)]
        start_ranks(arguments, choose_ranks(config, ranks), recipe=config.to_toml())
        return

    def work(store: "RankStore") -> int:
        diagnosis = diagnose(config, store.info, store, seconds)
        if info.rank == 0:
            print_diagnosis(diagnosis, infer_shape(config.data).warnings)
        return 0

    be_a_rank(info, work)


def print_diagnosis(found: "Diagnosis", warnings: Sequence[str]) -> None:
    from megabatch.io.terminal import Terminal
    from megabatch.preflight.doctor import advise
    from megabatch.training.screen import describe_breakdown

    console = Terminal()
    ranks = f"{found.num_ranks} rank{'s' * (found.num_ranks > 1)}"
    threads = f" x {found.decode_threads} decoding thread{'s' * (found.decode_threads > 1)}" * (
        found.decode_threads > 0
    )
    figures = {
        "input": f"{found.input_per_s:>8,.0f} images/s alone, {ranks}{threads}{describe_breakdown(found.spent)}",
        "compute": f"{found.compute_per_s:>8,.0f} images/s alone",
        "both": f"{found.both_per_s:>8,.0f} images/s, {found.waited.total:.1%} of the time waiting for images",
        "verdict": advise(found),
    }
    for name, text in figures.items():
        console.row(name, text)
    for line in warnings:
        console.row("warning", line)
    sys.stdout.flush()
