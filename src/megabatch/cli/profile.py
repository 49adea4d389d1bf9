"""megabatch profile: times of forward, backward and update on one rank, recorded for the simulator."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megabatch.cli.overrides import (
    MOST,
    Arguments,
    choose_ranks,
    load_recipe,
    require_folder_of,
    split_arguments_or_run,
)
from megabatch.errors import UserError
from megabatch.io.numbers import in_ms, plural
from megabatch.ranks.lifecycle import run_as_rank, start_ranks
from megabatch.text import print_line

if TYPE_CHECKING:
    from megabatch.config.schema import RunConfig
    from megabatch.ranks.store import RankStore
    from megabatch.simulate.device import Line
    from megabatch.simulate.profile import Profile

MOST_LAYERS = 12  # on the screen
MANY_RANKS = 8  # in the example


def profile(
    given: Arguments = None,
    ranks: Annotated[
        int | None,
        typer.Option(help="Number of ranks that would share this machine. One is timed, with its share of the cores."),
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0, max=MOST, help="How long to record; at least three rounds are recorded.")
    ] = 20,
    json: Annotated[
        Path | None, typer.Option("--json", help="File to write. Default: profile-RECIPE.json in the current folder.")
    ] = None,
) -> None:
    """Record how long one rank on this machine takes for each layer's forward and backward and for the update.

    It measures the recipe's microbatch, half of it and a quarter of it, on images of noise. It does not train.
    [bold]megabatch simulate --profile[/bold] reads the file.
    """
    from megabatch.config.loading import print_to_stderr
    from megabatch.data.catalog import FROM_PYTHON
    from megabatch.preflight.profile import choose_microbatches, record_profile
    from megabatch.ranks.devices import choose_device
    from megabatch.ranks.discover import discover
    from megabatch.ranks.launch import RECIPE
    from megabatch.ranks.machine import fair_threads, host_identity, usable_cores
    from megabatch.ranks.signals import was_launched
    from megabatch.training.device import warn_of_device

    info = discover()
    recipe, overrides = split_arguments_or_run(given)
    config = load_recipe(given, info, needs_source=False)
    file = json or Path(f"profile-{config.name}.json")
    require_folder_of(file)
    if config.data.source.startswith(FROM_PYTHON):
        raise UserError(f"{recipe} was started from Python, which holds its model; give a recipe instead")
    choose_microbatches(config.batch.microbatch)
    if info is None:
        num_ranks = choose_ranks(config, ranks)
        threads = config.run.threads or fair_threads(0, [(host_identity(), usable_cores())] * num_ranks)
        arguments = ["profile", RECIPE, "--json", str(file), "--seconds", str(seconds)]
        for warning in warn_of_device(config.precision, choose_device(config.run.device)):
            print_to_stderr(warning)
        start_ranks(arguments, 1, recipe=config.with_run(threads=threads).to_toml())
        print_next(file, [recipe, *overrides], config)
        return

    def work(store: "RankStore") -> int:
        found = record_profile(config, store.info, store, seconds, print_to_stderr)
        write(found, file)
        print_profile(found)
        if not was_launched():  # otherwise the launching process prints it, with the recipe as the user named it
            print_next(file, [recipe, *overrides], config)
        return 0

    run_as_rank(info, work)


def print_next(file: Path, arguments: Sequence[str], config: "RunConfig") -> None:
    """Print the next commands, ready to run."""
    from megabatch.planning.batch import most_ranks

    recipe, num_ranks = shlex.join(arguments), most_ranks(config.batch, MANY_RANKS)
    print_line("")
    print_line(f"written to {file}; to measure the links and predict several ranks:")
    print_line(f"megabatch plan {recipe}")
    print_line(f"megabatch simulate {recipe} --cluster this --profile {shlex.quote(str(file))} --ranks {num_ranks}")


def write(found: "Profile", file: Path) -> None:
    import msgspec

    from megabatch.io.disk import write_file

    try:
        write_file(file, msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    except OSError as error:
        raise UserError(f"--json {file} cannot be written ({error.strerror}); give another file") from None


def print_profile(found: "Profile") -> None:
    from megabatch.io.terminal import Terminal, plain_table
    from megabatch.simulate.profile import layer_times

    console = Terminal()
    threads = plural(found.threads, "thread")
    console.title(
        found.model,
        f"{found.image_size} pixels, {found.num_classes:,} classes, {found.precision}, "
        f"on one rank: {found.device}, {threads}",
    )
    console.print()
    table = plain_table()
    for column in ("images", "forward ms", "backward ms", "images/s"):
        table.add_column(column, justify="right")
    for point in found.points:
        per_s = point.microbatch / (point.forward_s + point.backward_s)
        table.add_row(f"{point.microbatch:,}", in_ms(point.forward_s), in_ms(point.backward_s), f"{per_s:,.1f}")
    console.print(table)
    console.print(f"\nforward of b images   {describe_line(found.forward_line)}")
    console.print(f"backward of b images  {describe_line(found.backward_line)}")
    console.print(f"update of a step      {in_ms(found.update_s)} ms")

    largest = found.points[-1]
    layers = layer_times(found, largest)
    pass_s = largest.forward_s + largest.backward_s
    console.title("slowest layers", f"at {largest.microbatch:,} images")
    table = plain_table()
    table.add_column("layer")
    for column in ("forward ms", "backward ms", "share", "parameters"):
        table.add_column(column, justify="right")

    def add(name: str, forward_s: float, backward_s: float, num_parameters: int) -> None:
        share = f"{(forward_s + backward_s) / pass_s:.1%}"
        table.add_row(name, in_ms(forward_s), in_ms(backward_s), share, f"{num_parameters:,}")

    ordered = sorted(layers, key=lambda layer: layer.forward_s + layer.backward_s, reverse=True)
    for layer in ordered[:MOST_LAYERS]:
        add(layer.name or "(the network itself)", layer.forward_s, layer.backward_s, layer.num_parameters)
    others = ordered[MOST_LAYERS:]
    if others:
        add(
            f"{len(others)} others",
            sum(layer.forward_s for layer in others),
            sum(layer.backward_s for layer in others),
            sum(layer.num_parameters for layer in others),
        )
    console.print(table)
    console.print("backward of a layer includes the layers without parameters that precede it in backward")


def describe_line(line: "Line") -> str:
    return f"{in_ms(line.fixed_s)} ms + {1e3 * line.per_image_s:,.3f} ms x b, least squares"
