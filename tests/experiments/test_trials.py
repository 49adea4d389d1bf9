"""Trials in real processes, with files and signals."""

import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from megabatch.config.loading import load_config
from megabatch.errors import UserError
from megabatch.experiments.trials import SweepScreen, Trial, epoch_of, run_trials, seconds_left
from megabatch.ranks.signals import Stopped
from megabatch.runs.folder import hold
from megabatch.runs.reader import read_summary
from megabatch.runs.records import Status, Summary
from megabatch.runs.totals import RunTotals
from tests.support.processes import descendants, is_alive, wait_until
from tests.support.small_runs import SMALL_RUN

pytestmark = pytest.mark.ranks  # starts processes

STUDY = Path("study")


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("COLUMNS", "120")


def summary_of(status: Status, wall_s: float = 1.0) -> Summary:
    return RunTotals(global_batch=1, target_top1=None, wall_s=wall_s).summary(status)


def write_result(trial: Trial, summary: Summary) -> None:
    """Write the files of a finished trial."""
    folder = STUDY / trial.name
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(load_config(trial.recipe, trial.overrides).to_toml())
    (folder / "summary.json").write_bytes(msgspec.json.encode(summary))


def run(*trials: Trial, jobs: int = 2) -> list[Summary]:
    return run_trials(trials, STUDY, jobs, SweepScreen(len(trials), jobs))


def test_finished_and_diverged_trials_are_not_run_again() -> None:
    trials = [Trial("a", "smoke"), Trial("b", "smoke", ("seed=2",))]
    expected = [summary_of("finished"), summary_of("diverged")]
    for trial, summary in zip(trials, expected, strict=True):
        write_result(trial, summary)
    assert run(*trials) == expected
    assert run(*reversed(trials)) == expected[::-1]
    assert not list(STUDY.glob("*.log"))


def test_trial_of_another_recipe_is_rejected_before_any_run() -> None:
    write_result(Trial("b", "smoke", ("optim.learning_rate=0.3",)), summary_of("finished"))
    message = "study/b holds a run with optim.learning_rate=0.3, not 0.1; use another folder or delete this one"
    with pytest.raises(UserError, match=re.escape(message)):
        run(Trial("a", "smoke"), Trial("b", "smoke"))
    assert not list(STUDY.glob("*.log"))


def test_two_studies_never_share_a_folder() -> None:
    STUDY.mkdir()
    with hold(STUDY), pytest.raises(UserError, match=f"folder='study' is in use by process {os.getpid()}; wait for it"):
        run(Trial("a", "smoke"))


def test_ranks_of_a_launcher_cannot_run_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"rank 1 of 4, .* start without torchrun"):
        run(Trial("a", "smoke"))


def test_remaining_time_uses_trials_of_the_same_kind() -> None:
    trials = [
        Trial(f"{length}-{seed}", "smoke", (f"train.epochs={epochs}", f"seed={seed}", f"optim.learning_rate={seed}"))
        for length, epochs in (("short", 2), ("long", 20))
        for seed in (1, 2, 3)
    ]
    done = {"short-1": summary_of("finished", 10.0), "long-1": summary_of("finished", 100.0)}
    done["short-2"] = summary_of("diverged", 1.0)  # not used in the estimate
    assert seconds_left(trials, done, num_trials=6, jobs=1) == 10 + 100 + 100
    assert seconds_left(trials, done, num_trials=6, jobs=2) == 105
    assert seconds_left(trials, done, num_trials=6, jobs=8) == 100  # a trial is not divided among jobs
    assert seconds_left(trials, done, num_trials=8, jobs=1) == 210 + 2 * 55
    assert seconds_left(trials, {}, num_trials=6, jobs=1) is None


def test_failed_trial_stops_the_others_with_a_user_error() -> None:
    before = {*descendants(os.getpid())}  # rank pools of other tests

    class Watching(SweepScreen):
        processes: frozenset[int] = frozenset()

        def show_running(self, folders: Sequence[Path]) -> None:
            self.processes |= {*descendants(os.getpid())} - before

    trials = [Trial("a", "fashion", (*SMALL_RUN, "train.epochs=9000")), Trial("b", "smoke", ("data.source=nowhere",))]
    screen = Watching(len(trials), jobs=2)
    with pytest.raises(UserError, match=r"trial b failed: data.source='nowhere' .*study/b.log"):
        run_trials(trials, STUDY, 2, screen)
    assert len(screen.processes) >= 2
    # The kernel kills a rank a moment after the process that started it.
    wait_until(lambda: not any(is_alive(process) for process in screen.processes), at_most_s=10)


def test_signal_stops_trials_at_a_checkpoint() -> None:
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
