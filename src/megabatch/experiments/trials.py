"""Trials: ordinary runs, each in a separate process and folder, several at a time.

FOLDER/NAME is the run of a trial and FOLDER/NAME.log its output.  Trials that finished or diverged are not run again,
and interrupted trials resume from their checkpoint.  The caller may be stopped or killed at any time; the same call
resumes.
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
from megabatch.io.numbers import duration, plural
from megabatch.io.terminal import Terminal
from megabatch.ranks.devices import choose_device
from megabatch.ranks.discover import discover
from megabatch.ranks.machine import usable_cores
from megabatch.ranks.signals import Stopped, StopRequest, die_with
from megabatch.runs.folder import hold
from megabatch.runs.reader import is_run, last_record, read_summary
from megabatch.runs.records import Summary
from megabatch.text import one_line
from megabatch.training.checkpoint.resume import recipe_difference

MOST_JOBS = 4096
POLL_S = 0.2
STOP_TIMEOUT_S = 600  # a step, an evaluation or a checkpoint may be in progress


class SweepScreen:
    """Output of a sweep: a line for each trial that ends and, on a terminal, the progress of running trials.

    `num_trials` includes trials that are not known yet.
    """

    def __init__(self, num_trials: int, jobs: int) -> None:
        self.console = Terminal()
        self.num_trials, self.jobs = num_trials, jobs
        self.trials: dict[str, Trial] = {}
        self.done: dict[str, Summary] = {}
        self.live = self.console.status(Text(""))

    def row(self, name: str, text: str) -> None:
        self.console.row(name, text)

    def expect(self, trials: Sequence["Trial"], done: Mapping[str, Summary]) -> None:
        """Add trials to run and the results of trials that are complete already."""
        new = done.keys() - self.done.keys()
        if new:
            self.row("before", f"{plural(len(new), 'trial')} already complete")
        self.trials |= {trial.name: trial for trial in trials}
        self.done |= done

    def show_end(self, trial: "Trial", summary: Summary) -> None:
        self.done[trial.name] = summary
        left_s = seconds_left(list(self.trials.values()), self.done, self.num_trials, self.jobs)
        outlook = f"; about {duration(left_s)} to go" if left_s else ""
        self.console.print(
            f"{len(self.done)}/{self.num_trials}  {trial.name}: {show_result(summary)} "
            f"({duration(summary.wall_s)}){outlook}"
        )

    def show_running(self, folders: Sequence[Path]) -> None:
        if self.console.is_live:
            text = ", ".join(f"{folder.name} epoch {epoch_of(folder):.1f}" for folder in folders)
            self.live.update(Text(one_line(text)[: self.console.width - 3]))  # one line
            self.live.start()

    def show_stop(self, num_running: int, by_signal: bool) -> None:
        self.live.stop()
        trials = plural(num_running, "trial")
        remedy = "; press Ctrl-C again to stop immediately" * by_signal
        self.row("stopping", f"{trials}, after the current step and a checkpoint{remedy}")

    def close(self) -> None:
        self.live.stop()


def seconds_left(trials: Sequence["Trial"], done: Mapping[str, Summary], num_trials: int, jobs: int) -> float | None:
    """Estimate the remaining time from finished trials of the same kind, or else of any kind; None without any."""
    took_s = {
        trial: done[trial.name].wall_s
        for trial in trials
        if trial.name in done and done[trial.name].status == "finished"  # diverged trials end early
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
    """Return the settings that trials of the same duration share."""
    ignored = ("seed=", "optim.learning_rate=", "data.validation=", "train.evaluate_every=", "checkpoint.")
    return (trial.recipe, *(override for override in trial.overrides if not override.startswith(ignored)))


def show_result(summary: Summary) -> str:
    return f"diverged after step {summary.steps}" if summary.status == "diverged" else f"{summary.top1:.4f}"


def epoch_of(folder: Path) -> float:
    """Return the epoch of a run's last complete row; 0 before the first."""
    with suppress(UserError):  # the run itself reports the error
        if record := last_record(folder):
            return record.epoch
    return 0.0


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
    """Run the trials that are not complete, `jobs` at a time; return all summaries, finished or diverged.

    `on_end` is called for each result as soon as it is available, those of earlier calls first.  A trial that fails
    stops the others and raises UserError.  A signal stops all and raises `Stopped`.
    """
    names = [trial.name for trial in trials]
    assert len({*names}) == len(names) and all(re.fullmatch(r"[\w.+-]+", name) for name in names), names
    info = discover()
    if info:
        raise UserError(
            f"this process is rank {info.rank} of {info.num_ranks}, but trials are runs of one rank each; "
            "start without torchrun, srun or mpiexec"
        )
    configs = {trial.name: load_config(trial.recipe, trial.overrides, report=silent) for trial in trials}
    with locked(folder), closing(screen), StopRequest() as stop:
        found = {trial.name: result_in(folder / trial.name, configs[trial.name]) for trial in trials}
        results = {name: summary for name, summary in found.items() if summary}
        screen.expect(trials, results)
        for trial in trials:
            if trial.name in results:
                on_end(trial, results[trial.name])
        waiting = deque(trial for trial in trials if trial.name not in results)
        with stop_at_exit(stop, screen) as running:
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
    """A trial that was started."""

    trial: Trial
    popen: subprocess.Popen[bytes]
    log: Path
    log_start: int  # offset after the output of earlier attempts


