"""Starts ranks on this machine through torch's elastic launcher: each runs the same command and finds its place.

A rank that fails leaves one line in torchelastic's error file; the launcher reads it and is the only one to speak.
"""

import ctypes
import json
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import mkdtemp
from types import FrameType

from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

PARENT = "MEGABATCH_LAUNCHER"  # the launcher's process id; says that a rank is ours, and whom it must not outlive
NOTES = "MEGABATCH_NOTES"  # a folder in which launcher and ranks leave word for each other
NOTES_FOLDER = "{notes}"
FOLDER = "run-folder"
STOP_TIMEOUT_S = 600  # a step, an evaluation or a checkpoint may be under way
FAILURE_TIMEOUT_S = 30  # what a rank gets to end after another one has failed
PR_SET_PDEATHSIG = 1


class RankFailed(Exception):
    """The first rank that failed: its exit code, its one line, and its traceback if the line does not say it all."""

    def __init__(self, rank: int, exit_code: int, message: str, trace: str, folder: Path | None) -> None:
        super().__init__(message)
        self.rank, self.exit_code, self.trace = rank, exit_code, trace
        self.folder = folder  # the run's, if it had come so far


class Stopped(Exception):
    """Ctrl-C or SIGTERM reached the launcher; it has passed the signal on and all ranks have ended."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.signal_number = signal_number


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def launch(arguments: Sequence[str], num_ranks: int, max_restarts: int, files: Mapping[str, str]) -> None:
    """Runs `python -m megabatch ARGUMENTS` as `num_ranks` ranks of this machine, and waits for them.

    Ranks find the `files` (name to text) in the folder that replaces the word NOTES_FOLDER in their arguments.
    """
    notes = Path(mkdtemp(prefix="megabatch-"))
    try:
        for name, text in files.items():
            (notes / name).write_text(text)
        words = [word.replace(NOTES_FOLDER, str(notes)) for word in arguments]
        launch_with_notes(words, num_ranks, max_restarts, notes)
    finally:
        shutil.rmtree(notes, ignore_errors=True)


def launch_with_notes(arguments: Sequence[str], num_ranks: int, max_restarts: int, notes: Path) -> None:
    os.environ[PARENT], os.environ[NOTES] = str(os.getpid()), str(notes)
    # One thread per core in all: ranks with more than their share of threads slow each other down.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // num_ranks)))
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
        failed_to_stop = first_reported_failure(notes)
        if failed_to_stop:
            raise failed_to_stop from None
        raise Stopped(stop.number or caught.sigval) from None
    except ChildFailedError as failed:
        # A rank without a file was killed, and is the cause of whatever the others say.
        rank, failure = min(failed.failures.items(), key=lambda item: item[1].error_file_data.get("time_ns", 0))
        # A rank that has reported may be ended by torchelastic before it could exit by itself.
        exit_code = failure.error_file_data.get("exit_code", failure.exitcode)
        reported = "time_ns" in failure.error_file_data or failure.exitcode < 0
        message = failure.message if reported else f"ended with exit code {failure.exitcode}"
        trace = failure.error_file_data.get("trace", "")
        raise RankFailed(rank, exit_code, message, trace, announced_folder(notes)) from None


def first_reported_failure(notes: Path) -> RankFailed | None:
    """What went wrong on the ranks while they were to stop, as they reported it."""
    reports = [json.loads(path.read_text()) for path in notes.rglob("error.json")]
    reports = sorted((report for report in reports if "time_ns" in report), key=lambda report: report["time_ns"])
    for report in reports[:1]:
        folder = announced_folder(notes)
        return RankFailed(report["rank"], report["exit_code"], report["message"], report["trace"], folder)
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


def die_with_launcher() -> None:
    """Ranks live in a session of their own: without this, a `kill -9` of their launcher would leave them training."""
    if sys.platform != "linux" or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if was_launched() and os.getppid() != int(os.environ[PARENT]):  # it died before we asked
        os._exit(1)


def announce_folder(folder: Path) -> None:
    """Tells the launcher where the run's folder is."""
    if NOTES in os.environ:
        (Path(os.environ[NOTES]) / FOLDER).write_text(str(folder))


def announced_folder(notes: Path | None = None) -> Path | None:
    """The run's folder, if rank 0 has come so far; asked by the launcher, or by a restarted rank."""
    notes = notes or Path(os.environ.get(NOTES, "/nonexistent"))
    return Path((notes / FOLDER).read_text()) if (notes / FOLDER).exists() else None


def report_failure(exit_code: int, message: str, trace: str = "") -> None:
    """Leaves the line for the launcher, where and as torchelastic looks for it."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        now_ns = time.time_ns()
        for_torch = {"message": message, "timestamp": now_ns // 10**9}
        ours = {"rank": int(os.environ["RANK"]), "time_ns": now_ns, "exit_code": exit_code, "trace": trace}
        Path(path).write_text(json.dumps(for_torch | ours))
