"""The outcome of faults and runs, and their totals."""

from collections.abc import Sequence
from statistics import fmean

import msgspec
from msgspec import Struct, field, to_builtins

from megabatch_lab.chaos.faults import Kind
from megabatch_lab.chaos.judge import PHASES, Phase


class Injected(Struct, kw_only=True):
    """A fault that was injected."""

    kind: Kind
    phase: Phase
    step: int  # of the newest row
    victim: str  # such as rank 1
    noticed_s: float | None = None  # until the launcher printed a message, ended, or restarted ranks
    resumed_s: float | None = None  # until the next new row; None if there was none
    repeated: int | None = None  # steps
    message: str | None = field(default=None, name="said")  # the first one about it
    restarted: bool = False  # a command had to be started again


class DisturbedRun(Struct, kw_only=True):
    number: int  # identifies the run, together with the seed
    max_restarts: int
    faults: list[Injected] = field(default_factory=list)
    num_starts: int = 0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)
    folder: str | None = None  # of the files, if there are problems


class Spread(Struct, frozen=True):
    mean: float
    most: float


class Tally(Struct, frozen=True, kw_only=True):
    """Totals over faults: of one kind, in one phase, or all."""

    injected: int
    survived: int  # their runs were bitwise identical and left nothing
    noticed_s: Spread | None
    resumed_s: Spread | None
    repeated: Spread | None


class ChaosReport(Struct, kw_only=True):
    command: str
    seed: int
    num_ranks: int
    num_hosts: int
    wanted: int
    undisturbed_s: float = 0.0
    num_steps: int = 0
    left_out: list[str] = field(default_factory=list)  # faults that cannot be injected here, and why
    undisturbed_problems: list[str] = field(default_factory=list)
    runs: list[DisturbedRun] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def injected(self) -> int:
        return sum(len(run.faults) for run in self.runs)

    @property
    def failed(self) -> list[DisturbedRun]:
        return [run for run in self.runs if run.problems]

    @property
    def holds(self) -> bool:
        return not self.failed and not self.undisturbed_problems and self.injected >= self.wanted

    @property
    def kinds(self) -> set[Kind]:
        return {fault.kind for run in self.runs for fault in run.faults}

    def tally(self, kind: Kind | None = None, phase: Phase | None = None) -> Tally:
        """Return the totals of one kind and phase, or of all kinds or phases for None."""
        pairs = [
            (fault, not run.problems)
            for run in self.runs
            for fault in run.faults
            if kind in (None, fault.kind) and phase in (None, fault.phase)
        ]
        faults = [fault for fault, _ in pairs]
        return Tally(
            injected=len(pairs),
            survived=sum(survived for _, survived in pairs),
            noticed_s=spread([fault.noticed_s for fault in faults]),
            resumed_s=spread([fault.resumed_s for fault in faults]),
            repeated=spread([fault.repeated for fault in faults]),
        )


def report_json(report: ChaosReport) -> bytes:
    """Return the report and its totals as JSON."""
    summary = {
        "injected": report.injected,
        "failed_runs": [run.number for run in report.failed],
        "holds": report.holds,
        "all": report.tally(),
        "by_phase": {phase: report.tally(phase=phase) for phase in PHASES},
        "by_kind": {kind: report.tally(kind) for kind in sorted(report.kinds)},
    }
    return msgspec.json.format(msgspec.json.encode(to_builtins(report) | summary), indent=1) + b"\n"


def spread(values: Sequence[float | None]) -> Spread | None:
    known = [value for value in values if value is not None]
    return Spread(fmean(known), max(known)) if known else None