def start(trial: Trial, config: RunConfig, folder: Path) -> Process:
    arguments = [trial.recipe, *trial.overrides, f"run.dir={folder / trial.name}"]
    if config.run.threads is None:
        arguments.append("run.threads=1")  # bitwise the same results for any number of jobs
    command = [sys.executable, "-P", "-m", "megabatch", "train", *arguments, "--ranks", "1"]
    log = folder / f"{trial.name}.log"
    with open(log, "ab", opener=private) as file:
        log_start = file.tell()
        popen = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches only us: a second one would end it without a checkpoint
            preexec_fn=partial(prepare_child, os.getpid()),
        )
    return Process(trial, popen, log, log_start)


def prepare_child(parent: int) -> None:
    """Restore SIGINT, which background jobs of a shell ignore, and die with the parent."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    die_with(parent)


@contextmanager
def stop_at_exit(stop: StopRequest, screen: "SweepScreen") -> Iterator[list[Process]]:
    """Yield a list of processes that do not outlive the block: after a failure or a signal they are stopped."""
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
    """Ask the runs to write a checkpoint and end, and wait for them."""
    deadline_s = time.monotonic() + STOP_TIMEOUT_S
    for process in running:
        process.popen.send_signal(signal.SIGINT)
    for process in running:
        with suppress(subprocess.TimeoutExpired):
            process.popen.wait(max(0.0, deadline_s - time.monotonic()))


def result_in(folder: Path, config: RunConfig) -> Summary | None:
    """Return the summary of the trial in `folder`; None if it is not complete."""
    if not is_run(folder):
        return None
    difference = recipe_difference(folder, config)
    if difference:
        raise UserError(f"{folder} {difference}; use another folder or delete this one")
    summary = read_summary(folder)
    return summary if summary and summary.status in ("finished", "diverged") else None


def score_of(summary: Summary) -> float | None:
    """Return the top-1; None if the trial diverged."""
    return summary.top1 if summary.status == "finished" else None


Tried = TypeVar("Tried")  # a learning rate, or a point with momentum


def scores_of(results: Mapping[Tried, Summary]) -> dict[Tried, float | None]:
    return {tried: score_of(summary) for tried, summary in results.items()}


def require_result(process: Process, folder: Path, config: RunConfig) -> Summary:
    """Return the summary of a trial that ended; raise UserError if it failed."""
    result = result_in(folder, config)  # compares again: the recipe may have changed
    if result is None:
        raise UserError(f"trial {process.trial.name} failed: {why_failed(process)}; its log is {process.log}")
    return result


def why_failed(process: Process) -> str:
    """Return the last error line of `megabatch train`."""
    output = process.log.read_bytes()[process.log_start :].decode(errors="replace").splitlines()
    lines = [line.removeprefix("megabatch: ") for line in output if line.startswith("megabatch: ")]
    code = process.popen.returncode
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return lines[-1] if lines else f"exit code {code}"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the folder: two callers would run each trial twice."""
    try:
        make_private(folder)
        lock = hold(folder, setting="folder")
    except OSError as error:
        raise UserError(f"folder={str(folder)!r} cannot be used ({error.strerror}); use another") from None
    with lock:
        yield


def choose_jobs(wanted: int | None, device: str) -> int:
    """Return the number of parallel trials: one per core; on CUDA one, since all would use the first GPU."""
    if wanted is not None and wanted < 1:
        raise UserError(f"--jobs {wanted}: expected at least 1; nearest: --jobs 1")
    if wanted is not None and wanted > MOST_JOBS:
        raise UserError(f"--jobs {wanted}: expected at most {MOST_JOBS:,}; nearest: --jobs {MOST_JOBS}")
    return wanted or (1 if choose_device(device) == "cuda" else len(usable_cores()))
