"""megabatch train: validates the recipe and starts ranks, or runs as one of them."""

import os
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from shlex import quote
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
from megabatch.ranks.discover import discover
from megabatch.ranks.lifecycle import report_start, run_as_rank, start_ranks
from megabatch.runs.files import CONFIG
from megabatch.runs.reader import is_run, read_recipe_and_batch, read_source, read_summary, started_in
from megabatch.text import print_line

if TYPE_CHECKING:
    from megabatch.config.schema import RunConfig
    from megabatch.ranks.store import RankStore

LENGTH = {"train.epochs", "train.steps", "schedule.warmup_epochs", "data.source"}  # a source may be spelled differently


def train(
    given: Arguments = None,
    ranks: Ranks = None,
    resume: Annotated[
        str,
        typer.Option(
            metavar="auto|never|PATH",
            help="Resume an unfinished run of this recipe, start a new run, or resume the run or checkpoint PATH.",
        ),
    ] = "auto",
    retune: Annotated[
        bool, typer.Option("--retune", help="Choose again how a resumed run fuses and all-reduces gradients.")
    ] = False,
    max_restarts: Annotated[
        int, typer.Option(min=0, max=MOST, help="How many times to restart the ranks after a failure.")
    ] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the run that would start, then exit.")] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse a recipe outside the range that is known to converge.")
    ] = False,
    report: Annotated[
        bool,
        typer.Option(
            "--report", help="Write report.html into the run's folder when the run ends, even after a failure."
        ),
    ] = False,
    cluster: ClusterOption = None,
    profile: ProfileOption = None,
) -> None:
    """Train a recipe.

    [bold]megabatch train[/bold] fashion batch.global=512 optim.learning_rate=0.4 --ranks 2

    Under torchrun, srun or mpiexec, it joins the ranks that they started.
    """
    for option, value in (("--cluster", cluster), ("--profile", profile)):
        if value and not dry_run:
            raise UserError(f"{option} {value} only predicts the time of a run; add --dry-run")
    info = discover()
    if not dry_run:
        report_start(info)

    from megabatch.cli.show import predict, print_preview
    from megabatch.config.loading import load_config, print_to_stderr, silent
    from megabatch.config.recipes import recipe_names
    from megabatch.config.reference_results import require_known
    from megabatch.config.schema import RunConfig
    from megabatch.data.catalog import infer_shape, load_data_set
    from megabatch.ranks.launch import RECIPE
    from megabatch.training.checkpoint.resume import choose_start
    from megabatch.training.run import run

    def resolve() -> RunConfig:
        recipe, overrides = choose_recipe(given, resume, recipe_names())
        if info and ranks not in (None, info.num_ranks):
            raise UserError(f"--ranks {ranks}: the launcher already started {info.num_ranks} ranks; remove --ranks")
        config = load_config(recipe, overrides, report=silent if info and info.rank else print_to_stderr)
        require_named_model(config, recipe, overrides)
        finished = finished_run(resume, config)
        if finished:
            raise UserError(
                f"{finished} is finished, and its learning rate has decayed; for more training, start a new run from "
                f"its weights: megabatch train {quote(str(finished / CONFIG))} train.epochs=N "
                f"{quote(f'model.weights={finished}')}"
            )
        if strict:
            require_known(config, infer_shape(config.data).num_train)
        return config

    if info and not dry_run:

        def work(store: "RankStore") -> int:
            ending = reported(store) if report and info.rank == 0 else nullcontext()
            return run(resolve(), resume, store, retune, ending)

        run_as_rank(info, work)
    config = resolve()
    if dry_run:
        arguments = [*(given or [DEFAULT_RECIPE]), *(["--resume", resume] if resume != "auto" else [])]
        num_ranks = info.num_ranks if info else choose_ranks(config, ranks)
        print_preview(config, num_ranks, arguments, predicted=predict(config, num_ranks, cluster, profile))
    else:
        num_ranks = choose_ranks(config, ranks)
        load_data_set(config.data)  # reports a wrong source before ranks start; indexes a folder once for all ranks
        choose_start(config, resume)  # refuses a wrong folder before ranks start; rank 0 decides
        # Ranks get the resolved recipe: a file may change, and a pipe can be read only once.
        arguments = ["train", RECIPE, "--resume", resume, *["--retune"] * retune, *["--report"] * report]
        signal, timeout_s = config.run.preempt_signal, config.comm.timeout_s
        start_ranks(arguments, num_ranks, max_restarts, config.to_toml(), signal, timeout_s)


@contextmanager
def reported(store: "RankStore") -> Iterator[None]:
    """Write the report after success and after failure. Failing to write it does not fail the run."""
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
    """Return the recipe and its overrides. The default is the recipe of the run to resume.

    If a built-in recipe (one of `names`) is the one that the run started from, the run's config is used, so that
    overrides of its first command, such as data.source, need not be repeated. A recipe file is used as it is.
    """
    folder = run_of(resume)
    if folder is None:
        recipe, overrides = split_arguments(given)
        if recipe not in names and is_run(Path(recipe)):
            shown = quote(recipe)
            raise UserError(
                f"{recipe} is a run, not a recipe; resume it with --resume {shown}, or start another with its recipe, "
                f"{quote(str(Path(recipe, CONFIG)))}"
            )
        return recipe, overrides
    recipe, overrides = split_arguments(given, default=str(folder / CONFIG))
    if recipe in names and recipe == read_recipe_and_batch(folder)[0]:
        recipe = str(folder / CONFIG)
    if recipe == str(folder / CONFIG):
        overrides = [*found_source(folder), *overrides]
    return recipe, overrides


def found_source(folder: Path) -> list[str]:
    """Return an override of data.source if that path is relative to the folder in which the run was started."""
    source = read_source(folder)
    before = started_in(folder) / source
    return [f"data.source={before}"] if source and not Path(source).exists() and before.exists() else []


def finished_run(resume: str, config: "RunConfig") -> Path | None:
    """Return the run of `resume` or run.dir if it is finished and `config` differs from it only in its length."""
    from megabatch.config.loading import load_config, silent
    from megabatch.config.resolve import decisive_settings

    folder = run_of(config.run.dir if resume == "auto" and config.run.dir else resume)
    summary = read_summary(folder) if folder else None
    if folder is None or summary is None or summary.status != "finished":
        return None
    ours, theirs = decisive_settings(config), decisive_settings(load_config(str(folder / CONFIG), report=silent))
    changed = {key for key in ours | theirs if ours.get(key) != theirs.get(key)}
    is_longer = changed & {"train.epochs", "train.steps"} and changed <= LENGTH
    return folder if is_longer else None


def run_of(resume: str) -> Path | None:
    """Return the run's folder if `resume` is the path of a run or of a checkpoint in it."""
    real = Path(os.path.realpath(resume))  # unlike Path.resolve, also accepts a link to itself
    folders = [Path(resume), *real.parents[:2]] if resume not in ("auto", "never") else []
    return next((folder for folder in folders if is_run(folder)), None)
