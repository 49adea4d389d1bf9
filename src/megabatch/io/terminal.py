"""Where coloured text, tables and bars are printed: the one Console.

Text of a user's (names of files and classes, what a library says) stands in most lines.  So nothing is markup here:
[red] is printed as it is written, and what is bold is said by a style.  And whatever is printed, also by a live bar,
goes through `render`, which leaves no letter that a terminal would take for a command.
"""

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from megabatch.text import lines_of, one_line

BOLD = "bold"
LONGEST_ROW = 20_000  # letters: a plan of many buckets is long


class Terminal(Console):
    def __init__(self, soft_wrap: bool = True) -> None:
        super().__init__(markup=False, highlight=False, emoji=False, soft_wrap=soft_wrap)

    def render_str(self, text: str, **options: Any) -> Text:
        """Cleaned before it is measured, so that columns are as wide as what is printed."""
        return super().render_str(lines_of(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            # Control segments are rich's own, such as those that move the cursor up to a bar.
            yield segment if segment.control else Segment(lines_of(segment.text), segment.style)

    def title(self, text: str, rest: str = "") -> None:
        """After an empty line, bold; then, on the same line, what is not."""
        self.print(Text.assemble("\n", (one_line(text), BOLD), f" {one_line(rest)}" if rest else ""))

    def row(self, name: str, text: str, width: int = 9) -> None:
        """A name, bold, and one line beside it, whatever is in it."""
        self.print(Text.assemble((f"{one_line(name):<{width}}", BOLD), " ", one_line(text, LONGEST_ROW)))


def plain_table(**options: Any) -> Table:
    return Table(box=None, pad_edge=False, header_style=BOLD, **options)
