"""All formats of untrusted files that megabatch reads."""

import tempfile
from contextlib import ExitStack
from pathlib import Path

from megabatch_lab.fuzz.archives import ARCHIVES
from megabatch_lab.fuzz.arrays import ARRAYS
from megabatch_lab.fuzz.cifar import CIFAR
from megabatch_lab.fuzz.formats import Format, make_input, write_input
from megabatch_lab.fuzz.images import IMAGES
from megabatch_lab.fuzz.outcome import FuzzReport
from megabatch_lab.fuzz.texts import TEXTS
from megabatch_lab.fuzz.trained import RUNS

FORMATS: dict[str, Format] = IMAGES | ARCHIVES | ARRAYS | CIFAR | TEXTS | RUNS


def keep_inputs(report: FuzzReport, folder: Path) -> None:
    """Write the inputs that escaped to a folder."""
    with tempfile.TemporaryDirectory(prefix="megabatch-fuzz-") as scratch, ExitStack() as stack:
        names = {escape.format for escape in report.escapes}
        benches = {name: FORMATS[name].set_up(Path(scratch), stack) for name in names}
        for escape in report.escapes:
            name, number = escape.format, escape.number
            files, _ = make_input(name, FORMATS[name], benches[name].specimens, report.seed, number)
            write_input(files, folder / f"{name}-{number}")
