"""Trials that run are real: processes, files, signals."""

import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from megabatch.config.loading import load_config
from megabatch.errors import UserError
from megabatch.experiments.trials import SweepScreen, Trial, epoch_of, run_trials, seconds_left, show_duration
from megabatch.ranks.signals import Stopped
from megabatch.runs.folder import hold
from megabatch.runs.reader import read_summary
from megabatch.runs.records import Status, Summary
from megabatch.runs.totals import RunTotals
from tests.support.processes import descendants, is_alive, wait_until
from tests.support.small_runs import SMALL_RUN

STUDY = Path("study")


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("COLUMNS", "120")


def summary_of(status: Status, wall_s: float = 1.0) -> Summary:
    return RunTotals(global_batch=1, target_top1=None, wall_s=wall_s).summary(status)


def leave_behind(trial: Trial, summary: Summary) -> None:
    """What the trial leaves when it has been run."""
    folder = STUDY / trial.name
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(load_config(trial.recipe, trial.overrides).to_toml())
    (folder / "summary.json").write_bytes(msgspec.json.encode(summary))


def run(*trials: Trial, jobs: int = 2) -> list[Summary]:
    return run_trials(trials, STUDY, jobs, SweepScreen(len(trials), jobs))


def test_what_has_finished_or_diverged_is_not_run_again() -> None:
    trials = [Trial("a", "smoke"), Trial("b", "smoke", ("seed=2",))]
    expected = [summary_of("finished"), summary_of("diverged")]
    for trial, summary in zip(trials, expected, strict=True):
        leave_behind(trial, summary)
    assert run(*trials) == expected
    assert run(*reversed(trials)) == expected[::-1]
    assert not list(STUDY.glob("*.log"))


def test_a_trial_of_another_recipe_is_refused_before_anything_is_run() -> None:
    leave_behind(Trial("b", "smoke", ("optim.learning_rate=0.3",)), summary_of("finished"))
    message = "study/b holds a run with optim.learning_rate=0.3, not 0.1; give another folder, or remove this one"
    with pytest.raises(UserError, match=re.escape(message)):
        run(Trial("a", "smoke"), Trial("b", "smoke"))
    assert not list(STUDY.glob("*.log"))


def test_two_studies_never_share_a_folder() -> None:
    STUDY.mkdir()
    with hold(STUDY), pytest.raises(UserError, match=f"folder='study' is in use by process {os.getpid()}; wait for it"):
        run(Trial("a", "smoke"))


def test_a_rank_runs_no_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"this is rank 1 of 4, .* start it without torchrun"):
        run(Trial("a", "smoke"))


def test_what_is_left_is_weighed_by_the_trials_of_its_kind() -> None:
    trials = [
        Trial(f"{length}-{seed}", "smoke", (f"train.epochs={epochs}", f"seed={seed}", f"optim.learning_rate={seed}"))
        for length, epochs in (("short", 2), ("long", 20))
        for seed in (1, 2, 3)
    ]
    done = {"short-1": summary_of("finished", 10.0), "long-1": summary_of("finished", 100.0)}
    done["short-2"] = summary_of("diverged", 1.0)  # which says nothing of how long others take
    assert seconds_left(trials, done, num_trials=6, jobs=1) == 10 + 100 + 100
    assert seconds_left(trials, done, num_trials=6, jobs=2) == 105
    assert seconds_left(trials, done, num_trials=6, jobs=8) == 100  # no trial is shared out
    assert seconds_left(trials, done, num_trials=8, jobs=1) == 210 + 2 * 55
    assert seconds_left(trials, {}, num_trials=6, jobs=1) is None


def test_durations_are_told_in_two_units() -> None:
    told = {0.4: "0 s", 59.4: "59 s", 59.6: "1 min 0 s", 250.0: "4 min 10 s", 7_830.0: "2 h 10 min"}
    assert {seconds: show_duration(seconds) for seconds in told} == told


def test_a_trial_that_fails_ends_the_others_and_is_one_line() -> None:
    before = {*descendants(os.getpid())}  # pools of ranks that other tests use

    class Watching(SweepScreen):
        processes: frozenset[int] = frozenset()

        def show_running(self, folders: Sequence[Path]) -> None:
            self.processes |= {*descendants(os.getpid())} - before

    trials = [Trial("a", "fashion", (*SMALL_RUN, "train.epochs=9000")), Trial("b", "smoke", ("data.source=nowhere",))]
    screen = Watching(len(trials), jobs=2)
    with pytest.raises(
        UserError, match=r"trial b failed: data.source='nowhere' does not exist; .*its log is study/b.log"
    ):
        run_trials(trials, STUDY, 2, screen)
    assert len(screen.processes) >= 2
    # The kernel kills a rank a moment after the process that has started it.
    wait_until(lambda: not any(is_alive(process) for process in screen.processes), at_most_s=10)


def test_a_signal_stops_trials_at_a_checkpoint() -> None:
    class Impatient(SweepScreen):
        def show_running(self, folders: Sequence[Path]) -> None:
            if folders and epoch_of(folders[0]) > 0:
                os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Stopped) as stopped:
        run_trials([Trial("a", "fashion", (*SMALL_RUN, "train.epochs=9000"))], STUDY, 1, Impatient(1, jobs=1))
    assert stopped.value.signal_number == signal.SIGTERM and signal.getsignal(signal.SIGTERM) == before
    summary = read_summary(STUDY / "a")
    assert summary is not None and summary.status == "stopped" and summary.steps > 0
    assert (STUDY / "a/checkpoints/last").readlink().name == f"step-{summary.steps:08d}"
