"""Run a recipe undisturbed, then under faults until enough were injected, and compare each run with the first."""

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import Protocol

from msgspec import Struct

from megabatch.errors import UserError
from megabatch_lab.chaos.disturb import Disturbance, check_end
from megabatch_lab.chaos.faults import FAULTS_A_RUN, NEED_DISK, ONE_HOST, TWO_HOSTS, Kind, Timeline, arrange, draw
from megabatch_lab.chaos.namespaces import Host, namespaces, stop_signals
from megabatch_lab.chaos.report import ChaosReport, DisturbedRun
from megabatch_lab.chaos.site import Site, one_host, several_hosts, small_disk, why_no_disk

PREFIX = "chaos-"  # of the folder in the temporary directory
UNDISTURBED = "undisturbed"
KEPT = "kept"  # a file that marks a folder to keep
RESTARTS = FAULTS_A_RUN  # the most that a run can need
NO_RESTARTS_EVERY = 3  # one in 3 runs has --max-restarts 0
SPARE_S = 30.0
DISK_FACTOR, DISK_EXTRA_BYTES = 3, 16 << 20  # relative to the undisturbed run's folder


class ChaosRequest(Struct, frozen=True, kw_only=True):
    command: str
    recipe: str  # resolved, as TOML
    timeout_s: float  # its comm.timeout_s
    kills: int
    seed: int
    num_ranks: int
    num_hosts: int
    only: int | None = None  # the number of a run


class Screen(Protocol):
    """Receives the outcome of each run; the command line prints it."""

    def begin(self, report: ChaosReport, folder: Path) -> None: ...
    def show_run(self, run: DisturbedRun) -> None: ...


def run_chaos(request: ChaosRequest, screen: Screen) -> ChaosReport:
    folder = Path(mkdtemp(prefix=PREFIX))
    try:
        with ExitStack() as stack:
            stack.enter_context(stop_signals())
            hosts = stack.enter_context(namespaces(request.num_hosts)) if request.num_hosts > 1 else []
            return Chaos(request, folder, hosts, screen).run()
    finally:
        if not is_kept(folder):
            shutil.rmtree(folder)


def keep(folder: Path) -> None:
    """Keep the folders of a failed run and of the undisturbed one."""
    (folder.parent / KEPT).touch()


def is_kept(folder: Path) -> bool:
    return (folder / KEPT).exists()


class Chaos:
    def __init__(self, request: ChaosRequest, folder: Path, hosts: Sequence[Host], screen: Screen) -> None:
        self.request, self.folder, self.hosts, self.screen = request, folder, hosts, screen
        self.recipe = folder / "recipe.toml"
        self.recipe.write_text(request.recipe)
        self.report = ChaosReport(
            command=request.command,
            seed=request.seed,
            num_ranks=request.num_ranks,
            num_hosts=request.num_hosts,
            wanted=request.kills,
        )

    def run(self) -> ChaosReport:
        started_s = time.monotonic()
        deck = self.choose_deck()
        timeline = self.run_undisturbed()
        self.screen.begin(self.report, self.folder)
        number = self.request.only or 1
        while self.report.injected < self.request.kills:
            run = self.disturb(number, deck, timeline)
            self.report.runs.append(run)
            self.screen.show_run(run)
            number += 1
            if self.request.only:
                break
        self.report.seconds = time.monotonic() - started_s
        return self.report

    def choose_deck(self) -> Sequence[Kind]:
        if self.hosts:
            return TWO_HOSTS
        reason = why_no_disk(self.folder / "disk")
        if reason:
            self.report.left_out.append(f"faults of a full disk: no small disk can be mounted ({reason})")
            return [kind for kind in ONE_HOST if kind not in NEED_DISK]
        return ONE_HOST

    def run_undisturbed(self) -> Timeline:
        outcome = DisturbedRun(number=0, max_restarts=0)
        folder = self.folder / UNDISTURBED
        with self.site(folder, 0, needs_disk=False) as site:
            disturbance = Disturbance(site, outcome)
            disturbance.run()
        self.expected = site.run
        if outcome.problems:
            keep(folder)
        if disturbance.is_abandoned or not disturbance.steps_s:
            raise UserError(f"the undisturbed run failed: {'; '.join(outcome.problems)}; see its logs in {folder}")
        timeline = disturbance.timed()
        self.report.undisturbed_problems = outcome.problems
        self.report.undisturbed_s, self.report.num_steps = timeline.total_s, timeline.num_steps
        return timeline

    def disturb(self, number: int, deck: Sequence[Kind], timeline: Timeline) -> DisturbedRun:
        faults = draw(self.request.seed, number, deck)[: self.request.kills - self.report.injected]
        by_itself = number % NO_RESTARTS_EVERY != 0
        outcome = DisturbedRun(number=number, max_restarts=RESTARTS if by_itself or self.hosts else 0)
        folder = self.folder / f"run-{number}"
        needs_disk = any(fault.kind in NEED_DISK for fault in faults)
        with self.site(folder, outcome.max_restarts, needs_disk) as site:
            disturbance = Disturbance(
                site,
                outcome,
                arrange(faults, timeline),
                timeline,
                self.request.timeout_s,
                self.request.timeout_s + timeline.total_s + SPARE_S,
            )
            disturbance.run()
            if not disturbance.is_abandoned:
                check_end(outcome, self.expected, site.run)
            if outcome.problems:
                outcome.folder = str(folder)
                keep(folder)
                if site.disk and site.run.exists():  # the disk is unmounted at the end
                    shutil.copytree(site.run, folder / "run", symlinks=True)
        if not outcome.problems:
            shutil.rmtree(folder)
        return outcome

    @contextmanager
    def site(self, folder: Path, max_restarts: int, needs_disk: bool) -> Iterator[Site]:
        mark = f"{os.getpid()}-{folder.name}"
        arguments = (folder, self.recipe, self.request.num_ranks, max_restarts, mark)
        if self.hosts:
            yield several_hosts(*arguments, self.hosts)
        elif needs_disk:
            with small_disk(folder / "disk", DISK_FACTOR * size_of(self.expected) + DISK_EXTRA_BYTES) as disk:
                yield one_host(*arguments, disk)
        else:
            yield one_host(*arguments)


def size_of(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*"))
