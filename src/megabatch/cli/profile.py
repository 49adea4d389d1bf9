"""megabatch profile: what one rank takes for forward, backward and update, recorded for the simulator."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megabatch.cli.overrides import (
    MOST,
    Arguments,
    choose_ranks,
    require_folder_of,
    require_named_model,
    split_arguments_or_run,
)
from megabatch.errors import UserError
from megabatch.ranks.lifecycle import be_a_rank, start_ranks
from megabatch.text import print_line

if TYPE_CHECKING:
    from megabatch.config.schema import RunConfig
    from megabatch.ranks.store import RankStore
    from megabatch.simulate.device import Line
    from megabatch.simulate.profile import Profile

MOST_LAYERS = 12  # on the screen
MANY_RANKS = 8  # for example


def profile(
    given: Arguments = None,
    ranks: Annotated[
        int | None,
        typer.Option(help="Ranks that would share this machine: one is timed, with its share of the cores."),
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0, max=MOST, help="How long to record; three rounds are taken in any case.")
    ] = 20,
    json: Annotated[
        Path | None, typer.Option("--json", help="The file to write. Default: profile-RECIPE.json in this folder.")
    ] = None,
) -> None:
    """Record what one rank of this machine takes for forward and backward, layer by layer, and for the update.

    At the recipe's microbatch, its half and its quarter, on images of noise: it needs none, and trains nothing.
    The file is for [bold]megabatch simulate --profile[/bold].
    """
    from megabatch.config.loading import load_config, print_to_stderr, silent
    from megabatch.data.catalog import FROM_PYTHON
    from megabatch.preflight.profile import choose_microbatches, record_profile
    from megabatch.ranks.discover import discover
    from megabatch.ranks.launch import RECIPE
    from megabatch.ranks.machine import fair_threads, host_identity, usable_cores
    from megabatch.ranks.signals import was_launched
    from megabatch.ranks.world import choose_device
    from megabatch.training.device import warn_of_device

    info = discover()
    recipe, overrides = split_arguments_or_run(given)
    config = load_config(
        recipe, overrides, report=silent if info and info.rank else print_to_stderr, needs_source=False
    )
    require_named_model(config, recipe, overrides)
    file = json or Path(f"profile-{config.name}.json")
    require_folder_of(file)
    if config.data.source.startswith(FROM_PYTHON):
        raise UserError(f"{recipe} is of a run from Python, where its model is; give another")
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
        if not was_launched():  # else whoever has launched it knows what the recipe was called
            print_next(file, [recipe, *overrides], config)
        return 0

    be_a_rank(info, work)


def print_next(file: Path, arguments: Sequence[str], config: "RunConfig") -> None:
    """Commands that can be run as they stand."""
    from megabatch.planning.batch import most_ranks

    recipe, num_ranks = shlex.join(arguments), most_ranks(config.batch, MANY_RANKS)
    print_line("")
    print_line(f"written to {file}; measure the links, and see what several such ranks would do:")
    print_line(f"megabatch plan {recipe}")
    print_line(f"megabatch simulate {recipe} --cluster this --profile {shlex.quote(str(file))} --ranks {num_ranks}")


def write(found: "Profile", file: Path) -> None:
    import msgspec

    from megabatch.io.disk import write_file

    try:
        write_file(file, msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    except OSError as error:
        raise UserError(f"--json {file} cannot be written ({error.strerror}); give another") from None


def print_profile(found: "Profile") -> None:
    from megabatch.io.terminal import Terminal, plain_table
    from megabatch.simulate.profile import layer_times

    console = Terminal()
    threads = f"{found.threads} thread{'s' * (found.threads > 1)}"
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
        table.add_row(
            f"{point.microbatch:,}", milliseconds(point.forward_s), milliseconds(point.backward_s), f"{per_s:,.1f}"
        )
    console.print(table)
    console.print(f"\nforward of b images   {describe_line(found.forward_line)}")
    console.print(f"backward of b images  {describe_line(found.backward_line)}")
    console.print(f"update of a step      {milliseconds(found.update_s)} ms")

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
        table.add_row(name, milliseconds(forward_s), milliseconds(backward_s), share, f"{num_parameters:,}")

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
    console.print("backward of a layer: since the gradients before it, with layers between that have no parameters")


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.2f}"


def describe_line(line: "Line") -> str:
    return f"{milliseconds(line.fixed_s)} ms + {1e3 * line.per_image_s:,.3f} ms x b, least squares"
