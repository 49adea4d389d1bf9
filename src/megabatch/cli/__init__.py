"""The command line: one small file per command.  Commands import torch only when they run, so help is instant."""

import sys
from typing import Annotated

import typer

from megabatch import __version__
from megabatch.cli import (
    bench,
    chaos,
    doctor,
    evaluate,
    export,
    fuzz,
    lr_range,
    pack,
    plan,
    predict,
    profile,
    recipes,
    runs,
    selftest,
    show,
    simulate,
    study,
    train,
)
from megabatch.errors import UserError

app = typer.Typer(
    help="Trains image classifiers with huge batches, as fast as the hardware allows.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(train.train)
app.command()(show.show)
app.command()(plan.plan)
app.command()(profile.profile)
app.command()(simulate.simulate)
app.command()(recipes.recipes)
app.command(name="eval")(evaluate.evaluate)
app.command()(predict.predict)
app.command()(export.export)
app.command()(doctor.doctor)
app.command(name="lr-range")(lr_range.lr_range)
app.command()(runs.runs)
app.command()(pack.pack)
app.command()(selftest.selftest)
app.command()(chaos.chaos)
app.command()(fuzz.fuzz)
app.add_typer(bench.app, name="bench")
app.add_typer(study.app, name="study")


def print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"megabatch {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    pass


def main() -> None:
    try:
        app()
    except UserError as error:
        print(f"megabatch: {error}", file=sys.stderr)
        sys.exit(2)
