"""megabatch report: one HTML page about one or more runs."""

from pathlib import Path
from typing import Annotated

import typer

from megabatch.text import print_line


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Folders of runs. Several runs are drawn in the same charts.", metavar="RUN..."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="File to write. Default: report.html in the run's folder, or here for several runs.",
        ),
    ] = None,
    is_opened: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
) -> None:
    """Write an HTML report of a run: its bottleneck, use of time, learning curves and mistakes.

    It reads only the run's records and needs neither the images nor a GPU. It also works while the run is in progress.
    The file is self-contained, so you can mail it.
    """
    from megabatch.report.page import write_report

    path = write_report(runs, out)
    print_line(f"report    {path}")
    if is_opened:
        import webbrowser

        webbrowser.open(path.resolve().as_uri())
