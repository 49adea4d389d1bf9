"""Arguments and options that several commands share: [RECIPE] [section.key=value ...] [--ranks N]."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megabatch.errors import UserError
from megabatch.text import expand_home

if TYPE_CHECKING:
    from megabatch.config.schema import RunConfig
    from megabatch.ranks.discover import RankInfo

DEFAULT_RECIPE = "fashion"
PHOTOS = "photos"  # the recipe for a folder of images that is given instead of a recipe
MOST = 1_000_000  # upper bound of ranks, rounds, seconds and megabytes on the command line

Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RECIPE] [section.key=value]...",
        help="A recipe name, a TOML file or a folder of images (default: fashion), followed by overrides of settings.",
        show_default=False,
    ),
]
Ranks = Annotated[
    int | None,
    typer.Option(help="Number of ranks. Default: one per GPU or core, if they divide the microbatches."),
]
ClusterOption = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="NAME|FILE",
        help="Also predict the time on this cluster: a preset or file of megabatch simulate.",
        show_default=False,
    ),
]
ProfileOption = Annotated[
    Path | None,
    typer.Option(
        "--profile",
        metavar="FILE",
        help="A file of megabatch profile, used instead of the cluster's devices.",
        show_default=False,
    ),
]

ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODULE:FACTORY",
        help="The run's model, if it is your own Python code. It is imported only if you name it here.",
        show_default=False,
    ),
]


def split_arguments(arguments: Sequence[str] | None, default: str = DEFAULT_RECIPE) -> tuple[str, list[str]]:
    """Return the recipe, which is the first argument if that has no =, and the overrides.

    If it is a folder or file of images, return the recipe for photos, with it as `data.source`.
    """
    arguments = list(arguments or [])
    if arguments and is_images(arguments[0]):
        return PHOTOS, [f"data.source={arguments[0]}", *arguments[1:]]
    if arguments and "=" not in arguments[0]:
        return arguments[0], arguments[1:]
    return default, arguments


def is_images(argument: str) -> bool:
    """Return whether the argument is a folder of images or a .csv, .tar or .npz file, and not a recipe or a run."""
    from megabatch.config.recipes import recipe_names
    from megabatch.runs.reader import is_run

    path = Path(expand_home(argument))
    with suppress(OSError, ValueError):  # such as a name that is too long
        is_source = path.is_dir() or (path.suffix in (".csv", ".tar", ".npz") and path.is_file())
        return is_source and argument not in recipe_names() and not is_run(path)
    return False


def split_arguments_or_run(arguments: Sequence[str] | None) -> tuple[str, list[str]]:
    """Do the same as `split_arguments`, but replace the folder of a run by its recipe."""
    from megabatch.config.recipes import recipe_names
    from megabatch.runs.files import CONFIG
    from megabatch.runs.reader import is_run

    recipe, overrides = split_arguments(arguments)
    is_run_folder = recipe not in recipe_names() and is_run(Path(recipe))
    return str(Path(recipe) / CONFIG) if is_run_folder else recipe, overrides


def load_recipe(
    arguments: Sequence[str] | None, info: "RankInfo | None" = None, needs_source: bool = True
) -> "RunConfig":
    """Load the recipe of a command, or that of a run's folder; only rank 0 prints notes about it."""
    from megabatch.config.loading import load_config, print_to_stderr, silent

    recipe, overrides = split_arguments_or_run(arguments)
    report = silent if info and info.rank else print_to_stderr
    config = load_config(recipe, overrides, report=report, needs_source=needs_source)
    require_named_model(config, recipe, overrides)
    return config


def require_named_model(config: "RunConfig", recipe: str, overrides: Sequence[str]) -> None:
    """Refuse Python code that is named only by a run's config.toml.

    Unlike a recipe, a run's folder may come from an untrusted source.
    """
    from megabatch.runs.files import CONFIG

    if Path(recipe).name == CONFIG:
        from megabatch.config.length import dotted_keys
        from megabatch.config.loading import parse_setting
        from megabatch.models.catalog import require_named
        from megabatch.user_code import is_user_code

        given = [key for parsed in map(parse_setting, overrides) for key in dotted_keys(parsed.key, parsed.value)]
        named = config.model.name if "model.name" in given else None
        require_named(config.model, named, recipe, f"model.name={config.model.name}")
        if is_user_code(config.optim.name) and "optim.name" not in given:
            raise UserError(
                f"{recipe}: its optimizer is Python code, {config.optim.name}, which would be imported and run; "
                f"if you trust it, add optim.name={config.optim.name}"
            )


def require_folder_of(path: Path | None, option: str = "--json") -> None:
    if path and not path.absolute().parent.is_dir():
        raise UserError(f"{option} {path}: the folder {path.absolute().parent} does not exist; create it first")
    if path and path.is_dir():
        raise UserError(f"{option} {path} is a folder; give the path of a file")


def choose_ranks(config: "RunConfig", wanted: int | None) -> int:
    """Return `wanted`, or one rank per GPU (on CPU, per core), reduced until it divides the microbatches."""
    from megabatch.config.messages import show_value
    from megabatch.planning.batch import check_ranks, most_ranks
    from megabatch.ranks.devices import choose_device

    device_type = choose_device(config.run.device)
    if wanted is not None and wanted < 1:
        raise UserError(f"--ranks {wanted}: a run needs at least 1 rank; use --ranks 1")
    if wanted is not None and wanted > MOST:
        raise UserError(f"--ranks {show_value(wanted)}: the limit is {MOST:,}; use fewer ranks")
    if wanted is not None:
        try:
            check_ranks(config.batch, wanted)
        except UserError as error:
            raise UserError(f"--ranks {wanted}: {error}") from None
        return wanted
    return most_ranks(config.batch, count_devices(device_type))


def count_devices(device_type: str) -> int:
    """Return the number of GPUs of this machine, or of cores that this process may use."""
    import torch

    from megabatch.ranks.machine import usable_cores

    return len(usable_cores()) if device_type == "cpu" else torch.accelerator.device_count()
