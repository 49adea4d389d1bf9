"""megabatch runs: a list of runs."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megabatch.text import one_line

if TYPE_CHECKING:
    from megabatch.runs.reader import Listing

GAP = 2  # between columns
COLUMNS = ("run", "status", "recipe", "batch", "top-1", "date", "at", "best", "steps", "seconds", "images/s")
LEFT = ("run", "status", "recipe", "date", "at")  # the others are numbers, aligned right
DROPPED = ("images/s", "seconds", "steps", "best", "at", "status", "date", "batch", "recipe")  # first to last


def runs(folder: Annotated[Path, typer.Argument(help="Folder that contains the runs.")] = Path("runs")) -> None:
    """List runs with their status, recipe, batch, accuracy and date. A wider terminal shows more columns."""
    from megabatch.io.terminal import Terminal
    from megabatch.runs.reader import list_runs

    console = Terminal()
    found = list_runs(folder)
    if not found:
        console.print(one_line(f"no runs in {folder}; megabatch train starts one"))
        return
    rows = [cells_of(run, str(run.path)) for run in found]
    columns = choose_columns(widths_of(rows), console.width)
    if len(columns) < len(COLUMNS):  # names without their folder leave room for more columns
        rows = [cells_of(run, run.path.name) for run in found]
        columns = choose_columns(widths_of(rows), console.width)
    widths = widths_of(rows)
    console.print(line_of({column: column for column in COLUMNS}, columns, widths), style="bold")
    for row in rows:
        console.print(line_of(row, columns, widths))


def line_of(cells: Mapping[str, str], columns: Sequence[str], widths: Mapping[str, int]) -> str:
    padded = [
        cells[column].ljust(widths[column]) if column in LEFT else cells[column].rjust(widths[column])
        for column in columns
    ]
    return (" " * GAP).join(padded).rstrip()


def cells_of(run: "Listing", name: str) -> dict[str, str]:
    """Return a run's text for each column, "-" for a missing value."""

    def show(value: float | str | None, form: str = "") -> str:
        return "-" if value is None else one_line(format(value, form))

    def result(name: str, form: str = "") -> str:
        return show(getattr(run.summary, name, None), form)  # the summary may be missing

    written = None if run.written_s is None else time.localtime(run.written_s)
    return {
        "run": one_line(name),
        "status": run.status,
        "recipe": show(run.recipe),
        "batch": show(run.batch, ","),
        "top-1": result("top1", ".4f"),
        "date": show(written and time.strftime("%Y-%m-%d", written)),
        "at": show(written and time.strftime("%H:%M", written)),
        "best": result("best_top1", ".4f"),
        "steps": result("steps"),
        "seconds": result("wall_s", ".1f"),
        "images/s": result("images_per_s", ",.0f"),
    }


def widths_of(rows: Sequence[Mapping[str, str]]) -> dict[str, int]:
    return {column: max(len(column), *(len(row[column]) for row in rows)) for column in COLUMNS}


def choose_columns(widths: Mapping[str, int], width: int) -> list[str]:
    """Return the columns that fit into `width`, dropped in the order of DROPPED; run and top-1 always stay."""
    columns = list(COLUMNS)
    for column in DROPPED:
        if sum(widths[each] for each in columns) + GAP * (len(columns) - 1) <= width:
            break
        columns.remove(column)
    return columns
