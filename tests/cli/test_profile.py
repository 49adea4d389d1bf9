"""The command `megabatch profile`."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megabatch.cli.app import app
from megabatch.errors import UserError
from megabatch.simulate.profile import read_profile


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")


def profile(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megabatch", "profile", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def test_a_profile_is_printed_and_written_to_the_named_file() -> None:
    result = profile("smoke", "--seconds", "0", "--ranks", "1", "run.threads=1")
    assert result.returncode == 0, result.stderr
    assert "slowest layers" in result.stdout
    assert "written to profile-smoke.json" in result.stdout
    *_, plan, simulate = result.stdout.splitlines()
    assert plan == "megabatch plan smoke run.threads=1"
    words = simulate.removeprefix("megabatch ").replace("--cluster this", "--cluster cpu-1gbe").split()
    assert "--profile profile-smoke.json" in simulate and "cpu-1gbe" in words
    assert "small_cnn" in CliRunner().invoke(app, words, catch_exceptions=False).output
    assert read_profile(Path("profile-smoke.json")).threads == 1


def test_the_timed_rank_has_as_many_threads_as_a_rank_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[int, int]] = []
    monkeypatch.setattr(
        "megabatch.cli.profile.start_ranks",
        lambda arguments, num_ranks, recipe: started.append((num_ranks, tomllib.loads(recipe)["run"]["threads"])),
    )
    monkeypatch.setattr("megabatch.ranks.machine.usable_cores", lambda: frozenset(range(8)))
    for words in (["--ranks", "1"], ["--ranks", "2"], ["--ranks", "4"], ["--ranks", "2", "run.threads=3"]):
        assert CliRunner().invoke(app, ["profile", "smoke", *words], catch_exceptions=False).exit_code == 0
    assert started == [(1, 8), (1, 4), (1, 2), (1, 3)]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["nowhere"], "recipe 'nowhere' is neither"),
        (["smoke", "batch.mikro=4"], r"there is no setting batch.mikro; nearest: batch.micro"),
        (["smoke", "batch.micro=1"], r"batch.micro=1: .*nearest: batch.micro=4"),
        (["smoke", "--json", "nowhere/p.json"], r"the folder .*nowhere does not exist"),
        (["smoke", "--json", "."], "is a folder"),
        (["smoke", "--ranks", "0"], "at least 1 rank"),
        (["smoke", "data.source=python:0123"], "was started from Python"),
    ],
)
def test_invalid_arguments_fail_before_launch(words: list[str], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        CliRunner().invoke(app, ["profile", *words], catch_exceptions=False)
