"""Ranks started by another launcher, which sets a few variables and kills all ranks when one fails."""

import importlib.util
import json
import os
import re
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
from megabatch.ranks.discover import COMPLETE, JOIN, LAUNCHED, RankInfo
from megabatch.ranks.store import RankStore
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
fsync, slow, saving = os.fsync, pathlib.Path("slow"), pathlib.Path("saving")
def slow_fsync(descriptor):
    if slow.exists() and not saving.exists() and "checkpoints" in os.readlink(f"/proc/self/fd/{descriptor}"):
        saving.touch()
        time.sleep(float(slow.read_text()))
    fsync(descriptor)
if os.environ.get("RANK") == "0":
    os.fsync = slow_fsync
"""
# Reports the imports of torch and its compiler on standard output.
REPORT_IMPORTS = """
import sys
class ReportTorch:
    def find_spec(self, name, path, target=None):
        if name in ("torch", "torch._dynamo"):
            print(f"imports {name}", flush=True)
sys.meta_path.insert(0, ReportTorch())
"""
# Rank 1 does not return from its first evaluation.
STUCK_IN_EVALUATION = """
import os, pathlib, time, torch, megabatch
class Network(torch.nn.Sequential):
    def forward(self, images):
        if not self.training and os.environ["RANK"] == "1":
            pathlib.Path("evaluating").touch()
            time.sleep(1000)
        return super().forward(images)
