"""megabatch lr-range: a search for a recipe's learning rate by full runs, scored on held-out images."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megabatch.cli.overrides import Arguments, require_named_model, split_arguments
from megabatch.io.numbers import duration
from megabatch.ranks.lifecycle import exit_like_ranks

if TYPE_CHECKING:
    from rich.table import Table

    from megabatch.runs.records import Summary


def lr_range(
    given: Arguments = None,
    low: Annotated[
        float | None, typer.Option(help="Lowest learning rate of the grid. Default: the recipe's / 8.")
    ] = None,
    high: Annotated[
        float | None, typer.Option(help="Highest learning rate of the grid. Default: the recipe's x 8.")
    ] = None,
    trials: Annotated[int, typer.Option(help="Total number of learning rates to try.")] = 8,
    coarse: Annotated[
        int, typer.Option(help="How many of the trials form the grid. The others are placed around its best.")
    ] = 4,
    jobs: Annotated[
        int | None, typer.Option(help="Concurrent trials, of one rank each. Default: one per core.")
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(help="Folder of the trials; they resume from it. Default: runs/lr-range-RECIPE."),
    ] = None,
) -> None:
    """Find a recipe's learning rate with full runs, compared on held-out training images.

    [bold]megabatch lr-range[/bold] fashion batch.global=1024 --low 0.1 --high 6.4
    """
    from megabatch.experiments.search import HELD_OUT, command_for, conclude, plan_search, search_learning_rates
    from megabatch.experiments.trials import SweepScreen, choose_jobs

    recipe, overrides = split_arguments(given)
    search = plan_search(recipe, overrides, low=low, high=high, num_coarse=coarse, num_trials=trials, folder=folder)
    require_named_model(search.config, recipe, overrides)
    jobs = choose_jobs(jobs, search.config.run.device)
    screen = SweepScreen(trials, jobs)
    length, num_held_out = search.config.train.length, search.shape.num_test
    share = f" (1/{1 / HELD_OUT:.0f} of each class)" if search.held_out else ""
    screen.row("recipe", f"{search.config.name}: {trials} runs of {length}, {jobs} at a time")
    screen.row(
        "held out",
        f"{num_held_out:,} of {search.shape.num_train + num_held_out:,} training images{share}; "
        "learning rates are scored on them; test images are not used",
    )
    screen.row("rates", f"{', '.join(f'{rate:g}' for rate in search.grid)}; then around the best")
    for line in search.shape.warnings:
        screen.row("warning", line)
    screen.row("folder", str(search.folder))
    with exit_like_ranks():
        results = search_learning_rates(search, jobs, screen)
    screen.console.print(tabulate(results))
    best, text = conclude(results)
    screen.row("best", text)
    screen.console.print(command_for(search, best))


def tabulate(results: "dict[float, Summary]") -> "Table":
    from megabatch.experiments.search import best_learning_rate
    from megabatch.experiments.trials import scores_of
    from megabatch.io.terminal import plain_table

    table = plain_table()
    for column in ("learning rate", "held-out top-1", "loss", "time"):
        table.add_column(column, justify="right")
    table.add_column("status")
    best = best_learning_rate(scores_of(results))
    for rate, summary in sorted(results.items()):
        is_whole = summary.status == "finished"
        table.add_row(
            f"{rate:g}",
            f"{summary.top1:.4f}" if is_whole else "-",
            f"{summary.test_loss:.4f}" if is_whole else "-",
            duration(summary.wall_s),
            f"{summary.status}{', best' * (is_whole and rate == best)}",
        )
    return table
