"""The train command as a user meets it: real processes, files, signals."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megabatch.config import load_config
from tests.distributed.runs import SMALL_RUN

LONG_RUN = [*SMALL_RUN, "train.epochs=100000"]


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def train(*words: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *launcher, "-m", "megabatch", "train", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


@contextlib.contextmanager
def started(*words: str) -> Iterator[subprocess.Popen[str]]:
    """A run that has taken a few steps; killed at the end if it still lives."""
    command = [sys.executable, "-m", "megabatch", "train", *words, "run.dir=run"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: process.poll() is not None or len(rows()) >= 3)
        assert process.poll() is None, process.communicate()
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_until(holds: Callable[[], bool], at_most_s: float = 60.0) -> None:
    deadline = time.monotonic() + at_most_s
    while not holds():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def rows(folder: str = "run") -> list[dict[str, Any]]:
    path = Path(folder) / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def summary(folder: str = "run") -> dict[str, Any]:
    return dict(json.loads((Path(folder) / "summary.json").read_text()))


def ranks_of(launcher: int) -> list[int]:
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    found = [int(child) for child in children if b"train" in Path(f"/proc/{child}/cmdline").read_bytes()]
    assert len(found) == 2
    return found


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_run_leaves_its_rows_its_summary_and_its_recipe() -> None:
    result = train(*SMALL_RUN, "train.target_top1=0.5", "--ranks", "2")
    assert result.returncode == 0, result.stderr
    folder = "runs/fashion-001"
    assert folder in result.stdout and "256" not in result.stdout.split("batch")[1].splitlines()[0]
    steps = [row for row in rows(folder) if "lr" in row]
    evaluations = [row for row in rows(folder) if "lr" not in row]
    assert [row["step"] for row in steps] == list(range(1, 51))
    assert all(set(row) == {"step", "epoch", "loss", "lr", "images_per_s"} for row in steps)
    assert steps[-1]["epoch"] == 8.0
    assert [row["step"] for row in evaluations] == [7, 13, 19, 25, 32, 38, 44, 50]
    assert all(row["samples_evaluated"] == 37 and 0 <= row["top1"] <= row["top5"] <= 1 for row in evaluations)
    result_row = summary(folder)
    assert result_row["status"] == "finished" and result_row["steps"] == 50
    assert result_row["top1"] == evaluations[-1]["top1"]
    assert result_row["best_top1"] == max(row["top1"] for row in evaluations)
    assert 0 < result_row["time_to_target_s"] <= result_row["wall_s"]
    assert f"top-1 {result_row['top1']:.4f}" in result.stdout
    resolved = tomllib.loads((Path(folder) / "config.toml").read_text())
    assert resolved["batch"] == {"global": 32, "micro": 4}
    assert load_config(f"{folder}/config.toml").train.target_top1 == 0.5


def test_under_torchrun_it_joins_and_is_the_same_run(tmp_path: Path) -> None:
    ours = train(*SMALL_RUN, "run.dir=ours", "--ranks", "1")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    joined = train(*SMALL_RUN, "run.dir=joined", launcher=launcher)
    assert ours.returncode == joined.returncode == 0, ours.stderr + joined.stderr
    assert "2 ranks" in joined.stdout
    one, two = ([row["loss"] for row in rows(folder) if "lr" in row] for folder in ("ours", "joined"))
    np.testing.assert_allclose(one, two, rtol=0, atol=1e-9)


def test_a_users_own_model_is_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "def net(num_classes, in_channels, image_size):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(in_channels * image_size**2, num_classes))\n"
    )
    (tmp_path / "mine.toml").write_text(
        load_config("fashion", SMALL_RUN).to_toml().replace("small_cnn", "mine:net").replace("width = 4", "")
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    text = (tmp_path / "mine.toml").read_text().replace("dropout = 0.2", "")
    (tmp_path / "mine.toml").write_text(text)
    result = train("mine.toml", "--ranks", "2")
    assert result.returncode == 0, result.stderr
    assert summary("runs/mine-001")["top1"] > 0.5


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stop_signal_ends_all_ranks_after_the_same_step(number: int, code: int) -> None:
    with started(*LONG_RUN, "--ranks", "2") as launcher:
        ranks = ranks_of(launcher.pid)
        launcher.send_signal(number)
        output, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == code
    assert errors == ""
    assert "stopped" in output
    taken = [row["step"] for row in rows() if "lr" in row]
    assert taken == list(range(1, len(taken) + 1))
    assert summary()["status"] == "stopped" and summary()["steps"] == taken[-1]
    assert not any(is_alive(rank) for rank in ranks)


def test_ranks_do_not_outlive_a_killed_launcher() -> None:
    with started(*LONG_RUN, "--ranks", "2") as launcher:
        ranks = ranks_of(launcher.pid)
        os.kill(launcher.pid, signal.SIGKILL)
        wait_until(lambda: not any(is_alive(rank) for rank in ranks), at_most_s=10)


def test_a_killed_rank_is_named_and_ends_the_run() -> None:
    with started(*LONG_RUN, "--ranks", "2") as launcher:
        ranks = ranks_of(launcher.pid)
        os.kill(ranks[1], signal.SIGKILL)
        _, errors = launcher.communicate(timeout=90)
    assert launcher.returncode == 1
    assert len(errors.splitlines()) == 1 and "rank 1" in errors and "SIGKILL" in errors
    assert summary()["status"] == "failed"
    assert not any(is_alive(rank) for rank in ranks)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data.source=gone.npz"], "gone.npz does not exist"),
        (["model.name=no_such:net"], "model.name='no_such:net' cannot be imported"),
        (["optim.learning_rate=1e300"], "the loss is"),
    ],
)
def test_what_a_rank_finds_wrong_is_shown_once_on_one_line(words: list[str], message: str) -> None:
    result = train(*SMALL_RUN, *words, "model.options={}", "--ranks", "2")
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1 and message in result.stderr
    ran = message == "the loss is"
    assert Path("runs").exists() == ran
    if ran:
        assert summary("runs/fashion-001")["status"] == "failed"


def test_an_unexpected_error_is_shown_once_with_its_rank_and_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "unwell.py").write_text(
        "import os\nfrom torch import nn\n"
        "class Net(nn.Sequential):\n"
        "    def __init__(self, num_classes, image_size):\n"
        "        super().__init__(nn.Flatten(), nn.Linear(3 * image_size**2, num_classes))\n"
        "        self.calls = 0\n"
        "    def forward(self, x):\n"
        "        self.calls += 1\n"
        "        if os.environ['RANK'] == '1' and self.calls > 20: raise KeyError('unwell')\n"
        "        return super().forward(x)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    result = train(*SMALL_RUN, "model.name=unwell:Net", "model.options={}", "--ranks", "2")
    assert result.returncode == 1
    lines = result.stderr.splitlines()
    assert lines[-1] == "megabatch: rank 1: KeyError: 'unwell'"
    assert sum("Traceback" in line for line in lines) == 1
    assert summary("runs/fashion-001")["status"] == "failed"
