"""An input that holds up its process, ends it, or takes its memory has escaped, and the others are read as well."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from megabatch_lab.fuzz import run, worker
from megabatch_lab.fuzz.catalog import FORMATS
from megabatch_lab.fuzz.formats import Bench, Format
from megabatch_lab.fuzz.outcome import Outcome
from megabatch_lab.fuzz.run import Request, fuzz
from megabatch_lab.fuzz.worker import Job, work

from tests.support.processes import descendants, is_alive, wait_until

# A worker to which what the first argument says happens at every third input.
PRETENDED = """
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
REQUEST = Request(formats=["jpeg"], inputs=6, seed=7, most_s=0.3, most_mb=1024, workers=2)


@pytest.mark.parametrize(
    ("fate", "said"),
    [
        ("hangs", "it took longer than it may"),
        ("is killed", "it ended its process by SIGABRT"),
        ("fails", "its process failed: ModuleNotFoundError: no such thing"),
    ],
)
def test_what_stops_a_worker_has_escaped_and_another_goes_on(
    fate: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "WORKER", [sys.executable, "-c", PRETENDED, fate])
    monkeypatch.setattr(run, "STARTS_WITHIN_S", 3.0)
    shown: list[Outcome] = []
    report = fuzz(REQUEST, shown.append)
    assert sorted(outcome.number for outcome in shown) == list(range(6))
    assert [(escape.number, escape.detail) for escape in report.escapes] == [(1, said), (4, said)]
    assert [(count.inputs, count.ok, count.escaped) for count in report.counts] == [(6, 4, 2)]


def test_ctrl_c_ends_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def remembered(*given: Any, **named: Any) -> Any:
        started.append(popen(*given, **named))
        return started[-1]

    def interrupt(outcome: Outcome) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "WORKER", [sys.executable, "-c", PRETENDED, "hangs"])
    monkeypatch.setattr(subprocess, "Popen", remembered)
    with pytest.raises(KeyboardInterrupt):
        fuzz(REQUEST, interrupt)
    assert started and all(process.poll() is not None for process in started)


def test_what_takes_more_memory_than_it_may_has_escaped_and_the_next_is_judged_by_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peaks_mb = iter([100.0, 150.0, 900.0, 900.0, 950.0])  # the fourth: where the next begins
    harmless = Format(
        lambda scratch, stack: Bench([{"image": b"x"}], lambda folder: None), lambda files, rng: files, bool
    )
    monkeypatch.setitem(FORMATS, "jpeg", harmless)
    monkeypatch.setattr(worker, "limit_memory", lambda more_mb: None)  # this process is that of the tests
    monkeypatch.setattr(worker, "peak_mb", lambda: next(peaks_mb))
    inputs = [("jpeg", number) for number in range(3)]
    job = Job(seed=7, inputs=inputs, most_mb=500, folder=str(tmp_path), results=0, parent=0)
    outcomes = list(work(job))
    assert [outcome.kind for outcome in outcomes] == ["ok", "escaped", "ok"]
    assert outcomes[1].detail == "it took 800 MB of memory"


def test_workers_end_with_a_fuzzer_that_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "megabatch", "fuzz", "jpeg", "--inputs", "1000000"]
    with subprocess.Popen(command, cwd=tmp_path, env=os.environ | {"TMPDIR": str(tmp_path)}) as fuzzer:
        wait_until(lambda: len(descendants(fuzzer.pid)) >= len(os.sched_getaffinity(0)))
        wait_until(lambda: any(tmp_path.glob("*/*/input")))  # they read
        workers = descendants(fuzzer.pid)
        fuzzer.kill()
    wait_until(lambda: not any(is_alive(worker) for worker in workers))
