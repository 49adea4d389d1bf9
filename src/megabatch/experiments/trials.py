"""Trials: ordinary runs, each in a process and a folder of its own, several at a time.

FOLDER/NAME is a trial's run, FOLDER/NAME.log what it said.  Trials that have finished or diverged are not run again,
and those that were interrupted resume from their checkpoint: whoever runs them may be stopped or killed at any moment,
and the same call resumes.
"""

import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from msgspec import Struct
from rich.text import Text

from megabatch.config.loading import load_config, silent
from megabatch.config.schema import RunConfig
from megabatch.errors import UserError
from megabatch.io.disk import make_private, private
from megabatch.io.terminal import Terminal
from megabatch.ranks.discover import discover
from megabatch.ranks.machine import usable_cores
from megabatch.ranks.signals import Stopped, StopRequest, die_with
from megabatch.ranks.world import choose_device
from megabatch.runs.folder import hold
from megabatch.runs.reader import is_run, last_record, read_summary
from megabatch.runs.records import Summary
from megabatch.text import one_line
from megabatch.training.checkpoint.resume import why_other

# What is said of trials while they run: a line for each that ends; on a terminal also how far the running ones are.


class SweepScreen:
    """`num_trials` are all that there will be, also those that are not known yet."""

    def __init__(self, num_trials: int, jobs: int) -> None:
        self.console = Terminal()
        self.num_trials, self.jobs = num_trials, jobs
        self.trials: dict[str, Trial] = {}
        self.done: dict[str, Summary] = {}
        self.live = self.console.status(Text(""))

    def say(self, name: str, text: str) -> None:
        self.console.row(name, text)

    def expect(self, trials: Sequence["Trial"], done: Mapping[str, Summary]) -> None:
        """Before trials are run: those, and the results that are there already."""
        new = done.keys() - self.done.keys()
        if new:
            self.say("before", f"{len(new)} {'trials have' if len(new) > 1 else 'trial has'} been run; not again")
        self.trials |= {trial.name: trial for trial in trials}
        self.done |= done

    def show_end(self, trial: "Trial", summary: Summary) -> None:
        self.done[trial.name] = summary
        left_s = seconds_left(list(self.trials.values()), self.done, self.num_trials, self.jobs)
        outlook = f"; about {show_duration(left_s)} to go" if left_s else ""
        self.console.print(
            f"{len(self.done)}/{self.num_trials}  {trial.name}: {show_result(summary)} "
            f"({show_duration(summary.wall_s)}){outlook}"
        )

    def show_running(self, folders: Sequence[Path]) -> None:
        if self.console.is_terminal:
            text = ", ".join(f"{folder.name} epoch {epoch_of(folder):.1f}" for folder in folders)
            self.live.update(Text(one_line(text)[: self.console.width - 3]))  # one line
            self.live.start()

    def show_stop(self, num_running: int, by_signal: bool) -> None:
        self.live.stop()
        trials = f"{num_running} trial{'s' * (num_running > 1)}"
        remedy = "; once more to end at once" * by_signal
        self.say("stopping", f"{trials}, after this step and a checkpoint{remedy}")

    def close(self) -> None:
        self.live.stop()


def seconds_left(trials: Sequence["Trial"], done: Mapping[str, Summary], num_trials: int, jobs: int) -> float | None:
    """A trial takes as long as those of its kind have taken, or else as all have; None if none has finished."""
    took_s = {
        trial: done[trial.name].wall_s
        for trial in trials
        if trial.name in done and done[trial.name].status == "finished"  # those that diverge end early
    }
    if not took_s:
        return None
    usual_s = statistics.fmean(took_s.values())
    expected_s = [usual_s] * (num_trials - len(trials))
    for trial in trials:
        if trial.name not in done:
            alike = [wall_s for other, wall_s in took_s.items() if kind_of(other) == kind_of(trial)]
            expected_s.append(statistics.fmean(alike) if alike else usual_s)
    return max(sum(expected_s) / jobs, max(expected_s, default=0.0))


