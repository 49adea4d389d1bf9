"""The inputs that have escaped, made again, for whoever wants to look at them."""

import tempfile
from contextlib import ExitStack
from pathlib import Path

from megabatch.fuzz.catalog import FORMATS
from megabatch.fuzz.formats import make_input, write_input
from megabatch.fuzz.outcome import Report


def keep_inputs(report: Report, folder: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="megabatch-fuzz-") as scratch, ExitStack() as stack:
        names = {escape.format for escape in report.escapes}
        benches = {name: FORMATS[name].set_up(Path(scratch), stack) for name in names}
        for escape in report.escapes:
            name, number = escape.format, escape.number
            files, _ = make_input(name, FORMATS[name], benches[name].specimens, report.seed, number)
            write_input(files, folder / f"{name}-{number}")
