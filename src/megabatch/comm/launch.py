"""Starts ranks on this machine through torch's elastic launcher: each runs the same command and finds its place.

A rank that fails leaves one line in torchelastic's error file; the launcher reads it and is the only one to speak.
"""

import ctypes
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

PARENT = "MEGABATCH_LAUNCHER"  # the launcher's process id; says that a rank is ours, and whom it must not outlive
PR_SET_PDEATHSIG = 1


class RankFailed(Exception):
    """The first rank that failed: its exit code, its one line, and its traceback if the line does not say it all."""

    def __init__(self, rank: int, exit_code: int, message: str, trace: str) -> None:
        super().__init__(message)
        self.rank, self.exit_code, self.trace = rank, exit_code, trace


class Stopped(Exception):
    """Ctrl-C or SIGTERM reached the launcher; it has passed the signal on and all ranks have ended."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.signal_number = signal_number


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def launch(arguments: Sequence[str], num_ranks: int) -> None:
    """Runs `python -m megabatch ARGUMENTS` as `num_ranks` ranks of this machine, and waits for them."""
    os.environ[PARENT] = str(os.getpid())
    # One thread per core in all: ranks with more than their share of threads slow each other down.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // num_ranks)))
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are here: no look-up of the host's name
    quieten("torch.distributed")
    try:
        with TemporaryDirectory(prefix="megabatch-") as errors:
            config = LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=num_ranks,
                run_id=f"megabatch-{os.getpid()}",
                rdzv_backend="c10d",
                rdzv_endpoint="localhost:0",
                local_addr="localhost",
                max_restarts=0,
                logs_specs=DefaultLogsSpecs(log_dir=errors),
            )
            elastic_launch(config, sys.executable)("-m", "megabatch", *arguments)
    except SignalException as stop:
        raise Stopped(stop.sigval) from None
    except ChildFailedError as failed:
        # A rank without a file was killed, and is the cause of whatever the others say.
        rank, failure = min(failed.failures.items(), key=lambda item: item[1].error_file_data.get("time_ns", 0))
        # A rank that has reported may be ended by torchelastic before it could exit by itself.
        exit_code = failure.error_file_data.get("exit_code", failure.exitcode)
        raise RankFailed(rank, exit_code, failure.message, failure.error_file_data.get("trace", "")) from None


def quieten(package: str) -> None:
    """Each of torchelastic's loggers has a level of its own; what they would say, we say in one line."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(package):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def was_launched() -> bool:
    """True in a rank that `launch` started."""
    return PARENT in os.environ


def die_with_launcher() -> None:
    """Ranks live in a session of their own: without this, `kill -9` of the launcher would leave them training."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ[PARENT]):  # it died before we asked
        os._exit(1)


def report_failure(exit_code: int, message: str, trace: str = "") -> None:
    """Leaves the line for the launcher, where and as torchelastic looks for it."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        now_ns = time.time_ns()
        for_torch = {"message": message, "timestamp": now_ns // 10**9}
        Path(path).write_text(json.dumps(for_torch | {"time_ns": now_ns, "exit_code": exit_code, "trace": trace}))
