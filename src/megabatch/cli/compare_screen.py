"""Terminal output of megabatch compare.

Each run has a column if all of them fit, otherwise a row, in as many blocks as needed. Long names and values are cut,
so that no line wraps.
"""

import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from msgspec import Struct
from rich.cells import cell_len, set_cell_size
from rich.text import Text

from megabatch.io.terminal import BOLD, Terminal
from megabatch.runs.comparison import Difference, GapToFirst, RunComparison, RunOutcome, SeedGroup
from megabatch.runs.intervals import Spread
from megabatch.runs.records import Straggler
from megabatch.runs.settings import Value
from megabatch.text import one_line

GAP = 2  # between columns
LONGEST_NAME, LONGEST_CELL = 32, 40  # characters of a run and of a value: both fit on 80 columns
MISSING = "-"
Table = list[tuple[str, list[str]]]  # each header with the lines below it


class Field(Struct, frozen=True):
    """One value per run, "-" for a run without it."""

    name: str
    cells: list[str]
    is_text: bool = False  # aligned left; numbers are aligned right


def print_comparison(compared: RunComparison) -> None:
    console = Terminal()
    names = short_names([run.path for run in compared.runs])
    shows_groups = any(group.top1 and group.top1.num_values > 1 for group in compared.groups)
    differing, results = differing_fields(compared), result_fields(compared, shows_groups)
    widths = column_widths([*differing, *results], names)
    by_column = sum(widths) + GAP * len(names) <= console.width

    def show(fields: Sequence[Field]) -> None:
        by_row = lines_by_row(fields, names, console.width)
        print_table(console, lines_by_column(fields, names, widths) if by_column else by_row)

    if len(names) > 1:
        console.title("Settings that differ", "" if differing else "none")
        show(differing)
    console.title("Results")
    show(results)
    if shows_groups:
        print_groups(console, compared.groups)


def short_names(paths: Sequence[str]) -> list[str]:
    """Return unique names without the common folder, cut to LONGEST_NAME."""
    parents = {Path(path).parent for path in paths}
    names = [Path(path).name or path if len(parents) == 1 else path for path in paths]
    names = [cut(name, LONGEST_NAME) for name in names]
    if len({*names}) == len(names):
        return names
    return [cut(f"{number} {name}", LONGEST_NAME) for number, name in enumerate(names, 1)]


def cut(text: str, longest: int) -> str:
    """Return one line of at most `longest` columns; a character may take two."""
    text = one_line(text, longest)
    return text if cell_len(text) <= longest else set_cell_size(text, longest).rstrip()


def show_value(value: Value | None) -> str:
    if value is None:
        return MISSING
    return cut(str(value).lower() if isinstance(value, bool) else str(value), LONGEST_CELL)


def differing_fields(compared: RunComparison) -> list[Field]:
    def field_of(found: Difference, name: str) -> Field:
        is_text = any(isinstance(value, str | bool | list) for value in found.values)
        return Field(cut(name, LONGEST_CELL), [show_value(value) for value in found.values], is_text)

    settings = [field_of(found, found.name) for found in compared.settings]
    return settings + [field_of(found, f"env: {found.name}") for found in compared.environment]


def result_fields(compared: RunComparison, shows_groups: bool) -> list[Field]:
    runs, first = compared.runs, compared.runs[0]
    targets = {run.target_top1 for run in runs}
    target = f"{first.target_top1:g}" if len(targets) == 1 and first.target_top1 is not None else "target"
    # A summary lacks steps_to_target. Shown beside runs that have it, it would look as if the target was missed.
    has_steps = all(run.time_to_target_s is None or run.steps_to_target is not None for run in runs)
    group_of = {place: number for number, group in enumerate(compared.groups, 1) for place in group.runs}

    def field(name: str, show: Callable[[RunOutcome], str]) -> Field:
        return Field(name, [show(run) for run in runs])

    def change(name: str, get: Callable[[RunOutcome], float | None], show: Callable[[float, float], str]) -> Field:
        """Return the change of every run against the first."""
        start, *others = [get(run) for run in runs]
        shown = [MISSING if start is None or value is None else show(value, start) for value in others]
        return Field(name, ["", *shown])

    fields = [
        Field("status", [run.status for run in runs], is_text=True),
        *([Field("group", [str(group_of[place]) for place in range(len(runs))])] if shows_groups else []),
        field("top-1", lambda run: show_number(run.top1, ".4f")),
        change("vs first", lambda run: run.top1, lambda value, start: f"{value - start:+.4f}"),
        field("best", lambda run: show_number(run.best_top1, ".4f")),
        field("test loss", lambda run: show_number(run.test_loss, ".4g")),
        field("steps", lambda run: show_number(run.steps, ",")),
        Field("ended early", [show_reason(run.ended_early) for run in runs], is_text=True),
        field("training top-1", lambda run: show_number(run.training_top1, ".4f")),
        field("skipped", lambda run: show_number(run.skipped_steps or None, ",")),
        field(f"s to {target}", lambda run: show_number(run.time_to_target_s, ",.1f")),
        *([field(f"steps to {target}", lambda run: show_number(run.steps_to_target, ","))] if has_steps else []),
        field("seconds", lambda run: show_number(run.wall_s, ",.1f")),
        field("images/s", lambda run: show_number(run.images_per_s, ",.0f")),
        change("vs first", lambda run: run.images_per_s, show_ratio),
        field("data wait", lambda run: show_number(run.data_wait_share, ".1%")),
        field("comm wait", lambda run: show_number(run.comm_wait_share, ".1%")),
        field("straggler", lambda run: show_straggler(run.straggler)),
        field("ranks", lambda run: show_number(run.ranks, ",")),
        field("hosts", lambda run: show_number(run.hosts if any((one.hosts or 1) > 1 for one in runs) else None, ",")),
        field("resumed from", lambda run: show_number(run.resumed_from_step, ",")),
    ]
    always = ("status", "top-1")
    return [field for field in fields if field.name in always or not {*field.cells} <= {MISSING, ""}]


