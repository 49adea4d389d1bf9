"""CI on a clean machine: .ci/run, .ci/unprepared, the list of allowed skips, and the workflow that calls them."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from megabatch_lab.rehearsal import fake_cuda

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


def reasons_to_skip() -> list[ast.expr]:
    """Return the reasons in calls of skip, skipif and importorskip, in all tests."""
    calls = [
        node
        for path in (ROOT / "tests").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    ]
    found = [call.args[0] for call in calls if ast.unparse(call.func) == "pytest.skip" and call.args]
    for call in calls:
        if ast.unparse(call.func) in ("pytest.skip", "pytest.mark.skipif", "pytest.importorskip"):
            found += [word.value for word in call.keywords if word.arg == "reason"]
    return found


def text_of(reason: ast.expr) -> str | None:
    """Return a reason's text, for a formatted one only up to the first value; None if it is computed."""
    first = reason.values[0] if isinstance(reason, ast.JoinedStr) else reason
    return first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else None


TEXTS = {text for reason in reasons_to_skip() if (text := text_of(reason)) is not None}


def test_every_reason_to_skip_names_the_missing_thing() -> None:
    assert len(TEXTS) > 5
    assert {text for text in TEXTS if not text.startswith("needs ")} == set()
    computed = {ast.unparse(reason) for reason in reasons_to_skip() if text_of(reason) is None}
    assert computed == {"reason", "str(fake_cuda.why_not())"}  # both are from `why_not`


@pytest.mark.parametrize(
    ("hip", "has_gpu", "compiler", "reason"),
    [
        ("7.0", False, "g++", "needs a CPU or CUDA build of torch"),
        (None, True, "g++", "needs a machine without a GPU"),
        (None, False, None, "needs g++"),
        (None, False, "g++", None),
    ],
)
def test_the_fake_cuda_names_the_missing_thing(
    monkeypatch: pytest.MonkeyPatch, hip: str | None, has_gpu: bool, compiler: str | None, reason: str | None
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(fake_cuda, "HAS_GPU", has_gpu)
    monkeypatch.setattr(shutil, "which", lambda name: compiler)
    found = fake_cuda.why_not()
    assert (found and found.partition(":")[0]) == reason


def test_every_allowed_skip_is_a_reason_in_the_tests() -> None:
    assert read_allowed(ALLOWED) <= {text.partition(":")[0] for text in TEXTS}


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
def test_unprepared_hides_caches(tmp_path: Path) -> None:
    cached = tmp_path / ".cache/megabatch"
    cached.mkdir(parents=True)
    command: list[str | Path] = [ROOT / ".ci/unprepared", "ls", "-A", tmp_path / ".cache"]
    seen = subprocess.run(command, env=os.environ | {"HOME": str(tmp_path)}, capture_output=True, text=True, check=True)
    assert seen.stdout == "" and cached.is_dir()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize("folder", ["/usr/share", "/usr/local/share"])
def test_unprepared_hides_data_sets(folder: str) -> None:
    """Replace the folder in a mount namespace by one that has a data set."""
    listed = f"ls -A {folder}/datasets"
    steps = [
        f"mount -t tmpfs new {folder}",
        f"mkdir -p {folder}/datasets/fashion-mnist",
        listed,
        f"{ROOT}/.ci/unprepared {listed}",
    ]
    command = ["unshare", "--mount", "sh", "-ec", "; ".join(steps)]
    seen = subprocess.run(command, capture_output=True, text=True, check=True)
    assert seen.stdout.splitlines() == ["fashion-mnist"]  # listed only by the first


JOBS = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]


def test_every_step_of_the_workflow_is_a_make_target() -> None:
    commands = [step["run"] for job in JOBS.values() for step in job["steps"] if "run" in step]
    assert all(command.startswith("make ") for command in commands)
    made = {command.split()[1] for command in commands}
    assert {"lint", "wheel", "docs", "ci", "matrix"} <= made <= make_targets()


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
