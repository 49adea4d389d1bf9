"""The run's folder: config.toml, env.json, metrics.jsonl, summary.json, train.log, checkpoints/, model.safetensors;
timeline/, if wanted.

It belongs to one run at a time, which holds it by `flock`: the kernel lets go of it however the run ends.
"""

import contextlib
import fcntl
import json
import math
import os
import platform
import time
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from types import TracebackType
from typing import Self, TextIO

import msgspec
import torch

from megabatch import __version__
from megabatch.config.schema import RunConfig
from megabatch.errors import UserError
from megabatch.runs.records import Record, StepRecord, Summary

LOCK = ".lock"
PLAN = "plan.json"  # planning.tuning.Tuning
# What explains a run's speed or numerics.  An allow-list: an environment also holds secrets.
VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CUBLAS_WORKSPACE_CONFIG",
    "GLOO_SOCKET_IFNAME",
    "LOCAL_WORLD_SIZE",
    "MKL_NUM_THREADS",
    "NCCL_ALGO",
    "NCCL_DEBUG",
    "NCCL_IB_DISABLE",
    "NCCL_PROTO",
    "NCCL_SOCKET_IFNAME",
    "OMP_NUM_THREADS",
    "SLURM_JOB_ID",
    "SLURM_JOB_NUM_NODES",
    "WORLD_SIZE",
)


class RunFolder:
    """A folder that this process holds until it leaves the `with`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        self.lock = hold(path)

    def begin(self, config: RunConfig, step: int) -> None:
        """Writes what describes the run, and keeps the rows up to `step`, where it begins or goes on."""
        (self.path / "summary.json").unlink(missing_ok=True)  # of the attempt before
        self.write_text("config.toml", config.to_toml())
        self.write_text("env.json", json.dumps(describe_environment(), indent=2) + "\n")
        rows = self.path / "metrics.jsonl"
        self.metrics = rows.open("ab")
        self.metrics.truncate(length_up_to(rows, step))
        self.log(f"begins at step {step}")

    def write(self, record: Record) -> None:
        """One row, flushed: what has happened is on disk before the next step begins."""
        self.metrics.write(msgspec.json.encode(record) + b"\n")
        self.metrics.flush()

    def sync_rows(self) -> None:
        os.fsync(self.metrics.fileno())

    def finish(self, summary: Summary) -> None:
        text = msgspec.json.format(msgspec.json.encode(summary), indent=2).decode()
        self.write_text("summary.json", text + "\n")
        self.log(f"{summary.status} after step {summary.steps}")

    def write_text(self, name: str, text: str) -> None:
        """The whole file or the one before it."""
        new = self.path / f".writing-{name}"
        new.write_text(text)
        new.rename(self.path / name)

    def log(self, text: str) -> None:
        append_to_log(self.path, text)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if hasattr(self, "metrics"):
            self.metrics.close()
        self.lock.close()


def append_to_log(folder: Path, text: str) -> None:
    with (folder / "train.log").open("a") as file:
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text.rstrip()}\n")


def hold(path: Path, setting: str = "run.dir") -> TextIO:
    """Takes the folder for this process; `setting` is what a user gives it by."""
    file = (path / LOCK).open("a+")
    for attempt in range(10):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if attempt < 9:
                time.sleep(0.1)  # `is_held` touches it for a moment
                continue
            file.seek(0)
            holder = file.read().strip()
            file.close()
            raise UserError(
                f"{setting}={str(path)!r} is in use by process {holder}; wait for it, or give another {setting}"
            ) from None
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file


def is_held(path: Path) -> bool:
    """True while some run holds the folder."""
    with contextlib.suppress(FileNotFoundError), (path / LOCK).open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def read_losses(folder: Path) -> dict[int, float]:
    """For every epoch that a run has come to, from 1 on, the mean training loss of the steps that ended in it."""
    losses: defaultdict[int, list[float]] = defaultdict(list)
    with (folder / "metrics.jsonl").open("rb") as rows:
        for row in rows:
            if b'"loss":' in row:  # a step's
                record = msgspec.json.decode(row, type=StepRecord)
                losses[math.ceil(record.epoch)].append(record.loss)
    return {epoch: fmean(found) for epoch, found in losses.items()}


def length_up_to(rows: Path, step: int) -> int:
    """The bytes of the rows that a checkpoint knows.  A kill may have left later ones, or half of one."""
    length = 0
    with rows.open("rb") as file:
        for line in file:
            try:
                if not line.endswith(b"\n") or json.loads(line)["step"] > step:
                    break
            except ValueError:
                break
            length += len(line)
    return length


def read_environment(folder: Path) -> dict[str, object]:
    """What `describe_environment` said where the run was made."""
    return msgspec.json.decode((folder / "env.json").read_bytes(), type=dict[str, object])


def describe_environment() -> dict[str, object]:
    return {
        "megabatch": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "host": platform.node(),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }
