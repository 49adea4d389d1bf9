"""megabatch doctor: the bottleneck of a run and how to remove it."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from megabatch.cli.overrides import MOST, Arguments, Ranks, choose_ranks, load_recipe
from megabatch.errors import UserError
from megabatch.io.numbers import plural
from megabatch.ranks.lifecycle import run_as_rank, start_ranks

if TYPE_CHECKING:
    from megabatch.preflight.doctor import Diagnosis
    from megabatch.ranks.store import RankStore


def doctor(
    given: Arguments = None,
    ranks: Ranks = None,
    seconds: Annotated[
        float, typer.Option(min=0.1, max=MOST, help="Duration of each of the three measurements: input, compute, both.")
    ] = 10.0,
) -> None:
    """Measure a recipe's input, its compute, and both together; report the bottleneck and what to change.

    The folder of a run can be given instead of a recipe.
    """
    from megabatch.data.catalog import FROM_PYTHON, infer_shape, load_data_set
    from megabatch.preflight.doctor import diagnose
    from megabatch.ranks.discover import discover
    from megabatch.ranks.launch import RECIPE

    info = discover()
    config = load_recipe(given, info)
    if config.data.source.startswith(FROM_PYTHON):
        raise UserError(f"{config.name} was started from Python, which holds its model and images; give a recipe")
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

    run_as_rank(info, work)


def print_diagnosis(found: "Diagnosis", warnings: Sequence[str]) -> None:
    from megabatch.io.terminal import Terminal
    from megabatch.preflight.doctor import advise
    from megabatch.training.screen import describe_breakdown

    console = Terminal()
    ranks = plural(found.num_ranks, "rank")
    threads = f" x {plural(found.decode_threads, 'decoding thread')}" * (found.decode_threads > 0)
    rows = {
        "input": f"{found.input_per_s:>8,.0f} images/s, {ranks}{threads}{describe_breakdown(found.spent)}",
        "compute": f"{found.compute_per_s:>8,.0f} images/s",
        "both": f"{found.both_per_s:>8,.0f} images/s, {found.waited.total:.1%} of the time spent waiting for images",
        "verdict": advise(found),
    }
    if found.has_sizes:
        rows = {"images": f"of {found.image_size} pixels, the largest of data.sizes"} | rows
    for name, text in rows.items():
        console.row(name, text)
    for line in warnings:
        console.row("warning", line)
    sys.stdout.flush()
