"""Runs under real launchers, disturbed in the ways that launchers and batch systems do, and compared bitwise.

Each scenario starts the same recipe, disturbs it after some steps, and waits until the run has finished.  A batch
system starts it again by itself; a command of MPI is started again here.
"""

import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import NamedTuple

import torch
from msgspec import Struct, field

from megabatch import __version__
from megabatch.errors import UserError, require_one_of
from megabatch.io.terminal import Terminal, plain_table
from megabatch.runs.files import LOG
from megabatch_lab.chaos.judge import Watch, differences, unfinished
from megabatch_lab.chaos.launcher import FOREIGN, begin_child
from megabatch_lab.chaos.namespaces import stop_signals
from megabatch_lab.chaos.processes import MARK, end_marked, environment_of, marked, parent_of, send
from megabatch_lab.chaos.slurm import HEAD, NODES, Slurm, require_slurm, slurm_cluster

DOCUMENTED = Path(__file__).parents[3] / "docs/clusters.md"
MEGABATCH = [sys.executable, "-P", "-m", "megabatch"]
STEP = 40  # disturbances come after this step
PATIENCE_S = 240.0  # for an event in a run: on a busy machine, its start takes most of it
UNDISTURBED = "undisturbed"
MOST_STARTS = 4
WIDTH = 12
SIGUSR1_BIT = 1 << (signal.SIGUSR1 - 1)


class Scenario(Struct, kw_only=True):
    launcher: str
    name: str
    action: str  # on the run
    result: str = ""
    has_run: bool = True  # else the command is rejected
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)

    @property
    def bits(self) -> str:
        if self.problems:
            return "FAILED"
        return "the reference" if self.name == UNDISTURBED else "the same" if self.has_run else "no run"


class LauncherReport(Struct, kw_only=True):
    versions: str
    scenarios: list[Scenario] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        return bool(self.scenarios) and not any(scenario.problems for scenario in self.scenarios)


class SlurmSite:
    """One run of the documented script on the cluster."""

    def __init__(self, slurm: Slurm, folder: Path, recipe: Path) -> None:
        self.slurm, self.folder, self.recipe = slurm, folder, recipe
        self.number = 0

    @property
    def run(self) -> Path:
        return self.folder / "runs" / str(self.number)

    def start(self, *options: str, script: str | None = None) -> None:
        on_path = self.slurm.folder / "bin"
        if not on_path.exists():
            on_path.mkdir()
            (on_path / "megabatch").write_text(f'#!/bin/sh\nexec {" ".join(MEGABATCH)} "$@"\n')
            (on_path / "megabatch").chmod(0o755)
        given = ["--nodes=2", "--ntasks-per-node=1", f"--export=ALL,PATH={on_path}:{os.environ['PATH']}"]
        text = script or documented_script(self.recipe)
        self.number = self.slurm.submit(self.folder, text, *given, *options)

    def jobs(self) -> list[dict[str, str]]:
        return self.slurm.jobs(self.number)

    def restarts(self) -> int:
        """Return how often Slurm has requeued the job or the tasks of the array."""
        return sum(int(job.get("Restarts", 0)) for job in self.jobs())

    def log(self) -> str:
        return "".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("job-*.log")))

    def wait_for_step(self, step: int = STEP, since: int = 0) -> None:
        """Wait until the run has taken `step` steps, in an attempt after the first `since`."""
        watch = Watch(self.run)

        def has_come() -> bool:
            progress = watch.look()
            if self.is_in("FAILED", "TIMEOUT", "CANCELLED"):
                raise UserError(f"the job failed before step {step}: {last_line(self.log())}")
            return len(progress.begun_at) > since and progress.step >= step

        wait(has_come, f"no step {step}")

    def is_in(self, *states: str) -> bool:
        """Return whether the job, or every task of the array, is in one of these states."""
        jobs = self.jobs()
        return bool(jobs) and all(job.get("JobState") in states for job in jobs)

    def wait_for_state(self, *states: str) -> None:
        wait(lambda: self.is_in(*states), f"the job is not {' or '.join(states)}")

    def cancel(self) -> None:
        if self.number:
            self.slurm.call("scancel", "--signal=KILL", "--full", str(self.number))
            self.slurm.call("scancel", str(self.number))


