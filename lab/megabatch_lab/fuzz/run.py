"""Read inputs in worker processes, and start another worker if an input crashes or stalls one."""

import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import msgspec
from msgspec import Struct

from megabatch.io.disk import remove
from megabatch.text import one_line
from megabatch_lab.fuzz.outcome import FuzzReport, InputOutcome, count_by_format
from megabatch_lab.fuzz.worker import READY, FuzzJob

WORKER = [sys.executable, "-m", "megabatch_lab.fuzz.worker"]
Inputs = list[tuple[str, int]]  # by format and number
CHUNK_BYTES = 1 << 16
POLL_S = 0.2
START_TIMEOUT_S = 120.0  # a worker imports torch and trains a small run


class FuzzRequest(Struct, frozen=True, kw_only=True):
    formats: list[str]
    inputs: int
    seed: int
    most_s: float  # limit per input
    most_mb: int
    workers: int
    only: int | None = None  # the number of one input


def fuzz(request: FuzzRequest, show: Callable[[InputOutcome], None]) -> FuzzReport:
    """Read all inputs and return the report.  Any thread may call `show`, with each outcome."""
    started_s = time.monotonic()
    inputs = inputs_of(request)
    shares = [inputs[first :: request.workers] for first in range(request.workers)]
    outcomes: list[InputOutcome] = []
    stopping = threading.Event()
    with tempfile.TemporaryDirectory(prefix="megabatch-fuzz-") as scratch, ThreadPoolExecutor(request.workers) as pool:

        def follow(share: Inputs) -> None:
            for outcome in read_all(share, request, Path(scratch), stopping):
                outcomes.append(outcome)
                show(outcome)

        try:
            list(pool.map(follow, shares))
        finally:
            stopping.set()
    escapes = [outcome for outcome in outcomes if outcome.kind == "escaped"]
    return FuzzReport(
        seed=request.seed,
        inputs=len(outcomes),
        seconds=time.monotonic() - started_s,
        counts=count_by_format(request.formats, outcomes),
        escapes=sorted(escapes, key=lambda escape: (escape.format, escape.number)),
    )


def inputs_of(request: FuzzRequest) -> Inputs:
    """Return the inputs, alternating between formats."""
    if request.only is not None:
        return [(name, request.only) for name in request.formats]
    rounds = -(-request.inputs // len(request.formats))
    return [(name, number) for number in range(rounds) for name in request.formats][: request.inputs]


def read_all(inputs: Inputs, request: FuzzRequest, scratch: Path, stopping: threading.Event) -> Iterator[InputOutcome]:
    """Yield the outcome of each input.  An input that crashes or stalls its worker has escaped."""
    begin = 0
    while begin < len(inputs) and not stopping.is_set():
        folder = Path(tempfile.mkdtemp(dir=scratch))
        with started_worker(inputs[begin:], request, folder) as worker:
            for outcome in worker.outcomes(request.most_s, stopping):
                yield outcome
                begin += 1
            if begin < len(inputs) and not stopping.is_set():
                name, number = inputs[begin]
                yield InputOutcome(format=name, number=number, kind="escaped", detail=worker.end())
                begin += 1
        remove(folder)


class Worker:
    def __init__(self, process: subprocess.Popen[bytes], results: int, errors: Path) -> None:
        self.process, self.results, self.errors = process, results, errors
        self.is_late = False

    def outcomes(self, most_s: float, stopping: threading.Event) -> Iterator[InputOutcome]:
        """Yield outcomes until the worker ends or an input takes too long."""
        buffer, deadline_s = b"", time.monotonic() + START_TIMEOUT_S
        while not stopping.is_set():
            if not select.select([self.results], [], [], POLL_S)[0]:
                self.is_late = time.monotonic() > deadline_s
                if self.is_late:
                    return
                continue
            chunk = os.read(self.results, CHUNK_BYTES)
            if not chunk:
                return
            *lines, buffer = (buffer + chunk).split(b"\n")
            yield from (msgspec.json.decode(line, type=InputOutcome) for line in lines if line != READY)
            deadline_s = time.monotonic() + most_s

    def end(self) -> str:
        """Return the reason why no more outcomes came."""
        if self.is_late:
            return "exceeded the time limit"
        code = self.process.wait()
        last = one_line(self.errors.read_bytes()[-400:].decode(errors="replace").strip().rpartition("\n")[2])
        return f"ended its process with {signal.Signals(-code).name}" if code < 0 else f"its process failed: {last}"


@contextmanager
def started_worker(inputs: Inputs, request: FuzzRequest, folder: Path) -> Iterator[Worker]:
    results, theirs = os.pipe()
    errors = folder / "stderr"
    job = FuzzJob(
        seed=request.seed,
        inputs=inputs,
        most_mb=request.most_mb,
        folder=str(folder),
        results=theirs,
        parent=os.getpid(),
    )
    with errors.open("wb") as stderr:
        process = subprocess.Popen(
            WORKER,
            start_new_session=True,  # Ctrl-C must only reach this process
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            pass_fds=[theirs],
            # Separate caches and temporary files; one thread is enough.
            env=os.environ | {"XDG_CACHE_HOME": str(folder), "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"},
        )
    os.close(theirs)
    try:
        assert process.stdin
        with process.stdin:
            process.stdin.write(msgspec.json.encode(job))
        yield Worker(process, results, errors)
    finally:
        process.kill()
        process.wait()
        os.close(results)
