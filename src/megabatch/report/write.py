"""megabatch report: runs in, one file out."""

import os
from collections.abc import Sequence
from pathlib import Path

from megabatch.disk import remedy, write_file
from megabatch.errors import UserError
from megabatch.report.page import page_of
from megabatch.report.view import read_run

NAME = "report.html"
MOST_RUNS = 50


def default_path(paths: Sequence[Path]) -> Path:
    """In the folder of a run; of several, in the current one."""
    return paths[0] / NAME if len(paths) == 1 else Path(NAME)


def write_report(paths: Sequence[Path], out: Path | None = None) -> Path:
    """Where it is.  For its user alone, as a run's other files: it shows images and paths."""
    if len(paths) > MOST_RUNS:
        raise UserError(f"{len(paths)} runs are more than the {MOST_RUNS} that one page can show; give fewer")
    paths = list({os.path.realpath(path): path for path in reversed(paths)}.values())[::-1]  # each once
    views = [read_run(path) for path in paths]
    out = default_path(paths) if out is None else out
    try:
        return write_file(out, page_of(views), is_private=True)
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror or error}; {remedy(error)}, or give --out") from None