def documented_script(recipe: Path) -> str:
    """Return the script of docs/clusters.md for two CPU ranks of a small recipe."""
    found = re.search(r"## Slurm\n```\n(.*?)```", DOCUMENTED.read_text(), re.DOTALL)
    assert found, DOCUMENTED
    text = re.sub(r" --gpus-per-node=\d+", "", found[1])
    return re.sub(r"cpus-per-task=\d+", "cpus-per-task=1", text).replace("my.toml", str(recipe))


def wait(holds: Callable[[], bool], problem: str) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not holds():
        if time.monotonic() > deadline_s:
            raise UserError(f"{problem} within {PATIENCE_S:g} s")
        time.sleep(0.2)  # a command of Slurm takes 0.05 s


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no output"])[-1]


def begun(run: Path) -> int:
    """Return the number of attempts that took a step."""
    return len(Watch(run).look().begun_at)


# The scenarios of Slurm.  Each starts a run and disturbs it.


def nothing(site: SlurmSite) -> None:
    site.start()


def signal_usr1(site: SlurmSite) -> None:
    site.start()
    site.wait_for_step()
    site.slurm.call("scancel", "--signal=USR1", str(site.number))


def requeue(site: SlurmSite) -> None:
    site.start()
    site.wait_for_step()
    site.slurm.call("scontrol", "requeue", str(site.number))


def preempt(site: SlurmSite) -> None:
    site.start()
    site.wait_for_step()
    other = SlurmSite(site.slurm, site.folder / "other", site.recipe)
    other.start("--partition=high", "--exclusive", script="#!/bin/bash\nsleep 1\n")
    other.wait_for_state("COMPLETED")


def suspend(site: SlurmSite) -> None:
    site.start()
    site.wait_for_step()
    site.slurm.call("scontrol", "suspend", str(site.number))
    site.wait_for_state("SUSPENDED")
    time.sleep(8)  # longer than comm.timeout_s
    site.slurm.call("scontrol", "resume", str(site.number))


def time_limit(site: SlurmSite) -> None:
    """Stop the ranks until Slurm has sent its warning: it looks at time limits only every 30 s."""
    site.start("--time=2", "--signal=USR1@60")
    site.wait_for_step()
    ranks = site.slurm.rank_processes()
    send(ranks, signal.SIGSTOP)
    try:
        wait(lambda: any(is_pending(rank) for rank in ranks), "no SIGUSR1 before the time limit")
    finally:
        send(ranks, signal.SIGCONT)


def is_pending(process: int) -> bool:
    """Return whether SIGUSR1 waits for a stopped process, or has ended it."""
    try:
        found = re.search(r"ShdPnd:\s*(\w+)", Path(f"/proc/{process}/status").read_text())
    except OSError:
        return True
    return bool(found and int(found[1], 16) & SIGUSR1_BIT)


def kill_rank(site: SlurmSite) -> None:
    site.start()
    site.wait_for_step()
    send(site.slurm.rank_processes(NODES[1]), signal.SIGKILL)


def lose_node(site: SlurmSite) -> None:
    site.start()
    site.wait_for_step()
    site.slurm.lose(NODES[1])
    wait(lambda: site.restarts() > 0, "Slurm did not requeue the job")
    site.slurm.restore(NODES[1])


def restart_slurmd(site: SlurmSite) -> None:
    site.start()
    site.wait_for_step()
    os.kill(site.slurm.daemon(NODES[1]), signal.SIGKILL)
    site.slurm.machines[NODES[1]].start(["slurmd", "-D"])


def two_steps(site: SlurmSite) -> None:
    """Start two runs in one job, each as a step of two ranks."""
    words = f"srun --exact --ntasks=2 --cpus-per-task=1 megabatch train {site.recipe} run.dir=runs/$SLURM_JOB_ID"
    site.start(script=f"#!/bin/bash\n{words} &\nfirst=$!\n{words}-b || exit\nwait $first\n")


def array(site: SlurmSite) -> None:
    """Start an array of two jobs, which may share nodes."""
    site.start("--array=0-1")


def mistake(site: SlurmSite) -> None:
    """Start a command that the first rank rejects while the other one starts."""
    late = """sh -c '[ $SLURM_PROCID = 0 ] || sleep 1; exec "$@" --no-such-option' sh megabatch train"""
    site.start(script=documented_script(site.recipe).replace("megabatch train", late))


