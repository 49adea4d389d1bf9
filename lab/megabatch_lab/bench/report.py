"""What every bench writes: {"command": ..., "machine": {...}, "rows": [...]}, and a table on the screen."""

import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from megabatch.ranks.machine import cpu_name


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
    """A column per row: a row has more values than a terminal has room for."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for name in rows[0]:
        table.add_row(name, *(show(row[name]) for row in rows))
    Console().print(table)
    write(rows, json_file)


def print_lines(rows: list[dict[str, str]]) -> None:
    """A line per row, under the names."""
    table = Table(box=None, pad_edge=False)
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row.values())
    Console().print(table)


def write(rows: list[dict[str, Any]], json_file: Path | None) -> None:
    if json_file is not None:
        command = " ".join(["megabatch", *sys.argv[1:]])
        json_file.write_text(json.dumps({"command": command, "machine": machine(), "rows": rows}, indent=2) + "\n")


def show(value: Any) -> str:
    return f"{value:,.{3 if value < 100 else 0}f}" if isinstance(value, float) else str(value)
