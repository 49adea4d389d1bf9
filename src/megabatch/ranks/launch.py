"""Starts ranks on this machine through torch's elastic launcher: each runs the same command and finds out which it is.

The first rank that fails leaves one line in torchelastic's error file; the launcher reads it and is the only one to
speak.
"""

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from megabatch.ranks.machine import usable_cores
from megabatch.ranks.scratch import SCRATCH, scratch_folder
from megabatch.ranks.signals import LAUNCHER, STOP_TIMEOUT_S, LauncherSignals, Stopped


class RankFailed(Exception):
    """The first rank that failed: its exit code, its one line, and its traceback if no log has that."""

    def __init__(self, rank: int, exit_code: int, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.rank, self.exit_code, self.trace = rank, exit_code, trace


def launch(arguments: Sequence[str], num_ranks: int, max_restarts: int, files: Mapping[str, str]) -> None:
    """Runs `python -m megabatch ARGUMENTS` as `num_ranks` ranks of this machine, and waits for them.

    Ranks find the `files` (name to text) in the folder that replaces SCRATCH in their arguments.
    """
    with scratch_folder() as scratch:
        for name, text in files.items():
            (scratch / name).write_text(text)
        filled_in = [argument.replace(SCRATCH, str(scratch)) for argument in arguments]
        run_elastic(filled_in, num_ranks, max_restarts, scratch)


def run_elastic(arguments: Sequence[str], num_ranks: int, max_restarts: int, scratch: Path) -> None:
    os.environ[LAUNCHER] = str(os.getpid())
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
        logs_specs=DefaultLogsSpecs(log_dir=str(scratch)),
        signals_to_handle="SIGQUIT",  # the others are `LauncherSignals`'
        shutdown_timeout=STOP_TIMEOUT_S,
    )
    signals = LauncherSignals(scratch)
    try:
        # -P: what lies in the working directory does not shadow what is installed.
        elastic_launch(config, sys.executable)("-P", "-m", "megabatch", *arguments)
    except SignalException as caught:
        reported = reported_failure(scratch)
        if reported:  # on the way to the end of the step
            raise reported from None
        raise Stopped(signals.number or caught.sigval) from None
    except ChildFailedError as failed:
        raise first_failure(scratch, failed.failures) from None


def first_failure(scratch: Path, failures: Mapping[int, ProcessFailure]) -> RankFailed:
    """A rank that was killed is the cause of whatever others have reported."""
    reported = reported_failure(scratch)
    # A SIGTERM is what torchelastic sends to the others; one that still starts dies of it.
    causes = {rank: failure for rank, failure in failures.items() if failure.exitcode != -signal.SIGTERM} or failures
    for rank, failure in causes.items():
        if failure.exitcode < 0 and not (reported and reported.rank == rank):
            return RankFailed(rank, 1, failure.message)
    rank, failure = next(iter(causes.items()))
    was_stopped = failure.exitcode > 128
    code = failure.exitcode if was_stopped else 1
    return reported or RankFailed(rank, code, f"ended with exit code {failure.exitcode}")


def reported_failure(scratch: Path) -> RankFailed | None:
    """What the first rank that failed in the newest attempt has left with `report_failure`."""
    newest = max((int(path.name.rpartition("_")[2]) for path in scratch.rglob("attempt_*")), default=0)
    reports = [json.loads(path.read_text()) for path in scratch.rglob("error.json")]
    for report in reports:
        if report.get("attempt") == newest:
            return RankFailed(report["rank"], report["exit_code"], report["message"], report["trace"])
    return None


def report_failure(exit_code: int, message: str, trace: str) -> None:
    """Leaves the line for the launcher, where and as torchelastic looks for it."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        for_torch = {"message": message, "timestamp": int(time.time())}
        attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        ours = {"attempt": attempt, "rank": int(os.environ["RANK"]), "exit_code": exit_code, "trace": trace}
        Path(path).write_text(json.dumps(for_torch | ours))


def quieten(package: str) -> None:
    """Each of torchelastic's loggers has a level of its own; what they would say, we say in one line."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(package):
            logging.getLogger(name).setLevel(logging.CRITICAL)
