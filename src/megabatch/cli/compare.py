"""megabatch compare: settings and results of several runs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megabatch.errors import UserError
from megabatch.text import one_line, print_text

if TYPE_CHECKING:
    from megabatch.runs.comparison import RunComparison


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, such as runs/fashion-*.")],
    target: Annotated[
        float | None,
        typer.Option(
            min=0, max=1, help="Report the time to this top-1 instead of train.target_top1.", show_default=False
        ),
    ] = None,
    as_csv: Annotated[
        bool, typer.Option("--csv", help="Print CSV: one row per run, with the settings that differ.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Compare runs: the settings that differ, the results, and top-1 over seeds with 95 % intervals."""
    from megabatch.runs.comparison import compare as compare_runs

    if as_json and as_csv:
        raise UserError("--json and --csv exclude each other; use one of them")
    compared = compare_runs(runs, target)
    if as_json:
        print_text(to_json(compared))
    elif as_csv:
        print_text(to_csv(compared))
    else:
        from megabatch.cli.compare_screen import print_comparison

        print_comparison(compared)


def to_json(compared: "RunComparison") -> str:
    """Return ASCII, so that a name cannot hold escape sequences and nothing is lost."""
    import json

    import msgspec

    return json.dumps(msgspec.json.decode(msgspec.json.encode(compared)), indent=2)


# The fields of a RunOutcome that hold one number or word. `group` counts from 1.
CSV_FIELDS = (
    *("path", "status", "recipe", "seed", "global_batch", "ranks", "hosts", "steps", "skipped_steps", "top1", "top5"),
    *("best_top1", "test_loss", "target_top1", "time_to_target_s", "steps_to_target", "wall_s", "images_per_s"),
    *("data_wait_share", "comm_wait_share", "resumed_from_step", "skipped_images", "resident_mb", "device_mb"),
)
IN_FIELDS = ("seed", "name", "batch.global", "train.target_top1")  # settings that CSV_FIELDS already has


def to_csv(compared: "RunComparison") -> str:
    import csv
    import io

    settings = [found for found in compared.settings if found.name not in IN_FIELDS]
    group_of = {place: number for number, group in enumerate(compared.groups, 1) for place in group.runs}
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    named = [one_line(found.name) for found in settings]
    table.writerow([*CSV_FIELDS, "straggler_rank", "straggler_delay_s", "straggler_share", "group", *named])
    for place, run in enumerate(compared.runs):
        late = run.straggler
        cells = [
            *(getattr(run, name) for name in CSV_FIELDS),
            *((late.rank, late.delay_s, late.share) if late else (None, None, None)),
            group_of[place],
            *(found.values[place] for found in settings),
        ]
        table.writerow([one_line(cell) if isinstance(cell, str) else cell for cell in cells])
    return out.getvalue().rstrip("\n")
