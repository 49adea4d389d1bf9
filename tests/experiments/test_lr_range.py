"""The command `megabatch lr-range` in real processes, one of which is killed."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from megabatch.cli.app import app
from megabatch.errors import UserError
from megabatch.runs.reader import read_summary
from tests.support.processes import descendants, is_alive, wait_until
from tests.support.small_runs import SMALL_RUN

STUDY = Path("study")


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def lr_range(*words: str) -> Result:
    return CliRunner().invoke(app, ["lr-range", *words])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--low", "0"], "--low 0: a learning rate is above 0 and finite; for example --low 0.025"),
        (["--low", "3"], "--high 1.6: expected above --low 3 and finite; for example --high 192"),
        (["--low", "1", "--high", "1.01"], "too close for 4 learning rates of three digits; for example --high 64"),
        (["--coarse", "1"], "--coarse 1: expected at least 2; nearest: --coarse 2"),
        (["--trials", "3"], "nearest: --trials 4"),
        (["--jobs", "0"], "--jobs 0: expected at least 1; nearest: --jobs 1"),
        (["run.dir=x"], "run.dir=x: each trial has its own folder; use --folder"),
        (["train.epochs=1.5", "batch.global=16384"], "is less than one step of batch.global=16384"),
        (["optim.lr=1"], "there is no setting optim.lr; nearest: optim.learning_rate"),
    ],
)
def test_invalid_search_is_rejected_and_leaves_no_files(words: list[str], message: str, tmp_path: Path) -> None:
    refused = lr_range("fashion", *words)
    assert isinstance(refused.exception, UserError) and message in str(refused.exception)
    assert not list(tmp_path.iterdir())


def num_starts(name: str) -> int:
    """Return how often the trial started or resumed."""
    return (STUDY / name / "train.log").read_text().count("begins at step")


@pytest.mark.lab  # starts a search four times
def test_killed_search_leaves_no_orphans_and_resumes() -> None:
    run_words = [*SMALL_RUN, "precision.name=fp32", "train.epochs=20", "checkpoint.every_steps=9"]
    words = [*run_words, "--low", "0.01", "--high", "1e6", "--coarse", "2", "--trials", "2", "--jobs", "2"]
    words += ["--folder", "study"]
    search = subprocess.Popen([sys.executable, "-m", "megabatch", "lr-range", *words], stdout=subprocess.PIPE)
    try:
        wait_until(lambda: (STUDY / "rate-0.01/checkpoints/last").exists())
        processes = descendants(search.pid)
        assert len(processes) >= 2  # a launcher and its rank
    finally:
        search.kill()
        search.communicate()
    wait_until(lambda: not any(is_alive(process) for process in processes), at_most_s=10)
    assert read_summary(STUDY / "rate-0.01") is None

    again = lr_range(*words)
    assert again.exit_code == 0, again.output
    assert "2/2  rate-0.01: " in again.output
    assert "17 of 200 training images (1/12 of each class)" in again.output
    assert "test images are not used" in again.output
    finished = read_summary(STUDY / "rate-0.01")
    assert finished is not None and finished.status == "finished" and finished.resumed_from_step
    assert num_starts("rate-0.01") == 2
    rows = [line.split() for line in again.output.splitlines()]
    assert [row[0] for row in rows if row[-1:] == ["diverged"]] == ["1e+06"]
    assert [row[:2] for row in rows if row[-2:] == ["finished,", "best"]] == [["0.01", f"{finished.top1:.4f}"]]
    assert "0.01, the lowest that was tried" in again.output and "with --trials 6 to continue" in again.output
    settings = [word for word in run_words if not word.startswith("optim.learning_rate=")]
    command = " ".join(["megabatch train fashion", *settings, "optim.learning_rate=0.01"])
    assert again.output.splitlines()[-1] == command

    at_once = lr_range(*words)
    assert "before    2 trials already complete" in at_once.output and at_once.output.splitlines()[-1] == command
    assert num_starts("rate-0.01") == 2
    other = lr_range(*words, "seed=7")
    assert "study/rate-0.01 holds a run with seed=1, not 7; use another folder" in str(other.exception)
