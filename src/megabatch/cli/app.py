"""The command line, with one file per command. Commands import torch only when they run, so help is instant."""

import errno
import sys
from collections.abc import Callable
from typing import Annotated

import typer

from megabatch import __version__
from megabatch.cli import (
    check,
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
from megabatch.text import expand_home, one_line, print_line

# From click, or from the copy of click that typer contains since 0.26.
UsageError: type[Exception] = typer.BadParameter.__bases__[0]
LONGEST_USAGE = 500  # characters of a usage error, which quotes the arguments

# The commands of `lab/`, which only a checkout has; `make` installs them.
LAB_COMMANDS = {
    "bench": "Measure megabatch and its peers in the same run.",
    "chaos": "Inject faults into training and compare the result with an undisturbed run.",
    "fuzz": "Read damaged files and check that each one is refused in one line.",
}


def add_lab_commands(app: typer.Typer) -> None:
    """Add the lab's commands. If the lab is not installed, each one raises an error that gives the remedy."""
    installed = find_plugins("megabatch.commands")
    for name, summary in LAB_COMMANDS.items():
        command = installed[name].load() if name in installed else refuse_missing(name)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name, rich_help_panel="Lab (needs a checkout)")
        else:
            hidden = name not in installed
            context = {"ignore_unknown_options": True, "allow_extra_args": True} if hidden else None
            app.command(
                name,
                help=summary if hidden else None,
                hidden=hidden,
                context_settings=context,
                rich_help_panel="Lab (needs a checkout)",
            )(command)


def refuse_missing(name: str) -> Callable[[], None]:
    def refuse() -> None:
        raise UserError(
            f"megabatch {name} is not in the installed package, only in the repository; "
            f"clone it, run make .venv/installed-dev, then .venv/bin/megabatch {name}"
        )

    return refuse


app = typer.Typer(
    help="Train image classifiers with huge batches, and see where the time of each run went.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
COMMANDS: dict[str, dict[str, Callable[..., None]]] = {
    "Train": {"train": train.train, "lr-range": lr_range.lr_range, "study": study.study},
    "Before a run": {
        "recipes": recipes.recipes,
        "settings": settings.settings,
        "show": show.show,
        "check": check.check,
        "pack": pack.pack,
        "doctor": doctor.doctor,
        "selftest": selftest.selftest,
    },
    "After a run": {
        "runs": runs.runs,
        "report": report.report,
        "compare": compare.compare,
        "eval": evaluate.evaluate,
        "predict": predict.predict,
        "export": export.export,
    },
    "Clusters": {"plan": plan.plan, "profile": profile.profile, "simulate": simulate.simulate},
}
for panel, commands in COMMANDS.items():
    for name, command in commands.items():
        app.command(name, rich_help_panel=panel)(command)
add_lab_commands(app)


def print_version(wanted: bool) -> None:
    if wanted:
        print_line(f"megabatch {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def describe_usage(error: Exception) -> str:
    """Return, for example: Invalid value for '--ranks': 'x' is not a valid integer; see megabatch train --help."""
    command = getattr(getattr(error, "ctx", None), "command_path", "megabatch")
    message = getattr(error, "format_message", error.__str__)()
    message = one_line(message, LONGEST_USAGE).rstrip(".")
    return f"{message}{' See' if message.endswith('?') else '; see'} {command} --help"


def arguments_of_user() -> list[str]:
    """Return the arguments of the command, with `~` expanded in `--option=~/path`, which shells leave as it is."""
    arguments = []
    for argument in sys.argv[1:]:
        option, separator, path = argument.partition("=~")
        if option.startswith("--") and separator:
            argument = f"{option}={expand_home('~' + path)}"
        arguments.append(argument)
    return arguments


def main() -> None:
    """Run a command; print a user's mistake as one line, even one that typer finds, which would print it in a frame."""
    try:
        sys.exit(app(arguments_of_user(), standalone_mode=False))
    except UserError as error:
        print_line(f"megabatch: {error}", to_stderr=True)
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:  # any path on the command line may be too long
            raise
        path = one_line(str(error.filename), LONGEST_USAGE)
        print_line(f"megabatch: {path}: {error.strerror}; use a shorter path", to_stderr=True)
    except UsageError as error:
        if type(error).__name__ != "NoArgsIsHelpError":  # it printed the help
            print_line(f"megabatch: {describe_usage(error)}", to_stderr=True)
    sys.exit(2)
