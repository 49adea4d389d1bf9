"""megabatch runs: what has been run here."""

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
LEFT = ("run", "status", "recipe", "date", "at")  # the others are numbers, and stand to the right
DROPPED = ("images/s", "seconds", "steps", "best", "at", "status", "date", "batch", "recipe")  # first to last


def runs(folder: Annotated[Path, typer.Argument(help="Where the runs' folders are.")] = Path("runs")) -> None:
    """List runs with their status, recipe, batch, accuracy and date; a wider terminal shows more of each."""
    from megabatch.io.terminal import Terminal
    from megabatch.runs.reader import list_runs

    console = Terminal()
    found = list_runs(folder)
    if not found:
        console.print(one_line(f"no runs in {folder}"))
        return
    rows = [cells_of(run, str(run.path)) for run in found]
    columns = choose_columns(widths_of(rows), console.width)
    if len(columns) < len(COLUMNS):  # without their folder, names leave room for more
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
    """What a run shows in each column; - where it has nothing to show."""

    def show(value: float | str | None, form: str = "") -> str:
        return "-" if value is None else one_line(format(value, form))

    def figure(name: str, form: str = "") -> str:
        return show(getattr(run.summary, name, None), form)  # without a summary there is none

    written = None if run.written_s is None else time.localtime(run.written_s)
    return {
        "run": one_line(name),
        "status": run.status,
        "recipe": show(run.recipe),
        "batch": show(run.batch, ","),
        "top-1": figure("top1", ".4f"),
        "date": show(written and time.strftime("%Y-%m-%d", written)),
        "at": show(written and time.strftime("%H:%M", written)),
        "best": figure("best_top1", ".4f"),
        "steps": figure("steps"),
        "seconds": figure("wall_s", ".1f"),
        "images/s": figure("images_per_s", ",.0f"),
    }


def widths_of(rows: Sequence[Mapping[str, str]]) -> dict[str, int]:
    return {column: max(len(column), *(len(row[column]) for row in rows)) for column in COLUMNS}


def choose_columns(widths: Mapping[str, int], width: int) -> list[str]:
    """Those that fit into `width` as they are, without the first of DROPPED; the run and its top-1 always stay."""
    columns = list(COLUMNS)
    for column in DROPPED:
        if sum(widths[kept] for kept in columns) + GAP * (len(columns) - 1) <= width:
            break
        columns.remove(column)
    return columns
