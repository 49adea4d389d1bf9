"""Ranks that another launcher starts and that know little of each other."""

import json
import os
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
