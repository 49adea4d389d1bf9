"""megabatch fuzz: files that were made wrong, read by every reader of files."""

import signal
from pathlib import Path
from typing import Annotated

import typer

from megabatch.cli.overrides import MOST, require_folder_of
from megabatch.errors import UserError, require_one_of


def fuzz(
    formats: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FORMAT]...", help="Which formats; by default all.", show_default=False),
    ] = None,
    inputs: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Inputs to make, of all formats together.")
    ] = 20_000,
    seed: Annotated[int, typer.Option(min=0, max=MOST, help="Decides every byte of every input.")] = 7,
    only: Annotated[
        int | None, typer.Option(min=0, max=MOST, help="Read the input of this number alone.", show_default=False)
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, max=3600, help="That reading one input may take.")] = 10.0,
    memory: Annotated[int, typer.Option(min=16, max=1 << 20, help="MB that reading one input may take.")] = 1024,
    keep: Annotated[
        Path | None, typer.Option(help="Write the inputs that escaped into this folder.", show_default=False)
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write all that was found to this file.")] = None,
) -> None:
    """Read files that were made wrong: bytes changed, and lies that only somebody who knows the format would tell.

    [bold]megabatch fuzz[/bold] jpeg tar --inputs 5000 --seed 3

    An input is accepted, or refused in one line; anything else has escaped: another error, a process that ended, too
    much time or memory, or an input that nothing is wrong with and that was refused. Exit code 1 if any has.
    """
    import msgspec

    from megabatch.io.disk import write_file
    from megabatch.ranks.machine import usable_cores
    from megabatch_lab.fuzz.catalog import FORMATS, keep_inputs
    from megabatch_lab.fuzz.run import Request
    from megabatch_lab.fuzz.run import fuzz as run_fuzz
    from megabatch_lab.fuzz.screen import FuzzScreen

    require_folder_of(json)
    chosen = list(dict.fromkeys(formats or FORMATS))
    for name in chosen:
        require_one_of("FORMAT", name, FORMATS)
    if keep and keep.exists() and not keep.is_dir():
        raise UserError(f"--keep {keep} is no folder; give another")
    request = Request(
        formats=chosen,
        inputs=inputs,
        seed=seed,
        most_s=seconds,
        most_mb=memory,
        workers=1 if only is not None else len(usable_cores()),
        only=only,
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # which leaves no process and no folder
    with FuzzScreen(request) as screen:
        report = run_fuzz(request, screen.show)
    screen.finish(report)
    if json:
        write_file(json, msgspec.json.encode(report))
    if keep:
        keep_inputs(report, keep)
    if report.escapes:
        raise typer.Exit(1)
