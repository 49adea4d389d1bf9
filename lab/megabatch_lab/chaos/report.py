"""What became of faults and runs, and what it adds up to."""

from collections.abc import Sequence
from statistics import fmean

import msgspec
from msgspec import Struct, field, to_builtins

from megabatch_lab.chaos.faults import Kind
from megabatch_lab.chaos.judge import PHASES, Phase


class Injected(Struct, kw_only=True):
    """A fault that has hit."""

    kind: Kind
    phase: Phase
    step: int  # the newest row's
    victim: str  # such as rank 1
    noticed_s: float | None = None  # until the launcher said a line, ended, or started ranks again
    resumed_s: float | None = None  # until the next new row; None if there was none to come
    repeated: int | None = None  # steps that were taken again
    said: str | None = None  # the first line about it
    restarted: bool = False  # somebody had to start a command again


class DisturbedRun(Struct, kw_only=True):
    number: int  # repeats it, with the seed
    max_restarts: int
    faults: list[Injected] = field(default_factory=list)
    num_starts: int = 0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)
    folder: str | None = None  # kept, if there are problems


class Spread(Struct, frozen=True):
    mean: float
    most: float


class Tally(Struct, frozen=True, kw_only=True):
    """Of faults: of one kind, in one phase, or all."""

    injected: int
    survived: int  # their runs have ended to the bit, and left nothing
    noticed_s: Spread | None
    resumed_s: Spread | None
    repeated: Spread | None


class Report(Struct, kw_only=True):
    command: str
    seed: int
    num_ranks: int
    num_hosts: int
    wanted: int
    undisturbed_s: float = 0.0
    num_steps: int = 0
    left_out: list[str] = field(default_factory=list)  # faults that cannot be made here, and why
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
        """Of all kinds, or in all phases, where none is given."""
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


def report_json(report: Report) -> bytes:
    """All of it, and what it adds up to."""
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
