"""The order of arms, the table on the screen and the JSON file of every bench."""

import json
import os
import platform
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from megabatch.ranks.machine import cpu_name


def in_turns(arms: Iterable[str], rounds: int, warm_up: int = 0) -> Iterator[tuple[str, bool]]:
    """Yield every arm once per round, each round starting with the next arm, and whether its time counts."""
    names = list(arms)
    for turn in range(-warm_up, rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            yield name, turn >= 0


def machine() -> dict[str, Any]:
    return {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def report(rows: list[dict[str, Any]], json_file: Path | None) -> None:
    """Print one column per row, because a row has too many values for a line, and write the JSON file."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for name in rows[0]:
        table.add_row(name, *(show(row[name]) for row in rows))
    Console().print(table)
    write(rows, json_file)


def print_lines(rows: list[dict[str, str]]) -> None:
    """Print a table with one line per row."""
    table = Table(box=None, pad_edge=False)
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row.values())
    Console().print(table)


def write(rows: list[dict[str, Any]], json_file: Path | None) -> None:
    """Write {"command": ..., "machine": {...}, "rows": [...]}."""
    if json_file is not None:
        command = " ".join(["megabatch", *sys.argv[1:]])
        json_file.write_text(json.dumps({"command": command, "machine": machine(), "rows": rows}, indent=2) + "\n")


def show(value: Any) -> str:
    return f"{value:,.{3 if value < 100 else 0}f}" if isinstance(value, float) else str(value)
