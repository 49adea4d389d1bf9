"""The output of `megabatch fuzz`: progress, a row per format, and the escapes."""

import threading

from rich.progress import Progress

from megabatch.io.terminal import Terminal, plain_table
from megabatch_lab.fuzz.outcome import FuzzReport, InputOutcome, alike
from megabatch_lab.fuzz.run import FuzzRequest, inputs_of

MAX_SHOWN = 20


class FuzzScreen:
    def __init__(self, request: FuzzRequest) -> None:
        self.console = Terminal()
        self.progress = Progress(console=self.console, transient=True, disable=not self.console.is_live)
        self.task = self.progress.add_task("inputs", total=len(inputs_of(request)))
        self.lock = threading.Lock()
        self.num_escaped = 0

    def __enter__(self) -> "FuzzScreen":
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def show(self, outcome: InputOutcome) -> None:
        with self.lock:
            self.num_escaped += outcome.kind == "escaped"
            self.progress.update(self.task, advance=1, description=f"inputs, {self.num_escaped:,} escaped")

    def finish(self, report: FuzzReport) -> None:
        table = plain_table()
        table.add_column("format")
        for column in ("inputs", "ok", "one line", "escaped", "past the header"):
            table.add_column(column, justify="right")
        for count in report.counts:
            share = f"{count.past_header / count.inputs:.0%}" if count.inputs else ""
            numbers = (count.inputs, count.ok, count.one_line, count.escaped)
            table.add_row(count.format, *(f"{number:,}" for number in numbers), share)
        self.console.print(table)
        kinds = alike(report.escapes)
        for example, how_many in kinds[:MAX_SHOWN]:
            self.console.row("escaped", f"{how_many:,} of {example.format}: {example.detail}")
            if example.where:
                self.console.row("", example.where)
            command = f"megabatch fuzz {example.format} --seed {report.seed} --only {example.number} --keep escaped"
            self.console.row("repeat", command)
        if len(kinds) > MAX_SHOWN:
            self.console.row("", f"and {len(kinds) - MAX_SHOWN:,} more kinds; --json writes all")
        escaped = f"{len(report.escapes):,} escaped" if report.escapes else "nothing escaped"
        inputs = f"{report.inputs:,} inputs, seed {report.seed}"
        self.console.row("verdict", f"{inputs}: {escaped}, {report.seconds:.0f} s")