def kind_of(trial: "Trial") -> tuple[str, ...]:
    """What trials of the same length have in common: all but seed, learning rate, and what takes little time."""
    ignored = ("seed=", "optim.learning_rate=", "data.validation=", "train.evaluate_every=", "checkpoint.")
    return (trial.recipe, *(override for override in trial.overrides if not override.startswith(ignored)))


def show_result(summary: Summary) -> str:
    return f"diverged after step {summary.steps}" if summary.status == "diverged" else f"{summary.top1:.4f}"


def show_duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def epoch_of(folder: Path) -> float:
    """How far a run is by its last whole row; 0 before the first."""
    with suppress(UserError):  # the run itself will say what is wrong with it
        if record := last_record(folder):
            return record.epoch
    return 0.0


MOST_JOBS = 4096  # at a time
POLL_S = 0.2
STOP_TIMEOUT_S = 600  # a step, an evaluation or a checkpoint may be under way


class Trial(Struct, frozen=True):
    """A run of a recipe (a name or a TOML file) with overrides."""

    name: str  # of its folder
    recipe: str
    overrides: tuple[str, ...] = ()


def run_trials(
    trials: Sequence[Trial],
    folder: Path,
    jobs: int,
    screen: "SweepScreen",
    on_end: Callable[[Trial, Summary], None] = lambda trial, summary: None,
) -> list[Summary]:
    """Runs what has not been run, `jobs` at a time; returns all summaries, of status finished or diverged.

    `on_end` is told of each as soon as it is there, those of earlier calls first.  A trial that fails otherwise stops
    the others and is a UserError; a signal stops all, and is `Stopped`.
    """
    names = [trial.name for trial in trials]
    assert len({*names}) == len(names) and all(re.fullmatch(r"[\w.+-]+", name) for name in names), names
    info = discover()
    if info:
        raise UserError(
            f"this is rank {info.rank} of {info.num_ranks}, and trials are runs of one rank each; "
            "start it without torchrun, srun or mpiexec"
        )
    configs = {trial.name: load_config(trial.recipe, trial.overrides, report=silent) for trial in trials}
    with held(folder), closing(screen), StopRequest() as stop:
        found = {trial.name: result_in(folder / trial.name, configs[trial.name]) for trial in trials}
        results = {name: summary for name, summary in found.items() if summary}
        screen.expect(trials, results)
        for trial in trials:
            if trial.name in results:
                on_end(trial, results[trial.name])
        waiting = deque(trial for trial in trials if trial.name not in results)
        with stopped_at_the_end(stop, screen) as running:
            while (waiting or running) and not stop.received():
                ended = [process for process in running if process.popen.poll() is not None]
                for process in ended:
                    running.remove(process)
                    name = process.trial.name
                    results[name] = require_result(process, folder / name, configs[name])
                    screen.show_end(process.trial, results[name])
                while waiting and len(running) < jobs:
                    trial = waiting.popleft()
                    running.append(start(trial, configs[trial.name], folder))
                for process in ended:  # while the next ones run
                    on_end(process.trial, results[process.trial.name])
                screen.show_running([folder / process.trial.name for process in running])
                time.sleep(POLL_S)
    return [results[name] for name in names]


class Process(Struct, frozen=True):
    """A trial that has been started."""

    trial: Trial
    popen: subprocess.Popen[bytes]
    log: Path
    log_start: int  # where its lines begin: above are those of earlier attempts


def start(trial: Trial, config: RunConfig, folder: Path) -> Process:
    arguments = [trial.recipe, *trial.overrides, f"run.dir={folder / trial.name}"]
    if config.run.threads is None:
        arguments.append("run.threads=1")  # whatever runs beside it, the same numbers to the bit
    command = [sys.executable, "-P", "-m", "megabatch", "train", *arguments, "--ranks", "1"]
    log = folder / f"{trial.name}.log"
    with open(log, "ab", opener=private) as file:
        log_start = file.tell()
        popen = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches us alone: a second one would end it without a checkpoint
            preexec_fn=partial(begin_child, os.getpid()),
        )
    return Process(trial, popen, log, log_start)


