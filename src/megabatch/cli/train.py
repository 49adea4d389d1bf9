"""megabatch train: validates the recipe, starts ranks, or joins them if it was started as one."""

import os
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megabatch.cli.overrides import (
    DEFAULT_RECIPE,
    MOST,
    Arguments,
    ClusterOption,
    ProfileOption,
    Ranks,
    choose_ranks,
    require_named_model,
    split_arguments,
)
from megabatch.errors import UserError
from megabatch.ranks.lifecycle import be_a_rank, start_ranks
from megabatch.runs.files import CONFIG
from megabatch.runs.reader import is_run, read_recipe_and_batch, read_source, started_in
from megabatch.text import print_line

if TYPE_CHECKING:
    from megabatch.ranks.store import RankStore


def train(
    given: Arguments = None,
    ranks: Ranks = None,
    resume: Annotated[
        str,
        typer.Option(
            metavar="auto|never|PATH",
            help="Resume an unfinished run of this recipe; begin a new one; or resume the run or checkpoint PATH.",
        ),
    ] = "auto",
    retune: Annotated[
        bool, typer.Option("--retune", help="Choose again how a resumed run fuses and all-reduces its gradients.")
    ] = False,
    max_restarts: Annotated[
        int, typer.Option(min=0, max=MOST, help="Times to restart the ranks after one has failed.")
    ] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be run, and end.")] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse a recipe that lies outside what is known to converge.")
    ] = False,
    report: Annotated[
        bool, typer.Option("--report", help="Write report.html into the run's folder when it ends, however it ends.")
    ] = False,
    cluster: ClusterOption = None,
    profile: ProfileOption = None,
) -> None:
    """Train a recipe to its end.

    [bold]megabatch train[/bold] fashion batch.global=512 optim.learning_rate=0.4 --ranks 2

    Under torchrun, srun or mpiexec it joins the ranks that they have started.
    """
    from megabatch.cli.show import expected_time, print_preview
    from megabatch.config.loading import load_config, print_to_stderr, silent
    from megabatch.config.recipes import recipe_names
    from megabatch.config.reference_results import require_known
    from megabatch.config.schema import RunConfig
    from megabatch.data.catalog import infer_shape, load_data_set
    from megabatch.ranks.discover import discover
    from megabatch.ranks.launch import RECIPE
    from megabatch.training.checkpoint.resume import choose_start, newest_of
    from megabatch.training.run import run

    def resolve() -> RunConfig:
        recipe, overrides = choose_recipe(given, resume, recipe_names())
        if info and ranks not in (None, info.num_ranks):
            raise UserError(f"--ranks {ranks}, but this is one of {info.num_ranks} ranks already; leave --ranks out")
        config = load_config(recipe, overrides, report=silent if info and info.rank else print_to_stderr)
        require_named_model(config, recipe, overrides)
        if strict:
            require_known(config, infer_shape(config.data).num_train)
        return config

    for option, value in (("--cluster", cluster), ("--profile", profile)):
        if value and not dry_run:
            raise UserError(f"{option} {value} says what time to expect, and trains nothing; add --dry-run")
    info = discover()
    if info and not dry_run:

        def work(store: "RankStore") -> int:
            ending = reported(store) if report and info.rank == 0 else nullcontext()
            return run(resolve(), resume, store, retune, ending)

        be_a_rank(info, work)
    config = resolve()
    if dry_run:
        arguments = [*(given or [DEFAULT_RECIPE]), *(["--resume", resume] if resume != "auto" else [])]
        num_ranks = info.num_ranks if info else choose_ranks(config, ranks)
        print_preview(config, num_ranks, arguments, time=expected_time(config, num_ranks, cluster, profile))
    else:
        num_ranks = choose_ranks(config, ranks)
        load_data_set(config.data)  # reports a wrong source before ranks start, and indexes a folder for all of them
        choose_start(config, resume, newest_of)
        # Ranks read what was resolved here: a file may change, and a pipe can be read only once.
        arguments = ["train", RECIPE, "--resume", resume, *["--retune"] * retune, *["--report"] * report]
        signal, timeout_s = config.run.preempt_signal, config.comm.timeout_s
        start_ranks(arguments, num_ranks, max_restarts, config.to_toml(), signal, timeout_s)


@contextmanager
def reported(store: "RankStore") -> Iterator[None]:
    """Its page, after whatever has become of the run; that it cannot be written is no failure of the run's."""
    from megabatch.report.page import write_report

    try:
        yield
    finally:
        folder = store.run_folder()
        try:
            if folder:
                print_line(f"report    {write_report([folder])}")
        except UserError as error:
            print_line(f"megabatch: no report: {error}", to_stderr=True)


def choose_recipe(given: Sequence[str] | None, resume: str, names: Container[str]) -> tuple[str, list[str]]:
    """The recipe to load, and its overrides: that of the run to resume, unless another one is given.

    A recipe among our `names` is what the run began with, if that is what the run is called: what its first command
    said besides, such as data.source, need not be said again.  One in a file counts as it stands there.
    """
    folder = run_of(resume)
    if folder is None:
        return split_arguments(given)
    recipe, overrides = split_arguments(given, default=str(folder / CONFIG))
    if recipe in names and recipe == read_recipe_and_batch(folder)[0]:
        recipe = str(folder / CONFIG)
    if recipe == str(folder / CONFIG):
        overrides = [*found_source(folder), *overrides]
    return recipe, overrides


def found_source(folder: Path) -> list[str]:
    """data.source, where it is relative to the folder in which the run was started, and not to this one."""
    source = read_source(folder)
    before = started_in(folder) / source
    return [f"data.source={before}"] if source and not Path(source).exists() and before.exists() else []


def run_of(resume: str) -> Path | None:
    """The folder of the run to resume, if `resume` is its path or that of one of its checkpoints."""
    real = Path(os.path.realpath(resume))  # unlike Path.resolve, also of a link that leads to itself
    folders = [Path(resume), *real.parents[:2]] if resume not in ("auto", "never") else []
    return next((folder for folder in folders if is_run(folder)), None)