class SlurmCase(NamedTuple):
    action: str
    disturb: Callable[[SlurmSite], None]
    restarts: int = 0  # by Slurm
    attempts: int = 1  # of a run, that take steps
    may_repeat: bool = False  # on a busy machine
    num_runs: int = 1
    state: str = "COMPLETED"


SLURM_SCENARIOS = {
    UNDISTURBED: SlurmCase("none", nothing),
    "usr1": SlurmCase("scancel --signal=USR1", signal_usr1, restarts=1, attempts=2),
    "requeue": SlurmCase("scontrol requeue", requeue, restarts=1, attempts=2),
    "preempt": SlurmCase("a job of a partition with priority, GraceTime=60", preempt, restarts=1, attempts=2),
    "suspend": SlurmCase("scontrol suspend, 8 s, scontrol resume", suspend),
    # The job may reach its time limit again, and the ranks may restart before Slurm gives up a lost node.
    "limit": SlurmCase("--time=2 --signal=USR1@60", time_limit, restarts=1, attempts=2, may_repeat=True),
    "kill": SlurmCase("kill -9 of a rank", kill_rank, attempts=2),
    "node": SlurmCase("a node loses power and its cable", lose_node, restarts=1, attempts=2, may_repeat=True),
    "slurmd": SlurmCase("kill -9 of a slurmd, started again", restart_slurmd),
    "steps": SlurmCase("two srun in one job", two_steps, num_runs=2),
    "array": SlurmCase("--array=0-1", array, num_runs=2),
    "mistake": SlurmCase("an invalid option, on the first rank first", mistake, num_runs=0, state="FAILED"),
}


def run_slurm(slurm: Slurm, folder: Path, recipe: Path, scenario: Scenario, expected: Path | None) -> Path:
    """Run a scenario of Slurm; return the run's folder."""
    site, case = SlurmSite(slurm, folder, recipe), SLURM_SCENARIOS[scenario.name]
    try:
        case.disturb(site)
        site.wait_for_state("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED")
    except (UserError, OSError, subprocess.TimeoutExpired) as error:
        scenario.problems.append(str(error))
    jobs, restarts = site.jobs(), site.restarts()
    states = {job.get("JobState", "unknown") for job in jobs}
    site.cancel()
    if states != {case.state}:
        scenario.problems.append(f"the job ended as {' and '.join(sorted(states))}: {last_line(site.log())}")
    runs = sorted(site.run.parent.glob("*"))
    if len(runs) != case.num_runs:
        scenario.problems.append(f"{len(runs)} runs, expected {case.num_runs}")
    counts = [("restarts by Slurm", restarts, case.restarts)]
    counts += [(f"attempts of {run.name}", begun(run), case.attempts) for run in runs]
    for name, found, wanted in counts:
        if found < wanted or (found > wanted and not case.may_repeat):
            scenario.problems.append(f"{found} {name}, expected {wanted}")
    for run in runs:
        scenario.problems += [*(differences(expected, run) if expected else []), *unfinished(run)]
    scenario.has_run = case.num_runs > 0
    scenario.result = observed(site.log(), jobs, restarts, len(runs))
    wait(lambda: slurm.idle_nodes() == len(NODES), "nodes are not idle after the job")
    return site.run


def observed(log: str, jobs: Sequence[dict[str, str]], restarts: int, num_runs: int) -> str:
    """Describe what a job did, from its output and Slurm's records."""
    signals = dict.fromkeys(re.findall(r"^requeue +(\w+) after step", log, re.MULTILINE))
    retries = len(re.findall(r"^starting ", log, re.MULTILINE)) - restarts - num_runs
    parts = [
        f"{num_runs} runs" * (num_runs > 1),
        *(f"saved on {name}" for name in signals),
        f"requeued {times(restarts)}" * (restarts > 0),
        f"started again in the allocation {times(retries)}" * (retries > 0),
        "resumed" * ("resumes   after step" in log),
        "not restarted" * (restarts == 0 and retries <= 0),
        *(f"exit code {job['ExitCode'].partition(':')[0]}" for job in jobs if job.get("JobState") == "FAILED"),
    ]
    return ", ".join(filter(None, parts))


