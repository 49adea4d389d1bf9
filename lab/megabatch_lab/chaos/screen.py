"""The output of `megabatch chaos`: a line per run, a table of faults by kind and phase, and the verdict."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from megabatch.io.terminal import Terminal, plain_table
from megabatch_lab.chaos.faults import FAULTS_A_RUN, TITLES, Kind
from megabatch_lab.chaos.judge import PHASES
from megabatch_lab.chaos.report import ChaosReport, DisturbedRun, Injected, Spread, Tally
from megabatch_lab.chaos.run import ChaosRequest

WIDTH = 11  # of the label before a line


class ChaosScreen:
    def __init__(self, command: Sequence[str], request: ChaosRequest) -> None:
        self.console = Terminal()
        self.command = command
        ranks = f"{request.num_ranks} rank{'s' * (request.num_ranks > 1)}"
        hosts = f" on {request.num_hosts} hosts" * (request.num_hosts > 1)
        self.print_row("chaos", f"{request.kills} faults, {FAULTS_A_RUN} per run, seed {request.seed}, {ranks}{hosts}")

    def print_row(self, name: str, text: str) -> None:
        self.console.row(name, text, WIDTH)

    def begin(self, report: ChaosReport, folder: Path) -> None:
        for line in report.left_out:
            self.print_row("left out", line)
        self.print_row("undisturbed", f"{report.num_steps} steps, {report.undisturbed_s:.1f} s, in {folder}")
        for problem in report.undisturbed_problems:
            self.print_row("FAILED", problem)

    def show_run(self, run: DisturbedRun) -> None:
        hits = ", ".join(f"{describe_victim(fault)} in {describe_phase(fault)}" for fault in run.faults)
        verdict = "identical" if not run.problems else "FAILED"
        self.print_row(f"run {run.number}", f"{verdict}, {run.seconds:.0f} s: {hits or 'ended before a fault'}")
        for problem in run.problems:
            self.console.row("", problem, WIDTH)
        if run.problems:
            self.console.row("", f"files are in {run.folder}; repeat with: {self.repeat(run)}", WIDTH)

    def repeat(self, run: DisturbedRun) -> str:
        """Return the command that repeats only this run, with the same number of faults."""
        return shlex.join([*self.command, "--only", str(run.number), "--kills", str(max(1, len(run.faults)))])

    def finish(self, report: ChaosReport) -> None:
        self.console.print()
        self.console.print(survived(report))
        self.console.print()
        self.console.print(durations(report))
        self.console.print()
        count = report.tally()
        if report.holds:
            text = f"{count.injected} faults survived: every run is bitwise identical and left nothing behind"
        elif report.failed or report.undisturbed_problems:
            numbers = ", ".join(str(run.number) for run in report.failed) or "the undisturbed one"
            text = f"{len(report.failed)} of {len(report.runs)} runs failed (seed {report.seed}: {numbers})"
        else:
            text = f"only {count.injected} of {report.wanted} faults were injected"
        self.print_row("survived" if report.holds else "FAILED", f"{text}; {report.seconds:.0f} s")


def rows_of(report: ChaosReport) -> list[tuple[str, Kind | None]]:
    return [*((title, kind) for kind, title in TITLES.items() if kind in report.kinds), ("all", None)]


def tabulate(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = plain_table()
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def survived(report: ChaosReport) -> Table:
    """Return a table of faults survived, by kind and phase."""
    rows = [
        [title, *(count(report.tally(kind, phase)) for phase in PHASES), count(report.tally(kind))]
        for title, kind in rows_of(report)
    ]
    return tabulate(["survived", *PHASES, "all"], rows)


def durations(report: ChaosReport) -> Table:
    """Return a table of mean and maximum times."""
    rows = []
    for title, kind in rows_of(report):
        tally = report.tally(kind)
        rows.append(
            [title, show_spread(tally.noticed_s, 1), show_spread(tally.resumed_s, 1), show_spread(tally.repeated, 0)]
        )
    return tabulate(["mean, max", "s to notice", "s to resume", "steps repeated"], rows)


def count(tally: Tally) -> str:
    return f"{tally.survived}/{tally.injected}" if tally.injected else "-"


def show_spread(spread: Spread | None, digits: int) -> str:
    return f"{spread.mean:.{digits}f}, {spread.most:.{digits}f}" if spread else "-"


def describe_victim(fault: Injected) -> str:
    return f"{fault.kind} ({fault.victim})" if fault.kind in ("rank", "stop", "host", "link") else fault.kind


def describe_phase(fault: Injected) -> str:
    return f"step {fault.step}" if fault.phase == "step" else f"{fault.phase}"
