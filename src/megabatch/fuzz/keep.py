"""The inputs that have escaped, made again, for whoever wants to look at them."""

import tempfile
from contextlib import ExitStack
from pathlib import Path

from megabatch.fuzz.catalog import FORMATS
from megabatch.fuzz.formats import make_input, write_input
from megabatch.fuzz.outcome import Report


def keep_inputs(report: Report, folder: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="megabatch-fuzz-") as scratch, ExitStack() as stack:
        for escape in report.escapes:
            made = FORMATS[escape.format]
            bench = made.set_up(Path(scratch, escape.format), stack)
            files, _ = make_input(escape.format, made, bench.specimens, report.seed, escape.number)
            write_input(files, folder / f"{escape.format}-{escape.number}")
