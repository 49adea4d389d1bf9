"""The only Console: prints styled text, tables and progress bars.

Most lines contain text from outside: names of files and classes, messages of libraries.  So markup is off: [red] is
printed literally, and bold text has a style.  All output, including live progress bars, passes through `render`, which
removes every character that a terminal would interpret as a command.
"""

import os
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from megabatch.text import lines_of, one_line

BOLD = "bold"
LONGEST_ROW = 20_000  # characters: a plan of many buckets is long


class Terminal(Console):
    def __init__(self, soft_wrap: bool = True) -> None:
        # None: rich looks at the output.
        is_terminal = None if is_watched(os.environ) else False
        super().__init__(markup=False, highlight=False, emoji=False, soft_wrap=soft_wrap, force_terminal=is_terminal)

    @property
    def is_live(self) -> bool:
        """Whether to show live progress.  With FORCE_COLOR, rich takes any output for a terminal, even a file."""
        return self.is_terminal and not self.is_dumb_terminal and self.file.isatty()

    def render_str(self, text: str, **options: Any) -> Text:
        """Clean the text before it is measured, so that columns have the printed width."""
        return super().render_str(lines_of(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            # Control segments come from rich, for example to move the cursor up to a progress bar.
            yield segment if segment.control else Segment(lines_of(segment.text), segment.style)

    def title(self, text: str, rest: str = "") -> None:
        """Print an empty line, then `text` in bold and `rest` on one line."""
        self.print(Text.assemble("\n", (one_line(text), BOLD), f" {one_line(rest)}" if rest else ""))

    def row(self, name: str, text: str, width: int = 9) -> None:
        """Print a bold name and a text on one line."""
        self.print(Text.assemble((f"{one_line(name):<{width}}", BOLD), " ", one_line(text, LONGEST_ROW)))


def is_watched(environment: Mapping[str, str]) -> bool:
    """Return False for a rank of mpiexec: Open MPI gives its ranks a terminal even if a file gets their output."""
    num_ranks = environment.get("PMI_SIZE", "1")
    return "OMPI_COMM_WORLD_RANK" not in environment and num_ranks in ("", "1")


def plain_table(**options: Any) -> Table:
    return Table(box=None, pad_edge=False, header_style=BOLD, **options)
