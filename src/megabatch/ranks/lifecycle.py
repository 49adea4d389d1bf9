"""Start the ranks of a command, run as one of them, and report the first failure. `train` and the benches use it."""

import os
import platform
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from megabatch import __version__
from megabatch.errors import UserError
from megabatch.ranks.discover import launcher_name
from megabatch.ranks.signals import die_with_launcher, was_launched
from megabatch.telemetry.activity import ExitReporter
from megabatch.text import print_line, print_text

if TYPE_CHECKING:
    from megabatch.ranks.discover import RankInfo
    from megabatch.ranks.store import RankStore

# Before the import of torch, which takes seconds.
die_with_launcher(os.getppid())
if was_launched() and threading.current_thread() is threading.main_thread():
    # Until a rank can stop after its step, SIGINT kills it.  A KeyboardInterrupt could get lost in torch's import, and
    # the launcher would take exit code 130 for a stop after a step and wait for the other ranks.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
# torch logs a warning for each connection from an address without a reverse DNS entry.  It reads this when imported.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def report_start(info: "RankInfo | None") -> None:
    """Print a line before the slow imports, so that a user sees that the command has started."""
    if was_launched() or (info and info.rank):
        return
    if info is None:
        print_line(f"starting  megabatch {__version__} on {platform.node()}")
        return
    print_line(
        f"starting  megabatch {__version__}, {info.num_ranks} ranks by {launcher_name()}, rank 0 on {platform.node()}"
    )


def start_ranks(
    arguments: Sequence[str],
    num_ranks: int,
    max_restarts: int = 0,
    recipe: str = "",  # the text of the file that replaces RECIPE in the arguments
    preempt_signal: str = "SIGTERM",
    timeout_s: float = 60.0,
) -> None:
    """Run `megabatch ARGUMENTS` on `num_ranks` ranks of this machine, and report the first failure."""
    from megabatch.ranks.launch import launch

    with exit_like_ranks():
        launch(arguments, num_ranks, max_restarts, recipe, signal.Signals[preempt_signal], timeout_s, print_message)


def print_message(line: str) -> None:
    print_line(f"megabatch: {line}", to_stderr=True)


@contextmanager
def exit_like_ranks() -> Iterator[None]:
    """Exit with the exit code of the ranks started in this context, and print the failure of the first."""
    from megabatch.ranks.failures import RankFailed
    from megabatch.ranks.signals import Stopped

    try:
        yield
    except Stopped as stopped:
        sys.exit(128 + stopped.signal_number)
    except RankFailed as failed:
        if failed.exit_code > 128:  # a requested stop, which the rank has printed
            sys.exit(failed.exit_code)
        rank = "" if failed.exit_code == 2 else f"rank {failed.rank}: "  # an error of the user occurs on all ranks
        print_failure(f"megabatch: {rank}{failed}", failed.trace)
        sys.exit(failed.exit_code)


def run_as_rank(info: "RankInfo", work: Callable[["RankStore"], int]) -> NoReturn:
    """Run `work` and exit with its result. Only the first rank to fail reports: to our launcher, or to the user."""
    from megabatch.ranks.store import RankStore, UnknownHost

    store = None
    try:
        store = RankStore(info)
        info = store.info
        store.exit_reporter = RankExitReporter(store)
        code = work(store)
    except KeyboardInterrupt:  # a second Ctrl-C
        code = 130
    except BaseException as error:
        code = exit_code_of(error)
        if store:
            store.exit_reporter.announce(error)
        else:  # a user error occurs on all ranks, or on all ranks of some hosts; others may occur only here
            reports = info.local_rank < 1 if isinstance(error, UnknownHost) else info.rank == 0
            if reports or code != 2:
                report_failure(error, info)
    # Everything is closed.  A regular exit of the interpreter sometimes aborts because of Gloo's threads.
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # such as a full disk
            stream.flush()
    os._exit(code)


def exit_code_of(error: BaseException) -> int:
    return 130 if isinstance(error, KeyboardInterrupt) else 2 if isinstance(error, UserError) else 1


def report_failure(error: BaseException, info: "RankInfo", store: "RankStore | None" = None) -> None:
    """Report the error as one line. The traceback is written to the run's log, or printed if there is no log."""
    from megabatch.ranks.failures import RankFailureReport, report_to_torchrun
    from megabatch.runs.files import LOG
    from megabatch.runs.folder import append_to_log

    line, code, trace = str(error).strip().partition("\n")[0], exit_code_of(error), ""
    if code == 1:
        line, trace = f"{type(error).__name__}: {line}", "".join(traceback.format_exception(error))
    folder = store.run_folder() if store else None
    is_logged = folder is not None and append_to_log(folder, f"rank {info.rank}: {line}\n{trace}")
    if folder and is_logged and trace:
        line, trace = f"{line} (traceback in {folder / LOG})", ""
    report = RankFailureReport(info.rank, code, line, trace)
    if was_launched() and store:
        store.report(report)
        return
    report_to_torchrun(report)
    has_rank = code != 2 or info.num_local_ranks != info.num_ranks  # the error may depend on the host
    rank = f"rank {info.rank} on {platform.node()}: " if has_rank else ""
    print_failure(f"megabatch: {rank}{line}", trace)


def print_failure(line: str, trace: str) -> None:
    if trace:
        print_text(trace.rstrip("\n"), to_stderr=True)
    print_line(line, to_stderr=True)


class RankExitReporter(ExitReporter):
    """Reports the first error of this rank, if no other rank failed before it."""

    ends_process = True

    def __init__(self, store: "RankStore") -> None:
        super().__init__(store.info.rank)
        self.store, self.lock = store, threading.Lock()

    def announce(self, error: BaseException) -> None:
        # A watchdog may announce another error.  The lock is never released: one thread gets it.
        is_first = self.lock.acquire(blocking=False) and self.store.register(error)
        if is_first and not isinstance(error, KeyboardInterrupt):
            report_failure(error, self.store.info, self.store)

    def report(self, error: BaseException) -> None:
        self.announce(error)

    def end_process(self, error: BaseException) -> None:
        self.announce(error)
        os._exit(exit_code_of(error))

    def log(self, text: str) -> None:
        from megabatch.runs.folder import append_to_log

        folder = self.store.run_folder()
        if folder:
            append_to_log(folder, text)

    def log_path(self) -> Path | None:
        from megabatch.runs.files import LOG

        folder = self.store.run_folder()
        return folder / LOG if folder else None