def show_number(value: float | None, form: str) -> str:
    return MISSING if value is None else format(value, form)


def show_reason(ended_early: str | None) -> str:
    """Return the setting that ended a run early."""
    return cut(ended_early.partition(":")[0], LONGEST_CELL) if ended_early else MISSING


def show_straggler(late: Straggler | None) -> str:
    return f"rank {late.rank:,} {late.share:.0%}" if late else MISSING


def show_ratio(value: float, start: float) -> str:
    return f"{value / start - 1:+.0%}" if start else MISSING


def widest(texts: Iterable[str]) -> int:
    return max((cell_len(text) for text in texts), default=0)


def column_widths(fields: Sequence[Field], names: Sequence[str]) -> list[int]:
    """Return the widths of the column of names and of each run's column."""
    columns = zip(names, *(field.cells for field in fields), strict=True)
    return [widest(field.name for field in fields), *(widest(cells) for cells in columns)]


def line_of(cells: Sequence[str], widths: Sequence[int], are_text: Sequence[bool]) -> str:
    spaces = [" " * (width - cell_len(cell)) for cell, width in zip(cells, widths, strict=True)]
    padded = [
        cell + space if is_text else space + cell for cell, space, is_text in zip(cells, spaces, are_text, strict=True)
    ]
    return (" " * GAP).join(padded).rstrip()


def lines_by_column(fields: Sequence[Field], names: Sequence[str], widths: Sequence[int]) -> Table:
    """Return a line per field with a column per run."""
    are_text = [True] + [False] * len(names)
    lines = [line_of([field.name, *field.cells], widths, are_text) for field in fields]
    return [(line_of(["", *names], widths, are_text), lines)]


def lines_by_row(fields: Sequence[Field], names: Sequence[str], width: int, corner: str = "run") -> Table:
    """Return a line per run with a column per field; fields that do not fit go to further blocks."""
    first = Field(corner, list(names), is_text=True)
    blocks: list[list[Field]] = []
    for field in fields:
        columns = [*(blocks[-1] if blocks else [first]), field]
        if blocks and sum(map(field_width, columns)) + GAP * (len(columns) - 1) <= width:
            blocks[-1].append(field)
        else:
            blocks.append([first, field])
    table = []
    for block in blocks:
        widths, are_text = [field_width(field) for field in block], [field.is_text for field in block]
        lines = [
            line_of(list(cells), widths, are_text) for cells in zip(*(field.cells for field in block), strict=True)
        ]
        table.append((line_of([field.name for field in block], widths, are_text), lines))
    return table


def field_width(field: Field) -> int:
    return widest([field.name, *field.cells])


def print_table(console: Terminal, table: Table) -> None:
    for number, (header, lines) in enumerate(table):
        console.print(Text(f"\n{header}" if number else header, style=BOLD))
        for line in lines:
            console.print(Text(line))


def print_groups(console: Terminal, groups: Sequence[SeedGroup]) -> None:
    console.title("Top-1 over seeds", "with 95 % intervals")
    numbers = [str(number) for number in range(1, len(groups) + 1)]
    fields = [
        Field("seeds", [str(len(group.seeds)) for group in groups]),
        Field("mean", [show_number(getattr(group.top1, "mean", None), ".4f") for group in groups]),
        Field("deviation", [show_number(getattr(group.top1, "deviation", None), ".4f") for group in groups]),
        Field("interval", [show_interval(group.top1, ".4f") for group in groups]),
    ]
    if len(groups) > 1:
        gaps = [group.gap_to_first for group in groups[1:]]
        fields += [
            Field("vs first", ["", *(show_number(getattr(found, "size", None), "+.4f") for found in gaps)]),
            Field("interval", ["", *(show_interval(found, "+.4f") for found in gaps)]),
        ]
    print_table(console, lines_by_row(fields, numbers, console.width, corner="group"))
    for number, group in zip(numbers, groups, strict=True):
        begin = f"group {number}: "
        text = one_line(f"{begin}{describe_group(group)}")
        for line in textwrap.wrap(text, max(console.width, 40), subsequent_indent=" " * len(begin)):
            console.print(Text(line))


def show_interval(found: Spread | GapToFirst | None, form: str) -> str:
    if found is None or found.interval is None:
        return MISSING
    return f"{found.interval.low:{form}} to {found.interval.high:{form}}"


def describe_group(group: SeedGroup) -> str:
    """Return, for example: optim.learning_rate=0.1; paired by seed; 1 unfinished, left out."""
    parts = [", ".join(f"{name}={show_value(value)}" for name, value in group.settings.items()) or "all runs"]
    if group.gap_to_first and group.gap_to_first.interval:
        parts.append("paired by seed" if group.gap_to_first.is_paired else "different seeds, so Welch's interval")
    if group.num_unfinished:
        parts.append(f"{group.num_unfinished} unfinished, left out")
    if group.num_diverged:
        parts.append(f"{group.num_diverged} diverged, so no mean")
    return "; ".join(parts)
