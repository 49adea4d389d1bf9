"""megabatch report: one page that explains runs."""

from pathlib import Path
from typing import Annotated

import typer

from megabatch.text import print_line


def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Folders of runs; several are drawn over each other.", metavar="RUN...")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", help="The file to write; by default report.html in the run's folder, or here for several."
        ),
    ] = None,
    is_opened: Annotated[bool, typer.Option("--open", help="Show it in the browser.")] = False,
) -> None:
    """Write one HTML file that explains a run: what limited it, where its time went, how it learnt, what it gets wrong.

    It reads the run's records alone, and needs neither the images nor a GPU.
    The file needs no network and no other file, so it can be mailed. Runs that have not ended show what there is.
    """
    from megabatch.report.page import write_report

    path = write_report(runs, out)
    print_line(f"report    {path}")
    if is_opened:
        import webbrowser

        webbrowser.open(path.resolve().as_uri())