def times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


# The scenarios of mpirun and mpiexec: an action, and the signal and its receiver.

MPI_SCENARIOS: dict[str, tuple[str, signal.Signals | None, str]] = {
    UNDISTURBED: ("none", None, ""),
    "usr1": ("SIGUSR1 to mpiexec", signal.SIGUSR1, "launcher"),
    "term": ("SIGTERM to mpiexec", signal.SIGTERM, "launcher"),
    "kill": ("kill -9 of a rank", signal.SIGKILL, "rank"),
}
NUM_RANKS = 3
OPEN_MPI, MPICH = "Open MPI", "MPICH"
MPI_COMMANDS = {
    OPEN_MPI: ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n", str(NUM_RANKS)],
    MPICH: ["mpiexec.hydra", "-n", str(NUM_RANKS)],
}
MPI_RANK = {OPEN_MPI: "OMPI_COMM_WORLD_RANK", MPICH: "PMI_RANK"}


class MpiSite:
    def __init__(self, launcher: str, folder: Path, recipe: Path) -> None:
        self.launcher, self.folder, self.run = launcher, folder, folder / "run"
        self.mark = f"{os.getpid()}-{folder.name}"
        self.command = [
            *MPI_COMMANDS[launcher],
            *(*MEGABATCH, "train", str(recipe), f"run.dir={self.run}", "run.preempt_signal=SIGUSR1"),
        ]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        ours = {MARK: self.mark, "OMP_NUM_THREADS": "1"}
        kept = {name: value for name, value in os.environ.items() if name not in FOREIGN}
        with (self.folder / LOG).open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=kept | ours,
                start_new_session=True,
                preexec_fn=partial(begin_child, os.getpid()),
            )

    def ranks(self) -> list[int]:
        """Return the process ids of the ranks in their order."""
        name, found = MPI_RANK[self.launcher], {}
        for process in marked(self.mark):
            rank = environment_of(process).get(name)
            if rank is not None and name not in environment_of(parent_of(process)):
                found[int(rank)] = process
        return [found[rank] for rank in sorted(found)]

    def strike(self, number: signal.Signals, receiver: str) -> None:
        assert self.process
        watch = Watch(self.run)
        wait(lambda: watch.look().step >= STEP or self.process.poll() is not None, f"no step {STEP}")  # type: ignore[union-attr]
        send([self.process.pid] if receiver == "launcher" else self.ranks()[1:2], number)

    def wait(self) -> int:
        assert self.process
        try:
            return self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise UserError(f"{self.launcher} did not end within {PATIENCE_S:g} s") from None

    def end(self) -> None:
        end_marked(self.mark)
        if self.process:
            self.process.wait()


def run_mpi(launcher: str, folder: Path, recipe: Path, scenario: Scenario, expected: Path | None) -> Path:
    """Run a scenario of MPI; return the run's folder."""
    _, number, receiver = MPI_SCENARIOS[scenario.name]
    folder.mkdir()
    site, codes = MpiSite(launcher, folder, recipe), list[int]()
    try:
        site.start()
        if number:
            site.strike(number, receiver)
        codes.append(site.wait())
        while codes[-1] and len(codes) < MOST_STARTS:  # as a batch system does
            site.start()
            codes.append(site.wait())
    except UserError as error:
        scenario.problems.append(str(error))
    left = len(marked(site.mark))
    site.end()
    output = (folder / LOG).read_text(errors="replace")
    scenario.problems += [f"{left} processes remain"] * (left > 0)
    scenario.problems += ["escape codes in the output"] * ("\x1b" in output)
    if number == signal.SIGUSR1 and "requeue   " not in output:  # after SIGTERM, Open MPI may kill rank 0 too soon
        scenario.problems.append("no line `requeue` in the output")
    if number and codes[1:] != [0]:
        scenario.problems.append(f"exit codes {codes}, expected one failure and then 0")
    reported = next((line for line in output.splitlines() if line.startswith("megabatch: rank")), "")
    named = f", {reported.partition(':')[2].partition(':')[0].strip()} reported" if reported else ""
    saved = "saved, " if "requeue   " in output else ""
    scenario.result = f"{saved}exit code {codes[0]}{named}; started again, resumed" if number and codes else ""
    scenario.problems += [*(differences(expected, site.run) if expected else []), *unfinished(site.run)]
    return site.run


