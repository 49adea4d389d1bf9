"""The command line: one small file per command.  Commands import torch only when they run, so help is instant."""

import errno
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from megabatch import __version__
from megabatch.cli import (
    compare,
    doctor,
    evaluate,
    export,
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
from megabatch.plugins import find_plugins
from megabatch.text import one_line, print_line

# Click's, of which typer has a copy of its own from 0.26 on.
UsageError: type[Exception] = typer.BadParameter.__bases__[0]
LONGEST_USAGE = 500  # letters of its message, which quotes what was given

# The commands that prove megabatch, in `lab/` of a checkout, which `make` installs.
LAB_COMMANDS = {
    "bench": "Measure megabatch beside its peers, in the same run.",
    "chaos": "Train while faults strike, and compare the result with an undisturbed run.",
    "fuzz": "Read files that were made wrong.",
}


def add_lab_commands(app: typer.Typer) -> None:
    """Add the commands of the installed lab; without it, each prints one line that says where it is."""
    installed = find_plugins("megabatch.commands")
    for name, summary in LAB_COMMANDS.items():
        command = installed[name].load() if name in installed else missing_from(name)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            hidden = name not in installed
            context = {"ignore_unknown_options": True, "allow_extra_args": True} if hidden else None
            app.command(name, help=summary if hidden else None, hidden=hidden, context_settings=context)(command)


def missing_from(name: str) -> Callable[[], None]:
    def refuse() -> None:
        raise UserError(
            f"megabatch {name} is part of megabatch's checkout, not of the installed package; "
            f"clone the repository, run make .venv/installed-dev, then .venv/bin/megabatch {name}"
        )

    return refuse


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
app.command()(study.study)
add_lab_commands(app)


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
