"""What `megabatch fuzz` prints: how far it is, a row for each format, and what has escaped."""

import threading

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from megabatch.fuzz.outcome import Outcome, Report, alike
from megabatch.fuzz.run import Request, inputs_of

MOST_SHOWN = 20


class FuzzScreen:
    def __init__(self, request: Request) -> None:
        self.console = Console(highlight=False, soft_wrap=True)
        self.progress = Progress(console=self.console, transient=True, disable=not self.console.is_terminal)
        self.task = self.progress.add_task("inputs", total=len(inputs_of(request)))
        self.lock = threading.Lock()
        self.num_escaped = 0

    def __enter__(self) -> "FuzzScreen":
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def show(self, outcome: Outcome) -> None:
        with self.lock:
            self.num_escaped += outcome.kind == "escaped"
            self.progress.update(self.task, advance=1, description=f"inputs, {self.num_escaped:,} escaped")

    def finish(self, report: Report) -> None:
        table = Table("format", box=None, pad_edge=False)
        for column in ("inputs", "ok", "one line", "escaped", "past the header"):
            table.add_column(column, justify="right")
        for count in report.counts:
            share = f"{count.past_header / count.inputs:.0%}" if count.inputs else ""
            numbers = (count.inputs, count.ok, count.one_line, count.escaped)
            table.add_row(count.format, *(f"{number:,}" for number in numbers), share)
        self.console.print(table)
        kinds = alike(report.escapes)
        for example, how_many in kinds[:MOST_SHOWN]:
            self.console.print(f"[bold]escaped[/bold]  {how_many:,} of {example.format}: {escape(example.detail)}")
            if example.where:
                self.console.print(f"         {escape(example.where)}")
            again = f"megabatch fuzz {example.format} --seed {report.seed} --only {example.number} --keep escaped"
            self.console.print(f"         again: {again}")
        if len(kinds) > MOST_SHOWN:
            self.console.print(f"         and {len(kinds) - MOST_SHOWN:,} more kinds: --json has all")
        escaped = f"{len(report.escapes):,} escaped" if report.escapes else "nothing escaped"
        self.console.print(
            f"[bold]verdict[/bold]  {report.inputs:,} inputs, seed {report.seed}: {escaped}, {report.seconds:.0f} s"
        )
