import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from megabatch_lab.chaos.judge import PHASES
from typer.testing import CliRunner

from megabatch.cli.app import app
from megabatch.errors import UserError

SHORT = ["train.steps=40", "schedule.warmup_epochs=1", "checkpoint.every_steps=10", "data.synthetic.test=200"]
SEED = "6559"  # kills the launcher early in start-up, and a rank during a write


def test_runs_survive_faults_bitwise_and_faults_are_counted(tmp_path: Path) -> None:
    """Faults are injected at random phases, such as start-up and writes, and the command leaves only its report."""
    words = ["smoke", *SHORT, "--ranks", "2", "--kills", "2", "--seed", SEED, "--json", "chaos.json"]
    command = [sys.executable, "-m", "megabatch", "chaos", *words]
    environment = os.environ | {"TMPDIR": str(tmp_path), "COLUMNS": "80"}
    found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=110)
    assert found.returncode == 0, found.stdout + found.stderr
    report = json.loads((tmp_path / "chaos.json").read_text())
    assert report["holds"] and report["injected"] == 2 and report["failed_runs"] == [] and report["num_steps"] == 40
    assert sum(len(run["faults"]) for run in report["runs"]) == 2
    assert report["all"]["injected"] == report["all"]["survived"] == 2
    assert sum(report["by_phase"][phase]["injected"] for phase in PHASES) == 2
    assert "2 faults survived: every run is bitwise identical" in found.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["chaos.json"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "recipe 'nowhere' is neither"),
        (["smoke", "batch.mikro=4"], "there is no setting batch.mikro; nearest: batch.micro"),
        (["smoke", "run.dir=here"], "run.dir cannot be given to chaos"),
        (["smoke", "--ranks", "0"], "--ranks 0.*at least 1 rank"),
        (["smoke", "--ranks", "5"], "--ranks 5: "),
        (["smoke", "--json", "nowhere/c.json"], "the folder .*nowhere does not exist"),
        (["smoke", "--hosts", "2", "--ranks", "1"], "--ranks 1 cannot be divided.*nearest: --ranks 2"),
    ],
)
def test_invalid_arguments_fail_before_anything_starts(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("megabatch_lab.chaos.namespaces.require_tools", lambda: None)
    with pytest.raises(UserError, match=message):
        CliRunner().invoke(app, ["chaos", *words], catch_exceptions=False)
    assert list(tmp_path.iterdir()) == []


def test_two_hosts_need_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(UserError, match="needs root; run it as root, with iproute2"):
        CliRunner().invoke(app, ["chaos", "--hosts", "2"], catch_exceptions=False)
