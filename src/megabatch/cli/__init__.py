"""The command line: one small file per command.  Commands import torch only when they run, so help is instant."""

import errno
import sys
from typing import Annotated

import typer

from megabatch import __version__
from megabatch.cli import (
    bench,
    chaos,
    compare,
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
    report,
    runs,
    selftest,
    settings,
    show,
    simulate,
    study,
    train,
)
from megabatch.errors import UserError
from megabatch.text import one_line, print_line

# Click's, of which typer has a copy of its own from 0.26 on.
UsageError: type[Exception] = typer.BadParameter.__bases__[0]
LONGEST_USAGE = 500  # letters of its message, which quotes what was given

app = typer.Typer(
    help="Trains image classifiers with huge batches, and explains where the time of each run went.",
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
app.command()(settings.settings)
app.command(name="eval")(evaluate.evaluate)
app.command()(predict.predict)
app.command()(export.export)
app.command()(doctor.doctor)
app.command(name="lr-range")(lr_range.lr_range)
app.command()(runs.runs)
app.command()(report.report)
app.command()(compare.compare)
app.command()(pack.pack)
app.command()(selftest.selftest)
app.command()(chaos.chaos)
app.command()(fuzz.fuzz)
app.add_typer(bench.app, name="bench")
app.command()(study.study)


def print_version(wanted: bool) -> None:
    if wanted:
        print_line(f"megabatch {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    pass


def describe_usage(error: Exception) -> str:
    """Such as: Invalid value for '--ranks': 'x' is not a valid integer; see megabatch train --help."""
    command = getattr(getattr(error, "ctx", None), "command_path", "megabatch")
    message = getattr(error, "format_message", error.__str__)()
    return f"{one_line(message, LONGEST_USAGE).rstrip('.')}; see {command} --help"


def main() -> None:
    """A user's mistake is one line, also where typer finds it: its own frame of several has the words as given."""
    try:
        sys.exit(app(standalone_mode=False))
    except UserError as error:
        print_line(f"megabatch: {error}", to_stderr=True)
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:  # of any path on the command line
            raise
        print_line(f"megabatch: {one_line(str(error.filename), LONGEST_USAGE)}: {error.strerror}", to_stderr=True)
    except UsageError as error:
        if type(error).__name__ != "NoArgsIsHelpError":  # which has printed the help
            print_line(f"megabatch: {describe_usage(error)}", to_stderr=True)
    sys.exit(2)
