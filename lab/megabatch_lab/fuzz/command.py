"""megabatch fuzz: feed corrupted files to every reader of files."""

import signal
from pathlib import Path
from typing import Annotated

import typer

from megabatch.cli.overrides import MOST, require_folder_of
from megabatch.errors import UserError, require_one_of


def fuzz(
    formats: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FORMAT]...", help="Formats to fuzz (default: all).", show_default=False),
    ] = None,
    inputs: Annotated[int, typer.Option(min=1, max=1_000_000, help="Number of inputs over all formats.")] = 20_000,
    seed: Annotated[int, typer.Option(min=0, max=MOST, help="Seed of the inputs.")] = 7,
    only: Annotated[
        int | None, typer.Option(min=0, max=MOST, help="Read only the input with this number.", show_default=False)
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, max=3600, help="Time limit per input, in seconds.")] = 10.0,
    memory: Annotated[int, typer.Option(min=16, max=1 << 20, help="Memory limit per input, in MB.")] = 1024,
    keep: Annotated[
        Path | None, typer.Option(help="Write the inputs that escaped to this folder.", show_default=False)
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write the full report to this file.")] = None,
) -> None:
    """Feed corrupted files to every reader: changed bytes, and wrong values with correct checksums.

    [bold]megabatch fuzz[/bold] jpeg tar --inputs 5000 --seed 3

    A reader must accept an input or refuse it with a one-line error. Anything else has escaped: another error, a crash,
    too much time or memory, or the refusal of a valid input. The exit code is 1 if any input escaped.
    """
    import msgspec

    from megabatch.io.disk import write_file
    from megabatch.ranks.machine import usable_cores
    from megabatch_lab.fuzz.catalog import FORMATS, keep_inputs
    from megabatch_lab.fuzz.run import FuzzRequest
    from megabatch_lab.fuzz.run import fuzz as run_fuzz
    from megabatch_lab.fuzz.screen import FuzzScreen

    require_folder_of(json)
    chosen = list(dict.fromkeys(formats or FORMATS))
    for name in chosen:
        require_one_of("FORMAT", name, FORMATS)
    if keep and keep.exists() and not keep.is_dir():
        raise UserError(f"--keep {keep} is not a folder; give another path")
    request = FuzzRequest(
        formats=chosen,
        inputs=inputs,
        seed=seed,
        most_s=seconds,
        most_mb=memory,
        workers=1 if only is not None else len(usable_cores()),
        only=only,
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends workers and removes folders
    with FuzzScreen(request) as screen:
        report = run_fuzz(request, screen.show)
    screen.finish(report)
    if json:
        write_file(json, msgspec.json.encode(report))
    if keep:
        keep_inputs(report, keep)
    if report.escapes:
        raise typer.Exit(1)