def begin_child(parent: int) -> None:
    """In the new process: it hears SIGINT, which a shell's background jobs ignore, and dies with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    die_with(parent)


@contextmanager
def stopped_at_the_end(stop: StopRequest, screen: "SweepScreen") -> Iterator[list[Process]]:
    """A list of processes, none of which outlives it: after a failure or a signal they are asked to stop."""
    running: list[Process] = []
    try:
        yield running
        if stop.number is not None:
            raise Stopped(stop.number)
    except KeyboardInterrupt:  # the second signal
        raise Stopped(stop.number or signal.SIGINT) from None
    except Exception as error:
        if running:
            screen.show_stop(len(running), by_signal=isinstance(error, Stopped))
            with suppress(KeyboardInterrupt):
                stop_all(running)
        raise
    finally:
        for process in running:
            process.popen.kill()  # the kernel kills its rank with it
            process.popen.wait()


def stop_all(running: Sequence[Process]) -> None:
    """Asks runs to write a checkpoint and end, and waits for them."""
    deadline_s = time.monotonic() + STOP_TIMEOUT_S
    for process in running:
        process.popen.send_signal(signal.SIGINT)
    for process in running:
        with suppress(subprocess.TimeoutExpired):
            process.popen.wait(max(0.0, deadline_s - time.monotonic()))


def result_in(folder: Path, config: RunConfig) -> Summary | None:
    """What the trial in `folder` has come to; None if that has yet to be seen."""
    if not is_run(folder):
        return None
    difference = why_other(folder, config)
    if difference:
        raise UserError(f"{folder} {difference}; give another folder, or remove this one")
    summary = read_summary(folder)
    return summary if summary and summary.status in ("finished", "diverged") else None


def score_of(summary: Summary) -> float | None:
    """Top-1; None if it diverged."""
    return summary.top1 if summary.status == "finished" else None


Tried = TypeVar("Tried")  # a learning rate, or one with a momentum


def scores_of(results: Mapping[Tried, Summary]) -> dict[Tried, float | None]:
    return {tried: score_of(summary) for tried, summary in results.items()}


def require_result(process: Process, folder: Path, config: RunConfig) -> Summary:
    """Of a trial that has ended."""
    result = result_in(folder, config)  # compares again: the recipe's file may have changed
    if result is None:
        raise UserError(f"trial {process.trial.name} failed: {why_failed(process)}; its log is {process.log}")
    return result


def why_failed(process: Process) -> str:
    """The line that `megabatch train` ends with."""
    said = process.log.read_bytes()[process.log_start :].decode(errors="replace").splitlines()
    lines = [line.removeprefix("megabatch: ") for line in said if line.startswith("megabatch: ")]
    code = process.popen.returncode
    if code < 0:
        return f"it was ended by {signal.Signals(-code).name}"
    return lines[-1] if lines else f"it ended with exit code {code}"


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Two that run trials in one folder would run each of them twice."""
    try:
        make_private(folder)
        lock = hold(folder, setting="folder")
    except OSError as error:
        raise UserError(f"folder={str(folder)!r} cannot be used ({error.strerror}); give another") from None
    with lock:
        yield


def choose_jobs(wanted: int | None, device: str) -> int:
    """How many trials run at a time: one per core; on CUDA one, for all would take the first GPU."""
    if wanted is not None and wanted < 1:
        raise UserError(f"--jobs {wanted}: at least one trial must run at a time; nearest: --jobs 1")
    if wanted is not None and wanted > MOST_JOBS:
        raise UserError(f"--jobs {wanted}: expected at most {MOST_JOBS:,} at a time; nearest: --jobs {MOST_JOBS}")
    return wanted or (1 if choose_device(device) == "cuda" else len(usable_cores()))
