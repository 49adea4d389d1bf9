"""CI on a clean machine: .ci/run, .ci/unprepared, the list of allowed skips, and the workflow that calls them."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.pages import ROOT, make_targets
from tests.support.skips import read_allowed
from tools.matrix import PAIRS

pytestmark = pytest.mark.ranks  # starts processes

ALLOWED = ROOT / ".ci/allowed-skips.txt"


SAMPLE = """
import pytest

@pytest.mark.parametrize("reason", ["needs luck: none today", "needs luck", "needs skill"])
def test_it(reason):
    pytest.skip(reason)
"""


def test_skips_are_counted_by_reason_and_fail_a_run_that_does_not_allow_them(tmp_path: Path) -> None:
    (tmp_path / "test_sample.py").write_text(SAMPLE)
    (tmp_path / "conftest.py").write_text("from tests.conftest import *\n")
    (tmp_path / "allowed.txt").write_text("# comment\nneeds luck  # why\n")
    command = [sys.executable, "-m", "pytest", "-q", "-n1", "--allowed-skips=allowed.txt"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert done.returncode == 1, done.stdout + done.stderr
    assert "    2  needs luck" in lines and "    1  needs skill" in lines
    assert [line for line in lines if "ERROR" in line] == [
        "ERROR: tests skipped for a reason that is not in allowed.txt: needs skill"
    ]
    assert lines[-1].startswith("3 skipped")  # CI reads pytest's last line


def skip_reasons() -> set[str]:
    """Return the reasons of skip and skipif in all tests.  For a formatted reason, only the text before the value."""
    calls = (
        node
        for path in (ROOT / "tests").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("skip", "skipif")
    )
    arguments = [
        value
        for call in calls
        for value in [*call.args[:1], *(word.value for word in call.keywords if word.arg == "reason")]
    ]
    texts = [value.values[0] if isinstance(value, ast.JoinedStr) else value for value in arguments]
    return {text.value for text in texts if isinstance(text, ast.Constant) and isinstance(text.value, str)}


def test_every_reason_to_skip_names_the_missing_thing() -> None:
    reasons = skip_reasons()
    assert len(reasons) > 5
    assert {reason for reason in reasons if not reason.startswith("needs ")} == set()


def test_every_allowed_skip_is_a_reason_in_the_tests() -> None:
    assert read_allowed(ALLOWED) <= {reason.partition(":")[0] for reason in skip_reasons()}


def test_unprepared_has_an_empty_home_and_a_minimal_environment() -> None:
    command: list[str | Path] = [
        ROOT / ".ci/unprepared",
        "GIVEN=yes",
        "sh",
        "-c",
        'ls -A "$HOME"; ls -A "$TMPDIR"; env',
    ]
    polluted = os.environ | {"PYTHONPATH": "somewhere", "OMP_NUM_THREADS": "7"}
    seen = subprocess.run(command, env=polluted, capture_output=True, text=True, check=True).stdout.splitlines()
    assert {line.partition("=")[0] for line in seen} <= {"CI", "HOME", "TMPDIR", "PATH", "GIVEN", "PWD", "SHLVL", "_"}


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_unprepared_hides_data_sets_and_caches(tmp_path: Path) -> None:
    cached = tmp_path / ".cache/megabatch"
    cached.mkdir(parents=True)
    command: list[str | Path] = [ROOT / ".ci/unprepared", "sh", "-c", f"ls -A {tmp_path}/.cache /usr/share/datasets"]
    seen = subprocess.run(command, env=os.environ | {"HOME": str(tmp_path)}, capture_output=True, text=True)
    assert "megabatch" not in seen.stdout and "mnist" not in seen.stdout
    assert cached.is_dir()


JOBS = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]


def test_the_workflow_runs_only_make_targets_and_ci_run() -> None:
    commands = [step["run"] for job in JOBS.values() for step in job["steps"] if "run" in step]
    made = {command.split()[1] for command in commands if command.startswith("make ")}
    assert {command for command in commands if not command.startswith("make ")} == {".ci/run"}
    assert made <= make_targets() and {"lint", "wheel", "matrix"} <= made


def test_workflow_actions_have_full_versions() -> None:
    used = [step["uses"] for job in JOBS.values() for step in job["steps"] if "uses" in step]
    assert used and all(re.fullmatch(r"actions/[\w-]+@v\d+\.\d+\.\d+", action) for action in used)


def test_the_workflow_tests_the_matrix_pairs_that_are_on_the_package_index() -> None:
    pairs = [f"{pair['python']}:{pair['torch']}" for pair in JOBS["matrix"]["strategy"]["matrix"]["include"]]
    assert pairs == [pair for pair in PAIRS if "+" not in pair]


def test_pre_commit_runs_the_commands_of_make_lint() -> None:
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repository["repo"] == "local"
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    assert recipe
    lines = recipe[1].replace("$(BIN)", ".venv/bin").splitlines()
    assert [hook["entry"] for hook in repository["hooks"]] == [line.strip() for line in lines]
    assert {(hook["language"], hook["pass_filenames"]) for hook in repository["hooks"]} == {("system", False)}
