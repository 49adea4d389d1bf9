import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from megabatch_lab.fuzz import run, worker
from megabatch_lab.fuzz.catalog import FORMATS
from megabatch_lab.fuzz.formats import Bench, Format
from megabatch_lab.fuzz.outcome import InputOutcome
from megabatch_lab.fuzz.run import FuzzRequest, fuzz
from megabatch_lab.fuzz.worker import FuzzJob, work

from tests.support.processes import descendants, is_alive, wait_until

# A worker that fails at every third input, in the way of its first argument.
FAKE_WORKER = """
import json, os, sys, time
job = json.load(sys.stdin)
results = os.fdopen(job["results"], "w", buffering=1)
print("ready", file=results)
for name, number in job["inputs"]:
    if number % 3 == 1:
        if sys.argv[1] == "hangs":
            time.sleep(1000)
        if sys.argv[1] == "is killed":
            os.abort()
        print("ModuleNotFoundError: no such thing", file=sys.stderr)
        sys.exit(1)
    print(json.dumps({"format": name, "number": number, "kind": "ok"}), file=results)
"""
REQUEST = FuzzRequest(formats=["jpeg"], inputs=6, seed=7, most_s=0.3, most_mb=1024, workers=2)


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        ("hangs", "exceeded the time limit"),
        ("is killed", "ended its process with SIGABRT"),
        ("fails", "its process failed: ModuleNotFoundError: no such thing"),
    ],
)
def test_input_that_stops_a_worker_has_escaped_and_another_worker_continues(
    failure: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "WORKER", [sys.executable, "-c", FAKE_WORKER, failure])
    monkeypatch.setattr(run, "START_TIMEOUT_S", 3.0)
    shown: list[InputOutcome] = []
    report = fuzz(REQUEST, shown.append)
    assert sorted(outcome.number for outcome in shown) == list(range(6))
    assert [(escape.number, escape.detail) for escape in report.escapes] == [(1, message), (4, message)]
    assert [(count.inputs, count.ok, count.escaped) for count in report.counts] == [(6, 4, 2)]


def test_ctrl_c_ends_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def remembered(*given: Any, **named: Any) -> Any:
        started.append(popen(*given, **named))
        return started[-1]

    def interrupt(outcome: InputOutcome) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "WORKER", [sys.executable, "-c", FAKE_WORKER, "hangs"])
    monkeypatch.setattr(subprocess, "Popen", remembered)
    with pytest.raises(KeyboardInterrupt):
        fuzz(REQUEST, interrupt)
    assert started and all(process.poll() is not None for process in started)


def test_input_above_the_memory_limit_has_escaped_and_the_next_is_judged_separately(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peaks_mb = iter([100.0, 150.0, 900.0, 900.0, 950.0])  # the fourth is the base of the next input
    harmless = Format(
        lambda scratch, stack: Bench([{"image": b"x"}], lambda folder: None), lambda files, rng: files, bool
    )
    monkeypatch.setitem(FORMATS, "jpeg", harmless)
    monkeypatch.setattr(worker, "limit_memory", lambda more_mb: None)  # this process also runs the tests
    monkeypatch.setattr(worker, "peak_mb", lambda: next(peaks_mb))
    inputs = [("jpeg", number) for number in range(3)]
    job = FuzzJob(seed=7, inputs=inputs, most_mb=500, folder=str(tmp_path), results=0, parent=0)
    outcomes = list(work(job))
    assert [outcome.kind for outcome in outcomes] == ["ok", "escaped", "ok"]
    assert outcomes[1].detail == "used 800 MB of memory"


def test_workers_end_when_the_fuzzer_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "megabatch", "fuzz", "jpeg", "--inputs", "1000000"]
    with subprocess.Popen(command, cwd=tmp_path, env=os.environ | {"TMPDIR": str(tmp_path)}) as fuzzer:
        wait_until(lambda: len(descendants(fuzzer.pid)) >= len(os.sched_getaffinity(0)))
        wait_until(lambda: any(tmp_path.glob("*/*/input")))  # workers read inputs
        workers = descendants(fuzzer.pid)
        fuzzer.kill()
    wait_until(lambda: not any(is_alive(worker) for worker in workers))
