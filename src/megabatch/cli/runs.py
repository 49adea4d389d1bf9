"""megabatch runs: what has been run here."""

from pathlib import Path
from typing import Annotated

import typer


def runs(folder: Annotated[Path, typer.Argument(help="Where the runs' folders are.")] = Path("runs")) -> None:
    """List runs with their status, accuracy and time."""
    from rich.console import Console
    from rich.table import Table

    from megabatch.runs.reader import list_runs

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("run", no_wrap=True)
    table.add_column("status")
    for column in ("steps", "top-1", "best", "seconds", "images/s"):
        table.add_column(column, justify="right")

    def show(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    for run in list_runs(folder):
        summary = run.summary
        figures = (
            "-----"
            if summary is None
            else [
                str(summary.steps),
                show(summary.top1, ".4f"),
                show(summary.best_top1, ".4f"),
                show(summary.wall_s, ".1f"),
                show(summary.images_per_s, ",.0f"),
            ]
        )
        table.add_row(str(run.path), run.status, *figures)
    Console(highlight=False).print(table if table.row_count else f"no runs in {folder}")
