"""Failure drills: one rank of a small run fails, and the seconds until the launcher names it are measured.

Each drill is a run of `megabatch train` in a child process.  Its network is this file's `network`, which fails on one
rank at a given moment.  A run passes if its output names that rank and the cause, and if all its processes end.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from megabatch.preflight.selftest.results import Check, anonymous
from megabatch.text import print_line

MARK = "selftest drill: the fault is now"
ERROR = "selftest drill"
RANK = 1  # that fails
FIRST_STEP = 4  # of a fault during training
LIMIT_S = 180.0  # for a whole drill
TIMEOUT_S = 10  # comm.timeout_s
LINE_WITHIN_S = 60.0  # after the fault
MOST_RANKS = 8


class Drill(NamedTuple):
    title: str
    fault: str
    line: str  # a pattern of the launcher's line, which names the rank and the cause


RAISED = rf"^megabatch: rank {RANK}\b.*{ERROR}"
DRILLS = (
    Drill("a rank raises while it loads", "load", RAISED),
    Drill("a rank raises in its first backward", "first backward", RAISED),
    Drill("a rank raises in an all-reduce", "backward", RAISED),
    Drill("a rank raises in an evaluation", "evaluation", RAISED),
    Drill("a rank is killed (SIGKILL)", "SIGKILL", rf"^megabatch: rank {RANK}\b.*SIGKILL"),
    Drill("a rank is stopped (SIGSTOP)", "SIGSTOP", rf"^megabatch: .*\brank {RANK}\b"),  # another one reports it
)


def network(num_classes: int, in_channels: int, fault: str) -> nn.Module:
    """Return a network that fails on rank RANK."""
    is_faulty = os.environ.get("RANK") == str(RANK)
    if is_faulty and fault == "load":
        fail()
    return nn.Sequential(
        nn.Flatten(), nn.Linear(in_channels * 64, 64), Fault(fault if is_faulty else ""), nn.Linear(64, num_classes)
    )


def fail() -> None:
    print_line(MARK, to_stderr=True)
    raise RuntimeError(ERROR)


class Fault(nn.Module):
    """The identity, until the fault."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault, self.num_passes = fault, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.fault:
            return x
        if not torch.is_grad_enabled():
            if self.fault == "evaluation":
                fail()
            return x
        self.num_passes += 1
        is_due = self.num_passes >= FIRST_STEP + 3  # after the passes of the warm-up
        if self.fault == "first backward" or (self.fault == "backward" and is_due):
            x.register_hook(lambda gradient: fail())
        if self.fault.startswith("SIG") and is_due:
            print_line(MARK, to_stderr=True)
            os.kill(os.getpid(), signal.Signals[self.fault])
        return x


def run_drill(drill: Drill, device: str, num_ranks: int) -> Check:
    name = f"drill: {drill.title}"
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            command(drill, device, num_ranks, Path(folder)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        watched = Output(process)
        try:
            process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)  # the launcher ends its ranks
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()  # ranks end with their launcher
                process.wait()
        ended_s = time.monotonic()
        watched.thread.join(5)
    return judge(name, drill, watched, ended_s, process.returncode)


def command(drill: Drill, device: str, num_ranks: int, folder: Path) -> list[str]:
    sizes = [f"batch.global={8 * num_ranks}", "batch.micro=8", "data.image_size=8"]
    sizes.append(f"data.synthetic.train={16 * 8 * num_ranks}")  # an evaluation after 16 steps
    settings = [
        f"model.name={__name__}:network",
        f"model.options={{fault = '{drill.fault}'}}",
        "data.synthetic.channels=1",
        "train.steps=400",
        "train.evaluate_every=1",
        f"comm.timeout_s={TIMEOUT_S}",
        f"run.device={device}",
        f"run.dir={folder / 'run'}",
    ]
    return [sys.executable, "-P", "-m", "megabatch", "train", "smoke", *sizes, *settings, "--ranks", str(num_ranks)]


class Output:
    """The lines of a child process, with their times."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process, self.lines = process, list[tuple[float, str]]()
        self.thread = threading.Thread(target=self.read, daemon=True)
        self.thread.start()

    def read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line.strip()))

    def time_of(self, is_wanted: Callable[[str], Any]) -> float | None:
        return next((at_s for at_s, line in self.lines if is_wanted(line)), None)


def judge(name: str, drill: Drill, output: Output, ended_s: float, exit_code: int) -> Check:
    fault_s = output.time_of(lambda line: MARK in line)
    line_s = output.time_of(re.compile(drill.line).search)
    last = output.lines[-1][1] if output.lines else ""
    if fault_s is None:
        return Check(name=name, passed=False, found=f"the run ended before the fault: {anonymous(last)}")
    measurements = {"exit_code": exit_code, "seconds_to_end": round(ended_s - fault_s, 2)}
    if line_s is None:
        found = f"rank {RANK} was not named; ended after {ended_s - fault_s:.1f} s with: {anonymous(last)}"
        return Check(name=name, passed=False, found=found, measurements=measurements)
    measurements["seconds_to_line"] = round(line_s - fault_s, 2)
    passed = exit_code == 1 and line_s - fault_s <= LINE_WITHIN_S
    found = f"named after {line_s - fault_s:.1f} s, all ranks ended after {ended_s - fault_s:.1f} s"
    return Check(name=name, passed=passed, found=found, measurements=measurements)
