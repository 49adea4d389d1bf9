"""The arguments that `train`, `show` and others share: [RECIPE] [section.key=value ...] [--ranks N]."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megabatch.errors import UserError

if TYPE_CHECKING:
    from megabatch.config.schema import RunConfig

DEFAULT_RECIPE = "fashion"
MOST = 1_000_000  # of what is counted on a command line: ranks, rounds, seconds, megabytes

Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RECIPE] [section.key=value]...",
        help="A recipe's name or TOML file (default: fashion), then settings that override it.",
        show_default=False,
    ),
]
Ranks = Annotated[
    int | None,
    typer.Option(help="Ranks to run on. Default: one per GPU, or per core, as far as they divide the microbatches."),
]
ClusterOption = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="NAME|FILE",
        help="Say what time to expect on this cluster: one of megabatch simulate's.",
        show_default=False,
    ),
]
ProfileOption = Annotated[
    Path | None,
    typer.Option(
        "--profile",
        metavar="FILE",
        help="What megabatch profile recorded, instead of the cluster's own devices.",
        show_default=False,
    ),
]

ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODULE:FACTORY",
        help="The run's model, if that is Python code of your own: it is imported only if you name it.",
        show_default=False,
    ),
]


def split_arguments(arguments: Sequence[str] | None, default: str = DEFAULT_RECIPE) -> tuple[str, list[str]]:
    """The recipe, which may only come first, and the overrides."""
    arguments = list(arguments or [])
    if arguments and "=" not in arguments[0]:
        return arguments[0], arguments[1:]
    return default, arguments


def split_arguments_or_run(arguments: Sequence[str] | None) -> tuple[str, list[str]]:
    """The same; the folder of a run stands for its recipe."""
    from megabatch.config.recipes import recipe_names
    from megabatch.runs.files import CONFIG
    from megabatch.runs.reader import is_run

    recipe, overrides = split_arguments(arguments)
    stands_for_run = recipe not in recipe_names() and is_run(Path(recipe))
    return str(Path(recipe) / CONFIG) if stands_for_run else recipe, overrides


def require_named_model(config: "RunConfig", recipe: str, overrides: Sequence[str]) -> None:
    """A run's config.toml may come from anybody, unlike a recipe: Python code that it names is not run for that."""
    from megabatch.runs.files import CONFIG

    if Path(recipe).name == CONFIG:
        from megabatch.config.length import dotted_keys
        from megabatch.config.loading import parse_override
        from megabatch.models.named_code import require_named
        from megabatch.user_code import is_own_code

        given = [key for parsed in map(parse_override, overrides) for key in dotted_keys(parsed.key, parsed.value)]
        named = config.model.name if "model.name" in given else None
        require_named(config.model, named, recipe, f"model.name={config.model.name}")
        if is_own_code(config.optim.name) and "optim.name" not in given:
            raise UserError(
                f"{recipe} says that its optimizer is Python code, {config.optim.name}, which would be imported and "
                f"run; if you trust it, add optim.name={config.optim.name}"
            )


def require_folder_of(path: Path | None, option: str = "--json") -> None:
    if path and not path.absolute().parent.is_dir():
        raise UserError(f"{option} {path}: the folder {path.absolute().parent} does not exist; make it first")
    if path and path.is_dir():
        raise UserError(f"{option} {path} is a folder; give a file in it")


def choose_ranks(config: "RunConfig", wanted: int | None) -> int:
    """The ranks that were asked for, or one per GPU, on CPU one per core, as far as they divide the microbatches."""
    from megabatch.config.messages import show_value
    from megabatch.planning.batch import check_ranks, most_ranks
    from megabatch.ranks.world import choose_device

    device_type = choose_device(config.run.device)
    if wanted is not None and wanted < 1:
        raise UserError(f"--ranks {wanted}: a run needs at least one rank; nearest: --ranks 1")
    if wanted is not None and wanted > MOST:
        raise UserError(f"--ranks {show_value(wanted)}: expected at most {MOST:,}; give fewer")
    if wanted is not None:
        try:
            check_ranks(config.batch, wanted)
        except UserError as error:
            raise UserError(f"--ranks {wanted}: {error}") from None
        return wanted
    return most_ranks(config.batch, count_devices(device_type))


def count_devices(device_type: str) -> int:
    """The GPUs of this machine, or the cores that this process may run on."""
    import torch

    from megabatch.ranks.machine import usable_cores

    return len(usable_cores()) if device_type == "cpu" else torch.accelerator.device_count()