labels = torch.arange(64) % 4
images = torch.zeros(64, 1, 8, 8, dtype=torch.uint8)
sets = {"train": (images, labels), "test": (images, labels)}
settings = ["batch.global=16", "batch.micro=8", "run.threads=1", "run.dir=run", "train.epochs=2"]
megabatch.fit(Network(torch.nn.Flatten(), torch.nn.Linear(64, 4)), **sets, overrides=settings)
"""
CLUSTERS = Path(__file__).parents[2] / "docs/clusters.md"
ADDRESS = "127.77.0.1"  # has no reverse DNS entry
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


def free_port() -> str:
    with closing(socket.create_server((ADDRESS, 0))) as free:
        return str(free.getsockname()[1])


@contextmanager
def started(command: Sequence[str], **variables: str) -> Iterator[list["subprocess.Popen[str]"]]:
    """Start two ranks with only the variables that Kubeflow sets.  Ranks that are alive at the end are killed."""
    port = free_port()
    with ExitStack() as stack:
        ranks = []
        for rank in range(2):
            joined = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": ADDRESS, "MASTER_PORT": port}
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
    """Kill the other ranks when one exits with a code above 0, as `srun --kill-on-bad-exit` and Open MPI do."""
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


def test_a_process_of_an_unknown_launcher_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLUX_JOB_SIZE", "2")
    ended = subprocess.run([sys.executable, *TRAIN], capture_output=True, text=True, timeout=100)
    (line,) = ended.stderr.splitlines()
    assert (ended.returncode, ended.stdout) == (2, "") and not Path("run").exists()
    assert line.startswith("megabatch: FLUX_JOB_SIZE=2 means that a launcher started this process")
    assert line.endswith(
        "; set RANK, WORLD_SIZE and MASTER_ADDR for each rank, or unset FLUX_JOB_SIZE if no launcher set it"
    )
    images = torch.zeros(4, 1, 8, 8, dtype=torch.uint8), torch.arange(4)
    with pytest.raises(UserError, match="FLUX_JOB_SIZE=2 means that a launcher started this process"):
        megabatch.fit(torch.nn.Flatten(), train=images, test=images)


@pytest.fixture
def slow_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of a file with the duration in seconds of rank 0's first fsync of a checkpoint."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code/sitecustomize.py").write_text(SLOW_DISK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "code"))
    return tmp_path / "slow"


def request_stop(ranks: Sequence["subprocess.Popen[str]"], slow_disk: Path, fsync_s: float) -> None:
    wait_until(lambda: len(rows()) > 5 or any(rank.poll() is not None for rank in ranks))
    slow_disk.write_text(str(fsync_s))
    for rank in ranks:
        rank.send_signal(signal.SIGUSR1)


@pytest.mark.parametrize("command", [TRAIN, FIT], ids=["train", "fit"])
def test_processes_with_only_rank_size_and_address_train_one_model_and_stop_after_rank_0_has_saved(
    command: Sequence[str], slow_disk: Path
) -> None:
    """A batch system that kills the other ranks at the first exit must not end rank 0 before it has saved."""
    if command == TRAIN:
        with (slow_disk.parent / "code/sitecustomize.py").open("a") as code:
            code.write(REPORT_IMPORTS)
    with started([*command, *ENDLESS]) as ranks:
        request_stop(ranks, slow_disk, fsync_s=2.0)
        play_batch_system(ranks)
        results = [(rank.communicate(timeout=100), rank.returncode) for rank in ranks]
    codes = [code for _, code in results]
    assert 138 in codes and {*codes} <= {138, -signal.SIGKILL}, results
    last = rows()[-1]["step"]
    assert [step_of(path) for path in newest_first(Path("run/checkpoints"))] == [last], results
    assert (summary()["status"], summary()["steps"]) == ("stopped", last)
    environment = json.loads(Path("run/env.json").read_text())
    assert (environment["ranks"], environment["hosts"]) == (2, 1)
    assert {path.name for path in Path().iterdir()} == {"code", "slow", "saving", "run"}
    if command == TRAIN:
        lines = results[0][0][0].splitlines()
        assert lines[0].startswith("starting ") and "2 ranks by RANK and WORLD_SIZE, rank 0 on " in lines[0]
        assert lines[1] == "imports torch" and "imports torch._dynamo" not in lines
        assert f"after step {last}, which is saved" in results[0][0][0]
        assert "resume    megabatch train --resume run\n" in results[0][0][0]  # the launcher counts the ranks


def test_ranks_do_not_report_a_checkpoint_if_rank_0_is_killed_while_saving(slow_disk: Path) -> None:
    with started([*TRAIN, *ENDLESS]) as ranks:
        request_stop(ranks, slow_disk, fsync_s=1000.0)
        wait_until(Path("saving").exists)
        ranks[0].kill()
        output, errors = ranks[1].communicate(timeout=100)
    assert ranks[1].returncode == 1, (output, errors)
    assert "FirstRankFailed: rank 0 was lost, or did not report" in errors.splitlines()[-1]
    assert not newest_first(Path("run/checkpoints"))


def test_a_rank_lost_in_an_evaluation_is_named() -> None:
    with started(["-c", STUCK_IN_EVALUATION]) as ranks:
        wait_until(lambda: Path("evaluating").exists() or any(rank.poll() is not None for rank in ranks))
        ranks[1].kill()
        _, errors = ranks[0].communicate(timeout=100)
    line = errors.splitlines()[-1]
    assert ranks[0].returncode == 1 and "MissingRank: evaluation of step 4: network error: " in line, errors
    assert f"rank 1 does not respond (on {os.uname().nodename})" in line


@pytest.mark.parametrize("event", ["a failed rank", "SIGTERM"])
def test_a_rank_that_waits_for_connections_notices(event: str, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    joined = {"WORLD_SIZE": "2", "MASTER_ADDR": ADDRESS, "MASTER_PORT": port}
    with subprocess.Popen(
        [sys.executable, *TRAIN], env=os.environ | joined | {"RANK": "0"}, stdout=subprocess.PIPE, text=True
    ) as rank_0:
        try:
            for name, value in joined.items():
                monkeypatch.setenv(name, value)
            store = RankStore(RankInfo(1, 2))  # rank 1 never connects to rank 0 through Gloo
            # Gloo has set rank 0's address, and waits for ours.
            wait_until(lambda: any("cpu" in key for key in store.persistent.list_keys()))
            if event == "SIGTERM":
                rank_0.terminate()
            else:
                assert store.is_first_to_fail()
            output, _ = rank_0.communicate(timeout=60)
        finally:
            rank_0.kill()
    last = output.splitlines()[-1]
    if event == "SIGTERM":
        assert rank_0.returncode == 143 and "SIGTERM before the ranks were connected" in last
    else:
        assert rank_0.returncode == 1 and last.startswith("starting ")  # the failed rank reports


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray")
def test_the_documented_example_trains_on_actors_of_ray() -> None:
    found = re.search(r"## Ray\n.*?```python\n(.*?)```", CLUSTERS.read_text(), re.DOTALL)
    assert found
    # Without a dashboard and its agents, Ray starts in seconds.
    code = found[1].replace("ray.init()", "ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)")
    Path("example.py").write_text(code)
    command, environment = [sys.executable, "example.py"], os.environ | {"RAY_worker_niceness": "0"}  # default: 15
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "finished", done.stderr
    assert json.loads(Path("ray-run/env.json").read_text())["ranks"] == 2
