"""Starts ranks on this machine through torch's elastic launcher: each runs the same command and finds its place.

The first rank that fails leaves one line in torchelastic's error file; the launcher reads it and is the only one to
speak.
"""

import contextlib
import ctypes
import fcntl
import json
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import gettempdir, mkdtemp
from types import FrameType

from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from megabatch.ranks.discover import usable_cores

PARENT = "MEGABATCH_LAUNCHER"  # the launcher's process id; says that a rank is ours, and whom it must not outlive
NOTES = "{notes}"
NOTES_PREFIX, NOTES_LOCK = "megabatch-", "launcher"
STOP_TIMEOUT_S = 600  # a step, an evaluation or a checkpoint may be under way
FAILURE_TIMEOUT_S = 30  # what a rank gets to end after another one has failed
PRCTL, PR_SET_PDEATHSIG = getattr(ctypes.CDLL(None), "prctl", None), 1  # Linux has it


class RankFailed(Exception):
    """The first rank that failed: its exit code, its one line, and its traceback if no log has that."""

    def __init__(self, rank: int, exit_code: int, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.rank, self.exit_code, self.trace = rank, exit_code, trace


class Stopped(Exception):
    """Ctrl-C or SIGTERM reached the launcher; it has passed the signal on and all ranks have ended."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.signal_number = signal_number


def launch(arguments: Sequence[str], num_ranks: int, max_restarts: int, files: Mapping[str, str]) -> None:
    """Runs `python -m megabatch ARGUMENTS` as `num_ranks` ranks of this machine, and waits for them.

    Ranks find the `files` (name to text) in the folder that replaces the word NOTES in their arguments.
    """
    sweep_notes()
    with make_notes() as notes:
        for name, text in files.items():
            (notes / name).write_text(text)
        words = [word.replace(NOTES, str(notes)) for word in arguments]
        launch_with_notes(words, num_ranks, max_restarts, notes)


@contextmanager
def make_notes() -> Iterator[Path]:
    """A folder in which launcher and ranks leave word for each other, held by `flock` as long as it is in use."""
    notes = Path(mkdtemp(prefix=NOTES_PREFIX))
    try:
        with (notes / "unlocked").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            (notes / "unlocked").rename(notes / NOTES_LOCK)  # `sweep_notes` never sees it without its lock
            yield notes
    finally:
        shutil.rmtree(notes, ignore_errors=True)


def sweep_notes() -> None:
    """Removes what launchers killed with -9 have left: nobody holds it any more."""
    for lock in Path(gettempdir()).glob(f"{NOTES_PREFIX}*/{NOTES_LOCK}"):
        with contextlib.suppress(OSError), lock.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent, ignore_errors=True)


def launch_with_notes(arguments: Sequence[str], num_ranks: int, max_restarts: int, notes: Path) -> None:
    os.environ[PARENT] = str(os.getpid())
    # One thread per core in all: ranks with more than their share of threads slow each other down.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(usable_cores()) // num_ranks)))
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are here: no look-up of the host's name
    quieten("torch.distributed")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=f"megabatch-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=max_restarts,
        logs_specs=DefaultLogsSpecs(log_dir=str(notes)),
        signals_to_handle="SIGQUIT",  # the others are `StopSignals`'
        shutdown_timeout=STOP_TIMEOUT_S,
    )
    stop = StopSignals(notes)
    try:
        # -P: what lies in the working directory does not shadow what is installed.
        elastic_launch(config, sys.executable)("-P", "-m", "megabatch", *arguments)
    except SignalException as caught:
        reported = reported_failure(notes)
        if reported:  # on the way to the end of the step
            raise reported from None
        raise Stopped(stop.number or caught.sigval) from None
    except ChildFailedError as failed:
        raise first_failure(notes, failed.failures) from None


def first_failure(notes: Path, failures: Mapping[int, ProcessFailure]) -> RankFailed:
    """A rank that was killed is the cause of whatever others have reported."""
    reported = reported_failure(notes)
    # A SIGTERM is what torchelastic sends to the others; one that still starts dies of it.
    causes = {rank: failure for rank, failure in failures.items() if failure.exitcode != -signal.SIGTERM} or failures
    for rank, failure in causes.items():
        if failure.exitcode < 0 and not (reported and reported.rank == rank):
            return RankFailed(rank, 1, failure.message)
    rank, failure = next(iter(causes.items()))
    was_stopped = failure.exitcode > 128
    code = failure.exitcode if was_stopped else 1
    return reported or RankFailed(rank, code, f"ended with exit code {failure.exitcode}")


def reported_failure(notes: Path) -> RankFailed | None:
    """What the first rank that failed in the newest attempt has left with `report_failure`."""
    newest = max((int(path.name.rpartition("_")[2]) for path in notes.rglob("attempt_*")), default=0)
    reports = [json.loads(path.read_text()) for path in notes.rglob("error.json")]
    for report in reports:
        if report.get("attempt") == newest:
            return RankFailed(report["rank"], report["exit_code"], report["message"], report["trace"])
    return None


class StopSignals:
    """Ctrl-C or SIGTERM asks the ranks to stop after their step; a second one ends everything at once."""

    def __init__(self, notes: Path) -> None:
        self.number: int | None = None
        self.notes = notes
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup asks
                signal.signal(number, self.receive)

    def receive(self, number: int, frame: FrameType | None) -> None:
        if self.number is not None:
            shutil.rmtree(self.notes, ignore_errors=True)
            os._exit(128 + number)  # and the kernel kills the ranks: see `die_with_launcher`
        self.number = number
        print("\nstopping  after this step; once more to end at once", flush=True)
        # Ranks get SIGINT either way: a SIGTERM tells them that another rank has failed.
        raise SignalException(f"signal {number}", sigval=signal.SIGINT)


def quieten(package: str) -> None:
    """Each of torchelastic's loggers has a level of its own; what they would say, we say in one line."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(package):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def was_launched() -> bool:
    """True in a rank that `launch` started."""
    return PARENT in os.environ


def die_with_launcher(parent: int) -> None:
    """Ranks live in a session of their own: without this, a `kill -9` of their launcher would leave them training.

    `parent` is the process that was the parent before anything slow was imported.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with(int(os.environ[PARENT]) if was_launched() else parent)


def die_with(parent: int) -> None:
    """Has the kernel kill this process when its parent dies: more exactly, the thread that has started it."""
    if PRCTL:
        PRCTL(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before we asked
            os._exit(1)


def report_failure(exit_code: int, message: str, trace: str) -> None:
    """Leaves the line for the launcher, where and as torchelastic looks for it."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        for_torch = {"message": message, "timestamp": int(time.time())}
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        ours = {"attempt": attempt, "rank": int(os.environ["RANK"]), "exit_code": exit_code, "trace": trace}
        Path(path).write_text(json.dumps(for_torch | ours))
