"""Ranks that another launcher starts: it sets a few variables, and kills all ranks when the first one fails."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import megabatch
from megabatch.errors import UserError
from megabatch.ranks.discover import COMPLETE, JOIN, LAUNCHED
from megabatch.training.checkpoint.format import newest_first, step_of
from tests.support.processes import wait_until
from tests.support.small_runs import SMALL_RUN

TRAIN = ["-m", "megabatch", "train", *SMALL_RUN, "run.dir=run"]
FIT = [
    "-c",
    """
import sys, torch, megabatch
labels = torch.arange(64) % 4
images = (labels[:, None, None, None] * 60).expand(64, 1, 8, 8).to(torch.uint8)
network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 4))
sets = {"train": (images, labels), "test": (images, labels)}
settings = ["batch.global=16", "batch.micro=8", "run.threads=1", "run.dir=run", *sys.argv[1:]]
megabatch.fit(network, **sets, overrides=settings)
""",
]
SLOW_DISK = """
import os, pathlib, time
fsync, slow = os.fsync, pathlib.Path("slow")
def slow_fsync(descriptor):
    if slow.exists():
        pathlib.Path("saving").touch()
        time.sleep(float(slow.read_text()))
    fsync(descriptor)
if os.environ.get("RANK") == "0":
    os.fsync = slow_fsync
"""
ENDLESS = [
    "train.epochs=20000",
    "train.evaluate_every=0",
    "run.preempt_signal=SIGUSR1",
    "checkpoint.every_steps=100000",
]


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in {*LAUNCHED, *JOIN, *(name for names in COMPLETE.values() for name in names)}:
        monkeypatch.delenv(name, raising=False)


@contextmanager
def started(command: Sequence[str], **variables: str) -> Iterator[list["subprocess.Popen[str]"]]:
    """Two ranks with no more variables than Kubeflow sets.  Those that still live at the end are killed."""
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = str(free.getsockname()[1])
    with ExitStack() as stack:
        ranks = []
        for rank in range(2):
            joined = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            process = subprocess.Popen(
                [sys.executable, *command],
                env=os.environ | joined | variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            ranks.append(process)
        yield ranks


def play_batch_system(ranks: Sequence["subprocess.Popen[str]"]) -> None:
    """As `srun --kill-on-bad-exit` and Open MPI do: kill the others at once when a rank ends with a code above 0."""
    wait_until(lambda: any(rank.poll() for rank in ranks) or all(rank.poll() == 0 for rank in ranks))
    for rank in ranks:
        if rank.poll() is None:
            rank.kill()


def rows() -> list[dict[str, Any]]:
    path = Path("run/metrics.jsonl")
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def summary() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path("run/summary.json").read_text())
    return found


@pytest.mark.parametrize("command", [TRAIN, FIT], ids=["train", "fit"])
def test_two_processes_that_know_only_rank_size_and_address_train_one_model(command: Sequence[str]) -> None:
    with started([*command, "train.epochs=8"]) as ranks:
        results = [(rank.communicate(timeout=100), rank.returncode) for rank in ranks]
    assert [code for _, code in results] == [0, 0], results
    environment = json.loads(Path("run/env.json").read_text())
    assert (environment["ranks"], environment["hosts"], summary()["status"]) == (2, 1, "finished")
    assert [path.name for path in Path().iterdir()] == ["run"]
    assert [errors for (_, errors), _ in results] == ["", ""]


def test_a_process_of_a_launcher_that_is_not_known_trains_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLUX_JOB_SIZE", "2")
    ended = subprocess.run([sys.executable, *TRAIN], capture_output=True, text=True, timeout=100)
    (line,) = ended.stderr.splitlines()
    assert (ended.returncode, ended.stdout) == (2, "") and not Path("run").exists()
    assert line.startswith("megabatch: FLUX_JOB_SIZE=2 says that a launcher started this process, but not which rank")
    assert line.endswith(
        "; set RANK, WORLD_SIZE and MASTER_ADDR for each rank, or unset FLUX_JOB_SIZE if no launcher set it"
    )
    images = torch.zeros(4, 1, 8, 8, dtype=torch.uint8), torch.arange(4)
    with pytest.raises(UserError, match="FLUX_JOB_SIZE=2 says that a launcher started this process"):
        megabatch.fit(torch.nn.Flatten(), train=images, test=images)


@pytest.fixture
def slow_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with the seconds that rank 0's fsync takes once it exists."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code/sitecustomize.py").write_text(SLOW_DISK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "code"))
    return tmp_path / "slow"


def ask_to_stop(ranks: Sequence["subprocess.Popen[str]"], slow_disk: Path, fsync_s: float) -> None:
    wait_until(lambda: len(rows()) > 5 or any(rank.poll() is not None for rank in ranks))
    slow_disk.write_text(str(fsync_s))
    for rank in ranks:
        rank.send_signal(signal.SIGUSR1)


@pytest.mark.parametrize("command", [TRAIN, FIT], ids=["train", "fit"])
def test_no_rank_leaves_before_rank_0_has_saved(command: Sequence[str], slow_disk: Path) -> None:
    with started([*command, *ENDLESS]) as ranks:
        ask_to_stop(ranks, slow_disk, fsync_s=0.5)
        play_batch_system(ranks)
        results = [(rank.communicate(timeout=100), rank.returncode) for rank in ranks]
    codes = [code for _, code in results]
    assert 138 in codes and {*codes} <= {138, -signal.SIGKILL}, results
    last = rows()[-1]["step"]
    assert [step_of(path) for path in newest_first(Path("run/checkpoints"))] == [last], results
    assert (summary()["status"], summary()["steps"]) == ("stopped", last)
    if command == TRAIN:
        assert f"after step {last}, which is saved" in results[0][0][0]
        slow_disk.unlink()
        with started([*command, *ENDLESS]) as ranks:
            wait_until(lambda: rows()[-1]["step"] > last or any(rank.poll() is not None for rank in ranks))
        assert f"begins at step {last}\n" in Path("run/train.log").read_text()


def test_a_rank_does_not_report_a_checkpoint_that_rank_0_was_killed_over(slow_disk: Path) -> None:
    with started([*TRAIN, *ENDLESS]) as ranks:
        ask_to_stop(ranks, slow_disk, fsync_s=1000.0)
        wait_until(Path("saving").exists)
        ranks[0].kill()
        output, errors = ranks[1].communicate(timeout=100)
    assert ranks[1].returncode == 1, (output, errors)
    assert "FirstRankFailed: rank 0 was lost, or did not report" in errors.splitlines()[-1]
    assert not newest_first(Path("run/checkpoints"))
