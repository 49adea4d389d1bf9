"""The command `megabatch selftest`: its launcher, drills and file."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from megabatch.cli.app import app
from megabatch.errors import UserError
from megabatch.preflight.selftest import drills
from megabatch.preflight.selftest.results import Check, SelfTest
from megabatch.ranks import launch
from megabatch.ranks.failures import RankFailed

# Python imports this file in each process of the self-test.
SHRINK = """
from megabatch.preflight.selftest import checks, drills
checks.ALGORITHMS, checks.COMM_DTYPES = {"flat": checks.ALGORITHMS["flat"]}, {"same": checks.COMM_DTYPES["same"]}
checks.ALL_REDUCED, checks.TOLERANCE, checks.OPTIMIZERS = (1,), {"fp32": 2e-3}, {"sgd": "0.1"}
drills.DRILLS = drills.DRILLS[:1]
"""


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.lab
def test_checks_and_drills_run_on_ranks_and_are_in_the_file(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SHRINK)
    command = [sys.executable, "-m", "megabatch", "selftest", "--device", "cpu", "--ranks", "2", "--laws"]
    result = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    )
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(Path("selftest.json").read_text())
    assert [(check["name"], check["passed"]) for check in report["checks"]] == [
        ("all-reduce flat, comm dtype same", True),
        ("all-reduce of 4 bytes", True),
        ("training fp32, sgd", True),
        ("resume fp32", True),
        ("resume fp16", True),
        ("drill: a rank raises while it loads", True),
    ]
    assert report["backend_class"] == "ProcessGroupGloo" and report["num_ranks"] == 2
    assert "6 of 6 checks passed" in result.stdout.splitlines()[-1]


def run_with(monkeypatch: pytest.MonkeyPatch, checks: list[Check], exit_code: int) -> Any:
    """Run the command with ranks that write a report with these checks, and then fail."""

    def launched(command: Any, num_ranks: int, *args: Any, **options: Any) -> None:
        if checks:
            report = SelfTest(
                megabatch="", torch="", device="", backend="", num_ranks=2, hosts_of=[2], checks=checks, seconds=3.0
            )
            Path("selftest.json").write_bytes(msgspec.json.encode(report))
        raise RankFailed(1, exit_code, "RanksDisagree: a fault")

    drilled = Check(name="drill: a fault", passed=True, found="")
    monkeypatch.setattr(launch, "launch", launched)
    monkeypatch.setattr(drills, "DRILLS", drills.DRILLS[:1])
    monkeypatch.setattr(drills, "run_drill", lambda *args: drilled)
    return CliRunner().invoke(app, ["selftest", "--device", "cpu", "--ranks", "2"])


def names_in_file() -> list[tuple[str, bool]]:
    return [(check["name"], check["passed"]) for check in json.loads(Path("selftest.json").read_text())["checks"]]


@pytest.mark.parametrize("exit_code", [1, 2])
def test_drills_still_run_if_the_ranks_fail_for_good(monkeypatch: pytest.MonkeyPatch, exit_code: int) -> None:
    result = run_with(monkeypatch, [Check(name="first", passed=True, found="")], exit_code)
    assert names_in_file() == [("first", True), ("the remaining checks", False), ("drill: a fault", True)]
    assert "2 of 3 checks passed" in result.output and "rank 1: RanksDisagree: a fault" in result.output
    assert isinstance(result.exception, UserError) and "please send us selftest.json" in str(result.exception)


def test_earlier_report_is_not_taken_for_that_of_ranks_that_fail_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("selftest.json").write_text("an earlier one")
    result = run_with(monkeypatch, [], 2)
    assert names_in_file() == [] and result.exit_code == 2 and "a fault" in result.output


def test_requested_stop_ends_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run_with(monkeypatch, [Check(name="first", passed=True, found="")], 130)
    assert names_in_file() == [("first", True)] and result.exit_code == 130
