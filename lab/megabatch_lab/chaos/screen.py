"""What `megabatch chaos` prints: a line for each run, a table of faults by kind and phase, and the verdict."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from megabatch.io.terminal import Terminal, plain_table
from megabatch_lab.chaos.faults import FAULTS_A_RUN, TITLES, Kind
from megabatch_lab.chaos.judge import PHASES
from megabatch_lab.chaos.report import DisturbedRun, Injected, Report, Spread, Tally
from megabatch_lab.chaos.run import Request

WIDTH = 11  # of the names before lines


class ChaosScreen:
    def __init__(self, command: Sequence[str], request: Request) -> None:
        self.console = Terminal()
        self.command = command
        ranks = f"{request.num_ranks} rank{'s' * (request.num_ranks > 1)}"
        hosts = f" on {request.num_hosts} hosts" * (request.num_hosts > 1)
        self.say("chaos", f"{request.kills} faults, {FAULTS_A_RUN} a run, seed {request.seed}, {ranks}{hosts}")

    def say(self, name: str, text: str) -> None:
        self.console.row(name, text, WIDTH)

    def begin(self, report: Report, folder: Path) -> None:
        for line in report.left_out:
            self.say("left out", line)
        self.say("undisturbed", f"{report.num_steps} steps, {report.undisturbed_s:.1f} s, in {folder}")
        for problem in report.undisturbed_problems:
            self.say("FAILED", problem)

    def show_run(self, run: DisturbedRun) -> None:
        hits = ", ".join(f"{describe_victim(fault)} in {describe_phase(fault)}" for fault in run.faults)
        verdict = "to the bit" if not run.problems else "FAILED"
        self.say(f"run {run.number}", f"{verdict}, {run.seconds:.0f} s: {hits or 'ended before a fault'}")
        for problem in run.problems:
            self.console.row("", problem, WIDTH)
        if run.problems:
            self.console.row("", f"kept in {run.folder}; again: {self.repeat(run)}", WIDTH)

    def repeat(self, run: DisturbedRun) -> str:
        """The command that runs this one alone, with as many faults."""
        return shlex.join([*self.command, "--only", str(run.number), "--kills", str(max(1, len(run.faults)))])

    def finish(self, report: Report) -> None:
        self.console.print()
        self.console.print(survived(report))
        self.console.print()
        self.console.print(took(report))
        self.console.print()
        count = report.tally()
        if report.holds:
            text = f"{count.injected} faults survived: every run to the bit, nothing left behind"
        elif report.failed or report.undisturbed_problems:
            numbers = ", ".join(str(run.number) for run in report.failed) or "the undisturbed one"
            text = f"{len(report.failed)} of {len(report.runs)} runs (seed {report.seed}: {numbers})"
        else:
            text = f"only {count.injected} of {report.wanted} faults have hit"
        self.say("survived" if report.holds else "FAILED", f"{text}; {report.seconds:.0f} s")


def rows_of(report: Report) -> list[tuple[str, Kind | None]]:
    return [*((title, kind) for kind, title in TITLES.items() if kind in report.kinds), ("all", None)]


def tabulate(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    table = plain_table()
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def survived(report: Report) -> Table:
    """Of how many: by kind, and by what the run was doing."""
    rows = [
        [title, *(count(report.tally(kind, phase)) for phase in PHASES), count(report.tally(kind))]
        for title, kind in rows_of(report)
    ]
    return tabulate(["survived", *PHASES, "all"], rows)


def took(report: Report) -> Table:
    """Mean and most."""
    rows = []
    for title, kind in rows_of(report):
        tally = report.tally(kind)
        rows.append(
            [title, show_spread(tally.noticed_s, 1), show_spread(tally.resumed_s, 1), show_spread(tally.repeated, 0)]
        )
    return tabulate(["mean, most", "s to notice", "s to resume", "steps repeated"], rows)


def count(tally: Tally) -> str:
    return f"{tally.survived}/{tally.injected}" if tally.injected else "-"


def show_spread(spread: Spread | None, digits: int) -> str:
    return f"{spread.mean:.{digits}f}, {spread.most:.{digits}f}" if spread else "-"


def describe_victim(fault: Injected) -> str:
    return f"{fault.kind} ({fault.victim})" if fault.kind in ("rank", "stop", "host", "link") else fault.kind


def describe_phase(fault: Injected) -> str:
    return f"step {fault.step}" if fault.phase == "step" else f"{fault.phase}"