def installed_mpi() -> list[str]:
    """Return the MPIs that are installed. Raise UserError if there are none."""
    found = [launcher for launcher, command in MPI_COMMANDS.items() if which(command[0])]
    if not found:
        raise UserError("--mpi needs mpirun.openmpi or mpiexec.hydra; install openmpi-bin or mpich")
    for launcher in found:
        MPI_COMMANDS[launcher][0] = which(MPI_COMMANDS[launcher][0])
    return found


def which(program: str) -> str:
    return shutil.which(program) or shutil.which(program, path=str(Path(sys.executable).parent)) or ""


def version_of(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    found = re.search(r"\d+\.\d+[\w.]*", done.stdout)
    return found[0] if found else "?"


def run_launchers(recipe: str, uses_slurm: bool, uses_mpi: bool, cases: Sequence[str]) -> LauncherReport:
    """Run the scenarios of Slurm and of MPI, or only those in `cases`, and print a line for each and a table."""
    known = {**(SLURM_SCENARIOS if uses_slurm else {}), **(MPI_SCENARIOS if uses_mpi else {})}
    for case in cases:
        require_one_of("--case", case, known)
    if uses_slurm:
        require_slurm()
    launchers = installed_mpi() if uses_mpi else []
    console = Terminal()
    versions = [f"megabatch {__version__}, torch {torch.__version__}, Python {platform.python_version()}"]
    if uses_slurm:
        versions.append(f"Slurm {version_of('slurmctld', '-V')}")
    versions += [f"{each} {version_of(MPI_COMMANDS[each][0], '--version')}" for each in launchers]
    report = LauncherReport(versions=", ".join(versions))
    console.row("chaos", report.versions, WIDTH)
    folder = Path(mkdtemp(prefix="chaos-"))
    (folder / "recipe.toml").write_text(recipe)
    try:
        with stop_signals(), ExitStack() as stack:
            if uses_slurm:
                slurm = stack.enter_context(slurm_cluster(folder / HEAD))
                run_all("Slurm", SLURM_SCENARIOS, partial(run_slurm, slurm), folder, cases, report, console)
            for launcher in launchers:
                run_all(launcher, MPI_SCENARIOS, partial(run_mpi, launcher), folder, cases, report, console)
    finally:
        if report.holds:
            shutil.rmtree(folder)
        else:
            console.row("files", f"are in {folder}", WIDTH)
    finish(report, console)
    return report


def run_all(
    launcher: str,
    scenarios: dict[str, SlurmCase] | dict[str, tuple[str, signal.Signals | None, str]],
    run: Callable[[Path, Path, Scenario, Path | None], Path],
    folder: Path,
    cases: Sequence[str],
    report: LauncherReport,
    console: Terminal,
) -> None:
    expected = None
    for name, (action, *_) in scenarios.items():
        if name != UNDISTURBED and cases and name not in cases:
            continue
        scenario, began_s = Scenario(launcher=launcher, name=name, action=action), time.monotonic()
        report.scenarios.append(scenario)
        found = run(folder / f"{launcher.replace(' ', '-')}-{name}", folder / "recipe.toml", scenario, expected)
        scenario.seconds = time.monotonic() - began_s
        expected = expected or found
        console.row(name, f"{scenario.bits}, {scenario.seconds:.0f} s, {launcher}: {scenario.result or action}", WIDTH)
        for problem in scenario.problems:
            console.row("", problem, WIDTH)


def finish(report: LauncherReport, console: Terminal) -> None:
    table = plain_table()
    for column in ("launcher", "scenario", "action", "result", "bits"):
        table.add_column(column)
    for each in report.scenarios:
        table.add_row(each.launcher, each.name, each.action, each.result or "finished", each.bits)
    console.print()
    console.print(table)
    console.print()
    failed = [f"{each.launcher} {each.name}" for each in report.scenarios if each.problems]
    text = f"{', '.join(failed)}" if failed else f"{len(report.scenarios)} scenarios, bitwise identical"
    console.row("FAILED" if failed else "survived", text, WIDTH)
