"""Runs under Slurm, and under MPICH, which `make` installs; the options of `megabatch chaos --slurm`."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from megabatch_lab.chaos import slurm
from megabatch_lab.chaos.namespaces import namespaces
from typer.testing import CliRunner

from megabatch.cli.app import app
from megabatch.errors import UserError

SHORT = ["train.steps=80", "schedule.warmup_epochs=1", "data.synthetic.test=200"]


def chaos(folder: Path, *words: str) -> dict[str, Any]:
    """Run `megabatch chaos` and return its report."""
    command = [sys.executable, "-m", "megabatch", "chaos", "smoke", *SHORT, *words, "--json", "chaos.json"]
    environment = os.environ | {"TMPDIR": str(folder)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list(folder.glob("chaos-*"))
    report: dict[str, Any] = json.loads((folder / "chaos.json").read_text())
    return report


@pytest.fixture
def slurm_folder() -> Iterator[Path]:
    """Return a folder whose path is short enough for Slurm's sockets, unlike that of tmp_path."""
    try:
        slurm.require_slurm()
        with namespaces(1):
            pass
    except UserError as error:
        pytest.skip(f"needs root and slurm-wlm: {error}")
    with tempfile.TemporaryDirectory(prefix="mb") as folder:
        yield Path(folder)


@pytest.mark.timeout(400)
def test_runs_under_slurm_survive_a_signal_a_killed_rank_and_a_second_step(slurm_folder: Path) -> None:
    report = chaos(slurm_folder, "--slurm", "--case", "usr1", "--case", "kill", "--case", "steps")
    assert [(each["name"], each["result"], each["problems"]) for each in report["scenarios"]] == [
        ("undisturbed", "not restarted", []),
        ("usr1", "saved on SIGUSR1, requeued once, resumed", []),
        ("kill", "started again in the allocation once, resumed", []),
        ("steps", "2 runs, not restarted", []),
    ]


def test_a_folder_that_is_too_long_for_the_sockets_of_slurm_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "require_slurm", lambda: None)
    with pytest.raises(UserError, match=r"at most 72 characters.*TMPDIR"), slurm.slurm_cluster(tmp_path / ("x" * 72)):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.timeout(400)
def test_a_run_under_mpich_survives_a_killed_rank_and_leaves_nothing(tmp_path: Path) -> None:
    report = chaos(tmp_path, "--mpi", "--case", "kill")
    found = [(each["name"], each["problems"]) for each in report["scenarios"] if each["launcher"] == "MPICH"]
    assert found == [("undisturbed", []), ("kill", [])]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--case", "usr1"], "--case usr1 is a scenario of a launcher; add --slurm or --mpi"),
        (["--slurm", "--case", "usr2"], "--case='usr2' is not one of .*nearest: --case=usr1"),
        (["--slurm"], "--slurm needs root and slurmctld"),
    ],
)
def test_invalid_scenarios_are_refused(words: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(slurm.shutil, "which", lambda program: None if program == "slurmctld" else program)
    with pytest.raises(UserError, match=message):
        CliRunner().invoke(app, ["chaos", *words], catch_exceptions=False)
