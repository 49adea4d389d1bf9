"""The command `megabatch train`: real processes, files and signals."""

import contextlib
import csv
import json
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from megabatch.cli.app import app
from megabatch.config.loading import load_config
from megabatch.data.catalog import load_data_set
from megabatch.errors import UserError
from megabatch.inference.evaluate import evaluate_run
from megabatch.ranks.world import World, current_rank
from megabatch.runs.reader import read_mistakes, read_step_trace
from megabatch.training.checkpoint.resume import decide_start
from megabatch.training.prepare import prepare, ready_to_train
from megabatch.training.run import train_and_record
from tests.support.processes import is_alive, wait_until
from tests.support.rank_pool import RankPool
from tests.support.small_runs import SMALL_RUN, small_run

LONG_RUN = [*SMALL_RUN, "train.epochs=100000"]
SAME = ["precision.name=fp32", "schedule.decay=constant"]  # the first steps are the same for any number of epochs
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


@pytest.fixture(autouse=True)
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def train(*words: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *launcher, "-m", "megabatch", "train", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


@contextlib.contextmanager
def launched(*words: str, launcher: tuple[str, ...] = ()) -> Iterator[subprocess.Popen[str]]:
    """Start a launcher and kill it at the end if it is still alive."""
    command = [sys.executable, *launcher, "-m", "megabatch", "train", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def started(*words: str, launcher: tuple[str, ...] = ()) -> Iterator[subprocess.Popen[str]]:
    """Start a run and wait for its first steps."""
    with launched(*words, "run.dir=run", launcher=launcher) as process:
        wait_until(lambda: process.poll() is not None or len(rows()) >= 3)
        assert process.poll() is None, process.communicate()
        yield process


def rows(folder: str = "run") -> list[dict[str, Any]]:
    """Return the complete rows; the run may be writing the next one."""
    path = Path(folder) / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def steps_in(folder: str = "run") -> list[int]:
    return [row["step"] for row in rows(folder) if "lr" in row]


def summary(folder: str = "run") -> dict[str, Any]:
    return dict(json.loads((Path(folder) / "summary.json").read_text()))


def ranks_of(launcher: int, num_ranks: int = 2) -> list[int]:
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    found = [int(child) for child in children if b"train" in Path(f"/proc/{child}/cmdline").read_bytes()]
    assert len(found) == num_ranks
    return found


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return the folder of a run on two ranks and its output."""
    inside = tmp_path_factory.mktemp("finished")
    words = [*SMALL_RUN, *SAME, "train.target_top1=0.5", "--ranks", "2", "--report"]
    command = [sys.executable, "-m", "megabatch", "train", *words]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=inside)
    assert result.returncode == 0, result.stderr
    return inside / "runs/fashion-001", result.stdout


def test_a_run_writes_rows_summary_and_recipe(finished: tuple[Path, str]) -> None:
    path, stdout = finished
    folder = str(path)
    assert "runs/fashion-001" in stdout and "32 = 4 micro x 4 accumulated x 2 ranks" in stdout
    assert "200 + 37 images of 12 pixels, 3 channels, 6 classes (" in stdout
    assert "reference batch 128, learning rate 0.1, " in stdout
    assert "warning   batch.micro=4 is the span of BatchNorm" in stdout
    steps = [row for row in rows(folder) if "lr" in row]
    evaluations = [row for row in rows(folder) if "lr" not in row]
    assert [row["step"] for row in steps] == list(range(1, 51))
    fields = {"step", "epoch", "loss", "lr", "loss_scale", "skipped", "images_per_s", "data_wait_s", "comm_wait_s"}
    fields |= {"kind", "data_wait", "skipped_images", "straggler", "straggler_delay_s", "evaluated", "wall_s", "times"}
    fields |= {"image_size", "noise", "top1"}
    assert all(set(row) == fields for row in steps)
    for row in steps:
        assert 0 < row["data_wait_s"] <= row["times"]["data"] + 1e-6  # one span is inside the other
        assert row["data_wait_s"] == pytest.approx(sum(row["data_wait"].values()))
        assert row["comm_wait_s"] == row["times"]["comm"]
    assert steps[-1]["epoch"] == 8.0
    assert [row["step"] for row in evaluations] == [7, 13, 19, 25, 32, 38, 44, 50]
    assert all(row["samples_evaluated"] == 37 and 0 <= row["top1"] <= row["top5"] <= 1 for row in evaluations)
    result_row = summary(folder)
    assert result_row["status"] == "finished" and result_row["steps"] == 50
    assert result_row["top1"] == evaluations[-1]["top1"]
    assert result_row["best_top1"] == max(row["top1"] for row in evaluations)
    assert 0 < result_row["time_to_target_s"] <= result_row["wall_s"]
    assert f"top-1 {result_row['top1']:.4f}" in stdout
    assert len(list(Path(folder).glob("events.out.tfevents.*"))) == (find_spec("tensorboard") is not None)
    assert json.loads((Path(folder) / "env.json").read_text())["variables"]["WORLD_SIZE"] == "2"
    resolved = tomllib.loads((Path(folder) / "config.toml").read_text())
    assert resolved["batch"] == {"global": 32, "micro": 4} and resolved["run"]["threads"] >= 1
    assert load_config(f"{folder}/config.toml").train.target_top1 == 0.5


def test_a_run_writes_a_traced_step_mistakes_and_a_report(finished: tuple[Path, str]) -> None:
    path, stdout = finished
    assert "report    runs/fashion-001/report.html" in stdout
    assert "of the time" in (path / "report.html").read_text()
    trace, mistakes = read_step_trace(path), read_mistakes(path)
    assert trace and trace.buckets and {"forward", "backward"} <= {span.name for span in trace.spans}
    assert mistakes and mistakes.step == 50 and sum(mistakes.class_counts) == 37
    written, wall_s = rows(str(path)), summary(str(path))["wall_s"]
    assert abs(sum(sum(row["times"].values()) for row in written) - wall_s) < 0.05 * wall_s


def test_a_printed_line_has_the_speed_since_the_previous_line(finished: tuple[Path, str]) -> None:
    steps = {row["step"]: row for row in rows(str(finished[0])) if "lr" in row}
    lines = re.findall(r"step +(\d+) loss .* +([\d,]+)/s .*data (\d+)% comm (\d+)%", finished[1])
    assert lines[-1][0] == "50"
    before = 0
    for last, *printed in lines:
        since = [steps[step] for step in range(before + 1, int(last) + 1)]
        took_s = sum(32 / row["images_per_s"] for row in since)
        waits = [sum(row[key] for row in since) / took_s for key in ("data_wait_s", "comm_wait_s")]
        assert printed == [f"{32 * len(since) / took_s:,.0f}", *(f"{100 * wait:.0f}" for wait in waits)]
        before = int(last)


def test_torchrun_gives_the_same_run_and_its_ranks_do_not_outlive_it(finished: tuple[Path, str]) -> None:
    with started(*LONG_RUN, *SAME, launcher=TORCHRUN) as process:
        wait_until(lambda: process.poll() is not None or len(steps_in()) >= 50)
        ranks = ranks_of(process.pid)
        assert all(is_alive(rank) for rank in ranks)
        os.kill(process.pid, signal.SIGKILL)
        wait_until(lambda: not any(is_alive(rank) for rank in ranks), at_most_s=10)
    ours, theirs = ([row["loss"] for row in rows(folder) if "lr" in row] for folder in (str(finished[0]), "run"))
    assert ours == theirs[:50] and len(ours) == 50


def test_eval_prints_the_figures_of_the_summary(finished: tuple[Path, str]) -> None:
    folder = finished[0]
    seen = summary(str(folder))
    again = CliRunner().invoke(app, ["eval", str(folder), "--confusion", "matrix.csv"])
    expected = f"top-1 {seen['top1']:.4f}, top-5 {seen['top5']:.4f}, loss {seen['test_loss']:.6f} on 37 samples"
    assert expected in again.output
    measures = {"precision": "precision", "balanced accuracy": "balanced_accuracy", "F1": "f1"}
    assert ", ".join(f"{name} {seen[key]:.4f}" for name, key in measures.items()) in again.output
    header, *matrix = csv.reader(Path("matrix.csv").read_text().splitlines())
    assert header[1:] == [row[0] for row in matrix] and len(matrix) == 6
    right = sum(int(row[1 + place]) for place, row in enumerate(matrix))
    assert sum(int(count) for row in matrix for count in row[1:]) == 37 and right == round(37 * seen["top1"])
    assert evaluate_run(folder, None)[0].test_loss == seen["test_loss"]


def test_runs_lists_a_run_with_its_figures(finished: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(finished[0].parent)
    listed = CliRunner().invoke(app, ["runs", "."]).output
    expected = ["fashion-001", "finished", "fashion", "32", f"{summary(str(finished[0]))['top1']:.4f}"]
    assert expected in [line.split()[:5] for line in listed.splitlines()]


def test_eval_refuses_a_folder_that_is_not_a_run() -> None:
    missing = CliRunner().invoke(app, ["eval", "nothing"])
    assert isinstance(missing.exception, UserError) and "nothing is not a run's folder" in str(missing.exception)


def refusal(world: World, *overrides: str) -> str:
    config = small_run(*overrides)
    training = ready_to_train(config, load_data_set(config.data), world)
    with pytest.raises(UserError) as refused:
        train_and_record(config, decide_start(config, "never", world), training)
    return str(refused.value)


def test_a_model_that_fails_on_the_images_is_refused_before_a_file_is_written(tmp_path: Path) -> None:
    """It is the last check before a file is written."""
    config = small_run("model.name=small_resnet", "data.image_size=8", "batch.micro=1", "model.options={}")
    with (
        pytest.raises(UserError, match=r"fails on images \[1, 3, 8, 8\]"),
        prepare(config, current_rank(), resume="auto"),
    ):
        pass
    assert not list(tmp_path.iterdir())


def test_a_user_error_on_rank_0_is_raised_on_every_rank(ranks: RankPool) -> None:
    messages = ranks.run(refusal, "run.dir=/proc/nothing", num_ranks=2)
    assert messages[0].startswith("run.dir='/proc/nothing' cannot be used") and messages[0] == messages[1]


FAILING = """
import os
from torch import nn

class Net(nn.Sequential):
    def __init__(self, num_classes, image_size):
        super().__init__(nn.Flatten(), nn.Linear(3 * image_size**2, num_classes))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if os.environ["RANK"] == "1" and self.calls > 20:
            raise KeyError("failing")
        return super().forward(x)
"""


def test_an_unexpected_error_under_torchrun_is_shown_once_with_its_rank_and_traceback(tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    result = train(*SMALL_RUN, "model.name=failing:Net", "model.options={}", launcher=TORCHRUN)
    assert result.returncode == 1
    log = "runs/fashion-001/train.log"
    printed = [line for line in result.stderr.splitlines() if line.startswith("megabatch:")]  # torchrun prints too
    assert printed == [f"megabatch: rank 1 on {platform.node()}: KeyError: 'failing' (traceback in {log})"]
    assert Path(log).read_text().count("Traceback (most recent call last)") == 1
    assert 'raise KeyError("failing")' in Path(log).read_text()
    assert summary("runs/fashion-001")["status"] == "failed"


STUCK = """
import os
from pathlib import Path
from torch import nn

class Net(nn.Sequential):
    def __init__(self, num_classes, image_size):
        super().__init__(nn.Flatten(), nn.Linear(3 * image_size**2, num_classes))
        self.calls = 0

    def forward(self, x):
        self.calls += self.training
        if os.environ["RANK"] == "1" and self.calls > 20:
            if Path("was-stuck").exists():
                raise KeyError("failing")
            Path("was-stuck").touch()
            while True:
                pass
        return super().forward(x)
"""


def test_a_spinning_rank_is_named_and_restarted_and_an_unexpected_error_is_one_line(tmp_path: Path) -> None:
    """The model and the recipe are files in the current folder."""
    (tmp_path / "stuck.py").write_text(STUCK)
    words = ["model.name=stuck:Net", "model.options={}", "train.epochs=4", "comm.timeout_s=3"]
    (tmp_path / "mine.toml").write_text(small_run(*words).to_toml())
    result = train("mine.toml", "--ranks", "2", "--max-restarts", "1")
    line, last = result.stderr.splitlines()
    assert result.returncode == 1 and "restart 1 of 1" in line
    assert re.search(
        r"(rank 1: Stuck: |rank 1 )has been in forward of step \d+ on .* since .*\(stuck.py:\d+ forward", line
    ), line
    assert last == "megabatch: rank 1: KeyError: 'failing' (traceback in runs/fashion-001/train.log)"
    log = Path("runs/fashion-001/train.log").read_text()
    assert "Path(" not in line and "stuck.py" in log and log.count('raise KeyError("failing")') == 1
    ended = summary("runs/fashion-001")
    assert ended["status"] == "failed" and ended["resumed_from_step"] is not None


def test_a_user_error_is_printed_once_under_torchrun() -> None:
    result = train(*SMALL_RUN, "optim.learning_rat=1", launcher=TORCHRUN)
    assert result.returncode == 1  # the exit code of torchrun
    printed = [line for line in result.stderr.splitlines() if line.startswith("megabatch:")]
    assert len(printed) == 1 and "optim.learning_rat" in printed[0]


def test_a_non_finite_loss_ends_the_run_with_one_line_and_no_restarts() -> None:
    # Weights grow by a factor of up to 1e9 per step and overflow fp64 after about 30 steps.
    words = ["optim.learning_rate=1e6", "optim.weight_decay=1000", "schedule.warmup_epochs=0"]
    words += ["checkpoint.every_steps=1", "run.dir=run", "model.options={}"]
    result = train(*SMALL_RUN, *words, "--ranks", "2", "--max-restarts", "1", "--report")
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1
    assert "This run diverged." in Path("run/report.html").read_text()
    assert re.search(r"the loss is (nan|inf) at step \d+: microbatch 0,", result.stderr)
    log = Path("run/train.log").read_text()
    assert log.count("begins at step") == 1  # there was no restart
    assert summary()["status"] == "diverged"
    state = load_file("run/checkpoints/last/state.safetensors")  # from an earlier step
    assert all(tensor.isfinite().all() for tensor in state.values())


def train_whole(world: World, folder: str, *overrides: str) -> None:
    config = small_run(*overrides, f"run.dir={folder}")
    train_and_record(
        config, decide_start(config, "never", world), ready_to_train(config, load_data_set(config.data), world)
    )


def check_same_as_undisturbed_run() -> None:
    assert summary("whole")["resumed_from_step"] is None
    for name in ("model.safetensors", "checkpoints/last/state.safetensors"):
        assert (Path("run") / name).read_bytes() == (Path("whole") / name).read_bytes()
    for ours, theirs in zip(rows(), rows("whole"), strict=True):  # no row is missing or repeated
        same = ("step", "epoch", "loss", "lr", "top1", "test_loss")
        assert [ours.get(key) for key in same] == [theirs.get(key) for key in same]


# test_checkpoint covers one, two and three ranks without the launcher.
@pytest.mark.lab  # starts a run four times
def test_a_run_with_killed_ranks_is_bitwise_identical_to_an_undisturbed_one(ranks: RankPool, tmp_path: Path) -> None:
    """Kill a rank twice.  Messages name the rank, rows are complete, and a half-written checkpoint is ignored.

    First rank 1: all ranks restart and resume, also in a new run.  Then rank 0, which writes: this ends the run, as a
    killed launcher or host would.
    """
    settings = ["batch.global=24", "precision.name=fp32", "train.epochs=18"]
    ranks.run(train_whole, str(tmp_path / "whole"), *settings, num_ranks=2)
    short = [*SMALL_RUN, *settings, "checkpoint.every_steps=7", "--ranks", "2"]
    with started(*short, "--max-restarts", "1", "--resume", "never") as launcher:
        wait_until(lambda: Path("run/checkpoints/last").exists())
        os.kill(ranks_of(launcher.pid)[1], signal.SIGKILL)
        wait_until(lambda: launcher.poll() is not None or len(start_steps()) == 2)
        first_resumed = start_steps()[1]
        assert "failed after step" in log()
        wait_until(lambda: launcher.poll() is not None or newest_checkpoint() > first_resumed)
        processes = ranks_of(launcher.pid)
        os.kill(processes[0], signal.SIGKILL)  # it is named, and the run ends
        _, errors = launcher.communicate(timeout=90)
    assert launcher.returncode == 1
    assert errors.splitlines()[-1].startswith("megabatch: rank 0: ") and "SIGKILL" in errors.splitlines()[-1]
    assert not any(is_alive(process) for process in processes)
    half_written = Path("run/checkpoints/writing-step-00000007")  # as after a kill during a checkpoint
    half_written.mkdir(parents=True, exist_ok=True)
    (half_written / "state.safetensors").write_bytes(b"half")
    again = train(*short, "run.dir=run")
    assert again.returncode == 0, again.stderr
    assert "resumes   after step" in again.stdout
    resumed = [first_resumed, summary()["resumed_from_step"]]
    assert resumed[0] > 0 and resumed[1] > resumed[0]
    assert all(step % 7 == 0 or step in evaluated_steps() for step in resumed)
    assert steps_in() == list(range(1, 151))
    check_same_as_undisturbed_run()


def log() -> str:
    return Path("run/train.log").read_text()


def newest_checkpoint() -> int:
    return max((int(path.name[-8:]) for path in Path("run/checkpoints").glob("step-*")), default=0)


def start_steps() -> list[int]:
    """Return the steps at which the run started and resumed."""
    return [int(step) for step in re.findall(r"begins at step (\d+)", log())]


def evaluated_steps() -> list[int]:
    return [row["step"] for row in rows() if "test_loss" in row]


def test_a_stopped_run_resumes_with_the_printed_or_the_same_command() -> None:
    """Both signals stop all ranks after one step, also on another number of ranks; no other folder is made."""
    folder, words = "runs/fashion-001", [*SMALL_RUN, "train.epochs=16", "--ranks", "2"]
    with launched(*words) as launcher:
        wait_until(lambda: len(rows(folder)) >= 3)
        ranks = ranks_of(launcher.pid)
        launcher.send_signal(signal.SIGINT)
        output, errors = launcher.communicate(timeout=60)
    assert (launcher.returncode, errors) == (130, "")
    stopped_at = check_stopped(folder, output)
    assert not any(is_alive(rank) for rank in ranks)
    assert f"megabatch train --resume {folder} --ranks 2" in output
    with launched("--resume", folder, "--ranks", "1") as launcher:
        wait_until(lambda: len(steps_in(folder)) > stopped_at + 2)
        launcher.send_signal(signal.SIGTERM)
        output, errors = launcher.communicate(timeout=60)
    assert (launcher.returncode, errors) == (143, "")
    assert check_stopped(folder, output) > stopped_at and summary(folder)["resumed_from_step"] == stopped_at
    assert train(*words).returncode == 0
    assert summary(folder)["status"] == "finished" and steps_in(folder) == list(range(1, 101))
    refused = CliRunner().invoke(app, ["train", *words, f"run.dir={folder}"])
    assert isinstance(refused.exception, UserError)
    assert "it is finished; give another run.dir" in str(refused.exception)
    assert [path.name for path in Path("runs").glob("f*")] == ["fashion-001"]


def check_stopped(folder: str, output: str) -> int:
    """Check that all ranks stopped after the same step and saved it; return the step."""
    taken = steps_in(folder)
    assert "stopped" in output and taken == list(range(1, len(taken) + 1))
    assert summary(folder)["status"] == "stopped" and summary(folder)["steps"] == taken[-1]
    assert (Path(folder) / "checkpoints/last").readlink().name == f"step-{taken[-1]:08d}"
    return taken[-1]


def test_a_stop_reports_that_its_checkpoint_cannot_be_written() -> None:
    with started(*LONG_RUN, "checkpoint.every_steps=1000000", "--ranks", "1") as launcher:
        Path("run/checkpoints").mkdir(exist_ok=True)
        shutil.rmtree("run/checkpoints")
        Path("run/checkpoints").write_text("a file instead of the folder, so that writing fails")
        launcher.send_signal(signal.SIGINT)
        _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 2
    assert len(errors.splitlines()) == 1 and "could not be saved: File exists (run/checkpoints); there is no" in errors
    assert summary()["status"] == "failed"


def test_a_second_ctrl_c_ends_at_once() -> None:
    with started(*LONG_RUN, "--ranks", "1") as launcher:
        ranks = ranks_of(launcher.pid, 1)
        for rank in ranks:
            os.kill(rank, signal.SIGSTOP)  # so that it cannot handle the first one
        launcher.send_signal(signal.SIGINT)
        assert launcher.stdout is not None
        assert any("stopping" in line for line in launcher.stdout)  # blocks until it is printed
        launcher.send_signal(signal.SIGINT)
        launcher.wait(timeout=10)
        wait_until(lambda: not any(is_alive(rank) for rank in ranks), at_most_s=10)
    assert launcher.returncode == 130


@contextlib.contextmanager
def two_nodes(*words: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Start two torchrun agents on one machine, as docs/clusters.md does on two."""
    rendezvous = ["--rdzv-backend=static", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=3"]
    commands = [[*agent, *rendezvous, f"--node-rank={i}", "-m", "megabatch", "train", *words] for i in range(2)]
    nodes = [subprocess.Popen(each, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for each in commands]
    try:
        yield nodes
    finally:
        for node in nodes:
            node.kill()
            node.communicate()


@pytest.mark.lab  # starts six processes
def test_two_nodes_train_one_run_and_rejoin_after_a_killed_rank() -> None:
    """torchrun restarts the ranks: one agent per node, and the other node learns of the failure late."""
    words = [*SMALL_RUN, "train.epochs=16", "comm.algorithm=flat", "checkpoint.every_steps=5", "run.dir=run"]
    with two_nodes(*words) as nodes:
        wait_until(lambda: newest_checkpoint() >= 5)
        killed = ranks_of(nodes[0].pid, 1)[0]
        os.kill(killed, signal.SIGKILL)
        outputs = [node.communicate(timeout=100) for node in nodes]
        assert [node.returncode for node in nodes] == [0, 0], outputs
    assert sum("finished" in output for output, _ in outputs) == 1  # only rank 0 prints
    assert summary()["status"] == "finished" and summary()["resumed_from_step"] >= 5
    assert steps_in() == list(range(1, 101))


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
