"""What is said of trials while they run: a line for each that ends; on a terminal also how far the running ones are."""

import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from rich.text import Text

from megabatch.errors import UserError
from megabatch.runs.reader import last_record
from megabatch.runs.records import Summary
from megabatch.sweep.trials import Trial
from megabatch.terminal import Terminal
from megabatch.text import one_line


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

    def expect(self, trials: Sequence[Trial], done: Mapping[str, Summary]) -> None:
        """Before trials are run: those, and the results that are there already."""
        new = done.keys() - self.done.keys()
        if new:
            self.say("before", f"{len(new)} {'trials have' if len(new) > 1 else 'trial has'} been run; not again")
        self.trials |= {trial.name: trial for trial in trials}
        self.done |= done

    def show_end(self, trial: Trial, summary: Summary) -> None:
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


def seconds_left(trials: Sequence[Trial], done: Mapping[str, Summary], num_trials: int, jobs: int) -> float | None:
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


def kind_of(trial: Trial) -> tuple[str, ...]:
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
